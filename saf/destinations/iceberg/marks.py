"""Marks of a source as JSON text: a property of the table, and one of a snapshot.

    saf.marks.SOURCE = {
      "snapshot": 8161…, "sequence": 12,           the snapshot of the commit that wrote this text
      "epochs": {"7": 3},                          by shard
      "marks": {"LANE": {"7": [2, 70, 1769…]}}     batch, position, opened_at in microseconds;
                                            some have set_aside_at, too
    }

Each commit of saf's writes the text twice, in the same atomic step as the rows.

*As a property of the table*, because snapshots expire. Iceberg is told to forget them: after five
days by default, or immediately. A mark that only a snapshot had would be gone, and a source that
was idle all this time would have to send everything again. Properties stay.

*As a property of the snapshot*, because a table can be rolled back. This removes rows, but
properties stay: messages that are gone would count as stored. So the table's property names its
snapshot, and counts only if that snapshot is still in the history of the branch ``main``, or has
expired from it. If it was rolled back, the text of the newest remaining snapshot counts. Its marks
are lower, as after any set-back, which the source notices (`saf.errors.Behind`). If that text has
expired too, it is unknown how far the table has got. This is refused by name, and never treated as
an empty table.

A snapshot that is not in a history has expired from it if the history begins above it: each commit
has a higher ``sequence_number``. So the first commit after a rollback, of whatever source, corrects
the properties of all sources: later, the history might begin above the rolled back snapshots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from saf.destinations.lake import State, mark_of, numbers_of
from saf.destinations.marks import Mark, Place

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

OURS = "saf.marks."
FIRST = 1
"""Number of a table's first snapshot."""


class MarksExpired(Exception):
    """The table was rolled back, and the marks that would count have expired."""

    def __init__(self, name: str, snapshot: int) -> None:
        super().__init__(name, snapshot)
        self.name = name
        """Name of the property."""
        self.snapshot = snapshot
        """Snapshot that the property names."""


class MarksDamaged(Exception):
    """A property is not as saf writes it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        """Name of the property."""


def name_of(source: UUID) -> str:
    """Return the name of the property that contains a source's marks."""
    return f"{OURS}{source}"


def state_of(source: UUID, table: TableMetadata) -> State:
    """Return the knowledge of a source in a version of a table.

    Raises:
        MarksExpired, MarksDamaged: it is unknown.
    """
    name = name_of(source)
    text = _counts(name, table)
    with _reading(name):
        return State() if text is None else _state(json.loads(text))


def put_right(table: TableMetadata) -> dict[str, str | None]:
    """Return new texts for sources' properties after a rollback; None: remove the property.

    Raises:
        MarksExpired, MarksDamaged: a source's marks are unknown.
    """
    names = [name for name in table.properties if name.startswith(OURS)]
    right = {name: _counts(name, table) for name in names}
    return {name: text for name, text in right.items() if text != table.properties[name]}


def _counts(name: str, table: TableMetadata) -> str | None:
    """Return the text that counts for a source: its property, an older snapshot's, or None."""
    text = table.properties.get(name)
    if text is None:
        return None
    with _reading(name):
        entry = json.loads(text)
        snapshot, sequence = int(entry["snapshot"]), int(entry["sequence"])
    oldest = None
    for oldest in history(table):
        if oldest.snapshot_id == snapshot:
            return text
        if _number(oldest) < sequence and (earlier := _text(oldest, name)):
            return earlier
    # a snapshot without a parent proves nothing: it loses its parent when that one expires
    if oldest is None or _number(oldest) == FIRST:
        return None  # complete history without the source: rolled back to before it
    if _number(oldest) > sequence:
        return text
    raise MarksExpired(name, snapshot)


def history(table: TableMetadata) -> Iterator[Snapshot]:
    """Yield the snapshots of main's newest version and its ancestors, newest first."""
    snapshots = {one.snapshot_id: one for one in table.snapshots}
    snapshot_id = table.current_snapshot_id
    while snapshot_id is not None and (snapshot := snapshots.get(snapshot_id)):
        yield snapshot
        snapshot_id = snapshot.parent_snapshot_id


def text_of(
    before: State,
    moved: Mapping[Place, Mark],
    epochs: Mapping[int, int],
    snapshot: int,
    number: int,
) -> str:
    """Return the text of a commit for a source: the table's knowledge, with the changes.

    ``snapshot`` and ``number`` are those of the commit's snapshot.
    """
    marks: dict[str, dict[int, list[int]]] = {}
    for (lane, shard), mark in sorted({**before.marks, **moved}.items()):
        marks.setdefault(lane, {})[shard] = [*numbers_of(mark).values()]
    entry = {
        "snapshot": snapshot,
        "sequence": number,
        "epochs": dict(sorted({**before.epochs, **epochs}.items())),
        "marks": marks,
    }
    return json.dumps(entry, separators=(",", ":"))


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


def _state(entry: Mapping[str, Any]) -> State:
    marks = {
        (lane, int(shard)): mark_of(lane, *numbers)
        for lane, of_shards in entry["marks"].items()
        for shard, numbers in of_shards.items()
    }
    return State(
        marks=marks, epochs={int(shard): epoch for shard, epoch in entry["epochs"].items()}
    )
