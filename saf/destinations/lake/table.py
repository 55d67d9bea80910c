"""Lake table: a lakehouse table to which chunks are appended, each in one commit, exactly once.

A chunk first becomes files that readers do not see. Then one commit makes them rows of the table
and moves the marks: both, or neither. A process that is killed before the commit leaves files that
nobody reads.

Another commit may come first. Then the marks are read again: this process is fenced, or the
messages are stored already, or it continues from there. After `ATTEMPTS` such commits, the
destination is `saf.errors.Unavailable`.

`reading` reads back the rows of a source in one version of a table. If rows were removed from the
table, `LakeReading.purged` reports that rows may be missing on purpose.

How a table is opened, read and committed to differs by kind: a kind is a subclass of `LakeTable`.
"""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, Generic, TypeVar
from uuid import UUID

import pyarrow as pa

from saf.columns import IN_TABLES, SPARK
from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.lake import DAY, LakeSettings, State
from saf.destinations.marks import NOTHING, Known, Mark, Place
from saf.destinations.places import Verdict, guarded, judged, refuse
from saf.destinations.tables import HELD, TableReading
from saf.destinations.texts import uuids, whole
from saf.errors import Unavailable
from saf.failpoints import fail_point
from saf.log.columns import OF_SPARK

COLUMNS = ("message_id", "shard", "to_service", "to_broker", "key", "created_at")
"""Columns required for each row."""
ATTEMPTS = 100
"""Most attempts at a commit while other processes change the same table."""
PAUSE_SECONDS = 0.005
"""Longest pause after the first attempt; the longest pause grows to ten times this value."""

Opened = TypeVar("Opened")

PROMOTED = {
    "string": pa.string(),
    "long": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": OF_SPARK["timestamp"],
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """Changes of one commit."""

    source: UUID
    rows: pa.Table
    """Messages that become rows, as read by the engine."""
    moved: Mapping[Place, Mark]
    """Marks that change."""
    epochs: Mapping[int, int]
    """Epoch of each shard in the commit, whether it changes or not."""


class LakeTable(ABC, Generic[Opened]):
    """A table as a `saf.destinations.Destination`; a kind implements the abstract methods."""

    def __init__(self, name: str) -> None:
        self.what = f"destination {name!r}"
        self._opened: Opened | None = None

    # For each kind

    @abstractmethod
    def _open(self) -> Opened:
        """Open the table with all columns; create it if it does not exist."""

    @abstractmethod
    def _identity(self, opened: Opened) -> UUID:
        """Return the table's identity."""

    @abstractmethod
    def _current(self) -> AbstractContextManager[Opened]:
        """Yield the newest version; after an error, translate the error and forget the table."""

    @abstractmethod
    def _state(self, opened: Opened, source: UUID) -> State:
        """Return the knowledge of a source in a version of the table."""

    @abstractmethod
    def _commit(self, opened: Opened, change: Change) -> bool:
        """Make a change durably; if another commit came first, return False and leave no file.

        Call ``fail_point("mom_insert")`` before the commit.
        """

    # As a destination

    def identity(self) -> UUID:
        """Return the identity of the table, which is created if it does not exist."""
        return self._identity(self._ready())

    def connect(self) -> None:
        """Ensure that the table exists, and has all columns."""
        self._ready()

    def close(self) -> None:
        """Forget the version that was read."""
        self._opened = None

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        """Store a chunk; see `saf.destinations.Destination`."""
        count = chunk.rows.num_rows
        for attempt in range(ATTEMPTS):
            with self._current() as opened:
                epochs, marks = self._places(opened, chunk)
                identity = self._identity(opened)
                verdict = judged(
                    self.what, identity, chunk, epochs, marks, exactly_once=exactly_once
                )
                change = _change(chunk, verdict, epochs, marks)
                if change is None or self._commit(opened, change):
                    break
            time.sleep(random.uniform(0, PAUSE_SECONDS * min(attempt + 1, 10)))  # noqa: S311
        else:
            raise Unavailable(self.what, "others change the same table again and again")
        fail_point("mom_commit")
        if verdict.wrong:
            return verdict.wrong
        stored = verdict.rows.num_rows
        return Stored(messages=stored, dropped=count - stored, marks=verdict.moved)

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored; see `Destination.marks`."""
        with self._current() as opened:
            epochs, marks = self._places(opened, chunk)
        refuse(self.what, chunk, epochs, marks)
        return marks

    def _ready(self) -> Opened:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _places(self, opened: Opened, chunk: Chunk) -> tuple[dict[Place, int], dict[Place, Mark]]:
        state = self._state(opened, chunk.source)
        places = guarded(chunk)
        return (
            {place: state.epochs.get(place[1], 0) for place in places},
            {place: state.marks.get(place, NOTHING) for place in places},
        )


def _change(
    chunk: Chunk, verdict: Verdict, epochs: Mapping[Place, int], marks: Mapping[Place, Mark]
) -> Change | None:
    """Return the change for a verdict; None if nothing changes."""
    own = dict(chunk.batch.epochs)
    moved = {place: mark for place, mark in verdict.moved.items() if mark != marks[place]}
    rows = verdict.rows if verdict.wrong is None else verdict.rows.slice(0, 0)
    unchanged = all(epoch == own[shard] for (_, shard), epoch in epochs.items())
    if not rows.num_rows and not moved and unchanged:
        return None
    return Change(
        source=chunk.source,
        rows=rows,
        moved=moved,
        epochs={shard: own[shard] for _, shard in epochs},
    )


@dataclass(frozen=True, kw_only=True)
class LakeReading(TableReading):
    """One version of a table, for reading back."""

    removed: bool
    """True if rows were removed."""

    def purged(self) -> str | None:
        """Return "table" if rows may be missing on purpose, because some were removed."""
        return "table" if self.removed else None


def reading(
    name: str,
    identity: UUID,
    rows: Callable[[UUID], pa.Table] | None,
    known: Callable[[UUID], Known],
    *,
    removed: bool,
) -> LakeReading:
    """Return a reading of a table.

    ``rows`` returns `COLUMNS` of a source's rows; it is None if the table does not exist.
    """

    def held(source: UUID) -> pa.Table:
        return HELD.empty_table() if rows is None else _held(rows(source))

    return LakeReading(
        name=name, is_=identity, read=cache(held), knows=cache(known), removed=removed
    )


def _held(rows: pa.Table) -> pa.Table:
    for name in ("message_id", "to_broker"):
        texts = rows[name].to_pylist()
        values = [None if text is None else UUID(text).bytes for text in texts]
        place = rows.column_names.index(name)
        rows = rows.set_column(place, name, pa.array(values, HELD.field(name).type))
    return rows.select(HELD.names).cast(HELD)


def schema(settings: LakeSettings) -> pa.Schema:
    """Return the columns that a table must have."""
    fields = [(name, OF_SPARK[SPARK[type_]]) for name, type_ in IN_TABLES.items()]
    if settings.has_day:
        fields.append((DAY, pa.date32()))
    fields += [(name, PROMOTED[type_]) for name, type_ in settings.promote.items()]
    return pa.schema(fields)


def rows_of(messages: pa.Table, source: UUID, settings: LakeSettings) -> pa.Table:
    """Return messages as rows, with the columns of `schema`."""
    messages = messages.combine_chunks()
    count, columns = messages.num_rows, {}
    constants = {"source": str(source), "received_at": datetime.now(UTC)}
    for name, type_ in IN_TABLES.items():
        if name in constants:
            columns[name] = pa.repeat(pa.scalar(constants[name]), count)
        elif type_ == "uuid":
            columns[name] = uuids(whole(messages[name]))
        else:
            columns[name] = whole(messages[name])
    if settings.has_day:
        columns[DAY] = whole(messages["created_at"]).cast(pa.timestamp("us")).cast(pa.date32())
    columns |= promoted(whole(messages["body"]), settings.promote)
    target = schema(settings)
    return pa.table({name: columns[name].cast(target.field(name).type) for name in target.names})


def promoted(bodies: pa.Array, fields: Mapping[str, str]) -> dict[str, pa.Array]:
    """Return a column for each member: NULL where it is missing, or has another type.

    >>> bodies = pa.array([b'{"amount": 7}', b'{"amount": "7"}', b"amount"])
    >>> promoted(bodies, {"amount": "double"})["amount"].to_pylist()
    [7.0, None, None]
    """
    if not fields:
        return {}
    objects = [_object(body) for body in bodies.to_pylist()]
    return {
        name: pa.array([AS[type_](one.get(name)) for one in objects], PROMOTED[type_])
        for name, type_ in fields.items()
    }


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.isascii() else _encodable(value)


def _encodable(value: object) -> str | None:
    """Return a text that UTF-8 can encode; JSON may escape halves of characters."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def _long(value: object) -> int | None:
    whole_number = isinstance(value, int) and not isinstance(value, bool)
    return value if whole_number and -(2**63) <= value < 2**63 else None  # type: ignore[operator,return-value]


def _double(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _moment(value: object) -> datetime | None:
    """Parse a time in RFC 3339; without a zone, it is UTC."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment and moment.tzinfo is None else moment


AS: Mapping[str, Callable[[object], object]] = {
    "string": _text,
    "long": _long,
    "double": _double,
    "boolean": lambda value: value if isinstance(value, bool) else None,
    "timestamp": _moment,
}
