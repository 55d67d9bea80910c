"""Streams of a Redis server, filled a step at a time, exactly once.

A step is some of a chunk's messages, in their order. One script stores it, whole or not at all
(`saf.destinations.redis.script`): it compares the marks with those that this side has read, adds
the messages to their streams, and moves the marks past them. Nothing else runs at the server
meanwhile, which is why a step is short (``step_rows``).

The steps of a chunk are sent without waiting for answers. Each one compares the marks with what the
one before leaves, so after a step that was not stored, none of the following is stored either. If
another process has moved the marks meanwhile, they are read again: then it is the newer owner, or
had the same chunk, of which the rest is stored.

So a chunk whose storing was interrupted is stored in part, up to the marks; given again, the rest
follows. A rejected message is found before the first step.

Durability is what the server's settings give (`saf.destinations.redis.guarantee`). What a crash or
a failover takes back, it takes back with the marks, because one script has written both. So the
marks are behind those that the source remembers, which is refused and repaired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations import Chunk, Stored
from saf.destinations.mapping import HEADERS, Mapped, mapped
from saf.destinations.marks import Mark, Place
from saf.destinations.places import Verdict, guarded, judged, last_of, refuse
from saf.destinations.redis import keys, wire
from saf.destinations.redis.script import MOST_FIELDS, STORE, STORED
from saf.destinations.redis.server import Link, errors, open_link
from saf.errors import Rejected, Unavailable
from saf.failpoints import fail_point

if TYPE_CHECKING:
    from saf.destinations.redis import Redis

PREFIX = "ce_"
"""What stands before an attribute of CloudEvents: there is no binding for Redis, so Kafka's."""

IN_FLIGHT = 4
"""Steps that are sent before the first one's answer is read."""
ATTEMPTS = 20
"""How often the marks are read anew, if others move them meanwhile."""
LARGEST = 512 << 20
"""The largest value that a server takes unless it says another, in bytes."""


class Streams:
    """Streams as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Redis) -> None:
        self.name = name
        self.what = f"destination {name!r}"
        self.settings = settings
        self._link: Link | None = None
        self._identity: UUID | None = None
        self._sha = ""
        self._largest = LARGEST

    def identity(self) -> UUID:
        """Return what the server says; one without an identity becomes a destination."""
        self.connect()
        assert self._identity is not None  # noqa: S101 - learnt at the first contact
        return self._identity

    def connect(self) -> None:
        """Connect, and make sure that the server keeps what it is given."""
        if self._link is not None:
            return
        self._link = open_link(self.name, self.settings)
        with self._connected() as link:
            link.look()
            self._identity = link.make_identity()
            self._sha = str(link.client.script_load(STORE))
            self._largest = int(link.config("proto-max-bulk-len") or LARGEST)

    def close(self) -> None:
        """Give up the connection, if there is one."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored:
        """Store a chunk; see `saf.destinations.Destination`."""
        identity, given = self.identity(), chunk.rows.num_rows
        stored, moved = 0, dict[Place, Mark]()
        with self._connected() as link:
            for _ in range(ATTEMPTS):
                said, epochs, marks = self._read(link, chunk)
                verdict = judged(
                    self.what, identity, chunk, epochs, marks, exactly_once=exactly_once
                )
                what = None if verdict.wrong else self._mapped(verdict.rows, chunk.source)
                fail_point("mom_insert")
                answers = self._send(link, self._steps(chunk, verdict, what, said, marks))
                stored += sum(count for count, fine in answers if fine)
                moved |= verdict.moved
                if answers[-1][1]:
                    break
                if what and not exactly_once:  # the marks do not drop what is stored
                    chunk = replace(chunk, rows=_left(verdict.rows, answers))
            else:
                raise Unavailable(self.what, "others move the same marks again and again")
        fail_point("mom_commit")
        if verdict.wrong:
            raise verdict.wrong
        return Stored(messages=stored, dropped=given - stored, marks=moved)

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored; see `Destination.marks`."""
        self.connect()
        with self._connected() as link:
            _, epochs, marks = self._read(link, chunk)
        refuse(self.what, chunk, epochs, marks)
        return marks

    def _read(
        self, link: Link, chunk: Chunk
    ) -> tuple[dict[Place, str], dict[Place, int], dict[Place, Mark]]:
        """Return what the server has of the places that a chunk needs, also as epochs and marks."""
        places = guarded(chunk)
        said = dict(zip(places, link.read(chunk.source, places), strict=True))
        found = {place: keys.read(value) for place, value in said.items()}
        return (
            said,
            {place: epoch for place, (epoch, _) in found.items()},
            {place: mark for place, (_, mark) in found.items()},
        )

    def _mapped(self, rows: pa.Table, source: UUID) -> Mapped:
        """Return what the server gets of messages.

        Raises:
            Rejected: it does not take one of them.
        """
        what = mapped(
            self.what,
            rows,
            source,
            topic=self.settings.topic,
            form=self.settings.format,
            prefix=PREFIX,
            reserved=[wire.BODY],
        )
        largest = pc.max(pc.binary_length(what.body)).as_py() or 0
        if largest > self._largest:
            raise Rejected(
                self.what, f"a body has more than proto-max-bulk-len ({self._largest:,}) bytes"
            )
        if max(map(len, what.own), default=0) + len(HEADERS) > MOST_FIELDS:
            raise Rejected(self.what, f"a message has some {MOST_FIELDS:,} headers or more")
        return what

    def _steps(
        self,
        chunk: Chunk,
        verdict: Verdict,
        what: Mapped | None,
        said: Mapping[Place, str],
        marks: Mapping[Place, Mark],
    ) -> Iterator[tuple[int, list[Any]]]:
        """Give the commands of a chunk, each with its number of messages; at least one."""
        mine, tag, source = dict(chunk.batch.epochs), self.settings.hash_tag, chunk.source
        count = what.count if what else 0
        for first in range(0, max(count, 1), self.settings.step_rows):
            rows = verdict.rows.slice(first, self.settings.step_rows)
            last = first + self.settings.step_rows >= count
            moved = verdict.moved if last else last_of(replace(chunk, rows=rows), marks)
            marks = {**marks, **moved}
            new = {place: keys.written(mine[place[1]], mark) for place, mark in marks.items()}
            some = what.slice(first, self.settings.step_rows) if what else None
            streams = [keys.stream(tag, topic) for topic in some.topics] if some else []
            yield (
                some.count if some else 0,
                wire.command(
                    self._sha,
                    [keys.marks(tag, source), keys.streams(tag, source), *streams],
                    {keys.field(place): value for place, value in said.items()},
                    {keys.field(p): value for p, value in new.items() if value != said[p]},
                    some,
                ),
            )
            said = new

    def _send(self, link: Link, steps: Iterator[tuple[int, list[Any]]]) -> list[tuple[int, bool]]:
        """Send steps; return the number of messages of each, and whether it was stored.

        If one was not, but the last one was, another process has stored the same messages.
        """
        pool = link.client.connection_pool
        connection = pool.get_connection()
        waiting: deque[int] = deque()
        answers: list[tuple[int, bool]] = []

        def answered() -> None:
            answers.append((waiting.popleft(), connection.read_response() == STORED))

        try:
            for count, command in steps:
                connection.send_packed_command(command)
                waiting.append(count)
                if len(waiting) >= IN_FLIGHT:
                    answered()
            while waiting:
                answered()
            if answers[-1][1]:
                self._wait_for_replicas(connection)
        except BaseException:
            connection.disconnect()  # answers may be under way
            raise
        finally:
            pool.release(connection)
        return answers

    def _wait_for_replicas(self, connection: Any) -> None:
        """Wait until the replicas have what this connection has written.

        Raises:
            Unavailable: too few have it in time. Given again, the chunk is waited for again.
        """
        wanted = self.settings.replicas
        if not wanted:
            return
        seconds = self.settings.bounds.lock_seconds
        connection.send_command("WAIT", wanted, int(seconds * 1000))
        have = connection.read_response()
        if have < wanted:
            raise Unavailable(
                self.what, f"{have} of {wanted} replicas have the messages after {seconds:g} s"
            )

    @contextmanager
    def _connected(self) -> Iterator[Link]:
        """Give the connection; give it up after an error, which is translated."""
        link = self._link
        assert link is not None  # noqa: S101 - connected before
        try:
            with errors(self.what, self.settings):
                yield link
        except Unavailable:
            self.close()
            raise


def _left(rows: pa.Table, answers: Sequence[tuple[int, bool]]) -> pa.Table:
    """Return those of some rows whose steps were not stored."""
    counts, fine = zip(*answers, strict=True)
    return rows.filter(pa.array(~np.repeat(np.array(fine, bool), counts)))
