"""Batches of a NATS server: a stream, filled a step at a time, exactly once.

`saf.destinations.stepwise` explains steps. Here, a step is an atomic batch of at most 1,000
messages: the server holds them back until the last one arrives, and then stores all or none. The
messages come first, and the marks of their places last. Each mark names the number of the previous
mark, which the server compares: if it differs, the batch is not stored. The own mark of a shard
also counts how many of the shard's messages were ever stored, so that removed messages are noticed.

While the server stores one batch, the messages of the next are on their way. The next batch's marks
follow after the answer, because they name numbers that the answer contains.

A server that is killed in the middle of a batch finishes it after the restart.
`saf.destinations.nats.server` describes what a power failure takes back.

A header's value is a line of ASCII here. Other characters are encoded as CloudEvents encodes them
over HTTP: ``%`` and two digits for each byte of UTF-8. Most values stay unchanged.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote
from uuid import UUID, uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from nats.aio.msg import Msg

from saf.destinations import Chunk, Reading
from saf.destinations.mapping import Mapped, held_of, mapped, said_of, source_of
from saf.destinations.marks import MAIN, Place, known_of
from saf.destinations.nats import subject_of
from saf.destinations.nats.connection import Message, of, status
from saf.destinations.nats.server import (
    EXPECTED,
    STORED,
    WRONG_SEQUENCE,
    JetStreamError,
    Link,
    answered,
    identity_subject,
    mark_subject,
    marks_subject,
    place_of,
    takes,
)
from saf.destinations.places import guarded
from saf.destinations.settings import unusable
from saf.destinations.stepwise import Cut, Step, Stepwise
from saf.destinations.tables import Held, TableReading
from saf.destinations.texts import TEXT
from saf.errors import CannotReadBack, Rejected, Unavailable

if TYPE_CHECKING:
    from saf.destinations.nats import Nats

MOST = 1_000
"""Most messages of a batch, including marks."""
MANY_PLACES = 500
"""Up to this many places, each batch has all marks; above, only those of its own messages."""
FEW_ROWS = 300
"""Messages of a batch with more places: each may need two marks."""
ONLY_MARKS = 900

EVENTS = "ce-"
"""Prefix of CloudEvents attributes, as the binding for NATS defines it."""

BATCH, SEQUENCE, COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
THE_SERVERS = "nats-"
"""Prefix of header names that are commands to the server."""

LARGEST_HEAD = 65_535
LARGEST_LINE = 4_000
FRAME = len("NATS/1.0\r\n\r\n") + len(f"{BATCH}: {'x' * 32}\r\n{SEQUENCE}: 1000\r\n")
"""Size of a message's headers without saf's and the sender's, in bytes."""
AROUND = len(": \r\n")
"""Size of a header without its name and value, in bytes."""
NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""Names of headers that the client sends."""
AS_IT_IS = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
ENCODED = r"[^\x20-\x7E]|%|^ | $"

AT_ONCE = 1_000
"""Messages to request at a time."""
TOO_MANY = "413"
"""Status code of the server's answer to a request with too many results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class There:
    """State of a mark in the stream."""

    sequence: int = 0
    stored: int = 0
    """Messages of the shard that were ever stored; only the own place of a shard counts them."""


@dataclass(kw_only=True, slots=True)
class Batch:
    """A batch that is being sent."""

    step: Step
    id: str = field(default_factory=lambda: uuid4().hex)
    begun: str
    """Inbox for the server's reason if it rejects the first message."""
    ended: str
    """Inbox for the result of the batch."""
    why: str = ""
    """The server's reason for rejecting the first message."""


class Batches(Stepwise[Link, "Nats"]):
    """A stream as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Nats) -> None:
        super().__init__(name, settings)
        self._takes: Sequence[str] = ()
        self._largest = 0
        self._there: dict[Place, There] = {}

    def _prepare(self, link: Link) -> UUID:
        config = link.config()
        self._takes = config["subjects"]
        largest = self.settings.capabilities.largest_body or 0
        self._largest = min(link.connection.max_payload, largest + LARGEST_HEAD)
        if 0 < (limit := int(config.get("max_msg_size", -1))) < self._largest:
            self._largest = limit
        return link.make_identity()

    def _read(self, link: Link, source: UUID, places: Sequence[Place]) -> list[str]:
        marks = link.last([
            mark_subject(self.settings.stream, source, place) for place in places
        ])  # fmt: skip
        self._there = {
            place: There(sequence=sequence, stored=stored)
            for place, (_, sequence, stored) in zip(places, marks, strict=True)
        }
        return [text for text, _, _ in marks]

    def _mapped(self, rows: pa.Table, source: UUID) -> Mapped:
        messages = mapped(self.what, rows, source, self.settings, prefix=EVENTS)
        if messages.count:
            check(self.what, messages, self._largest)
        for subject in map(subject_of, messages.topics):
            if not any(takes(pattern, subject) for pattern in self._takes):
                raise unusable(
                    f"{self.what}, stream {self.settings.stream!r},",
                    f"takes only {', '.join(self._takes)}, and not {subject}",
                    "add it to the stream's subjects, or choose another topic in saf.toml",
                )
        return messages

    def _cuts(self, chunk: Chunk, rows: pa.Table) -> Iterator[Cut]:
        all_places, count = guarded(chunk), rows.num_rows
        few = len(all_places) <= MANY_PLACES
        at_once = min(self.settings.step_rows, MOST - len(all_places) if few else FEW_ROWS)
        cuts = []
        for first in range(0, count, at_once):
            size = min(at_once, count - first)
            places = all_places if few else _guarded(chunk, rows.slice(first, size))
            cuts.append(Cut(first=first, count=size, places=places))
        covered = {place for cut in cuts for place in cut.places}
        rest = [place for place in all_places if place not in covered]
        for first in range(0, len(rest), ONLY_MARKS):
            yield Cut(first=0, count=0, places=rest[first : first + ONLY_MARKS])
        yield from cuts

    def _send(self, link: Link, source: UUID, steps: Iterator[Step]) -> list[tuple[int, bool]]:
        answers: list[tuple[int, bool]] = []
        previous: Batch | None = None
        for step in steps:
            if answers and not answers[-1][1]:
                answers.append((step.count, False))
                continue
            batch = self._begin(link, step)
            if previous is not None:
                answers.append((previous.step.count, self._ended(link, previous)))
                if not answers[-1][1]:
                    answers.append((step.count, False))
                    self._abandon(link, batch)
                    continue
            self._end(link, source, batch)
            previous = batch
        if previous is not None and (not answers or answers[-1][1]):
            answers.append((previous.step.count, self._ended(link, previous)))
        return answers

    def _begin(self, link: Link, step: Step) -> Batch:
        """Send a batch's messages."""
        connection = link.connection
        batch = Batch(step=step, begun=connection.inbox(), ended=connection.inbox())
        if step.what:
            connection.publish(outgoing(step.what, batch.id, batch.begun))
        return batch

    def _end(self, link: Link, source: UUID, batch: Batch) -> None:
        """Send a batch's marks; the last one ends the batch."""
        step, stream = batch.step, self.settings.stream
        counts = _counts(step.what)
        positions: dict[Place, There] = {}
        messages = []
        for number, (place, text) in enumerate(step.after.items(), start=1):
            previous = self._there[place]
            lane, shard = place
            stored = previous.stored + (counts.get(str(shard), 0) if lane == MAIN else 0)
            positions[place] = There(sequence=number, stored=stored)
            headers = {EXPECTED: previous.sequence, STORED: stored, **link.kept()}
            headers |= {BATCH: batch.id, SEQUENCE: step.count + number}
            last = number == len(step.after)
            messages.append(
                Message(
                    mark_subject(stream, source, place),
                    text.encode(),
                    texts(headers | ({COMMIT: 1} if last else {})),
                    batch.ended if last else "",
                )
            )
        link.connection.publish(messages)
        self._there |= positions

    def _ended(self, link: Link, batch: Batch) -> bool:
        """Wait for the result of a batch; return True if it was stored.

        Raises:
            Unavailable: it was not stored, for another reason than its marks.
        """
        while (answer := link.connection.receive()).subject != batch.ended:
            if answer.subject == batch.begun and answer.data:
                batch.why = answer.data.decode()
        try:
            last = int(answered(of(self.settings.stream, answer))["seq"])
        except JetStreamError as error:
            if error.code in WRONG_SEQUENCE:
                return False
            if batch.why:
                raise Unavailable(self.what, f"{error}: {batch.why}") from None
            raise
        first = last - len(batch.step.after)
        for place in batch.step.after:
            position = self._there[place]
            self._there[place] = There(sequence=first + position.sequence, stored=position.stored)
        return True

    def _abandon(self, link: Link, batch: Batch) -> None:
        """Make the server forget a batch whose marks cannot follow, by a number out of order."""
        headers = {BATCH: batch.id, SEQUENCE: f"{MOST + 1}"}
        link.connection.request(identity_subject(self.settings.stream), b"", headers)


def _guarded(chunk: Chunk, rows: pa.Table) -> list[Place]:
    """Return the places that some of a chunk's rows need."""
    shards = {*pc.unique(rows["shard"]).to_pylist()}
    return [place for place in guarded(replace(chunk, rows=rows)) if place[1] in shards]


def _counts(messages: Mapped | None) -> dict[str, int]:
    """Return the number of messages of each shard, by the shard's text."""
    if messages is None:
        return {}
    values = messages.each("shard")
    return {pair["values"]: pair["counts"] for pair in pc.value_counts(values).to_pylist()}


def encoded(value: str) -> str:
    r"""Return a header's encoded value.

    >>> encoded("plain text"), encoded("100 %\n"), encoded(" ü")
    ('plain text', '100 %25%0A', '%20%C3%BC')
    """
    text = quote(value, safe=AS_IT_IS)
    inner = text.strip(" ")
    first, last = len(text) - len(text.lstrip(" ")), len(text.rstrip(" "))
    return "%20" * first + inner + "%20" * (len(text) - last if inner else 0)


def check(where: str, what: Mapped, largest: int) -> None:
    """Raise if the server does not accept one of these messages.

    Raises:
        Rejected: a header's name, the headers, the size or the subject exceed a limit.
    """
    for name in {name for headers in what.own for name in headers}:
        if not NAME.fullmatch(name):
            raise Rejected(where, f"NATS cannot carry a header {name!r}")
        if name.lower().startswith(THE_SERVERS):
            raise Rejected(where, f"the sender has given a header {name!r}, a server's command")
    own = [sum(map(_size, headers, headers.values())) for headers in _own(what)]
    heads = FRAME + np.array(own, np.int64)[what.which]
    for name, values in what.headers.items():
        if isinstance(values, str):
            heads += _size(name, encoded(values))
        else:
            sizes = pc.add(pc.binary_length(_encoded(values)), _size(name, ""))
            heads += np.asarray(pc.fill_null(sizes, 0))
    if (head := int(heads.max())) > LARGEST_HEAD:
        raise Rejected(where, f"its headers have {head:,} bytes, more than {LARGEST_HEAD:,}")
    if (size := int((heads + np.asarray(pc.binary_length(what.body))).max())) > largest:
        raise Rejected(where, f"it has {size:,} bytes, more than its server takes ({largest:,})")
    for topic in what.topics:
        if len(subject_of(topic).encode()) > LARGEST_LINE:
            raise Rejected(where, f"its subject has more than {LARGEST_LINE:,} bytes")


def outgoing(what: Mapped, batch: str, reply: str) -> Iterator[Message]:
    """Yield the messages of a batch; the first one has a reply subject."""
    constant, names, columns = {BATCH: batch}, [], []
    for name, values in what.headers.items():
        if isinstance(values, str):
            constant[name] = encoded(values)
        else:
            names.append(name)
            columns.append(_encoded(values).to_pylist())
    topics, own = [subject_of(topic) for topic in what.topics], _own(what)
    rows = zip(
        zip(*columns, strict=True) if columns else repeat(()),
        what.topic.tolist(), what.which.tolist(), what.body.to_pylist(),
        strict=False,
    )  # fmt: skip
    for number, (values, topic, which, body) in enumerate(rows, start=1):
        pairs = zip(names, values, strict=True)
        said = {name: value for name, value in pairs if value is not None}
        headers = {**constant, SEQUENCE: str(number), **said, **own[which]}
        yield Message(topics[topic], body, headers, reply)
        reply = ""


def texts(headers: Mapping[str, object]) -> dict[str, str]:
    """Return headers with their values as texts."""
    return {name: str(value) for name, value in headers.items()}


def _own(what: Mapped) -> list[dict[str, str]]:
    """Return the distinct sets of senders' own headers, encoded."""
    return [{name: encoded(value) for name, value in one.items()} for one in what.own]


def _size(name: str, value: str) -> int:
    return len(name) + len(value) + AROUND


def _encoded(values: pa.Array) -> pa.Array:
    """Return encoded values; Python handles only the values that need encoding."""
    if not pc.any(pc.match_substring_regex(values, ENCODED)).as_py():
        return values
    known = values.dictionary_encode()
    values = [encoded(value) for value in known.dictionary.to_pylist()]
    return pa.array(values, TEXT).take(known.indices)


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
        for answer in questions.ask(multi_last=[marks_subject(questions.stream, source)]):
            headers = answer.headers or {}
            place = place_of(headers["Nats-Subject"])
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
