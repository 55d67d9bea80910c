"""Answers: Spark evaluates the expressions of routers, in step with the delivery.

`receipts` runs items of work, some of which have such routers.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.columns import EXPRESSED
from saf.engine.classifying import ANSWERS, as_answers
from saf.engine.resolving import RAISED
from saf.engine.source import messages
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import JobFailed, Unavailable
from saf.routing.matching import Router
from saf.routing.resolved import Resolved
from saf.spark import items
from saf.spark.expressions import Compiled, compiled_for, evaluated, without_sql
from saf.spark.reasons import LARGEST, MOST, Raised, explain
from saf.spark.session import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SAID = "number long, said binary"
"""What a task hands back: the number of its item, and its receipts with what expressions raised."""


class Answers:
    """The answers of one task: first for parked messages that may go on, then for the batch, by id.

    It holds only the answers for one chunk of the batch, and those that came with them.
    """

    def __init__(
        self, broker: str, batches: Iterator[pa.RecordBatch], compiled: Mapping[str, Compiled]
    ) -> None:
        self._broker = broker
        self._batches = batches
        self._compiled = compiled
        self._parked: list[pa.RecordBatch] = []
        self._ahead: list[pa.RecordBatch] = []
        self.raised: list[Raised] = []
        """The first messages that expressions have raised for."""
        self._now: pa.Table = None
        self._name = "id"
        self._ids = self._order = np.array([], np.int64)

    def about(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Read on to some messages; return which of them have answers."""
        self._name = "parked_id" if "parked_id" in rows.column_names else "id"
        if self._name == "parked_id":
            self._read(lambda: bool(self._ahead))
            batches = self._parked
        else:
            first, last = rows["id"][0].as_py(), rows["id"][-1].as_py()
            self._read(lambda: bool(self._ahead) and _last(self._ahead[-1]) >= last)
            batches = self._ahead = [one for one in self._ahead if _last(one) >= first]
        if not batches:
            return np.zeros(len(rows), np.bool_)
        self._now = pa.Table.from_batches(batches)
        ids = self._now[self._name].to_numpy()
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]
        return np.isin(rows[self._name].to_numpy(), ids)

    def to(self, router: Router, rows: pa.Table) -> pa.Table:
        """Return the answers to some of these messages.

        Raises:
            Unavailable: there are no answers, because the source could not be read to the end.
        """
        one, wanted = self._compiled[router.expression], rows[self._name].to_numpy()
        if not np.isin(wanted, self._ids).all():
            why = "the messages for its routers in SQL could not be read to the end"
            raise Unavailable(f"broker {self._broker!r}", why)
        places = self._order[np.searchsorted(self._ids, wanted)]
        said = self._now[one.column].take(places).combine_chunks()
        if said.null_count:
            self._note(one, rows.filter(pc.is_null(said)))
        return as_said(one, said)

    def _note(self, one: Compiled, rows: pa.Table) -> None:
        """Keep the first few messages of those that an expression raises for."""
        number = "log_id" if "log_id" in rows.column_names else "id"
        small = rows.filter(pc.less_equal(pc.binary_length(rows["body"]), LARGEST))
        for row in small.slice(0, MOST - len(self.raised)).to_pylist():
            message = {name: row[name] for name in (*EXPRESSED, "shard")}
            self.raised.append(Raised(text=one.text, message={**message, "id": row[number]}))

    def _read(self, enough: Callable[[], bool]) -> None:
        """Read on until there is enough.

        Answers for parked messages come first, and may share a batch with others.
        """
        while not enough() and (batch := next(self._batches, None)) is not None:
            parked = batch.num_rows - batch["parked_id"].null_count
            if parked:
                self._parked.append(batch.slice(0, parked))
            if parked < batch.num_rows:
                self._ahead.append(batch.slice(parked))


def receipts(work: Sequence[Work], rules: ForwardingRules) -> list[Receipt]:
    """Forward items of work, some of which have routers in SQL; return the tasks' receipts."""
    from pyspark.sql import SparkSession

    return _receipts(SparkSession.builder.getOrCreate(), list(enumerate(work)), rules)


def _receipts(
    spark: SparkSession, numbered: Sequence[tuple[int, Work]], rules: ForwardingRules
) -> list[Receipt]:
    """Run some items, each with the number that its receipts have; return the receipts.

    An expression may end a job without raising: a regular expression that needs more stack than
    there is, say. Then each item gets a job of its own, so that the others go on. If that job fails
    too, and so does a job that only evaluates the expressions, the item's messages for routers in
    SQL wait.
    """
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    work, compiled = compiled_for(spark, [item for _, item in numbered])
    numbered = [(number, item) for (number, _), item in zip(numbered, work, strict=True)]
    try:
        return _job(spark, numbered, rules, compiled)
    except Py4JNetworkError:
        raise  # Spark has ended
    except (Py4JError, PySparkException):
        if not compiled:
            raise
        if len(numbered) == 1:
            ((number, item),) = numbered
            why = _fails_by_itself(spark, item, rules, compiled)
            if why is None:
                raise  # it is not the expressions' fault
            why = f"Spark fails with its expression: {why}"
            return _receipts(spark, [(number, without_sql(item, why))], rules)
    return [receipt for one in numbered for receipt in _alone(spark, one, rules)]


def _alone(
    spark: SparkSession, numbered: tuple[int, Work], rules: ForwardingRules
) -> list[Receipt]:
    """Run one item in a job of its own; if the job fails, that is a problem of its broker."""
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        return _receipts(spark, [numbered], rules)
    except Py4JNetworkError:
        raise  # Spark has ended
    except (Py4JError, PySparkException) as error:
        failed = JobFailed(first_line(error))
        kind = type(failed).__name__
        return [Receipt(work=numbered[0], destination=None, error_kind=kind, error=str(failed))]


def _fails_by_itself(
    spark: SparkSession, item: Work, rules: ForwardingRules, compiled: Mapping[str, Compiled]
) -> str | None:
    """Return why the expressions of an item cannot be evaluated; None if they can.

    Their answers do not matter here.
    """
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    rows = evaluated(items.rows(spark, [(0, item)]), [item], compiled, rules.max_bytes)
    try:
        rows.write.format("noop").mode("overwrite").save()
    except Py4JNetworkError:
        raise  # Spark has ended
    except (Py4JError, PySparkException) as error:
        return first_line(error)
    return None


def _job(
    spark: SparkSession,
    numbered: Sequence[tuple[int, Work]],
    rules: ForwardingRules,
    compiled: Mapping[str, Compiled],
) -> list[Receipt]:
    rows = items.rows(spark, numbered)
    if compiled:
        rows = evaluated(rows, [item for _, item in numbered], compiled, rules.max_bytes)
    found: list[Receipt] = []
    for row in rows.mapInArrow(deliver(rules, compiled), SAID).collect():
        receipts, raised = pickle.loads(row.said)  # noqa: S301 - our own bytes  # nosec B301
        found += receipts
        if raised:
            explain(spark, dict(numbered)[row.number], raised)
    return found


def deliver(
    rules: ForwardingRules, compiled: Mapping[str, Compiled]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for mapInArrow: an item and its answers in, receipts out."""

    def task(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from saf.engine.task import Task
        from saf.forwarding.runner import bounded

        handed, batches = items.taken(partition)
        number, item = items.opened(handed)
        asked = any(router.expression in compiled for router in item.routes.routers)
        answers = Answers(item.broker, batches, compiled) if asked else None
        running = Task(number, item, rules, answers)
        with closing(messages(item, rules.max_bytes)) as rows:
            receipts = bounded(number, item, lambda: running.run(rows))
        said = pickle.dumps((receipts, answers.raised if answers else []))
        yield pa.RecordBatch.from_pydict({"number": [number], "said": [said]})

    return task


def _last(batch: pa.RecordBatch) -> int:
    return int(batch["id"][-1].as_py())


def as_said(one: Compiled, said: pa.Array) -> pa.Table:
    """Return what an expression gives, as answers: NULL if it raises, empty if it says nothing."""
    if one.structured:
        texts = said.dictionary_encode()
        answers = [*map(_answer, texts.dictionary.to_pylist()), RAISED]
        return as_answers(answers).take(pc.fill_null(texts.indices, len(answers) - 1))
    nothing = pa.nulls(len(said))
    services = pc.if_else(pc.equal(said, b""), pa.scalar(None, said.type), said)
    errors = pc.if_else(pc.is_null(said), RAISED, pa.scalar(None, pa.string()))
    return pa.table([services, nothing, nothing, errors], ANSWERS.names).cast(ANSWERS)


def _answer(text: bytes) -> Resolved | str:
    value = json.loads(text or "{}")
    if value.get("service") is None:
        return "its classifier says nothing"
    try:
        broker = UUID(value["broker"]) if value.get("broker") else None
    except ValueError:
        return f"it names the broker {value['broker']!r}, which is no uuid"
    return Resolved(service=value["service"], broker=broker, key=value.get("key"))
