"""Streams of a Redis server, filled a step at a time, exactly once.

`saf.destinations.stepwise` explains steps. One script stores a step, all or nothing
(`saf.destinations.redis.script`): it compares the marks with those that this process has read, adds
the messages to their streams, and moves the marks past them. The server runs nothing else at the
same time, so a step is short (``step_rows``).

The steps of a chunk are sent without waiting for answers.

Durability depends on the server's settings (`saf.destinations.redis.server`). If a crash or a
failover takes messages back, it takes back the marks too, because one script has written both. So
the marks are behind those that the source remembers, which is refused and repaired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations import Chunk
from saf.destinations.mapping import HEADERS, Mapped, mapped
from saf.destinations.marks import Place
from saf.destinations.places import guarded
from saf.destinations.redis import script, wire
from saf.destinations.redis.script import MOST_FIELDS, STORE, STORED
from saf.destinations.redis.server import Link, errors, open_link
from saf.destinations.stepwise import Cut, Step, Stepwise
from saf.errors import Rejected, Unavailable

if TYPE_CHECKING:
    from saf.destinations.redis import Redis

IN_FLIGHT = 4
"""Steps to send before the first one's answer is read."""
LARGEST = 512 << 20
"""Largest value that a server accepts by default, in bytes."""


class Streams(Stepwise[Link]):
    """Streams as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Redis) -> None:
        super().__init__(name)
        self.settings = settings
        self._sha = ""
        self._largest = LARGEST

    def _open(self) -> Link:
        return open_link(self.name, self.settings)

    def _prepare(self, link: Link) -> UUID:
        link.look()
        self._sha = str(link.client.script_load(STORE))
        self._largest = int(link.config("proto-max-bulk-len") or LARGEST)
        return link.make_identity()

    def _shut(self, link: Link) -> None:
        link.close()

    def _errors(self) -> AbstractContextManager[None]:
        return errors(self.what, self.settings)

    def _read(self, link: Link, source: UUID, places: Sequence[Place]) -> list[str]:
        return link.read(source, places)

    def _mapped(self, rows: pa.Table, source: UUID) -> Mapped:
        messages = mapped(
            self.what,
            rows,
            source,
            topic=self.settings.topic,
            form=self.settings.format,
            prefix=wire.EVENTS,
            reserved=[wire.BODY],
        )
        largest = pc.max(pc.binary_length(messages.body)).as_py() or 0
        if largest > self._largest:
            raise Rejected(
                self.what, f"a body has more than proto-max-bulk-len ({self._largest:,}) bytes"
            )
        if max(map(len, messages.own), default=0) + len(HEADERS) > MOST_FIELDS:
            raise Rejected(self.what, f"a message has some {MOST_FIELDS:,} headers or more")
        return messages

    def _cuts(self, chunk: Chunk, rows: pa.Table) -> Iterator[Cut]:
        places, at_once = guarded(chunk), self.settings.step_rows
        for first in range(0, max(rows.num_rows, 1), at_once):
            yield Cut(first=first, count=min(at_once, rows.num_rows - first), places=places)

    def _send(self, link: Link, source: UUID, steps: Iterator[Step]) -> list[tuple[int, bool]]:
        pool = link.client.connection_pool
        connection = pool.get_connection()
        waiting: deque[int] = deque()
        answers: list[tuple[int, bool]] = []

        def answered() -> None:
            answers.append((waiting.popleft(), connection.read_response() == STORED))

        try:
            # else the wait could fail after storing, and at least once would store the chunk twice
            self._wait_for_replicas(connection, "earlier writes")
            for step in steps:
                connection.send_packed_command(self._command(source, step))
                waiting.append(step.count)
                if len(waiting) >= IN_FLIGHT:
                    answered()
            while waiting:
                answered()
            if answers[-1][1]:
                self._wait_for_replicas(connection, "the messages")
        except BaseException:
            connection.disconnect()  # answers may still arrive
            raise
        finally:
            pool.release(connection)
        return answers

    def _command(self, source: UUID, step: Step) -> list[Any]:
        tag = self.settings.hash_tag
        streams = [script.stream(tag, topic) for topic in step.what.topics] if step.what else []
        moved = {place: text for place, text in step.after.items() if text != step.before[place]}
        return wire.command(
            self._sha,
            [script.marks(tag, source), script.streams(tag, source), *streams],
            {script.field(place): text for place, text in step.before.items()},
            {script.field(place): text for place, text in moved.items()},
            step.what,
        )

    def _wait_for_replicas(self, connection: Any, content: str) -> None:
        """Wait until the replicas have all that the server had at the call.

        A server waits for the last write of the connection: since Redis 7.2, a command that writes
        nothing does not count. If an earlier attempt has stored the whole chunk without a complete
        wait, the script writes nothing now. So this method itself writes, after the script.

        Raises:
            Unavailable: too few replicas have it in time. A repeated chunk waits again.
        """
        required = self.settings.replicas
        if not required:
            return
        seconds = self.settings.bounds.lock_seconds
        written = ("SET", script.waited(self.settings.hash_tag), "")
        wait = ("WAIT", required, int(seconds * 1000))
        connection.send_packed_command(connection.pack_commands([written, wait]))
        connection.read_response()
        count = connection.read_response()
        if count < required:
            raise Unavailable(
                self.what, f"{count} of {required} replicas have {content} after {seconds:g} s"
            )
