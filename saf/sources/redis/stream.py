"""A stream of a Redis server as a source.

One transaction reads the entries after a position and what the stream has at that moment. The
server counts the entries that were ever added (``entries-added``), so a stream that was deleted and
made again has had fewer than those that were read. Entries that were deleted before they were read
show once all entries up to the mark are gone: then more are gone than were read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import redis

from saf.destinations.mapping import CONTENT_TYPE
from saf.destinations.redis.server import Link, errors
from saf.destinations.settings import unusable
from saf.sources import BEGINNING, GONE, MOST_BYTES, Extent, Position, Record, Records
from saf.sources.linked import Linked

if TYPE_CHECKING:
    from saf.sources.redis import Redis

AT_ONCE = 500
"""Entries to request at a time: only after an answer is known how large they are."""
NO_KEY = "no such key"
LARGEST = 1 << 63
"""Positions are stored as a pair of PostgreSQL's bigint."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LATEST_MS = 253_402_214_400_000
"""First millisecond that is too late for a message's time; ids need not be times."""


class Stream(Linked[Link]):
    """A stream as a `saf.sources.Source`."""

    prefix = "ce_"

    def __init__(self, name: str, settings: Redis) -> None:
        super().__init__(name)
        self.settings = settings
        self._destination = settings.as_destination()

    def _open(self) -> Link:
        return Link(self.what, self._destination)

    def _errors(self) -> AbstractContextManager[None]:
        return errors(self.what, self._destination)

    def extent(self, shard: int) -> Extent:  # noqa: ARG002 - there is one
        """Return what the stream has."""
        with self._connected() as link:
            client = link.client
            try:
                info = client.xinfo_stream(self.settings.topic)
            except redis.ResponseError as error:
                return self._extent(error)
            return self._extent(info)

    def read(
        self,
        shard: int,  # noqa: ARG002 - there is one
        after: Position,
        limit: int,
        size: int = MOST_BYTES,
    ) -> Records:
        """Return entries after a position."""
        records: list[Record] = []
        with self._connected() as link:
            while True:
                count = min(limit - len(records), AT_ONCE)
                extent, entries = self._asked(link.client, after, count)
                found = [*self._records(entries)]
                records += found
                size -= sum(len(record.body) for record in found)
                if len(found) < count or len(records) >= limit or size <= 0:
                    break
                after = found[-1].position
        at_end = not records or records[-1].position >= extent.last
        return Records(extent=extent, records=records, added=extent.added if at_end else None)

    def _asked(self, client: Any, after: Position, count: int) -> tuple[Extent, Any]:
        """Return what the stream has, and entries after a position, at one moment."""
        first = f"({after[0]}-{after[1]}" if after > BEGINNING else "-"
        with client.pipeline(transaction=True) as pipeline:
            pipeline.xinfo_stream(self.settings.topic)
            pipeline.xrange(self.settings.topic, first, "+", count=count)
            info, entries = pipeline.execute(raise_on_error=False)
        extent = self._extent(info)
        if isinstance(entries, Exception):
            raise entries
        return extent, entries

    def _extent(self, info: Any) -> Extent:
        if isinstance(info, redis.ResponseError) and NO_KEY in str(info):
            return GONE
        if isinstance(info, Exception):
            raise info
        if "entries-added" not in info:
            raise unusable(self.what, "its server is too old", "upgrade it to 7.0 or newer")
        oldest = info["first-entry"]
        added = int(info["entries-added"])
        return Extent(
            last=self._position(info["last-generated-id"]),
            first=self._position(oldest[0]) if oldest else None,
            added=added,
            removed=added - int(info["length"]),
        )

    def _records(self, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> Iterator[Record]:
        body_field = self.settings.body_field.encode()
        for id_, fields in entries:
            position = self._position(id_)
            body = fields.get(body_field)
            if body is None:
                headers, body = _as_object(fields.items())
            else:
                headers = {_text(n): value for n, value in fields.items() if n != body_field}
            milliseconds = position[0]
            yield Record(
                position=position,
                headers=headers,
                body=body,
                created_at=EPOCH + timedelta(milliseconds=milliseconds)
                if milliseconds < LATEST_MS
                else None,
            )

    def _position(self, id_: bytes) -> Position:
        first, _, second = id_.partition(b"-")
        position = int(first), int(second)
        if max(position) >= LARGEST:
            raise unusable(
                self.what,
                f"stream {self.settings.topic!r} has the id {id_.decode()}, whose parts exceed "
                f"{LARGEST - 1}",
                "read a stream whose ids the server assigns",
            )
        return position


def _text(name: bytes) -> str:
    r"""Return a field's name as text; other writers may use any bytes.

    >>> _text(b"a"), _text(b"\xff")
    ('a', '\\xff')
    """
    return name.decode(errors="backslashreplace")


def _as_object(fields: Iterable[tuple[bytes, bytes]]) -> tuple[dict[str, bytes], bytes]:
    r"""Return fields as a JSON object, with the header that says so.

    >>> _as_object([(b"order", b"7")])
    ({'content-type': b'application/json'}, b'{"order":"7"}')
    """
    named = {_text(name): _text(value) for name, value in fields}
    body = json.dumps(named, ensure_ascii=False, separators=(",", ":")).encode()
    return {CONTENT_TYPE: b"application/json"}, body
