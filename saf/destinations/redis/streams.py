"""Streams of a Redis server, filled a step at a time, exactly once.

`saf.destinations.stepwise` explains steps. One script stores a step, all or nothing
(`saf.destinations.redis.script`): it compares the marks with those that this process has read, adds
the messages to their streams, and moves the marks past them. The server runs nothing else at the
same time, so a step is short (``step_rows``).

The steps of a chunk are sent without waiting for answers. Arrow writes the command of a step: the
client would write each value of each message separately, in Python. Here, a column becomes the
bytes of its values, ``$4`` and ``body`` with their line ends, and a message is these joined.

Durability depends on the server's settings (`saf.destinations.redis.server`). If a crash or a
failover takes messages back, it takes back the marks too, because one script has written both. So
the marks are behind those that the source remembers, which is refused and repaired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations import Chunk, Reading
from saf.destinations.mapping import HEADERS, Mapped, held_of, mapped, said_of, source_of, texts_of
from saf.destinations.marks import Place, known_of
from saf.destinations.places import guarded
from saf.destinations.redis import script
from saf.destinations.redis.script import MOST_FIELDS, STORE, STORED
from saf.destinations.redis.server import Link
from saf.destinations.stepwise import Cut, Step, Stepwise
from saf.destinations.tables import Held, TableReading
from saf.destinations.texts import BYTES
from saf.errors import CannotReadBack, Rejected, Unavailable

if TYPE_CHECKING:
    from saf.destinations.redis import Redis

IN_FLIGHT = 4
"""Steps to send before the first one's answer is read."""
LARGEST = 512 << 20
"""Largest value that a server accepts by default, in bytes."""
BODY = "body"
"""Field of an entry that contains the message's body."""

EVENTS = "ce_"
"""Prefix of CloudEvents attributes: Redis has no binding, so this is Kafka's."""

AT_ONCE = 5_000
"""Entries to request at a time."""


class Streams(Stepwise[Link, "Redis"]):
    """Streams as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Redis) -> None:
        super().__init__(name, settings)
        self._sha = ""
        self._largest = LARGEST

    def _prepare(self, link: Link) -> UUID:
        link.look()
        self._sha = str(link.client.script_load(STORE))
        self._largest = int(link.config("proto-max-bulk-len") or LARGEST)
        return link.make_identity()

    def _read(self, link: Link, source: UUID, places: Sequence[Place]) -> list[str]:
        return link.read(source, places)

    def _mapped(self, rows: pa.Table, source: UUID) -> Mapped:
        messages = mapped(self.what, rows, source, self.settings, prefix=EVENTS, reserved=[BODY])
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
        return command(
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


def command(
    sha: str,
    keys: Sequence[str],
    expected: Mapping[str, str],
    moved: Mapping[str, str],
    what: Mapped | None,
) -> list[Any]:
    """Return the command for `saf.destinations.redis.script.STORE`, in parts.

    Args:
        sha: the script's name at the server.
        keys: the keys of the marks and of the set of streams, followed by those of the topics.
        expected: expected values of fields of marks.
        moved: new values of fields of marks.
        what: the messages, if any.
    """
    arguments = [len(expected), *_flat(expected), len(moved), *_flat(moved)]
    if what is None or not what.count:
        words = ["EVALSHA", sha, len(keys), *keys, *arguments, 0]
        return [b"*%d\r\n" % len(words) + _bulks(words)]
    shapes, shape, fields, values = _shaped(what)
    arguments.append(len(shapes))
    for one in shapes:
        arguments += [len(one), *(part for pair in one for part in pair)]
    words = ["EVALSHA", sha, len(keys), *keys, *arguments]
    count = len(words) + int((2 + fields)[shape].sum())
    array = pc.binary_join_element_wise(
        _words(len(what.topics)).take(pa.array(what.topic)),
        _words(len(shapes)).take(pa.array(shape)),
        *values,
        pa.scalar(b"", BYTES),
        null_handling="replace",
        null_replacement=b"",
    )
    return [b"*%d\r\n" % count + _bulks(words), _content(array)]


def _shaped(
    messages: Mapped,
) -> tuple[list[list[tuple[str, str]]], npt.NDArray[np.int64], npt.NDArray[np.int64], list[Any]]:
    """Return the shapes, each message's shape, values per shape, and the columns of values."""
    constant: list[tuple[str, str]] = []
    own: list[tuple[str, pa.Array]] = []
    for name, values in messages.headers.items():
        if isinstance(values, str):
            constant.append((name, f"={values}"))
        elif (one := _one(values)) is not None:
            constant.append((name, f"={one}"))
        else:
            own.append((name, values))
    forms: dict[tuple[str, ...], int] = {}
    form = np.array([forms.setdefault(tuple(one), len(forms)) for one in messages.own], np.int64)
    code = form[messages.which] if len(messages.which) else messages.which
    for _, values in own:
        code = code * 2 + np.asarray(values.is_valid(), np.int64)
    codes, shape = np.unique(code, return_inverse=True)
    forms_of_senders = [*forms]
    shapes, fields = [], []
    for one in codes.tolist():
        names = [name for place, (name, _) in enumerate(reversed(own)) if one >> place & 1][::-1]
        of_sender = forms_of_senders[one >> len(own)]
        each = [*of_sender, *names, BODY]
        shapes.append([*constant, *((name, "?") for name in each)])
        fields.append(len(each))
    values_of_senders = pa.array([_bulks(one.values()) for one in messages.own], BYTES)
    columns = [
        values_of_senders.take(pa.array(messages.which)),
        *(_bulk(values) for _, values in own),
    ]
    return shapes, shape, np.array(fields, np.int64), [*columns, _bulk(messages.body)]


def _one(values: pa.Array) -> str | None:
    """Return the value that all messages share; None if values differ or are missing."""
    if values.null_count or not len(values) or not pc.all(pc.equal(values, values[0])).as_py():
        return None
    return str(values[0].as_py())


def _flat(pairs: Mapping[str, str]) -> Iterable[str]:
    return (part for pair in pairs.items() for part in pair)


def _bulks(words: Iterable[object]) -> bytes:
    r"""Return words in the server's format.

    >>> _bulks(["grüezi", 7])
    b'$7\r\ngr\xc3\xbcezi\r\n$1\r\n7\r\n'
    """
    encoded = [str(word).encode() for word in words]
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)


def _words(count: int) -> pa.Array:
    """Return the numbers from 1 to ``count`` in the server's format."""
    return pa.array([_bulks([number + 1]) for number in range(count)], BYTES)


def _bulk(values: pa.Array) -> pa.Array:
    """Return the values of a column in the server's format; null for null."""
    values = values.cast(BYTES)
    sizes = pc.binary_length(values).cast(pa.large_string()).cast(BYTES)
    end = pa.scalar(b"\r\n", BYTES)
    return pc.binary_join_element_wise(
        pa.scalar(b"$", BYTES), sizes, end, values, end, pa.scalar(b"", BYTES)
    )


def _content(array: pa.Array) -> memoryview:
    """Return the concatenated bytes of all values, without copying them."""
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    offsets = np.frombuffer(array.buffers()[1], np.int64)
    first, last = offsets[array.offset], offsets[array.offset + len(array)]
    return memoryview(array.buffers()[2])[first:last]


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
