"""Answers: results of the routers' expressions, for the task that delivers the messages.

Inside a task, an expression that raises gives NULL, and Spark keeps no reason. So a task returns
the first few messages with this result (`Answers.raised`). For each of them, the driver evaluates
the expression alone, without a Spark job (`reason`), and writes the error into the dead letter that
the task has created (`explain`). If a run is killed before that, or the source does not answer, the
dead letter's error lacks the reason.

A dry run (`DryRuns`) finds the service that a message would go to. Spark starts at the first
question to a router in SQL, and evaluates without a job.

If answers are missing, `Answers.to` raises `Unavailable`: no message is routed without its answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from saf.columns import EXPRESSED, UUIDS
from saf.database import pinned
from saf.engine import resolving
from saf.engine.classifying import ANSWERS, as_answers
from saf.engine.in_step import InStep
from saf.engine.resolving import RAISED
from saf.engine.work import Work
from saf.errors import MissingExtra, SafError, Unavailable
from saf.routing.matching import SQL, Router, Routes
from saf.routing.resolved import Resolved
from saf.spark import session
from saf.spark.expressions import Compiled, compiled_of, with_derived
from saf.spark.session import first_line
from saf.telemetry.logger import Log

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


class Answers:
    """The answers of one task; a `saf.engine.resolving.Answers`."""

    def __init__(self, broker: str, in_step: InStep, compiled: Mapping[str, Compiled]) -> None:
        self._broker = broker
        self._in_step = in_step
        self._compiled = compiled
        self.raised: list[Raised] = []
        """The first messages for which expressions raised."""
        self._now: pa.Table = None
        self._name = "id"
        self._ids = self._order = np.array([], np.int64)

    def about(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Read ahead to these messages; return which of them have answers."""
        self._name = "parked_id" if "parked_id" in rows.column_names else "id"
        self._now = self._in_step.answers(rows)
        if self._now is None:
            self._ids = np.array([], np.int64)
            return np.zeros(len(rows), np.bool_)
        ids = self._now["id"].to_numpy()
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]
        return np.isin(rows[self._name].to_numpy(), ids)

    def to(self, router: Router, rows: pa.Table) -> pa.Table:
        """Return a router's answers for these messages.

        Raises:
            Unavailable: some answers are missing.
        """
        expression, wanted = self._compiled[router.expression], rows[self._name].to_numpy()
        if not np.isin(wanted, self._ids).all():
            why = "Spark has not evaluated the expressions for all messages of its routers in SQL"
            raise Unavailable(f"broker {self._broker!r}", why)
        places = self._order[np.searchsorted(self._ids, wanted)]
        answers = self._now[expression.column].take(places).combine_chunks()
        if answers.null_count:
            self._note(expression, rows.filter(pc.is_null(answers)))
        return as_said(expression, answers)

    def _note(self, expression: Compiled, rows: pa.Table) -> None:
        """Keep the first few messages for which an expression raised."""
        number = "log_id" if "log_id" in rows.column_names else "id"
        small = rows.filter(pc.less_equal(pc.binary_length(rows["body"]), LARGEST))
        for row in small.slice(0, MOST - len(self.raised)).to_pylist():
            message = {name: row[name] for name in (*EXPRESSED, "shard")}
            self.raised.append(Raised(text=expression.text, message={**message, "id": row[number]}))


def as_said(one: Compiled, said: pa.Array) -> pa.Table:
    """Return an expression's results as answers: NULL for an error, empty text for no answer."""
    if one.structured:
        texts = said.dictionary_encode()
        answers = [*map(_answer, texts.dictionary.to_pylist()), RAISED]
        return as_answers(answers).take(pc.fill_null(texts.indices, len(answers) - 1))
    nulls = pa.nulls(len(said))
    services = pc.if_else(pc.equal(said, b""), pa.scalar(None, said.type), said)
    errors = pc.if_else(pc.is_null(said), RAISED, pa.scalar(None, pa.string()))
    return pa.table([services, nulls, nulls, errors], ANSWERS.names).cast(ANSWERS)


def _answer(text: bytes) -> Resolved | str:
    value = json.loads(text or "{}")
    if value.get("service") is None:
        return "its classifier returns no service"
    try:
        broker = UUID(value["broker"]) if value.get("broker") else None
    except ValueError:
        return f"it names the broker {value['broker']!r}, which is not a UUID"
    return Resolved(service=value["service"], broker=broker, key=value.get("key"))


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
        log.warning("reasons_lost", broker=item.broker, error=item.dsn.reason(error))


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


def answer(spark: SparkSession, text: str, message: Mapping[str, Any]) -> str | None:
    """Return an expression's answer for a message.

    Raise the expression's own error, as a PySparkException or a Py4JError.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    row = spark.sql("SELECT 1").select(
        *(F.lit(_plain(name, message[name])).cast(kind).alias(name) for name, kind in KINDS)
    )
    frame = pinned.jvm_frame(with_derived(row).select(F.expr(text)))
    # one row of constants: the optimized plan contains only the expression itself
    value = frame.queryExecution().optimizedPlan().expressions().apply(0).eval(None)
    return None if value is None else str(value.toString())


def _plain(name: str, value: Any) -> Any:
    if name in UUIDS and isinstance(value, bytes):
        return str(UUID(bytes=value))
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return value


class DryRuns:
    """A `saf.operating.dry_run.InSql`; a context manager, because it must stop its Spark.

    ``starting`` is called before Spark starts, which takes some seconds.
    """

    def __init__(self, starting: Callable[[], object]) -> None:
        self._starting = starting
        self._spark: SparkSession | None = None
        self._lock = Lock()

    def __enter__(self) -> DryRuns:
        return self

    def __exit__(self, *_: object) -> None:
        if self._spark is not None:
            self._spark.stop()

    def __call__(self, routes: Routes) -> tuple[Routes, resolving.Answers | None]:
        """Return routes with their routers' problems, and the answers; see `InSql`.

        Return no answers if Spark's packages are not installed.
        """
        if not any(router.kind == SQL and not router.problem for router in routes.routers):
            return routes, None
        try:
            session.require_packages()
        except MissingExtra:
            return routes, None
        with self._lock:
            if self._spark is None:
                self._starting()
            self._spark = session.start("local[1]", app_name="saf router")
            (routes,), compiled = compiled_of(self._spark, [routes])
        return routes, _Answers(self._spark, compiled)


class _Answers:
    def __init__(self, spark: Any, compiled: Mapping[str, Compiled]) -> None:
        self._spark = spark
        self._compiled = compiled

    def about(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        return np.ones(len(rows), np.bool_)

    def to(self, router: Router, rows: pa.Table) -> pa.Table:
        expression = self._compiled[router.expression]
        return pa.concat_tables([self._to(expression, row) for row in rows.to_pylist()])

    def _to(self, expression: Compiled, message: Mapping[str, Any]) -> pa.Table:
        why = reason(self._spark, Raised(text=expression.text, message=message))
        if why is not None:
            return as_answers([f"{RAISED}: {why}"])
        text = answer(self._spark, expression.text, message) or ""
        return as_said(expression, pa.array([text.encode()], pa.binary()))
