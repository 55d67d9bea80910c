"""Reading back: all messages of a stream, as long as none of them was removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa

from saf.destinations.mapping import held_of
from saf.destinations.marks import MAIN, Place
from saf.destinations.nats import subjects
from saf.destinations.nats.connection import Received
from saf.destinations.nats.server import STORED, Link, connected
from saf.destinations.nats.wire import EVENTS
from saf.destinations.reading import Reading
from saf.destinations.tables import HELD, TableReading
from saf.destinations.written import known_of
from saf.errors import CannotReadBack

if TYPE_CHECKING:
    from saf.destinations.nats import Nats

AT_ONCE = 1_000
"""Messages that are asked for at a time."""
END, NOTHING, TOO_MANY = "204", "404", "413"
"""The codes of the server's own answers: that was all; there is nothing; there are too many."""


@contextmanager
def read(name: str, settings: Nats) -> Iterator[Reading]:
    """Open the stream for reading.

    Raises:
        CannotReadBack: messages were removed, or the stream allows no direct reading.
    """
    with connected(name, settings) as link:
        config = link.look()
        if config is not None and not config.get("allow_direct"):
            raise CannotReadBack(name, f"its stream {settings.stream} lacks allow_direct")
        moment = cache(lambda source: Moment(name, link, source, empty=config is None))
        for source in link.sources() if config is not None else ():
            moment(source)
        yield TableReading(
            name=name,
            is_=link.identity(),
            read=cache(lambda source: moment(source).held()),
            knows=lambda source: moment(source).known,
        )


class Moment:
    """What there is of one source at one moment: its marks, and where the stream ended then."""

    def __init__(self, name: str, link: Link, source: UUID, *, empty: bool) -> None:
        self._name = name
        self._link = link
        self._source = source
        self._until = 0
        self._stored = 0
        texts: dict[Place, str] = {}
        if not empty:
            for one in self._ask(multi_last=[subjects.marks(link.settings.stream, source)]):
                headers = one.headers()
                place = subjects.place_of(headers["Nats-Subject"])
                texts[place] = one.body.decode()
                self._stored += int(headers.get(STORED, 0)) if place[0] == MAIN else 0
        self.known = known_of(link.identity(), texts)

    def held(self) -> pa.Table:
        """Return the columns that are needed of each message. Python reads them one by one."""
        columns: dict[str, list[Any]] = {name: [] for name in HELD.names}
        for said in self._messages():
            message = held_of(said, self._source, EVENTS)
            if message is not None:
                for name, values in columns.items():
                    values.append(message[name])
        found = len(columns["message_id"])
        if found < self._stored:
            raise CannotReadBack(
                self._name,
                f"{self._stored - found:,} of its messages were removed from the stream",
            )
        return pa.table(columns, schema=HELD)

    def _messages(self) -> Iterator[dict[str, str]]:
        """Give the headers of the stream's messages."""
        first = 1
        while first <= self._until:
            sequence = first
            for one in self._ask(seq=first, batch=AT_ONCE):
                said = one.headers()
                sequence = int(said["Nats-Sequence"])
                if sequence > self._until:
                    return
                yield {name: unquote(value) for name, value in said.items()}
            if sequence < first or not self._more:
                return
            first = sequence + 1

    def _ask(self, **said: Any) -> Iterator[Received]:
        """Give messages; then, what is known is where the stream ended."""
        subject = f"$JS.API.DIRECT.GET.{self._link.settings.stream}"
        self._more = False
        for answer in self._link.connection.answers(subject, json.dumps(said).encode()):
            if not answer.status:
                yield answer
                continue
            if answer.status == TOO_MANY:
                raise CannotReadBack(self._name, "a source has more marks than can be read at once")
            headers = answer.headers()
            self._more = int(headers.get("Nats-Num-Pending", 0)) > 0
            if "multi_last" in said:
                self._until = int(headers.get("Nats-UpTo-Sequence", 0))
            return
