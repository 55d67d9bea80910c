"""Reading back: all messages of all streams, in one pass, provided that none was removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from saf.destinations.mapping import held_of, said_of, source_of
from saf.destinations.marks import Known
from saf.destinations.rabbitmq_stream import amqp
from saf.destinations.rabbitmq_stream.connection import Connection
from saf.destinations.rabbitmq_stream.journal import Journal, generation, publisher
from saf.destinations.reading import Reading
from saf.destinations.tables import Held, TableReading
from saf.errors import CannotReadBack

if TYPE_CHECKING:
    from saf.destinations.rabbitmq_stream import RabbitmqStream


@contextmanager
def read(name: str, settings: RabbitmqStream) -> Iterator[Reading]:
    """Open the streams for reading.

    Raises:
        CannotReadBack: messages were removed.
    """
    with settings.connected(name) as link:
        identity = link.identity()
        held: dict[UUID, Held] = {}
        known: dict[UUID, Known] = {}
        streams: dict[str, list[Journal]] = {}
        for source in link.sources():
            held[source] = Held()
            journal = link.journal(source)
            journal.follow()
            known[source] = journal.known(identity)
            for stream in journal.streams:
                streams.setdefault(stream, []).append(journal)
        existing = link.connection.replicas(sorted(streams))
        for stream, journals in sorted(streams.items()):
            if stream not in existing:
                raise CannotReadBack(name, f"its stream {stream} is gone")
            if missing := _read(link.connection, stream, held):
                raise CannotReadBack(name, f"{missing:,} messages of its stream {stream} are gone")
            if missing is None and any(_has_had(journal, stream) for journal in journals):
                raise CannotReadBack(name, f"all messages of its stream {stream} are gone")
        yield TableReading(
            name=name,
            is_=identity,
            read=lambda source: held.get(source, Held()).table(),
            knows=lambda source: known.get(source) or Known(destination=identity),
        )


def entries(connection: Connection, stream: str) -> Iterator[tuple[int, bytes]]:
    """Yield the messages of a stream that exist now, with their numbers."""
    with connection.chunks(stream) as following:
        while (chunk := following(wait=False)) is not None:
            yield from enumerate(chunk.entries, start=chunk.first)


def _read(connection: Connection, stream: str, held: Mapping[UUID, Held]) -> int | None:
    """Add the messages of a stream, one by one; return the number of the first message, if any.

    Later numbers may have gaps: the server uses some for its own entries.
    """
    first = None
    for number, message in entries(connection, stream):
        first = number if first is None else first
        headers = said_of(*amqp.read(message), amqp.EVENTS)
        source = source_of(headers, amqp.EVENTS)
        if source is not None and source in held:
            held[source].add(held_of(headers, amqp.EVENTS))
    return first


def _has_had(journal: Journal, stream: str) -> bool:
    """Return True if messages were ever stored in a stream, as far as its server remembers."""
    publishers = [
        (publisher(journal.source, place, generation(mark.batch)), stream)
        for place, (_, mark) in journal.done.items()
    ]
    return any(journal.connection.sequences(publishers))
