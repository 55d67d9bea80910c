"""Reasons: what an expression raises for one message, evaluated again by the driver.

Inside a task, an expression that raises gives NULL, and Spark keeps no reason. So a task hands back
the first few messages for which that happened. The driver evaluates the expression for each of them
alone, without a Spark job, and writes what it raises into the error of the dead letter that the
task has made. If a run is killed before that, the error lacks the reason.
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
"""How many messages a task hands back: if an expression has a mistake, all say the same."""
LARGEST = 65536
"""The largest body of such a message, in bytes."""
LONGEST = 1000
"""How many characters of a reason are kept."""
KINDS = tuple(EXPRESSED.items())

# Uses only what a forwarder may see of dead letters: neither their errors nor their bodies
EXPLAIN = """
UPDATE saf.dead_letter SET error = %(error)s
WHERE subscription_id = %(subscription_id)s AND destination = '' AND shard = %(shard)s
  AND id = %(id)s
"""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An expression has raised for a message."""

    text: str
    """The text that gives the expression's answer; see `saf.spark.expressions.Compiled`."""
    message: Mapping[str, Any]
    """The message in the columns that expressions see, with ``shard`` and ``id``, its outbox id."""


def answer(spark: SparkSession, text: str, message: Mapping[str, Any]) -> str | None:
    """Return what an expression answers for a message.

    Raises what the expression raises, as a PySparkException or a Py4JError.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    row = spark.sql("SELECT 1").select(
        *(F.lit(_plain(name, message[name])).cast(kind).alias(name) for name, kind in KINDS)
    )
    frame: Any = with_derived(row).select(F.expr(text))._jdf
    # one row of constants: what is left of the plan is the expression itself
    said = frame.queryExecution().optimizedPlan().expressions().apply(0).eval(None)
    return None if said is None else str(said.toString())


def reason(spark: SparkSession, raised: Raised) -> str | None:
    """Return what the expression raises for the message, in a sentence."""
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
    """Write into the dead letters of one item of work what the expressions have raised."""
    found = [(one.message, why) for one in raised if (why := reason(spark, one)) is not None]
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
        # the dead letters are there, and say that it raised
        log.warning("reasons_lost", broker=item.broker, error=item.dsn.redact(str(error)))


def _plain(name: str, value: Any) -> Any:
    if name in UUIDS and isinstance(value, bytes):
        return str(UUID(bytes=value))
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return value
