"""Reader: one source, read by this process.

A turn reads each owned partition up to the end that it had when the turn began, a chunk at a time,
and the partitions in turn. The next chunk is read and decoded while the previous one is stored.
Nothing is remembered from turn to turn but what the inbox's database has, and a connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa

from saf.broker import health
from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.database.background import Background
from saf.destinations import Refusal
from saf.destinations.marks import MAIN
from saf.errors import Fenced, UnknownService
from saf.failpoints import fail_point
from saf.sources import BEGINNING, Extent, Position, Records, Source, columns
from saf.sources.decoding import Decoder
from saf.sources.garbage import rarely_collected
from saf.sources.judging import judge
from saf.sources.ownership import Membership, Share
from saf.sources.settings import SourceSettings
from saf.sources.storing import SourceInbox, chunk_of
from saf.sources.window import Window
from saf.telemetry.logger import Log

log = Log("saf.forward")

COUNT_SECONDS = 30.0
"""Seconds between two looks whether the topic has more partitions now."""
LEAST_SECONDS = 1.0
"""Seconds between two looks at who owns what, if the lease allows."""


@dataclass(kw_only=True)
class Turn:
    """Result of a turn."""

    messages: int = 0
    dead: int = 0
    dropped: int = 0
    chunks: int = 0
    owned: int = 0
    """Number of partitions that this process owns."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """A chunk that was read and decoded."""

    share: Share
    records: Records
    rows: pa.Table | None
    """The decoded records; None without records."""

    @property
    def at(self) -> Position:
        """Position up to which it was read."""
        if self.records.end is not None:
            return self.records.end
        return self.records.records[-1].position if self.records.records else self.share.position

    @property
    def added(self) -> int:
        """Number of messages up to that position, as the topic's broker counts them."""
        if self.records.added is not None:
            return self.records.added
        return (self.share.added or 0) + len(self.records.records)

    @property
    def repeated(self) -> int:
        """Number of records that were stored before, as the window of ids shows."""
        return len(self.records.records) - self.rows.num_rows if self.rows is not None else 0


class Reader:
    """Reads a source into an inbox. Used by one thread at a time."""

    def __init__(
        self,
        name: str,
        settings: SourceSettings,
        into: str,
        dsn: Dsn,
        *,
        lease_seconds: float,
        max_bytes: int,
        chunk_bytes: int,
    ) -> None:
        self.name = name
        self.settings = settings
        self.into = into
        self.dsn = dsn
        self.lease_seconds = lease_seconds
        self.max_bytes = max_bytes
        self.chunk_bytes = chunk_bytes
        self._source: Source | None = None
        self._connection: psycopg.Connection[Any] | None = None
        self._membership: Membership | None = None
        self._inbox: SourceInbox | None = None
        self._decoder: Decoder | None = None
        self._opened_at = datetime.now(UTC)
        self._shares: dict[int, Share] = {}
        self._windows: dict[int, Window] = {}
        """For a topic without places: the ids of each owned partition."""
        self._acknowledged: Future[None] | None = None
        """The last acknowledgement that was begun."""
        self._balanced_at = self._counted_at = float("-inf")
        self._ahead = Background(1, f"saf-{name}")

    def turn(self, stopped: Callable[[], bool]) -> Turn:
        """Read what the owned partitions have now; end after a chunk if ``stopped`` says so.

        Raises:
            Unavailable: the topic's broker or the inbox's database does not answer.
            SourceRefused: the topic is not what it was.
            UnknownService: the service does not live at the inbox.
        """
        turn = Turn()
        try:
            with unavailable_if_lost(f"destination {self.into!r}"):
                self._tend()
                turn.owned = len(self._shares)
                self._read_all(turn, stopped)
        except Fenced as error:
            log.info("taken_over", source=self.name, detail=str(error))
            self.close()
        except BaseException:
            self.close()
            raise
        return turn

    def end(self) -> None:
        """Free the partitions, disconnect, and end the thread that reads ahead."""
        self.close()
        self._ahead.dismiss()

    def close(self) -> None:
        """Free the partitions and disconnect."""
        source, self._source = self._source, None
        if source is not None:
            source.close()  # first, so that unacknowledged messages wait for the next owner
        connection, self._connection = self._connection, None
        membership, self._membership = self._membership, None
        if connection is not None:
            with suppress(psycopg.Error):
                if membership is not None:
                    membership.leave(connection)
            connection.close()
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()
        self._shares, self._windows, self._acknowledged = {}, {}, None
        self._balanced_at = float("-inf")

    def _tend(self) -> None:
        """Connect, join, and renew the lease; see which partitions are owned."""
        if self._source is None:
            self._source = self.settings.open(self.name)
        self._source.connect()
        if self._connection is None:
            self._connection = self.dsn.connect(role="source", autocommit=True)
            check_schema(self._connection)
            health.refuse(self._connection, "inbox")
        if self._membership is None:
            self._join(self._source.prefix, self._connection)
        now = time.monotonic()
        if not self._shares or now - self._counted_at >= COUNT_SECONDS:
            assert self._membership is not None  # noqa: S101 - joined
            self._membership.know(self._connection, self._source.partitions())
            self._counted_at = now
        if now - self._balanced_at >= min(LEAST_SECONDS, self.lease_seconds / 3):
            self._balance(now)

    def _join(self, prefix: str, connection: psycopg.Connection[Any]) -> None:
        membership = Membership(
            name=self.name, settings=self.settings, lease_seconds=self.lease_seconds
        )
        subscription_id = membership.reader(connection)
        if subscription_id is None:
            known = [name for (name,) in fetch(connection, "SELECT name FROM saf.service")]
            where = f"source {self.name!r}: destination {self.into!r}"
            raise UnknownService(where, [self.settings.service], known=known, broker=self.into)
        membership.join(connection)
        assert membership.source is not None  # noqa: S101 - set by join()
        self._membership = membership
        ((self._opened_at,),) = fetch(connection, "SELECT now()")
        self._decoder = Decoder(
            source=membership.source,
            service=self.settings.service,
            prefix=prefix,
            max_bytes=self.max_bytes,
            named_services=self.settings.named_services,
            key_header=self.settings.key_header,
        )
        self._inbox = SourceInbox(
            self.into, self.dsn, owner=membership.member_id, subscription_id=subscription_id,
            window=self.settings.window,
        )  # fmt: skip

    def _balance(self, now: float) -> None:
        assert self._membership and self._connection  # noqa: S101, PT018 - set by _tend()
        self._membership.renew(self._connection)
        known = self._shares
        found = {share.shard: share for share in self._membership.balance(self._connection)}
        # of a partition that stays, this process knows as much: it alone moves the mark
        self._shares = {
            shard: known[shard] if shard in known and known[shard].epoch == share.epoch else share
            for shard, share in found.items()
        }
        if (bounds := self.settings.window) is not None:
            self._windows = {
                shard: self._windows[shard]
                if share is known.get(shard)
                else Window(bounds, self._membership.ids(self._connection, shard))
                for shard, share in self._shares.items()
            }
        self._balanced_at = now

    def _read_all(self, turn: Turn, stopped: Callable[[], bool]) -> None:
        """Read each owned partition up to its present end."""
        assert self._membership and self._connection  # noqa: S101, PT018 - set by _tend()
        ends = self._ends()
        left = [shard for shard, end in ends.items() if self._shares[shard].position < end]
        ahead: Future[Read] | None = None
        try:
            while left and not stopped():
                shard = left.pop(0)
                read = (ahead or self._start(self._shares[shard])).result()
                ahead = None
                if read.rows is None:
                    self._pass(read)
                    continue
                if read.at < ends[shard]:
                    left.append(shard)
                if left:
                    ahead = self._start(self._after(read, left[0]))
                self._store(turn, read, read.rows)
                self._acknowledge(read)
                if self._renewed() and not self._shares.keys() >= {*left}:
                    break  # some have another owner now
        finally:
            if ahead is not None:
                with suppress(Exception):
                    ahead.result()  # the source is used by one thread at a time
        if self._acknowledged is not None:
            self._acknowledged.result()
        if ahead is not None and self.settings.window is not None:
            self.close()  # messages read ahead are not stored: they must be delivered again
            return
        for share in self._shares.values() if turn.chunks else ():
            if share.position >= ends.get(share.shard, share.position):
                self._membership.looked(self._connection, share, 0)

    def _ends(self) -> dict[int, Position]:
        """Return the present end of each owned partition, unless one must not be read on."""
        assert self._source and self._membership and self._connection  # noqa: S101, PT018
        ends = {}
        for shard in [*self._shares]:
            extent = self._source.extent(shard)
            share = self._judged(self._shares[shard], extent)
            ends[shard] = end = extent.end(share.position)
            pending = extent.pending(share.progress) if share.position < end else 0
            self._membership.looked(self._connection, share, pending)
        return ends

    def _after(self, read: Read, shard: int) -> Share:
        """Return a share as it will be once ``read`` is stored."""
        share = self._shares[shard]
        if shard != read.share.shard:
            return share
        return replace(share, start=read.at, added=read.added)

    def _judged(self, share: Share, extent: Extent) -> Share:
        """Return a share of which more may be read; a new one begins now."""
        assert self._membership and self._connection  # noqa: S101, PT018 - set by _tend()
        if share.topic_id is None and extent.topic_id is not None:
            share = self._membership.identify(self._connection, share, extent.topic_id)
        if error := judge(self.name, self.settings.topic, share.progress, extent):
            raise error
        if share.start is None and share.mark.number == BEGINNING:
            share = share.begun(self.settings.start, extent)
            self._membership.begin(self._connection, share)
        self._shares[share.shard] = share
        return share

    def _start(self, share: Share) -> Future[Read]:
        return self._ahead.submit(lambda: self._next(share))

    @rarely_collected
    def _next(self, share: Share) -> Read:
        """Read and decode the next chunk of a partition."""
        assert self._source and self._decoder  # noqa: S101, PT018 - set by _tend()
        records = self._source.read(
            share.shard, share.position, self.settings.chunk_rows, self.chunk_bytes
        )
        if error := judge(self.name, self.settings.topic, share.progress, records.extent):
            raise error
        if not records.records:
            return Read(share=share, records=records, rows=None)
        rows = columns.table(self._decoder, share.shard, records.records)
        if (window := self._windows.get(share.shard)) is not None:
            first, number = share.position
            rows = window.fresh(rows, number)
            end = number + rows.num_rows
            records = replace(records, end=(first, end), added=end)
        return Read(share=share, records=records, rows=rows)

    def _pass(self, read: Read) -> None:
        """Remember that up to a position there is nothing to store."""
        share = self._after(read, read.share.shard)
        if share.position > read.share.position:
            assert self._membership and self._connection  # noqa: S101, PT018 - set by _tend()
            self._membership.begin(self._connection, share)
            self._shares[share.shard] = share

    def _store(self, turn: Turn, read: Read, rows: pa.Table) -> None:
        assert self._inbox and self._membership and self._membership.source  # noqa: S101, PT018
        turn.dropped += read.repeated
        if not rows.num_rows:
            return
        share = self._shares[read.share.shard]
        known = {(MAIN, share.shard): share.mark} if share.mark.number > BEGINNING else {}
        chunk = chunk_of(
            source=self._membership.source,
            owner=self._membership.member_id,
            rows=rows,
            epoch=(share.shard, share.epoch),
            known=known,
            opened_at=self._opened_at,
        )
        self._inbox.end, self._inbox.added, self._inbox.dead = read.at, read.added, 0
        fail_point("source_read")
        stored = self._inbox.store(chunk, exactly_once=True)
        fail_point("source_stored")
        if isinstance(stored, Refusal):
            raise stored.error
        mark = stored.marks[MAIN, share.shard]
        self._shares[share.shard] = replace(self._after(read, share.shard), mark=mark)
        turn.chunks += 1
        turn.dead += self._inbox.dead
        turn.messages += stored.messages - self._inbox.dead
        turn.dropped += stored.dropped

    def _acknowledge(self, read: Read) -> None:
        """Begin to acknowledge records that are stored, in the thread that reads."""
        if read.records.receipt is None:
            return
        assert self._source is not None  # noqa: S101 - set by _tend()
        if self._acknowledged is not None:
            self._acknowledged.result()
        acknowledge = partial(self._source.acknowledge, read.records.receipt)
        self._acknowledged = self._ahead.submit(acknowledge)

    def _renewed(self) -> bool:
        """Renew the lease, once a third of it is over; return whether it was."""
        now = time.monotonic()
        if now - self._balanced_at <= self.lease_seconds / 3:
            return False
        self._balance(now)
        return True
