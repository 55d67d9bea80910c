"""Answers: what Spark made of the expressions of routers, in step with the delivery.

`receipts` runs items of work some of which have such routers.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from saf.engine.classifying import ANSWERS, as_answers
from saf.engine.source import messages
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import Unavailable
from saf.routing.matching import Router
from saf.routing.resolved import Resolved
from saf.spark.expressions import Compiled, compiled_for, evaluated


class Answers:
    """Those of one task: of the parked messages that may go on, then of the batch, by id.

    Holds no more of the batch's than those of one chunk, and what came with them.
    """

    def __init__(
        self, broker: str, batches: Iterator[pa.RecordBatch], compiled: Mapping[str, Compiled]
    ) -> None:
        self._broker = broker
        self._batches = batches
        self._compiled = compiled
        self._parked: list[pa.RecordBatch] = []
        self._ahead: list[pa.RecordBatch] = []
        self._now: pa.Table = None
        self._name = "id"
        self._ids = self._order = np.array([], np.int64)

    def about(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """From now on it is about these messages; which of them have answers."""
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
        """The answers to some of these messages.

        Raises:
            Unavailable: there is none, because the source could not be read to the end.
        """
        one, wanted = self._compiled[router.expression], rows[self._name].to_numpy()
        if not np.isin(wanted, self._ids).all():
            why = "the messages for its routers in SQL could not be read to the end"
            raise Unavailable(f"broker {self._broker!r}", why)
        places = self._order[np.searchsorted(self._ids, wanted)]
        said = self._now[one.column].take(places).combine_chunks()
        if one.structured:
            texts = said.dictionary_encode()
            answers = [_answer(text) for text in texts.dictionary.to_pylist()]
            return as_answers(answers).take(texts.indices)
        nothing = pa.nulls(len(said))
        return pa.table([said, nothing, nothing, nothing], ANSWERS.names).cast(ANSWERS)

    def _read(self, enough: Callable[[], bool]) -> None:
        """Parked ones come first, and may share a batch with the first of the others."""
        while not enough() and (batch := next(self._batches, None)) is not None:
            parked = batch.num_rows - batch["parked_id"].null_count
            if parked:
                self._parked.append(batch.slice(0, parked))
            if parked < batch.num_rows:
                self._ahead.append(batch.slice(parked))


def receipts(work: Sequence[Work], rules: ForwardingRules) -> list[Receipt]:
    """Forward items of work, some of which have routers in SQL; what the tasks say."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    work, compiled = compiled_for(spark, work)
    rows = spark.range(0, len(work), 1, len(work))
    if compiled:
        rows = evaluated(rows, work, compiled, rules.max_bytes)
    said = rows.mapInArrow(deliver(work, rules, compiled), "receipts binary").collect()
    return [one for row in said for one in pickle.loads(row.receipts)]  # noqa: S301 - our own bytes


def deliver(
    work: Sequence[Work], rules: ForwardingRules, compiled: Mapping[str, Compiled]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for mapInArrow: answers in, receipts out; else as `saf.spark.runner`'s."""
    pickled = [pickle.dumps(item) for item in work]

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # exists inside a task only

        from saf.engine.delivery import Delivery

        context = TaskContext.get()
        assert context is not None  # noqa: S101 - for the type checker
        # the pipeline is narrow, so the partition's number is that of the item
        number = context.partitionId()
        item = pickle.loads(pickled[number])  # noqa: S301 - our own bytes
        asked = any(router.expression in compiled for router in item.routes.routers)
        answers = Answers(item.broker, batches, compiled) if asked else None
        delivery = Delivery(number, item, rules, answers)
        said = delivery.run(messages(item, rules.max_bytes))
        yield pa.RecordBatch.from_pydict({"receipts": [pickle.dumps(said)]})

    return task


def _last(batch: pa.RecordBatch) -> int:
    return int(batch["id"][-1].as_py())


def _answer(text: bytes) -> Resolved | str:
    value = json.loads(text)
    if value.get("service") is None:
        return "its classifier says nothing"
    try:
        broker = UUID(value["broker"]) if value.get("broker") else None
    except ValueError:
        return f"it names the broker {value['broker']!r}, which is no uuid"
    return Resolved(service=value["service"], broker=broker, key=value.get("key"))
