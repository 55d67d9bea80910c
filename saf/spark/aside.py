"""What one chunk sets aside, gathered while it is delivered and written with its position.

Or before, where a watermark is about to pass it (`Aside.write_ahead`). What is there already is not
written again: the answer to a commit may have got lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from saf import dead, parking
from saf.cursor import hold
from saf.dead import AsStored
from saf.dialogs.statements import TELL
from saf.errors import SafError
from saf.failpoints import fail_point
from saf.message import COLUMNS, MAX_BODY
from saf.parking import Lane
from saf.spark.at_source import AtSource
from saf.spark.sorting import Part
from saf.spark.work import Work

_UUIDS = ("message_id", "to_broker", "conversation_id")


@dataclass
class Aside:
    """Of one chunk: lanes that failed or are open again, parked messages, dead letters."""

    work: Work
    lane: Lane | None = None
    """The lane that the chunk was parked in; None for new messages."""
    failed: dict[Lane, SafError] = field(default_factory=dict)
    opened: set[Lane] = field(default_factory=set)
    parked: list[Part] = field(default_factory=list)
    dead: list[tuple[pa.Table, str, str, str]] = field(default_factory=list)
    """Messages, the destination, the reason, the error."""
    unread: list[AsStored] = field(default_factory=list)
    """Messages too large to be read."""
    max_bytes: int = MAX_BODY
    """Of a body that is read."""
    dead_letters: int = 0
    """How many messages have become dead letters."""
    parked_messages: int = 0
    _staying: set[int] = field(default_factory=set)
    """Of the messages that were parked already, those that stay so."""

    @property
    def ahead(self) -> bool:
        """There is something that a watermark must not pass unwritten."""
        here = [part for part in self.parked if self.lane is None or part.lane != self.lane]
        return bool(here or self.dead or self.unread)

    def __bool__(self) -> bool:
        return bool(self.failed or self.opened or self.parked or self.dead or self.unread)

    def bury(self, rows: pa.Table, destination: str, reason: str, error: str) -> None:
        """These become dead letters."""
        if rows.num_rows:
            self.dead.append((rows, destination, reason, error))
            self.dead_letters += rows.num_rows

    def bury_unread(self, rows: pa.Table) -> pa.Table:
        """Messages that are too large to be read become dead letters; return the others."""
        if not rows["body"].null_count:
            return rows
        large = rows.filter(pc.is_null(rows["body"]))
        number = "id" if self.lane is None else "parked_id"
        places = zip(large["shard"].to_pylist(), large[number].to_pylist(), strict=True)
        self.unread += [AsStored(shard=shard, id=id_) for shard, id_ in places]
        self.dead_letters += large.num_rows
        return rows.filter(pc.is_valid(rows["body"]))

    def bury_unfit(self, rows: pa.Table, max_bytes: int) -> pa.Table:
        """Messages that have expired or are too large become dead letters; return the others.

        By the time at which the batch was opened: read again, it gives the same.
        """
        self.max_bytes = max_bytes
        rows = self.bury_unread(rows)
        expiry = rows["expires_at"]
        if expiry.null_count < len(expiry):
            now = pa.scalar(self.work.batch.opened_at, expiry.type)
            expired = pc.fill_null(pc.less_equal(expiry, now), False)
            self.bury(rows.filter(expired), "", "expired", "expires_at has passed")
            rows = rows.filter(pc.invert(expired))
        return rows

    def write(self, source: psycopg.Connection[Any]) -> None:
        """Write it all, in the caller's transaction."""
        subscription_id = self.work.batch.subscription_id
        for lane, error in self.failed.items():
            parking.postpone(source, subscription_id, lane, str(error))
        for part in self.parked:
            rows = list(self._parked(part))
            ids = [row["id"] for row in rows]
            here = parking.known(source, subscription_id, part.lane.destination, ids)
            parking.park(source, part.lane, [row for row in rows if row["id"] not in here])
        self._bury(source)
        for lane in self.opened:
            parking.succeeded(source, subscription_id, lane)

    def write_ahead(self, at_source: AtSource) -> None:
        """Write what there is so far, if a watermark must not pass it unwritten."""
        if not self.ahead:
            return

        def write(source: psycopg.Connection[Any]) -> None:
            hold(source, self.work.batch)
            if self.lane is None:
                self.write(source)
            else:
                buried = [one.id for one in self.unread]
                for rows, *_ in self.dead:
                    buried += rows["parked_id"].to_pylist()
                self.write_from_lane(source, buried)

        at_source(write)
        self.written()
        fail_point("set_aside")

    def written(self) -> None:
        """What there is so far needs no writing any more."""
        self.parked_messages += sum(part.rows.num_rows for part in self.parked)
        self.opened.clear()
        self.parked.clear()
        self.dead.clear()
        self.unread.clear()

    def write_from_lane(self, source: psycopg.Connection[Any], parked_ids: Sequence[int]) -> None:
        """The same for messages that were parked in a lane already: what has gone leaves it."""
        subscription_id = self.work.batch.subscription_id
        for failed, error in self.failed.items():
            parking.postpone(source, subscription_id, failed, str(error))
        for part in self.parked:
            ids = part.rows["parked_id"].to_pylist()
            self._staying |= set(ids)
            if part.lane != self.lane:
                parking.move(source, subscription_id, part.lane, ids)
        self._bury(source)
        parking.unpark(source, [number for number in parked_ids if number not in self._staying])

    def _bury(self, source: psycopg.Connection[Any]) -> None:
        subscription_id = self.work.batch.subscription_id
        for destination in {destination for _, destination, _, _ in self.dead}:
            dicts = [
                row
                for rows, there, reason, error in self.dead
                if there == destination
                for row in self._dicts(rows, destination=there, reason=reason, error=error)
            ]
            here = dead.known(source, subscription_id, destination, [row["id"] for row in dicts])
            new = [row for row in dicts if row["id"] not in here]
            dead.bury(source, sorted(new, key=itemgetter("id")))  # retried in the order they died
            _tell(source, [row for row in new if row["reason"] == "unresolved"])
        dead.bury_as_stored(
            source,
            subscription_id,
            "outbox" if self.lane is None else "parked",
            self.unread,
            destination="" if self.lane is None else self.lane.destination,
            max_bytes=self.max_bytes,
            setting="forwarder.max_bytes",
        )

    def _parked(self, part: Part) -> Iterator[dict[str, Any]]:
        more = {
            "destination": part.lane.destination,
            "lane": part.lane.lane,
            "quality": part.quality,
            "batch": self.work.batch.number,
        }
        for row in self._dicts(part.rows, **more):
            yield {**row, "position": row["id"]}

    def _dicts(self, rows: pa.Table, **more: object) -> Iterator[dict[str, Any]]:
        more = {**more, "subscription_id": self.work.batch.subscription_id}
        if "log_id" in rows.column_names:
            rows = rows.drop_columns(["id"]).rename_columns({"log_id": "id"})
        for row in rows.select(["shard", "id", *COLUMNS]).to_pylist():
            uuids = {name: UUID(bytes=row[name]) for name in _UUIDS if row[name] is not None}
            yield {**row, **uuids, **more}


def _tell(source: psycopg.Connection[Any], rows: Iterable[dict[str, Any]]) -> None:
    """Whoever has said these in a dialog, here at the source, gets an Error."""
    said = [row for row in rows if row["from_initiator"] is not None]
    if said:
        source.execute(
            TELL,
            {
                "conversation_id": [row["conversation_id"] for row in said],
                "is_initiator": [row["from_initiator"] for row in said],
                "error": [row["error"] for row in said],
            },
        )
