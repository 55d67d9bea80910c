"""Answers: results of the routers' expressions, for the task that delivers the messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.columns import EXPRESSED
from saf.engine.classifying import ANSWERS, as_answers
from saf.engine.in_step import InStep
from saf.engine.resolving import RAISED
from saf.errors import Unavailable
from saf.routing.matching import Router
from saf.routing.resolved import Resolved
from saf.spark.expressions import Compiled
from saf.spark.reasons import LARGEST, MOST, Raised


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
