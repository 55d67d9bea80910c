"""The messages that one chunk sets aside: gathered during delivery, written with the position.

They are written earlier if a watermark is about to pass them (`SetAside.write_ahead`). Messages
that are set aside already are not written again: the answer to an earlier commit may have been
lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from saf.columns import COLUMNS
from saf.dialogs.statements import TELL
from saf.engine.parts import Part
from saf.engine.source_session import SourceSession
from saf.engine.work import Work
from saf.errors import SafError
from saf.failpoints import fail_point
from saf.log.cursor import lock_cursors, note_set_aside
from saf.message import MAX_BODY
from saf.setaside import backoff, dead, dropped, parking
from saf.setaside.dead import AsStored
from saf.setaside.dropped import EXPIRED, Reason
from saf.setaside.lane import FOUND, Lane
from saf.setaside.lane_columns import KIND, LANE, given_of
from saf.setaside.parking import ADDRESS

MAY_HAVE_LEFT = (
    "unavailable",
    "a forwarder ended while it sent this at most once: it may have arrived, or not",
)
"""The reason and the error of messages that are not sent again."""

_FOUND = pa.array([str(kind) for kind in FOUND.values()], pa.string())
_UUIDS = ("message_id", "to_broker", "conversation_id")


@dataclass
class SetAside:
    """A chunk's changes: lanes that failed or are open again, parked and dead messages."""

    work: Work
    position: int = 0
    """The chunk's last id; 0 if it is from lanes."""
    from_lanes: bool = False
    """Whether the chunk was parked before, so that its rows have lanes; else it is new."""
    destination: str = ""
    """The destination that these lanes belong to; empty if none."""
    failed: dict[Lane, SafError] = field(default_factory=dict)
    moving: set[Lane] = field(default_factory=set)
    """Failed lanes of which some messages were stored all the same."""
    down: set[str] = field(default_factory=set)
    """Destinations that do not answer."""
    taken: int = 0
    """The greatest number of a message that is done, though others of its chunk were refused."""
    opened: set[Lane] = field(default_factory=set)
    parked: list[Part] = field(default_factory=list)
    dead: list[tuple[pa.Table, str, str, str]] = field(default_factory=list)
    """Dead letters: the messages, the destination, the reason, the error."""
    unread: list[AsStored] = field(default_factory=list)
    """Messages that become dead letters as stored: too large to read, or isolated."""
    max_bytes: int = MAX_BODY
    """The largest body that is read, in bytes."""
    dead_letters: int = 0
    """Messages that have become dead letters."""
    parked_messages: int = 0
    _left_out: dict[str, pa.Table] = field(default_factory=dict)
    """By destination, the messages that were left out: shard, message_id and number."""
    _staying: set[int] = field(default_factory=set)
    """The messages that were parked before and stay parked."""
    _noted: dict[int, list[datetime]] = field(default_factory=dict)
    """For each shard, when messages were set aside, once that is committed."""

    @property
    def ahead(self) -> bool:
        """Whether some messages must be written before a watermark passes them."""
        return bool(self.parked or self.dead or self.unread)

    def __bool__(self) -> bool:
        return bool(self.failed or self.opened or self._left_out or self.ahead)

    def fail(self, lanes: Collection[Lane], error: SafError, *, moving: bool = False) -> None:
        """Note that an attempt at lanes has failed; ``moving``: some messages were stored."""
        self.failed |= dict.fromkeys(lanes, error)
        self.moving = self.moving.union(lanes) if moving else self.moving.difference(lanes)

    def take(self, rows: pa.Table) -> None:
        """Note messages that are done, at a destination that has refused others of their chunk."""
        if rows.num_rows:
            self.taken = max(self.taken, int(pc.max(rows[self._number]).as_py()))

    def waits_from(self) -> int | None:
        """Return the first id that waits, if all other messages of a new chunk are done."""
        if self.dead or self.unread or self._left_out or self.opened:
            return None
        waiting = [part.rows["id"] for part in self.parked if part.rows.num_rows]
        return min((int(pc.min(ids).as_py()) for ids in waiting), default=None)

    def wait(self, part: Part) -> None:
        """Park messages in their lanes, or leave them there."""
        if self.from_lanes:
            self._staying |= set(part.rows["parked_id"].to_pylist())
        else:
            self.parked.append(part)

    def move(self, part: Part) -> None:
        """Park messages in lanes that they were not in before."""
        self.parked.append(part)
        if self.from_lanes:
            self._staying |= set(part.rows["parked_id"].to_pylist())

    def leave_out(self, rows: pa.Table, destination: str) -> int:
        """Take messages that a transform leaves out for a destination.

        Return how many were not taken before, by an attempt that has raised.
        """
        new = rows.select(["shard", "message_id", self._number])
        known = self._left_out.get(destination)
        if known is not None:
            new = new.filter(pc.invert(pc.is_in(new[self._number], known[self._number])))
        self._left_out[destination] = new if known is None else pa.concat_tables([known, new])
        return int(new.num_rows)

    def bury(self, rows: pa.Table, destination: str, reason: str, error: str) -> None:
        """Make dead letters of messages."""
        if rows.num_rows:
            self.dead.append((rows, destination, reason, error))
            self.dead_letters += rows.num_rows

    def bury_unread(self, rows: pa.Table) -> pa.Table:
        """Make dead letters of messages that are too large to be read; return the others."""
        if not rows["body"].null_count:
            return rows
        large = rows.filter(pc.is_null(rows["body"]))
        self.unread += [AsStored(shard=shard, id=id_) for shard, id_ in self._places(large)]
        self.dead_letters += large.num_rows
        return rows.filter(pc.is_valid(rows["body"]))

    def bury_as_stored(self, rows: pa.Table, error: str) -> None:
        """Make dead letters of messages as stored, because reading them may fail."""
        for shard, id_ in self._places(rows):
            self.unread.append(AsStored(shard=shard, id=id_, reason="rejected", error=error))
        self.dead_letters += rows.num_rows

    def bury_unfit(self, rows: pa.Table, max_bytes: int) -> pa.Table:
        """Make dead letters of messages that have expired or are too large; return the others.

        The time at which the batch was opened counts, so a second reading gives the same result.
        """
        self.max_bytes = max_bytes
        rows = self.bury_unread(rows)
        expired = self.expired(rows)
        if expired is not None:
            self.bury(rows.filter(expired), "", "expired", EXPIRED)
            rows = rows.filter(pc.invert(expired))
        return rows

    def expired(self, rows: pa.Table) -> pa.ChunkedArray | None:
        """Return which messages had expired when the batch was opened; None if none had."""
        expiry = rows["expires_at"]
        if expiry.null_count == len(expiry):
            return None
        now = pa.scalar(self.work.batch.opened_at, expiry.type)
        expired = pc.fill_null(pc.less_equal(expiry, now), False)
        return expired if pc.any(expired).as_py() else None

    def note(self, source: psycopg.Connection[Any]) -> None:
        """Note that messages are set aside, so that the transaction commits durably.

        Commits that only move a position need not be durable. But the watermark of a later chunk
        may pass these messages, and would drop them if a crash made them come again.
        """
        if not self.ahead:
            return
        shards = {one.shard for one in self.unread}
        for rows in (*(part.rows for part in self.parked), *(rows for rows, *_ in self.dead)):
            shards |= {*pc.unique(rows["shard"]).to_pylist()}
        self._noted = note_set_aside(source, self.work.batch.of(shards))

    def write(self, source: psycopg.Connection[Any], before: int) -> None:
        """Write all changes, in the caller's transaction, which has locked the batch's cursors.

        If the position ``before`` is past the chunk, the task that moved it has written the
        changes, or had nothing to write. Operators' decisions since then are not undone.
        """
        self.note(source)
        if before >= self.position:
            return
        subscription_id = self.work.batch.subscription_id
        rows: list[dict[str, Any]] = []
        for destination in {part.destination for part in self.parked}:
            parts = [part for part in self.parked if part.destination == destination]
            dicts = [row for part in parts for row in self._parked(part)]
            here = parking.known(source, subscription_id, destination, dicts)
            rows += [row for row in dicts if row["message_id"] not in here]
        if rows:
            parking.park(source, rows)
        self._postpone(source)
        self._bury(source)
        backoff.succeeded(source, subscription_id, self.opened)

    def count_left_out(
        self,
        source: psycopg.Connection[Any],
        *,
        beyond: int = 0,
        among: Collection[int] | None = None,
    ) -> None:
        """Count messages that were left out, only in the transaction that completes them.

        Count only numbers ``beyond`` one, or ``among`` some: the others were completed before.
        """
        if not self._left_out:
            return
        rows = pa.concat_tables(self._left_out.values())
        rows = rows.filter(pc.greater(rows[self._number], beyond))
        if among is not None:
            done = pa.array(list(among), pa.int64())
            rows = rows.filter(pc.is_in(rows[self._number], done))
        by_shard = rows.group_by("shard", use_threads=False).aggregate(
            [("message_id", "count"), ("message_id", "last")]
        )
        counts = {
            (row["shard"], Reason.LEFT_OUT): (
                row["message_id_count"],
                UUID(bytes=row["message_id_last"]),
            )
            for row in by_shard.to_pylist()
        }
        dropped.add(source, self.work.batch.subscription_id, counts)

    def write_ahead(self, source_session: SourceSession) -> None:
        """Write the changes gathered so far, if a watermark must not pass them before."""
        if not self.ahead:
            return

        def write(source: psycopg.Connection[Any]) -> None:
            before = lock_cursors(source, self.work.batch)
            if self.from_lanes:
                buried = [item.id for item in self.unread]
                for rows, *_ in self.dead:
                    buried += rows["parked_id"].to_pylist()
                self.write_from_lanes(source, buried)
            else:
                self.write(source, before)

        source_session(write)
        self.written()
        fail_point("set_aside")

    def written(self) -> None:
        """Note that the changes gathered so far are committed."""
        self.work.batch.set_aside_at.update(self._noted)
        self._noted = {}
        self.parked_messages += sum(part.rows.num_rows for part in self.parked)
        self.opened.clear()
        self.parked.clear()
        self.dead.clear()
        self.unread.clear()

    def write_from_lanes(
        self, source: psycopg.Connection[Any], parked_ids: Sequence[int]
    ) -> list[int]:
        """Write the changes for messages that were parked before; settled ones leave their lane.

        Return the ids that were still parked.
        """
        self.note(source)
        subscription_id = self.work.batch.subscription_id
        gone = [number for number in parked_ids if number not in self._staying]
        if self.parked:
            lanes = {lane for part in self.parked for lane in part.lanes}
            parking.touch(source, subscription_id, lanes.union(self.failed), "behind others")
        self._postpone(source)
        for part in self.parked:
            found = pc.is_in(part.rows[KIND], _FOUND)
            copied, moved = part.rows.filter(found), part.rows.filter(pc.invert(found))
            if moved.num_rows:
                ids = moved["parked_id"].to_pylist()
                parking.move(source, part.destination, given_of(moved), ids)
            if copied.num_rows:
                rows = copied.select(["parked_id", *LANE, *ADDRESS]).to_pylist()
                parking.copy(source, part.destination, part.quality, rows)
                gone += copied["parked_id"].to_pylist()
        self._bury(source)
        return parking.unpark(source, gone)

    def _postpone(self, source: psycopg.Connection[Any]) -> None:
        backoff.postpone(source, self.work.batch.subscription_id, self.failed, self.moving)

    def _bury(self, source: psycopg.Connection[Any]) -> None:
        subscription_id = self.work.batch.subscription_id
        for destination in {destination for _, destination, _, _ in self.dead}:
            dicts = [
                row
                for rows, name, reason, error in self.dead
                if name == destination
                for row in self._dicts(rows, destination=name, reason=reason, error=error)
            ]
            here = dead.known(source, subscription_id, destination, dicts)
            new = [row for row in dicts if row["message_id"] not in here]
            at = {shard: times[-1] for shard, times in self._noted.items()}
            dead.bury(source, sorted(new, key=itemgetter("id")), at)  # a retry keeps this order
            _tell(source, [row for row in new if row["reason"] == "unresolved"])
        dead.bury_as_stored(
            source,
            subscription_id,
            "parked" if self.from_lanes else "outbox",
            self.unread,
            destination=self.destination,
            not_before=self.work.batch.opened_at,
            max_bytes=self.max_bytes,
            setting="forwarder.max_bytes",
        )

    @property
    def _number(self) -> str:
        return "parked_id" if self.from_lanes else "id"

    def _places(self, rows: pa.Table) -> Iterator[tuple[int, int]]:
        return zip(rows["shard"].to_pylist(), rows[self._number].to_pylist(), strict=True)

    def _parked(self, part: Part) -> Iterator[dict[str, Any]]:
        more = {
            "destination": part.destination,
            "quality": part.quality,
            "batch": self.work.batch.number,
            "opened_at": self.work.batch.opened_at,
        }
        dicts = self._dicts(part.rows, **more)
        for row, lane in zip(dicts, part.by_row, strict=True):
            yield {**row, **lane, "position": row["id"]}

    def _dicts(self, rows: pa.Table, **more: object) -> Iterator[dict[str, Any]]:
        more = {**more, "subscription_id": self.work.batch.subscription_id}
        if "log_id" in rows.column_names:
            rows = rows.drop_columns(["id"]).rename_columns({"log_id": "id"})
        for row in rows.select(["shard", "id", *COLUMNS]).to_pylist():
            uuids = {name: UUID(bytes=row[name]) for name in _UUIDS if row[name] is not None}
            yield {**row, **uuids, **more}


def _tell(source: psycopg.Connection[Any], rows: Iterable[dict[str, Any]]) -> None:
    """Send an Error to the dialog ends here at the source that have sent these messages."""
    dialog_rows = [row for row in rows if row["from_initiator"] is not None]
    if dialog_rows:
        source.execute(
            TELL,
            {
                "conversation_id": [row["conversation_id"] for row in dialog_rows],
                "is_initiator": [row["from_initiator"] for row in dialog_rows],
                "error": [row["error"] for row in dialog_rows],
            },
        )
