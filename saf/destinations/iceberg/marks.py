"""Marks of a source, as a text of JSON: a property of the table, and one of a snapshot.

    saf.marks.SOURCE = {
      "snapshot": 8161…, "sequence": 12,           the snapshot of the commit that has said this
      "epochs": {"7": 3},                          by shard
      "marks": {"LANE": {"7": [2, 70, 1769…]}}     batch, position, opened_at in microseconds;
                                            some have set_aside_at, too
    }

Each commit of saf's writes it twice, in the same atomic step as the rows.

*As a property of the table*, because snapshots expire. Iceberg is made to forget them: after five
days by default, at once if somebody likes. A mark that only a snapshot had would be gone, and a
source that has been quiet for so long would be told to send everything again. Properties stay.

*As a property of the snapshot*, because a table can be rolled back. That takes rows back, and
properties stay then, too: messages that are not there any more would count as stored. So the
table's property names its snapshot, and counts only if that one is still in the history of the
branch ``main``, or has expired from it. If it was rolled back, what counts is what the newest
snapshot says that is still there: lower marks, as after any set-back, which the source notices
(`saf.errors.Behind`). If that has expired too, nobody knows how far the table has got. That is
refused by name, and never taken for nothing.

A snapshot that is not in a history has expired from it if the history begins above it: each commit
has a higher ``sequence_number``. So the first commit after a rollback, of whatever source, puts
the properties of all sources right: later, the history might begin above what was rolled back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from saf.destinations.lake.state import State, mark_of, numbers_of
from saf.destinations.marks import Mark, Place

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

OURS = "saf.marks."
FIRST = 1
"""The number of a table's first snapshot."""


class MarksExpired(Exception):
    """The table was rolled back, and the marks that count then have expired."""

    def __init__(self, name: str, snapshot: int) -> None:
        super().__init__(name, snapshot)
        self.name = name
        """The property."""
        self.snapshot = snapshot
        """The snapshot that it names."""


class MarksDamaged(Exception):
    """A property is not what saf has written."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        """The property."""


def name_of(source: UUID) -> str:
    """Return the name of the property with a source's marks."""
    return f"{OURS}{source}"


def state_of(source: UUID, table: TableMetadata) -> State:
    """Return what a version of a table knows of a source.

    Raises:
        MarksExpired, MarksDamaged: nobody knows.
    """
    name = name_of(source)
    text = _counts(name, table)
    with _reading(name):
        return State() if text is None else _state(json.loads(text))


def put_right(table: TableMetadata) -> dict[str, str | None]:
    """Return what sources' properties have to say since a rollback; None: they have to go.

    Raises:
        MarksExpired, MarksDamaged: nobody knows.
    """
    names = [name for name in table.properties if name.startswith(OURS)]
    right = {name: _counts(name, table) for name in names}
    return {name: text for name, text in right.items() if text != table.properties[name]}


def _counts(name: str, table: TableMetadata) -> str | None:
    """Return what counts of a source: what its property says, or an older snapshot, or nothing."""
    text = table.properties.get(name)
    if text is None:
        return None
    with _reading(name):
        said = json.loads(text)
        which, sequence = int(said["snapshot"]), int(said["sequence"])
    oldest = None
    for oldest in history(table):
        if oldest.snapshot_id == which:
            return text
        if _number(oldest) < sequence and (then := _text(oldest, name)):
            return then
    # a snapshot without a parent says nothing: it loses it when that one is forgotten
    if oldest is None or _number(oldest) == FIRST:
        return None  # all is known, and nothing of the source: rolled back to before it
    if _number(oldest) > sequence:
        return text
    raise MarksExpired(name, which)


def history(table: TableMetadata) -> Iterator[Snapshot]:
    """Give the snapshots that the newest one of main is made of, newest first."""
    snapshots = {one.snapshot_id: one for one in table.snapshots}
    which = table.current_snapshot_id
    while which is not None and (snapshot := snapshots.get(which)):
        yield snapshot
        which = snapshot.parent_snapshot_id


def text_of(
    before: State,
    moved: Mapping[Place, Mark],
    epochs: Mapping[int, int],
    snapshot: int,
    number: int,
) -> str:
    """Return what a commit says of a source: what the table has known, and what changes.

    ``snapshot`` and ``number`` are those of its snapshot.
    """
    marks: dict[str, dict[int, list[int]]] = {}
    for (lane, shard), mark in sorted({**before.marks, **moved}.items()):
        marks.setdefault(lane, {})[shard] = [*numbers_of(mark).values()]
    said = {
        "snapshot": snapshot,
        "sequence": number,
        "epochs": dict(sorted({**before.epochs, **epochs}.items())),
        "marks": marks,
    }
    return json.dumps(said, separators=(",", ":"))


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise MarksDamaged(name) from None


def _number(snapshot: Snapshot) -> int:
    return snapshot.sequence_number or 0


def _text(snapshot: Snapshot, name: str) -> str | None:
    summary = snapshot.summary
    return summary.additional_properties.get(name) if summary else None


def _state(said: Mapping[str, Any]) -> State:
    marks = {
        (lane, int(shard)): mark_of(lane, *numbers)
        for lane, of_shards in said["marks"].items()
        for shard, numbers in of_shards.items()
    }
    return State(marks=marks, epochs={int(shard): one for shard, one in said["epochs"].items()})
