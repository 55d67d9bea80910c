"""Reconciling a topic: prove that the inbox has each message of a source's topic.

One snapshot of the inbox has the marks of the topic's partitions and the messages stored from them.
Both move in the same transactions. So whatever runs beside it, each message of the topic up to the
marks must be in the snapshot, and those after the marks are *pending*. The topic is read again and
decoded again, which gives the same message ids:

    missing      in the topic, up to the mark, and not in the inbox
    duplicate    in the inbox more often than in the topic, which has lost none of its messages
    set aside    a record that no inbox takes; it became a dead letter, and is not compared

Messages that the topic no longer has are not compared, nor are messages that were purged from the
inbox on purpose: see `saf.operating.repair.reconcile` for the range. Memory is bounded: a topic
with more than `MOST_IDS` messages is read several times, each time for some of the ids.

Limit: messages that an operator has skipped (``start = "latest"``, or `saf source continue --from
latest`) are missing, because no table records them. Compare those created since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.config import Settings
from saf.errors import UsageError, placed
from saf.log.side import IN_RANGE, Side, open_side
from saf.message import FIRST_MOMENT, LAST_DAY
from saf.operating.repair.reconcile.outcome import Range
from saf.operating.sources import Partition, SourceStatus, named, status_at
from saf.sources import BEGINNING, GONE, Extent, Position, Source, columns
from saf.sources.decoding import REASON, Decoder
from saf.sources.judging import judge
from saf.sources.settings import SourceSettings

MOST_IDS = 250_000
"""Most messages to compare at a time."""
STORED = f"""
SELECT uuid_send(message_id), count(*) FROM saf.inbox
WHERE source = %(source)s AND get_byte(uuid_send(message_id), 15) %% %(parts)s = %(part)s
  AND {IN_RANGE}
GROUP BY 1
"""


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A message of the topic that the inbox lacks."""

    message_id: UUID
    shard: int
    position: Position

    def as_dict(self) -> dict[str, Any]:
        """Return it as a dict for JSON."""
        position = placed(self.position)
        return {"message_id": str(self.message_id), "shard": self.shard, "position": position}


@dataclass(kw_only=True)
class Compared:
    """Result for one source; the numbers count messages."""

    name: str
    topic: str
    into: str
    range: Range
    compared: int = 0
    pending: int = 0
    set_aside: int = 0
    missing: int = 0
    duplicate: int = 0
    named: tuple[Gone, ...] = ()
    """Some of the missing messages."""

    @property
    def same(self) -> bool:
        """Whether the inbox has all that was read, and nothing twice."""
        return not (self.missing or self.duplicate)


def compare(
    settings: Settings,
    name: str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    limit: int = 100,
) -> Compared:
    """Compare the topic of a source with the inbox. Only reads.

    Args:
        settings: the saf.toml.
        name: the source.
        since: earliest created_at of messages to compare; default: see the module.
        until: compare only messages with an earlier created_at.
        limit: maximum number of messages to name; all are counted.

    Raises:
        Unavailable: the topic's broker or the inbox does not answer.
        SourceRefused: the topic is not what was read.
        UsageError: the topic is a queue, which no longer has what was read.
    """
    source = named(settings, name)
    if source.window is not None:
        raise UsageError(
            f"source {name!r}: topic {source.topic!r} is a queue: its messages are gone once they "
            "are stored, so nothing is left to compare"
        )
    into, dsn = settings.inbox_for(name)
    with (
        open_side(into, f"destination {into!r}", dsn, "inbox") as side,
        closing(source.open(name)) as topic,
    ):
        known = status_at(side.connection, name, source, into)
        purged: tuple[str, ...] = ()
        if since is None and side.may_be_purged():
            purged = ("inbox",)
            since = datetime.now(UTC) - timedelta(seconds=settings.purge.retention_seconds)
        compared = Range(since=since, until=until, purged=purged)
        found = Compared(name=name, topic=source.topic, into=into, range=compared)
        topic.connect()
        extents = [topic.extent(shard) for shard in range(topic.partitions())]
        for partition in known.partitions:
            extent = extents[partition.shard] if partition.shard < len(extents) else GONE
            if error := judge(name, source.topic, partition, extent):
                raise error
        found.pending = sum(_pending(known.partitions, extents))
        if known.source is not None:
            _compare(found, side, _Topic(settings, source, known, topic), extents, limit)
    return found


class _Topic:
    """A topic up to the marks of a snapshot, as the decoder reads it."""

    def __init__(
        self, settings: Settings, source: SourceSettings, known: SourceStatus, topic: Source
    ) -> None:
        assert known.source is not None  # noqa: S101 - it was read
        self.source = known.source
        self._marks = {one.shard: one.position for one in known.partitions}
        self._topic = topic
        self._rows = source.chunk_rows
        self._bytes = settings.forwarder.chunk_bytes
        self._decoder = Decoder(
            source=known.source,
            service=source.service,
            prefix=topic.prefix,
            max_bytes=settings.forwarder.max_bytes,
            named_services=source.named_services,
            key_header=source.key_header,
        )

    def chunks(self) -> Iterator[pa.Table]:
        """Yield all records up to the marks, decoded, a chunk at a time."""
        for shard, mark in self._marks.items():
            at = BEGINNING
            while at < mark:
                read = self._topic.read(shard, at, self._rows, self._bytes)
                records = [one for one in read.records if one.position <= mark]
                if records:
                    yield columns.table(self._decoder, shard, records)
                reached = read.end or (records[-1].position if records else mark)
                if len(records) < len(read.records) or reached == at:
                    break
                at = reached


def _compare(
    found: Compared, side: Side, topic: _Topic, extents: Sequence[Extent], limit: int
) -> None:
    """Count what the inbox lacks, or has twice, one part of the ids at a time."""
    has_all = not any(extent.removed for extent in extents)
    parts = sum(extent.added - extent.removed for extent in extents) // MOST_IDS + 1
    named: list[Gone] = []
    for part in range(parts):
        params = {"source": topic.source, "parts": parts, "part": part}
        params |= {"since": found.range.since, "until": found.range.until}
        stored = {bytes(id_): int(count) for id_, count in side.fetch(STORED, params)}
        had: Counter[bytes] = Counter()
        for rows in topic.chunks():
            is_dead = rows[REASON].is_valid()
            if part == 0:
                found.set_aside += int(pc.sum(is_dead).as_py() or 0)
            good = rows.filter(pc.and_(pc.invert(is_dead), _in_range(rows, found)))
            for id_, batch, number, shard in zip(
                *(good[name].to_pylist() for name in ("message_id", "batch", "id", "shard")),
                strict=True,
            ):
                if id_[15] % parts != part:
                    continue
                found.compared += 1
                had[id_] += 1
                if had[id_] > stored.get(id_, 0):
                    found.missing += 1
                    if len(named) < limit:
                        place = (batch, number)
                        named.append(Gone(message_id=UUID(bytes=id_), shard=shard, position=place))
        if has_all:
            found.duplicate += sum(max(count - had[id_], 0) for id_, count in stored.items())
    found.named = tuple(named)


def _in_range(rows: pa.Table, found: Compared) -> pa.ChunkedArray:
    created = rows["created_at"]
    since = pc.greater_equal(created, found.range.since or FIRST_MOMENT)
    return pc.and_(since, pc.less(created, found.range.until or LAST_DAY))


def _pending(known: Sequence[Partition], extents: Sequence[Extent]) -> Iterator[int]:
    """Yield how many messages of each partition were not read yet."""
    read = {one.shard: one for one in known}
    for shard, extent in enumerate(extents):
        partition = read.get(shard)
        if partition is None or partition.added is None:
            yield extent.added - extent.removed
        elif partition.position < extent.last:
            yield max(extent.added - partition.added, 0)
