"""Link to a RabbitMQ server's streams: a destination's connection, and saf's state at the server.

The streams are:

    TOPIC            messages
    MARKS            the destination's identity, followed by the sources that have a journal
    MARKS.SOURCE     the journal of a source: `saf.destinations.rabbitmq_stream.journal`

`Link` creates streams that do not exist, and changes no settings of existing streams.

An error is recognised by its code. If a later attempt may succeed, it is `Unavailable`: no answer,
a stream without a leader. If an operator must fix something, it is `Refused`: the login, a right.

`Link.guarantee` returns the promise of the server's streams: which messages a crash may take back.
A server confirms a message when most of the servers that keep its stream have written it, and never
syncs its files. So the number of servers that lose power together decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import NAMESPACE_URL, UUID, uuid5

from saf.destinations.marks import Known
from saf.destinations.queues import ENOUGH, kept_by
from saf.destinations.rabbitmq_stream.connection import (
    DENIED,
    LOGINS,
    NOT_MET,
    Connection,
    StreamError,
    text_of,
)
from saf.destinations.rabbitmq_stream.journal import (
    KEPT_BYTES,
    SEGMENT_BYTES,
    Journal,
)
from saf.destinations.settings import Guarantee, rights, unusable
from saf.errors import Refused, SafError, Unavailable

if TYPE_CHECKING:
    from saf.destinations.rabbitmq_stream import RabbitmqStream

OLDEST = (3, 10)
"""Oldest supported version."""
NOTER = 254
"""Number of the publisher of ids: the identity, and the sources."""
IDENTITY = "identity"
"""Name of the publisher of the identity: the first id counts, because its publishing id is 1."""


class Link:
    """A destination's connection to its server, and to its streams."""

    def __init__(self, name: str, settings: RabbitmqStream) -> None:
        self.what = f"destination {name!r}"
        self.settings = settings
        self.connection = Connection(settings)
        self._there: set[str] = set()
        self._journal: Journal | None = None

    def look(self) -> None:
        """Raise if messages must not be stored here.

        Raises:
            Refused: the server is too old.
        """
        version = self.connection.server["version"]
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise unusable(self.what, f"its version is {version}", "upgrade it to 3.10 or newer")

    def make(self, streams: Collection[str], **arguments: str) -> None:
        """Create the streams that do not exist."""
        new = sorted({*streams} - self._there)
        if not new:
            return
        if self.settings.replicas is not None:
            arguments["initial-cluster-size"] = str(self.settings.replicas)
        existing = self.connection.replicas(new)
        for stream in new:
            if stream not in existing:
                self.connection.create(stream, arguments)
        self._there.update(new)

    def journal(self, source: UUID, *, make: bool = False) -> Journal:
        """Return the journal of a source."""
        if self._journal is None or self._journal.source != source:
            stream = f"{self.settings.marks}.{source}"
            self._journal = Journal(connection=self.connection, stream=stream, source=source)
        if make and self._journal.stream not in self._there:
            if source not in self.sources():
                self._note(str(source), number=0)
            self.make(
                [self._journal.stream],
                **{
                    "max-length-bytes": str(KEPT_BYTES),
                    "stream-max-segment-size-bytes": str(SEGMENT_BYTES),
                },
            )
        return self._journal

    def known(self, source: UUID) -> Known:
        """Return all marks of a source."""
        journal = self.journal(source)
        journal.follow()
        return journal.known(self.identity())

    def identity(self) -> UUID:
        """Return the destination's identity, or its future one; write nothing.

        A server without an identity gets one computed from its address. So a server that has lost
        everything is not taken for a new one: it is the same one, without its acknowledged data.
        """
        if identities := self._noted():
            return identities[0]
        settings = self.settings
        return uuid5(NAMESPACE_URL, f"{settings.server}#{settings.marks}")

    def make_identity(self) -> UUID:
        """Return the identity, after storing it; it stays when the server's data is moved."""
        self.make([self.settings.marks])
        identities = self._noted()
        if not identities:
            self._note(str(self.identity()), number=1, by=IDENTITY)
            identities = self._noted()
        return identities[0]

    def sources(self) -> list[UUID]:
        """Return the sources that have a journal."""
        return list(dict.fromkeys(self._noted()[1:]))

    def _noted(self) -> list[UUID]:
        """Return the ids in the stream of the identity."""
        stream = self.settings.marks
        if stream not in self.connection.replicas([stream]):
            return []
        identities: list[UUID] = []
        with self.connection.chunks(stream) as following:
            while (chunk := following(wait=False)) is not None:
                identities += [UUID(text_of(entry)) for entry in chunk.entries]
        return identities

    def _note(self, text: str, *, number: int, by: str = "") -> None:
        """Add an id to the stream of the identity."""
        self.connection.declare({NOTER: (by, self.settings.marks)})
        self.connection.add(NOTER, text, number=number)
        self.connection.forget([NOTER])

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def guarantee(self) -> Guarantee:
        """Return the server's promise with its current settings."""
        self.look()
        settings = self.settings
        server = f"RabbitMQ {self.connection.server['version']}, {settings.server}"
        quality = settings.quality.replace("_", " ")
        replicas = self.connection.replicas([settings.marks]).get(settings.marks)
        if replicas is None:
            server = f"{server}, whose streams are made at the first message"
            return Guarantee(server=server, promise=quality)
        findings: list[tuple[str, str]] = []
        if replicas == 1:
            findings.append(
                (
                    "a loss of power may lose messages that the system had not written yet, in "
                    "each stream separately; saf reconcile finds missing messages",
                    "a cluster of three servers, each with power of its own",
                )
            )
        elif replicas < ENOUGH:
            findings.append(("two servers work only together", "a cluster of three servers"))
        kept = kept_by(replicas)
        return Guarantee(
            server=server,
            promise=f"{quality}; {kept}; the loss of a server's marks is detected, and saf rebase "
            "sends missing messages again",
            more=tuple(findings),
        )


@contextmanager
def errors(what: str, settings: RabbitmqStream) -> Iterator[None]:
    """Translate the errors of a connection."""
    try:
        yield
    except (StreamError, OSError) as error:
        raise translated(what, settings, error) from None


def translated(what: str, settings: RabbitmqStream, error: Exception) -> SafError:
    """Return saf's error for an error of a connection."""
    reason = settings.redact(str(error)) or type(error).__name__
    if isinstance(error, StreamError):
        if error.code in LOGINS:
            return Refused(what, reason, "fix its login in saf.toml")
        if error.code == DENIED:
            return Refused(what, reason, rights(what))
        if error.code == NOT_MET:
            return unusable(what, reason, "choose another topic in saf.toml, or fix that stream")
    unavailable = Unavailable(what, f"{settings.server}: {reason}")
    unavailable.hangs = isinstance(error, TimeoutError)
    return unavailable
