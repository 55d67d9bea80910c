"""Runs of a forwarder on the one Spark session that the tests of a process share.

A JVM takes seconds to come up. What is about the command, its process, its signals or its settings
of Spark starts ``saf forward``; what is about messages on a real Spark uses this.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from saf.config import load
from saf.forwarding.forwarder import Forwarder
from saf.spark import session
from saf.spark.runner import SparkRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local[2]"


def spark() -> SparkSession:
    """The session; started when it is first asked for."""
    return session.start(MASTER)


def runner() -> SparkRunner:
    """A runner on it."""
    return SparkRunner(spark)


def forward(config: Path, exit_code: int = 0) -> dict[str, Any]:
    """A run until nothing is left; what ``saf forward --json`` would print."""
    summary = Forwarder(load(config), runner()).drain()
    said = summary.as_dict()
    assert summary.exit_code == exit_code, said
    return said


def stop() -> None:
    """End the session, if there is one."""
    from pyspark import SparkContext

    if SparkContext._active_spark_context is not None:
        SparkContext._active_spark_context.stop()
