"""Transforming: results of transforms, which replace messages just before they are sent.

A transform is a function of DataFrames for the messages of one service. Spark evaluates it beside
the delivery (`saf.spark.evaluation`), and its results arrive here in step (`saf.engine.in_step`).

Until a chunk is given to its destination, everything uses messages as they were sent: chunks and
positions count these, and these are parked and become dead letters. So marks do not depend on how
many messages a transform makes of one, and a batch that is read again finds the same marks.

A transform makes nothing, one message, or several with numbers (``part``) of each message. The
first result keeps the id of the message, so a destination that has the first has them all. The ids
of the others are derived from this id and their numbers. Headers of results are normalized
(`written`).

An invalid result makes a dead letter of its message. If a transform has a problem, or nobody
evaluates it, the messages of its service wait.

Some results are kept (`saf.engine.kept_results`), and are used from then on:

- those of a transform that is not deterministic;
- those of the transform of a router. The router's classifier sees a message as it was sent. If the
  message is parked afterwards, it has the address that the router has found, and no longer shows
  that it was sent to the router.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Protocol
from uuid import UUID, uuid5

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.engine import kept_results
from saf.engine.in_step import ENDED, LAST, InStep
from saf.engine.set_aside import SetAside
from saf.engine.work import ForwardingRules, Work
from saf.message import STRICT, as_json, check_headers

RESULT = pa.schema(
    [
        ("id", pa.int64()),
        ("part", pa.int32()),
        ("key", pa.string()),
        ("message_type", pa.string()),
        ("headers", pa.string()),
        ("body", pa.binary()),
        (ENDED, pa.bool_()),
    ]
)
"""The columns of results."""
GIVEN = ("key", "message_type", "headers", "body")
"""The columns of a message that a transform may return."""

NEEDS_SPARK = (
    "its transform needs a Spark of the forwarder's own: run `saf forward` with a forwarder.master "
    "such as local[*] or spark://…"
)
OF_DIALOGS = "messages of conversations are not transformed"

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A task's evaluated transforms."""

    given: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """For each evaluated service, the columns of `GIVEN` that its transform returns."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """For each other service with a transform, why it cannot be evaluated."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """For messages, by their ids in the outbox, the error that the transform raises for them."""
    parked: frozenset[int] = frozenset()
    """Parked messages that have results, by their ids in the outbox."""
    last: int = LAST
    """The greatest id in the batch that is evaluated."""


class Memory(Protocol):
    """Keeps results at the source, and knows the addressees of messages; see `kept_results`."""

    def kept_results(self, messages: Mapping[str, Sequence[int]]) -> list[tuple[Any, ...]]:
        """Return the kept results of messages, given by shards and ids."""

    def keep_results(self, results: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Keep results, committed; return those that their messages use from now on."""

    def sent_to(
        self, messages: Mapping[str, Sequence[int]], services: Collection[str]
    ) -> dict[int, str]:
        """Map messages to those of ``services`` that they were sent to, as far as known."""


class Transforming:
    """The transforms of one task."""

    def __init__(
        self,
        services: Collection[str],
        evaluated: Evaluated | None = None,
        in_step: InStep | None = None,
        *,
        max_bytes: int,
        not_deterministic: Collection[str] = (),
        routers: Collection[str] = (),
    ) -> None:
        """Take the services with a transform; ``routers`` are the services that are routers."""
        if evaluated is None:
            evaluated = Evaluated(problems=dict.fromkeys(services, NEEDS_SPARK))
        self.services = frozenset(services)
        self.problems = {
            service: f"service {service!r}: {why}" for service, why in evaluated.problems.items()
        }
        self.routers = self.services & {*routers}
        """Routers that have a transform."""
        self._keeping = self.routers.union(not_deterministic)
        """Services whose results are kept."""
        self._evaluated = evaluated
        self._in_step = in_step
        self._max_bytes = max_bytes
        self._now = RESULT.empty_table()
        self._faults: dict[int, str] = dict(evaluated.faults)
        self._kept: set[int] = set()
        """The messages in hand whose results are kept, by their ids in the outbox."""
        self._sent_to: dict[int, str] = {}
        """The routers that the parked messages in hand were sent to."""

    @classmethod
    def of(
        cls,
        work: Work,
        rules: ForwardingRules,
        evaluated: Evaluated | None = None,
        in_step: InStep | None = None,
    ) -> Transforming:
        """Return the transforms of an item of work."""
        return cls(
            rules.transforms,
            evaluated,
            in_step,
            max_bytes=rules.max_bytes,
            not_deterministic=rules.not_deterministic,
            routers=[router.service for router in work.routes.routers],
        )

    def __bool__(self) -> bool:
        return bool(self.services)

    def read_results(self, rows: pa.Table, memory: Memory | None) -> None:
        """Read up to the results of some messages, of the batch or parked.

        ``memory`` may be None only if no results are ever kept.

        Raises:
            Unavailable: results are missing; see `InStep.results`.
        """
        self._sent_to = {}
        if not self.services or not rows.num_rows:
            return
        found = None if self._in_step is None else self._in_step.results(rows)
        self._now = _in_order(RESULT.empty_table() if found is None else _as_results(found))
        self._note_faults()
        self._kept.clear()
        if self._keeping and memory is not None:
            self._count(memory.kept_results(_named(rows)))

    def bury_at_fault(self, rows: pa.Table, set_aside: SetAside) -> pa.Table:
        """Make dead letters of messages that a transform fails on; return the others."""
        mask = self._mine(rows)
        if not mask.any():
            return rows
        wrong: dict[str, list[int]] = {}
        of_dialogs = rows["conversation_id"].is_valid().to_numpy()
        for place in np.flatnonzero(mask & of_dialogs).tolist():
            wrong.setdefault(OF_DIALOGS, []).append(place)
        faults = self._faults.keys() - self._kept
        if faults:
            ids = log_ids(rows).to_numpy()
            at_fault = mask & ~of_dialogs & np.isin(ids, list(faults))
            for place in np.flatnonzero(at_fault).tolist():
                wrong.setdefault(self._faults[int(ids[place])], []).append(place)
        for why, places in wrong.items():
            bad = rows.take(places)
            service = self._services(bad)[0].as_py()
            set_aside.bury(bad, "", "rejected", f"transform of {service!r}: {why}")
        if not wrong:
            return rows
        left = np.ones(rows.num_rows, np.bool_)
        left[[place for places in wrong.values() for place in places]] = False
        return rows.filter(pa.array(left))

    def keep(self, rows: pa.Table, memory: Memory) -> None:
        """Keep the results of messages where they may differ the next time.

        None of these messages may be sent before.
        """
        mask = _is_in(self._services(rows), self._keeping & self._evaluated.given.keys())
        mask &= ~_is_in(log_ids(rows), self._kept)
        if "parked_id" in rows.column_names:
            mask &= _is_in(log_ids(rows), self._evaluated.parked)
        if mask.any():
            self._count(memory.keep_results(self._as_kept(rows.filter(pa.array(mask)))))

    def ready(
        self, rows: pa.Table, memory: Memory, *, routed: bool = True
    ) -> tuple[pa.Table, str | None]:
        """Return the parked messages before the first without a result, and why it has none.

        Messages that are not ``routed`` yet need none, unless they were sent to a router.
        """
        if not (self.services if routed else self.routers):
            return rows, None
        self.read_results(rows, memory)
        if self.routers and routed and rows.num_rows:
            self._sent_to = memory.sent_to(_named(rows), self.routers)
        services = self._services(rows)
        ids = log_ids(rows)
        known = _is_in(ids, self._evaluated.parked | self._faults.keys() | self._kept)
        wanted = self.services if routed else self.routers - self._evaluated.problems.keys()
        lacking = np.flatnonzero(_is_in(services, wanted) & ~known)
        if not lacking.size:
            return rows, None
        first = int(lacking[0])
        return rows.slice(0, first), self.problems.get(
            services[first].as_py(), "others had their turn"
        )

    def outputs(self, rows: pa.Table) -> pa.Table:
        """Return the messages to send, without those that a transform leaves out."""
        if not self._mine(rows).any():
            return rows
        out, nth, parts = self._made(rows)
        later = np.flatnonzero(nth > 0)
        if later.size:
            ids_now = out["message_id"].to_pylist()
            for place, part in zip(later.tolist(), parts.take(later).to_pylist(), strict=True):
                ids_now[place] = uuid5(UUID(bytes=ids_now[place]), str(part)).bytes
            named = pa.array(ids_now, out["message_id"].type)
            out = out.set_column(out.column_names.index("message_id"), "message_id", named)
        return out

    def _made(self, rows: pa.Table) -> tuple[pa.Table, Places, pa.ChunkedArray]:
        """Return messages' results: rows, each row's ordinal within its message, and its part."""
        mask = self._mine(rows)
        ids, of_results = log_ids(rows).to_numpy(), self._now["id"].to_numpy()
        first = np.searchsorted(of_results, ids, "left")
        count = np.where(mask, np.searchsorted(of_results, ids, "right") - first, 1)
        source = np.repeat(np.arange(len(ids)), count)
        nth = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
        row_mask = mask[source]
        kept = row_mask & np.isin(ids, list(self._kept))[source]
        result = pa.array(first[source] + nth, pa.int64(), mask=~row_mask)
        out, services = _taken(rows, source), self._services(rows)
        services = services.take(pa.array(source, pa.int64()))
        for name in GIVEN:
            givers = [service for service, given in self._evaluated.given.items() if name in given]
            given = kept | (row_mask & _is_in(services, givers))
            if given.any():
                new = self._now[name].take(result)
                new = new if given.all() else pc.if_else(pa.array(given), new, out[name])
                out = out.set_column(out.column_names.index(name), name, new)
        return out, nth, self._now["part"].take(result)

    def _as_kept(self, rows: pa.Table) -> dict[str, list[Any]]:
        """Return messages' results as they are kept, with a row for each message left out."""
        out, nth, parts = self._made(rows)
        left_out = rows.filter(pa.array(~_is_in(log_ids(rows), log_ids(out).to_pylist())))
        count = left_out.num_rows
        columns = {
            "shard": out["shard"].to_pylist() + left_out["shard"].to_pylist(),
            "id": log_ids(out).to_pylist() + log_ids(left_out).to_pylist(),
            "number": nth.tolist() + [0] * count,
            "part": parts.to_pylist() + [None] * count,
        }
        return columns | {name: out[name].to_pylist() + [None] * count for name in GIVEN}

    def _count(self, kept: Sequence[tuple[Any, ...]]) -> None:
        """Use kept results for their messages, in place of any other results."""
        if not kept:
            return
        self._kept.update(row[0] for row in kept)
        columns = dict(zip(("id", *kept_results.RESULT), zip(*kept, strict=True), strict=True))
        columns["ended"] = (False,) * len(kept)
        table = pa.table(
            [pa.array(columns[column.name], column.type) for column in RESULT], schema=RESULT
        )
        others = self._now.filter(pa.array(~_is_in(self._now["id"], {row[0] for row in kept})))
        results = table.filter(pc.is_valid(table["body"]))
        self._now = _in_order(pa.concat_tables([others, results]))

    def _services(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return the service that each message was sent to, before any router redirected it."""
        services = rows["to_service"]
        if not self._sent_to:
            return services
        sent = [self._sent_to.get(id_) for id_ in log_ids(rows).to_pylist()]
        return pc.coalesce(pa.chunked_array([pa.array(sent, pa.string())]), services)

    def _mine(self, rows: pa.Table) -> Mask:
        """Return which messages have results, or lack them."""
        parked = "parked_id" in rows.column_names  # those with a problem have no results either
        services = self.services if parked else self._evaluated.given.keys()
        return _is_in(self._services(rows), services) | _is_in(log_ids(rows), self._kept)

    def _note_faults(self) -> None:
        """Note messages whose results cannot be sent.

        Headers of the results are rewritten as PostgreSQL writes them.
        """
        now = self._now
        headers = as_written(now["headers"])
        ids, parts = now["id"], now["part"]
        size = pc.binary_length(now["body"])
        repeats = np.zeros(len(ids), np.bool_)
        repeats[1:] = (ids.to_numpy()[1:] == ids.to_numpy()[:-1]) if len(ids) else []
        number = pc.fill_null(parts, -1).to_numpy()
        doubles = repeats.copy()
        doubles[1:] &= (number[1:] == number[:-1]) | (number[1:] < 0) | (number[:-1] < 0)
        for wrong, why in (
            (pc.is_null(now["body"]), "it gives no body"),
            (
                pc.fill_null(pc.greater(size, self._max_bytes), False),
                f"it gives a body of more than {self._max_bytes:,} bytes (forwarder.max_bytes)",
            ),
            (
                pc.and_(pc.is_null(headers), pc.is_valid(now["headers"])),
                "it returns headers that are not a JSON object, or that PostgreSQL cannot store",
            ),
            (pc.fill_null(pc.less(parts, 0), False), "it gives a part a number below 0"),
            (
                pa.chunked_array([pa.array(doubles)]),
                "it returns several messages for it, without a different number for each in a "
                "column part",
            ),
        ):
            if pc.any(wrong).as_py():
                for id_ in pc.unique(ids.filter(wrong)).to_pylist():
                    self._faults.setdefault(id_, why)
        self._now = now.set_column(now.column_names.index("headers"), "headers", headers)


def log_ids(rows: pa.Table) -> pa.ChunkedArray:
    """Return the messages' ids in the outbox."""
    return rows["log_id" if "log_id" in rows.column_names else "id"]


def _named(rows: pa.Table) -> dict[str, list[int]]:
    return {"shards": rows["shard"].to_pylist(), "ids": log_ids(rows).to_pylist()}


def _as_results(rows: pa.Table) -> pa.Table:
    """Return results with all columns; columns missing from ``rows`` are null."""
    known, lacking = {*rows.column_names}, pa.nulls(rows.num_rows)
    columns = [rows[name] if name in known else lacking for name in RESULT.names]
    return pa.table(columns, RESULT.names).cast(RESULT)


def _taken(rows: pa.Table, places: Places) -> pa.Table:
    """Return the rows at some places; copy nothing if these are all rows in order."""
    if len(places) == rows.num_rows and (places == np.arange(len(places))).all():
        return rows
    return rows.take(pa.array(places, pa.int64()))


def _in_order(results: pa.Table) -> pa.Table:
    """Sort results by id, then by part."""
    results = results.combine_chunks()
    ids = results["id"].to_numpy()
    if (ids[1:] > ids[:-1]).all():
        return results
    return results.take(pc.sort_indices(results, [("id", "ascending"), ("part", "ascending")]))


def _is_in(values: pa.ChunkedArray, wanted: Collection[Any]) -> Mask:
    found = pc.is_in(values, pa.array(wanted, values.type))
    return found.to_numpy()  # type: ignore[no-any-return]


def as_written(headers: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return headers as PostgreSQL writes them; null where it cannot store them."""
    if headers.null_count == len(headers):
        return headers
    texts = pc.unique(headers)
    values = pa.array([_written(text) for text in texts.to_pylist()], headers.type)
    return pa.chunked_array([values.take(pc.index_in(headers, texts).combine_chunks())])


def written(text: str) -> str:
    r"""Return headers, given as JSON text, normalized to the way PostgreSQL writes a jsonb.

    Code that runs after a transform expects headers to be a JSON object on one line with unescaped
    names: the lines of `jsonl`, and `saf.engine.storing`, which searches the text for a name. A
    transform may return any text, so each distinct text is decoded and encoded again; numbers keep
    their digits, because a signature covers them.

    >>> written('{"a" :\n 1.50, "\\u0073af": ["ü", null, true]}')
    '{"a": 1.50, "saf": ["ü", null, true]}'

    Raises:
        ValueError: not a JSON object that PostgreSQL can store.
        RecursionError: nested too deeply.
    """
    found = STRICT.decode(text)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - as for invalid JSON
    result = as_json(found, _text)
    result.encode()  # raises for a lone surrogate
    check_headers(result)
    return result


def _written(text: str | None) -> str | None:
    try:
        return None if text is None else written(text)
    except (ValueError, RecursionError):
        return None


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("a jsonb holds no NUL")
    return encode_basestring(value)
