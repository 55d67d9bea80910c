"""Reasons: the error that an expression raises for a message, evaluated again by the driver.

Inside a task, an expression that raises gives NULL, and Spark keeps no reason. So a task returns
the first few messages with this result. The driver evaluates the expression for each of them
alone, without a Spark job, and writes the error into the dead letter that the task has created. If
a run is killed before that, the dead letter's error lacks the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg

from saf.columns import EXPRESSED, UUIDS
from saf.engine.resolving import RAISED
from saf.engine.work import Work
from saf.errors import SafError
from saf.logger import Log
from saf.spark.expressions import with_derived
from saf.spark.session import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = Log("saf.router")

MOST = 20
"""Maximum number of messages a task returns: a wrong expression raises the same for all."""
LARGEST = 65536
"""The largest body of such a message, in bytes."""
LONGEST = 1000
"""Maximum length, in characters, of a stored reason."""
KINDS = tuple(EXPRESSED.items())

# Uses only those columns of dead letters that a forwarder may see: no errors and no bodies
EXPLAIN = """
UPDATE saf.dead_letter SET error = %(error)s
WHERE subscription_id = %(subscription_id)s AND destination = '' AND shard = %(shard)s
  AND id = %(id)s
"""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An expression has raised for a message."""

    text: str
    """SQL text that returns the expression's answer; see `saf.spark.expressions.Compiled`."""
    message: Mapping[str, Any]
    """The message, with the columns that expressions see, ``shard``, and ``id``, its outbox id."""


def answer(spark: SparkSession, text: str, message: Mapping[str, Any]) -> str | None:
    """Return an expression's answer for a message.

    Raise the expression's own error, as a PySparkException or a Py4JError.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    row = spark.sql("SELECT 1").select(
        *(F.lit(_plain(name, message[name])).cast(kind).alias(name) for name, kind in KINDS)
    )
    frame: Any = with_derived(row).select(F.expr(text))._jdf
    # one row of constants: the optimized plan contains only the expression itself
    value = frame.queryExecution().optimizedPlan().expressions().apply(0).eval(None)
    return None if value is None else str(value.toString())


def reason(spark: SparkSession, raised: Raised) -> str | None:
    """Return the error that the expression raises for the message, as one line; None without."""
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        answer(spark, raised.text, raised.message)
    except Py4JNetworkError:
        raise  # Spark has ended
    except (PySparkException, Py4JError) as error:
        return first_line(error)[:LONGEST]
    return None


def explain(spark: SparkSession, item: Work, raised: Iterable[Raised]) -> None:
    """Write the expressions' errors into the dead letters of one item of work."""
    found = [
        (problem.message, why) for problem in raised if (why := reason(spark, problem)) is not None
    ]
    if not found:
        return
    try:
        with item.dsn.connect(role="forward", autocommit=True) as source:
            for message, why in found:
                values = {
                    "error": f"router {message['to_service']!r}: {RAISED}: {why}",
                    "subscription_id": item.batch.subscription_id,
                    "shard": message["shard"],
                    "id": message["id"],
                }
                source.execute(EXPLAIN, values)
    except (psycopg.Error, SafError) as error:
        # the dead letters exist, and already state that the expression raised
        log.warning("reasons_lost", broker=item.broker, error=item.dsn.redact(str(error)))


def _plain(name: str, value: Any) -> Any:
    if name in UUIDS and isinstance(value, bytes):
        return str(UUID(bytes=value))
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return value
