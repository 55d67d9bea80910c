"""The inbox of a broker behind a URL, exactly once: the forwarder's side.

A chunk is one request. The other end (`saf.webhooks.deliveries`) passes it to the same code that
stores at a broker with a dsn: in one transaction, it refuses an older epoch, drops repeats, writes
the rest, and moves the marks. So nothing is lost or doubled if an answer gets lost, if the other
end is killed in the middle, or if a process wakes up late.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from uuid import UUID

from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.https.chunks import body_of
from saf.destinations.https.link import Link
from saf.destinations.https.wire import ARROW, UNLIKE, Said, to_marks
from saf.destinations.marks import Mark, Place
from saf.errors import Rejected, Unavailable
from saf.failpoints import fail_point

if TYPE_CHECKING:
    from saf.destinations.https import Https


class RemoteInbox:
    """An inbox as a `saf.destinations.Destination`, which connects at the first chunk."""

    def __init__(self, name: str, settings: Https) -> None:
        self.what = f"destination {name!r}"
        self.settings = settings
        self._name = name
        self._link: Link | None = None
        self._identity: UUID | None = None
        self._most: int | None = None

    def identity(self) -> UUID:
        """Return the inbox's broker_id."""
        if self._identity is None:
            self.connect()
        assert self._identity is not None  # noqa: S101 - set by connect()
        return self._identity

    def connect(self) -> None:
        """Ask for the inbox's identity. If this fails, nothing was sent."""
        answer = self._linked().ask("identity")
        try:
            self._identity = UUID(answer["identity"])
            self._most = int(answer["max_bytes"])
        except UNLIKE:
            raise Unavailable(self.what, "its answer does not name the inbox's broker") from None

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        """Store a chunk; see `saf.destinations.Destination`."""
        fail_point("mom_insert")
        answer = self._given(chunk, store=True, exactly_once=exactly_once)
        fail_point("mom_commit")
        if isinstance(answer, Refusal):
            return answer
        try:
            return Stored(
                messages=int(answer["messages"]),
                dropped=int(answer["dropped"]),
                marks=to_marks(answer["marks"]),
            )
        except UNLIKE:
            raise Unavailable(self.what, "its answer does not list what it stored") from None

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored; see `Destination.marks`."""
        answer = self._given(chunk, store=False, exactly_once=False)
        if isinstance(answer, Refusal):
            raise answer.error
        try:
            return to_marks(answer["marks"])
        except UNLIKE:
            raise Unavailable(self.what, "its answer does not list what it stored") from None

    def close(self) -> None:
        """Close the connection, if one is open."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _given(self, chunk: Chunk, *, store: bool, exactly_once: bool) -> Said | Refusal:
        body = body_of(chunk, store=store, exactly_once=exactly_once)
        if self._most is None:
            self.connect()
        if self._most is not None and body.size > self._most:
            raise Rejected(
                self.what,
                f"{body.size:,} bytes are more than the max_bytes of its application, "
                f"{self._most:,}",
            )
        return self._linked().post(body, ARROW, self.settings.bounds.chunk_seconds, chunk)

    def _linked(self) -> Link:
        if self._link is None:
            self._link = Link(self._name, self.settings)
        return self._link
