"""Reading back: all messages of a stream, in one pass, provided that none was removed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from uuid import UUID

from nats.aio.msg import Msg

from saf.destinations.mapping import held_of, said_of, source_of
from saf.destinations.marks import MAIN, Place, known_of
from saf.destinations.nats import subjects
from saf.destinations.nats.batches import EVENTS
from saf.destinations.nats.connection import status
from saf.destinations.nats.server import STORED, Link
from saf.destinations.reading import Reading
from saf.destinations.tables import Held, TableReading
from saf.errors import CannotReadBack

if TYPE_CHECKING:
    from saf.destinations.nats import Nats

AT_ONCE = 1_000
"""Messages to request at a time."""
TOO_MANY = "413"
"""Status code of the server's answer to a request with too many results."""


@contextmanager
def read(name: str, settings: Nats) -> Iterator[Reading]:
    """Open the stream for reading.

    Raises:
        CannotReadBack: messages were removed, or the stream does not allow direct reads.
    """
    with settings.connected(name) as link:
        config = link.look()
        if config is not None and not config.get("allow_direct"):
            raise CannotReadBack(name, f"its stream {settings.stream} lacks allow_direct")
        questions = Questions(name, link)
        moments = defaultdict[UUID, Moment](Moment)
        for source in link.sources() if config is not None else ():
            moments[source].learn(questions, source)
        until = max((one.until for one in moments.values()), default=0)
        for one in questions.messages(until):
            headers = {name: unquote(value) for name, value in (one.headers or {}).items()}
            message = said_of(headers, one.data, EVENTS)
            if (broker_id := source_of(message, EVENTS)) is not None:
                moments[broker_id].add(int(headers["Nats-Sequence"]), message)
        for moment in moments.values():
            if (missing := moment.stored - moment.found) > 0:
                raise CannotReadBack(name, f"{missing:,} messages were removed from its stream")
        identity = link.identity()
        yield TableReading(
            name=name,
            is_=identity,
            read=lambda source: moments[source].held.table(),
            knows=lambda source: known_of(identity, moments[source].marks),
        )


class Moment:
    """One source at one moment: its marks, and the messages up to then."""

    def __init__(self) -> None:
        self.until = 0
        """Last number of the stream."""
        self.stored = 0
        """Number of messages ever stored."""
        self.found = 0
        self.marks: dict[Place, str] = {}
        self.held = Held()

    def learn(self, questions: Questions, source: UUID) -> None:
        """Request the marks of a source."""
        for answer in questions.ask(multi_last=[subjects.marks(questions.stream, source)]):
            headers = answer.headers or {}
            place = subjects.place_of(headers["Nats-Subject"])
            self.marks[place] = answer.data.decode()
            self.stored += int(headers.get(STORED, 0)) if place[0] == MAIN else 0
        self.until = questions.until

    def add(self, sequence: int, said: Mapping[str, str]) -> None:
        """Add a message, if it existed at that moment."""
        if sequence <= self.until:
            self.found += 1
            self.held.add(held_of(said, EVENTS))


class Questions:
    """Requests to the stream that have many answers each."""

    def __init__(self, name: str, link: Link) -> None:
        self.stream = link.settings.stream
        self.until = 0
        """Last number of the stream at the last request for last messages."""
        self._name = name
        self._connection = link.connection
        self._more = False

    def messages(self, until: int) -> Iterator[Msg]:
        """Yield the messages up to a number."""
        first = 1
        while first <= until:
            sequence = until
            for message in self.ask(seq=first, batch=AT_ONCE):
                sequence = int((message.headers or {})["Nats-Sequence"])
                yield message
            if not self._more:
                return
            first = sequence + 1

    def ask(self, **request: Any) -> Iterator[Msg]:
        """Yield messages; at the end, set whether more exist, and the stream's last number."""
        answers = self._connection.answers(
            f"$JS.API.DIRECT.GET.{self.stream}", json.dumps(request).encode()
        )
        for answer in answers:
            if not (code := status(answer)):
                yield answer
                continue
            if code == TOO_MANY:
                raise CannotReadBack(self._name, "a source has more marks than one read returns")
            headers = answer.headers or {}
            self._more = int(headers.get("Nats-Num-Pending", 0)) > 0
            self.until = int(headers.get("Nats-UpTo-Sequence", 0))
            return
