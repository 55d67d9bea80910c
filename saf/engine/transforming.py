"""Transforming: what a transform has made of messages takes their place, just before they are sent.

A transform is a function of DataFrames for the messages of one service. Spark evaluates it beside
the delivery (`saf.spark.transforms`), and its results come here by the messages' ids.

Until a chunk is given to its destination, everything is about messages as they were sent: chunks
and positions count these, and these are parked and become dead letters. So marks do not depend on
how many messages a transform makes of one. A batch that is read again finds the same marks.

Of a message, a transform makes nothing, one message, or several with numbers (``part``). The first
keeps the id of the message, so that a destination that has it has them all. The ids of the others
follow from it and from their numbers.

What is wrong with a result makes a dead letter of its message. If a transform has a problem, or
nobody evaluates it, the messages of its service wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from uuid import UUID, uuid5

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.engine.set_aside import SetAside
from saf.errors import Unavailable

RESULT = pa.schema(
    [
        ("id", pa.int64()),
        ("part", pa.int32()),
        ("key", pa.string()),
        ("message_type", pa.string()),
        ("headers", pa.string()),
        ("body", pa.binary()),
        ("ended", pa.bool_()),
    ]
)
"""The columns of results. The last row says that they have ``ended``, and nothing else."""
GIVEN = ("key", "message_type", "headers", "body")
"""The columns of a message that a transform may give."""

NEEDS_SPARK = (
    "its transform needs a Spark of the forwarder's own: run `saf forward` with a forwarder.master "
    "such as local[*] or spark://…"
)
OF_DIALOGS = "messages of conversations are not transformed"

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What one task is told of its transforms."""

    given: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """For each service that is evaluated, which of `GIVEN` its transform gives."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """For each other one, why it cannot be."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """For messages, by their ids in the outbox, what the transform raises for them."""
    parked: frozenset[int] = frozenset()
    """The parked messages that have results, by their ids in the outbox."""


class Transforming:
    """The transforms of one task."""

    def __init__(
        self,
        services: Collection[str],
        evaluated: Evaluated | None = None,
        results: Iterator[pa.RecordBatch] | None = None,
        *,
        max_bytes: int,
    ) -> None:
        """``results`` are in the order of the ids, and of each id in that of its parts."""
        if evaluated is None:
            evaluated = Evaluated(problems=dict.fromkeys(services, NEEDS_SPARK))
        self.services = frozenset(services)
        self.problems = {
            service: f"service {service!r}: {why}" for service, why in evaluated.problems.items()
        }
        self._evaluated = evaluated
        self._results = iter(results or ())
        self._max_bytes = max_bytes
        self._ended = results is None
        self._kept: list[pa.Table] = []
        """The results of parked messages."""
        self._ahead: list[pa.Table] = []
        self._now = RESULT.empty_table()
        self._faults: dict[int, str] = dict(evaluated.faults)

    def __bool__(self) -> bool:
        return bool(self.services)

    def look(self, rows: pa.Table) -> None:
        """Read on to the results of some messages of the batch, or of parked ones.

        Raises:
            Unavailable: there are not all results, because a task before this one has ended early.
        """
        if not self.services or not rows.num_rows:
            return
        if "parked_id" in rows.column_names:
            self._read(max(self._evaluated.parked, default=-1))
            found = self._kept
        else:
            ids = rows["id"]
            self._read(int(ids[-1].as_py()))
            first = int(ids[0].as_py())
            self._ahead = [one for one in self._ahead if _last(one) >= first]
            found = [*self._kept, *self._ahead]
        self._now = pa.concat_tables([RESULT.empty_table(), *found]).combine_chunks()
        if found is not self._kept:
            self._now = self._now.take(pc.sort_indices(self._now, [("id", "ascending")]))
        self._note_faults()

    def bury_at_fault(self, rows: pa.Table, set_aside: SetAside) -> pa.Table:
        """Make dead letters of messages that a transform fails on; return the others."""
        mine = self._mine(rows)
        if not mine.any():
            return rows
        wrong: dict[str, list[int]] = {}
        spoken = rows["conversation_id"].is_valid().to_numpy()
        for place in np.flatnonzero(mine & spoken).tolist():
            wrong.setdefault(OF_DIALOGS, []).append(place)
        if self._faults:
            ids = log_ids(rows).to_numpy()
            at_fault = mine & ~spoken & np.isin(ids, list(self._faults))
            for place in np.flatnonzero(at_fault).tolist():
                wrong.setdefault(self._faults[int(ids[place])], []).append(place)
        for why, places in wrong.items():
            some = rows.take(places)
            service = some["to_service"][0].as_py()
            set_aside.bury(some, "", "rejected", f"transform of {service!r}: {why}")
        if not wrong:
            return rows
        left = np.ones(rows.num_rows, np.bool_)
        left[[place for places in wrong.values() for place in places]] = False
        return rows.filter(pa.array(left))

    def ready(self, rows: pa.Table) -> tuple[pa.Table, str | None]:
        """Return the parked messages before the first that has no result, and why it has none."""
        if not self.services:
            return rows, None
        self.look(rows)
        known = np.isin(log_ids(rows).to_numpy(), list(self._evaluated.parked))
        known |= np.isin(log_ids(rows).to_numpy(), list(self._faults))
        lacking = np.flatnonzero(self._mine(rows) & ~known)
        if not lacking.size:
            return rows, None
        first = int(lacking[0])
        service = rows["to_service"][first].as_py()
        return rows.slice(0, first), self.problems.get(service, "others had their turn")

    def outputs(self, rows: pa.Table) -> pa.Table:
        """Return what is sent of messages; what a transform leaves out is not in it."""
        mine = self._mine(rows)
        if not mine.any():
            return rows
        ids, of_results = log_ids(rows).to_numpy(), self._now["id"].to_numpy()
        first = np.searchsorted(of_results, ids, "left")
        count = np.where(mine, np.searchsorted(of_results, ids, "right") - first, 1)
        source = np.repeat(np.arange(len(ids)), count)
        nth = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
        made = mine[source]
        result = pa.array(first[source] + nth, pa.int64(), mask=~made)
        out = rows.take(pa.array(source, pa.int64()))
        services = out["to_service"]
        for name in GIVEN:
            givers = [one for one, given in self._evaluated.given.items() if name in given]
            given = pc.and_(pa.array(made), pc.is_in(services, pa.array(givers, pa.string())))
            new = pc.if_else(given, self._now[name].take(result), out[name])
            out = out.set_column(out.column_names.index(name), name, new)
        later = np.flatnonzero(nth > 0)
        if later.size:
            ids_now, parts = out["message_id"].to_pylist(), self._now["part"].take(result)
            for place, part in zip(later.tolist(), parts.take(later).to_pylist(), strict=True):
                ids_now[place] = uuid5(UUID(bytes=ids_now[place]), str(part)).bytes
            named = pa.array(ids_now, out["message_id"].type)
            out = out.set_column(out.column_names.index("message_id"), "message_id", named)
        return out

    def _mine(self, rows: pa.Table) -> Mask:
        services = pa.array(self._evaluated.given, pa.string())
        if "parked_id" in rows.column_names:  # those with a problem have no results either
            services = pa.array(self.services, pa.string())
        return pc.is_in(rows["to_service"], services).to_numpy()  # type: ignore[no-any-return]

    def _read(self, last: int) -> None:
        """Read on until there are all results up to an id."""
        parked = pa.array(self._evaluated.parked, pa.int64())
        while not self._ended and not (self._ahead and _last(self._ahead[-1]) > last):
            batch = next(self._results, None)
            if batch is None:
                raise Unavailable("a transform", "its results have not come to their end")
            rows = pa.Table.from_batches([batch]).cast(RESULT)
            if rows["ended"][-1].as_py():
                self._ended, rows = True, rows.slice(0, rows.num_rows - 1)
            kept = pc.is_in(rows["id"], parked)
            for where, some in ((self._kept, kept), (self._ahead, pc.invert(kept))):
                mine = rows.filter(some)
                if mine.num_rows:
                    where.append(mine)

    def _note_faults(self) -> None:
        """Note which messages have results that cannot be sent, and leave these results out."""
        now = self._now
        ids, parts = now["id"], now["part"]
        size = pc.binary_length(now["body"])
        again = np.zeros(len(ids), np.bool_)
        again[1:] = (ids.to_numpy()[1:] == ids.to_numpy()[:-1]) if len(ids) else []
        alone = pc.fill_null(parts, -1).to_numpy()
        same = again.copy()
        same[1:] &= (alone[1:] == alone[:-1]) | (alone[1:] < 0) | (alone[:-1] < 0)
        for wrong, why in (
            (pc.is_null(now["body"]), "it gives no body"),
            (
                pc.fill_null(pc.greater(size, self._max_bytes), False),
                f"it gives a body of more than {self._max_bytes:,} bytes (forwarder.max_bytes)",
            ),
            (pc.fill_null(pc.less(parts, 0), False), "it gives a part a number below 0"),
            (
                pa.chunked_array([pa.array(same)]),
                "it makes several messages of it, and does not number them all, each with another "
                "number, in a column part",
            ),
        ):
            if pc.any(wrong).as_py():
                for id_ in pc.unique(ids.filter(wrong)).to_pylist():
                    self._faults.setdefault(id_, why)


def log_ids(rows: pa.Table) -> pa.ChunkedArray:
    """The ids that messages have in the outbox."""
    return rows["log_id" if "log_id" in rows.column_names else "id"]


def inputs_of(rows: pa.Table, some: pa.Table, *, but: bool = False) -> pa.Table:
    """Return those of messages that some outputs were made of; or all ``but`` these."""
    name = _number(rows)
    found = pc.is_in(rows[name], some[name].combine_chunks())
    return rows.filter(pc.invert(found) if but else found)


def several_of(outputs: pa.Table) -> pa.Table:
    """Return the outputs whose message has several."""
    numbers = outputs[_number(outputs)]
    counts = numbers.value_counts()
    several = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    return outputs.filter(pc.is_in(numbers, several))


def _number(rows: pa.Table) -> str:
    return "parked_id" if "parked_id" in rows.column_names else "id"


def _last(rows: pa.Table) -> int:
    return int(rows["id"][-1].as_py())
