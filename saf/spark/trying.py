"""Trying a transform: its result for one message. Nothing is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from saf.columns import EXPRESSED
from saf.engine.classifying import as_table
from saf.engine.in_step import InStep
from saf.engine.set_aside import SetAside
from saf.engine.transforming import Evaluated, Transforming
from saf.errors import ConfigurationError
from saf.spark import session
from saf.spark.evaluation import in_order
from saf.spark.results import SEEN, as_seen, transformed
from saf.spark.session import first_line

SHOWN = ("message_id", "key", "message_type", "headers", "body")


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The result of a transform for one message."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The messages, with the columns `SHOWN`; empty if the transform leaves the message out."""
    dead: str | None = None
    """The reason why the message would become a dead letter, if any."""
    waits: str | None = None
    """The problem of the transform itself, if any."""


def tried(
    service: str,
    function: str,
    message: Mapping[str, Any],
    max_bytes: int,
    *,
    deterministic: bool,
) -> Tried:
    """Start Spark and try a function on a message, given by its columns in the outbox."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    context = session.start("local[1]", app_name="saf transform", quick=True)
    try:
        spark = SparkSession.builder.getOrCreate()
        row = [1, *(_plain(message.get(name)) for name in EXPRESSED)]
        schema = ", ".join(f"{name} {kind}" for name, kind in SEEN.items())
        frame = as_seen(spark.createDataFrame([row], schema))
        try:
            usable = transformed(
                frame, f"transform of {service!r}", function, deterministic=deterministic
            )
        except ConfigurationError as error:
            return Tried(waits=str(error))
        try:
            batches = in_order(spark, [usable.frame]).toArrow().to_batches()
        except (PySparkException, Py4JError) as error:
            return Tried(dead=f"its function raises {first_line(error)}")
    finally:
        session.stop(context)
    evaluated = Evaluated(given={service: usable.given})
    transforming = Transforming([service], evaluated, InStep(iter(batches)), max_bytes=max_bytes)
    rows = as_table([{**message, "id": 1, "shard": 0}])
    transforming.look(rows, None)
    aside = SetAside(work=None)  # type: ignore[arg-type] # nothing is written
    going = transforming.bury_at_fault(rows, aside)
    if aside.dead:
        return Tried(dead=aside.dead[0][3])
    outputs = transforming.outputs(going).select(SHOWN).to_pylist()
    return Tried(
        messages=[{**output, "message_id": UUID(bytes=output["message_id"])} for output in outputs]
    )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, UUID) else value
