"""Reading back: all entries of a source's streams, provided that none was removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa

from saf.destinations.mapping import held_of, said_of, source_of, texts_of
from saf.destinations.marks import known_of
from saf.destinations.reading import Reading
from saf.destinations.redis import script
from saf.destinations.redis.server import Link
from saf.destinations.redis.streams import BODY, EVENTS
from saf.destinations.tables import Held, TableReading
from saf.errors import CannotReadBack

if TYPE_CHECKING:
    from saf.destinations.redis import Redis

AT_ONCE = 5_000
"""Entries to request at a time."""


@contextmanager
def read(name: str, settings: Redis) -> Iterator[Reading]:
    """Open all streams of all sources for reading.

    Raises:
        CannotReadBack: entries were removed.
    """
    with settings.connected(name) as link:
        moment = cache(lambda source: Moment(name, link, source))
        tag = settings.hash_tag
        for key in [*link.client.scan_iter(match=_literally(script.streams(tag, "")) + "*")]:
            moment(UUID(key.decode().removeprefix(script.streams(tag, ""))))
        yield TableReading(
            name=name,
            is_=link.identity(),
            read=cache(lambda source: moment(source).held()),
            knows=lambda source: moment(source).known,
        )


class Moment:
    """One source at one moment: its marks, and the ends of its streams."""

    def __init__(self, name: str, link: Link, source: UUID) -> None:
        self._link = link
        self._source = source
        marks, streams = (
            key_of(link.settings.hash_tag, source) for key_of in (script.marks, script.streams)
        )
        existing: set[bytes] | None = None
        answers: list[Any] = []
        while not answers or answers[1] != existing:  # a stream was added
            existing = link.client.smembers(streams)
            with link.client.pipeline(transaction=True) as pipeline:
                pipeline.hgetall(marks)
                pipeline.smembers(streams)
                for key in sorted(existing or ()):
                    pipeline.xinfo_stream(key)
                answers = pipeline.execute(raise_on_error=False)
        self.known = known_of(link.identity(), script.texts(answers[0]))
        self._ends: dict[bytes, bytes] = {}
        for key, info in zip(sorted(existing or ()), answers[2:], strict=True):
            if isinstance(info, Exception):
                raise CannotReadBack(name, f"its stream {key.decode()} is gone")
            if missing := info["entries-added"] - info["length"]:
                raise CannotReadBack(
                    name, f"{missing:,} entries of its stream {key.decode()} were removed"
                )
            self._ends[key] = info["last-generated-id"]

    def held(self) -> pa.Table:
        """Return the messages."""
        held = Held()
        for key, end in self._ends.items():
            for entry in self._entries(key, end):
                if source_of(entry, EVENTS) == self._source:
                    held.add(held_of(entry, EVENTS))
        return held.table()

    def _entries(self, key: bytes, end: bytes) -> Iterator[Mapping[str, str]]:
        """Yield saf's headers of each entry; bodies need not be text."""
        first = "-"
        while entries := self._link.client.xrange(key, first, end, count=AT_ONCE):
            for _, fields in entries:
                body = fields.pop(BODY.encode(), b"")
                yield said_of(texts_of(fields.items()), body, EVENTS)
            first = f"({entries[-1][0].decode()}"


def _literally(text: str) -> str:
    r"""Return a pattern that matches a text literally.

    >>> _literally("{a*}")
    '{a\\*}'
    """
    return "".join(f"\\{character}" if character in "*?[]\\^" else character for character in text)
