"""A stream of a NATS server as a source.

A position is ``(0, sequence)``. Sequences of other subjects, and of messages that were removed,
are gaps. So `saf.sources.judging` counts sequences instead of messages, and a read that finds no
more messages of its subjects continues at the end of the stream.

Messages are requested in batches (*direct get*), which leaves nothing behind at the server: a
consumer would be remembered there. Any server of a cluster may answer, also one that lacks the
newest messages. So whether a read has come to the end is a question to the stream's leader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from saf.destinations.nats.connection import Raw, status
from saf.destinations.nats.server import (
    NO_MESSAGE,
    NO_STREAM,
    Api,
    JetStreamError,
    all_marks,
    errors,
)
from saf.destinations.settings import unusable
from saf.errors import Unavailable
from saf.sources import GONE, MOST_BYTES, Extent, Position, Record, Records
from saf.sources.linked import Linked

if TYPE_CHECKING:
    from saf.sources.nats import Nats

OLDEST = (2, 11)
"""Oldest supported version; since then, a server answers with batches."""
AT_ONCE, BYTES_AT_ONCE = 5_000, 8 << 20
"""Most messages, and most bytes, to request at a time."""
END, NONE = "204", "404"
"""Status of the answer after a batch, and of an answer without messages."""
ADDED = (
    rb"Nats-Stream: [^\r]*\r\nNats-Subject: ([^\r]*)\r\nNats-Sequence: (\d+)\r\n"
    rb"Nats-Time-Stamp: ([^\r]*)\r\n"
)
"""Headers that the server adds to a message."""
VERSION = b"NATS/1.0\r\n"
VALUE = rb": ([^ \r](?:[^\r]*[^ \r])?)\r\n"
"""Rest of a line whose value has no spaces around it."""
COMMAND = rb":[^\r]*\r\n"
MOST_LINES = 50
"""Most headers of a pattern: to compile a long one takes long."""
FURTHER = rb"(?:Nats-(?:Num-Pending|Last-Sequence): \d+\r\n)*\r\n"
"""Rest of the headers of a message in a batch."""
LAST_ADDED, FIRST_ADDED = re.compile(ADDED), b"Nats-Stream: "
COMMANDS, MESSAGE_ID = b"Nats-", b"Nats-Msg-Id"
"""Prefix of headers that are commands to the server, and the only one that says something."""
SUBJECT = "Nats-Subject"


class Stream(Linked[Api]):
    """A stream as a `saf.sources.Source`."""

    prefix = "ce-"

    def __init__(self, name: str, settings: Nats) -> None:
        super().__init__(name)
        self.settings = settings
        self._destination = settings.as_destination()
        self._marks = all_marks(settings.stream).removesuffix(">").encode()
        self._headers = Headers()
        self._has_wildcards = not {"*", ">"}.isdisjoint(settings.topic.split("."))

    def _open(self) -> Api:
        api = Api(self.what, self._destination)
        version = api.connection.version
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            api.close()
            raise unusable(self.what, f"its version is {version}", "upgrade it to 2.11 or newer")
        return api

    def _errors(self) -> AbstractContextManager[None]:
        return errors(self.what, self._destination)

    def extent(self, shard: int) -> Extent:  # noqa: ARG002 - there is one
        """Return what the stream has."""
        with self._connected() as api:
            return self._extent(api)

    def read(
        self,
        shard: int,  # noqa: ARG002 - there is one
        after: Position,
        limit: int,
        size: int = MOST_BYTES,
    ) -> Records:
        """Return messages after a position."""
        records: list[Record] = []
        at = after[1]
        with self._connected() as api:
            before = self._extent(api)
            if not before.exists:
                return Records(extent=before)
            left, room, asks = limit, size, True
            self._ask(api, at, left, room)
            while asks:
                at, more, found = self._answer(api, at)
                left -= len(found)
                room -= sum(len(body) for _, body in found)
                if asks := more and left > 0 and room > 0:
                    self._ask(api, at, left, room)  # the server works while these are decoded
                records += [one for raw in found if (one := self._record(raw)) is not None]
                if more and not asks and not records:  # nothing but marks
                    left, room, asks = limit, size, True
                    self._ask(api, at, left, room)
            if not more and at < before.last[1] and not self._has_after(api, at):
                at = before.last[1]
            extent = self._extent(api)  # last, so that it shows removals during the read
        return Records(extent=extent, records=records, added=at, end=(0, at))

    def _ask(self, api: Api, after: int, limit: int, size: int) -> None:
        """Request a batch of messages."""
        asked = {
            "seq": after + 1,
            "next_by_subj": self.settings.topic,
            "batch": min(limit, AT_ONCE),
            "max_bytes": min(size, BYTES_AT_ONCE),
        }
        subject = f"$JS.API.DIRECT.GET.{self.settings.stream}"
        api.connection.ask_for_batch(subject, json.dumps(asked).encode())

    def _answer(self, api: Api, after: int) -> tuple[int, bool, list[Raw]]:
        """Return the last sequence of a batch, whether more follow, and the messages."""
        found, answer = api.connection.batch()
        code, said = status(answer), answer.headers or {}
        if code not in (END, NONE):
            raise Unavailable(self.what, f"{self.settings.server}: it answers {dict(said)}")
        at = int(_added(found[-1][0])[2]) if found else after
        return at, code == END and int(said.get("Nats-Num-Pending", 0)) > 0, found

    def _record(self, raw: Raw) -> Record | None:
        """Return a message; None for a mark of saf's destination."""
        head, body = raw
        headers, subject, sequence, moment = self._headers.read(head)
        if subject.startswith(self._marks):
            return None
        if not _is_encoded(headers):
            if self._has_wildcards:
                headers[SUBJECT] = subject
        elif b"%" in head:
            for name, value in headers.items():
                if b"%" in value:
                    headers[name] = unquote_to_bytes(value)
        return Record(
            (0, int(sequence)),
            headers,
            body,
            None,
            datetime.fromisoformat(moment.decode()),
        )

    def _has_after(self, api: Api, sequence: int) -> bool:
        """Return whether the stream's leader has a message of the subjects after a sequence."""
        try:
            api.ask("STREAM.MSG.GET", seq=sequence + 1, next_by_subj=self.settings.topic)
        except JetStreamError as error:
            if error.code in (NO_MESSAGE, NO_STREAM):
                return False
            raise
        return True

    def _extent(self, api: Api) -> Extent:
        info = api.stream()
        if info is None:
            return GONE
        if not info["config"].get("allow_direct"):
            raise unusable(
                f"{self.what}, stream {self.settings.stream!r},",
                "does not let its messages be read directly",
                "set its allow_direct",
            )
        state: dict[str, Any] = info["state"]
        last, first = int(state["last_seq"]), int(state["first_seq"])
        has_any = bool(state["messages"])
        return Extent(
            last=(0, last),
            first=(0, first) if has_any else None,
            added=last,
            removed=first - 1 if has_any else last,
            topic_id=f"{self.settings.stream}, created at {info['created']}",
        )


class Headers:
    """Reads the headers of messages.

    Those of one writer have the same names. So once two messages were alike, their pattern is
    tried first, which takes a third of the time.
    """

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._alike = re.compile(rb"(?!)")
        self._last = b""
        """Pattern of the last message that was read without one."""

    def read(self, head: bytes) -> tuple[dict[str, bytes], bytes, bytes, bytes]:
        """Return a message's headers, its subject, its sequence, and when it was added."""
        if (found := self._alike.fullmatch(head)) is not None:
            *values, subject, sequence, moment = found.groups()
            return dict(zip(self._names, values, strict=True)), subject, sequence, moment
        added = _added(head)
        subject, sequence, moment = added.groups()
        headers: dict[str, bytes] = {}
        alike = re.escape(VERSION)
        repeated = False
        own = head[: added.start()]
        lines = own.removesuffix(b"\r\n").split(b"\r\n")[1:]
        for line in lines:
            name, _, value = line.partition(b":")
            if name.startswith(COMMANDS) and name != MESSAGE_ID:
                alike += re.escape(name) + COMMAND
                continue
            called = name.decode(errors="backslashreplace")
            repeated = repeated or called in headers
            headers[called] = value.strip(b" ")
            alike += re.escape(name) + VALUE
        usual = own.startswith(VERSION) and own.endswith(b"\r\n") and len(lines) <= MOST_LINES
        if usual and not repeated and alike == self._last:
            self._names = [*headers]
            self._alike = re.compile(alike + ADDED + FURTHER)
        self._last = alike
        return headers, subject, sequence, moment


def _added(head: bytes) -> re.Match[bytes]:
    found = LAST_ADDED.match(head, head.rfind(FIRST_ADDED))
    assert found is not None  # noqa: S101 - the server adds them to each message
    return found


def _is_encoded(headers: dict[str, bytes]) -> bool:
    r"""Return whether the values are encoded: those of saf and of CloudEvents are.

    >>> _is_encoded({"saf-source": b"x"}), _is_encoded({"a": b"100%41"})
    (True, False)
    """
    return (
        "saf-source" in headers
        or "ce-specversion" in headers
        or headers.get("content-type", b"").startswith(b"application/cloudevents")
    )
