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
ADDED = re.compile(
    rb"\r\nNats-Stream: [^\r]*\r\nNats-Subject: ([^\r]*)\r\nNats-Sequence: (\d+)\r\n"
    rb"Nats-Time-Stamp: ([^\r]*)\r\n"
)
"""Headers that the server adds to a message."""
FIRST_ADDED = b"\r\nNats-Stream: "
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
        at, more = after[1], True
        with self._connected() as api:
            before = self._extent(api)
            if not before.exists:
                return Records(extent=before)
            while more and len(records) < limit and size > 0:
                at, more, page = self._batch(api, at, limit - len(records), size)
                records += page
                size -= sum(len(record.body) for record in page)
            if not more and at < before.last[1] and not self._has_after(api, at):
                at = before.last[1]
            extent = self._extent(api)  # last, so that it shows removals during the read
        return Records(extent=extent, records=records, added=at, end=(0, at))

    def _batch(self, api: Api, after: int, limit: int, size: int) -> tuple[int, bool, list[Record]]:
        """Return the last sequence of a batch, whether more follow, and the messages."""
        asked = {
            "seq": after + 1,
            "next_by_subj": self.settings.topic,
            "batch": min(limit, AT_ONCE),
            "max_bytes": min(size, BYTES_AT_ONCE),
        }
        subject = f"$JS.API.DIRECT.GET.{self.settings.stream}"
        found, answer = api.connection.batch(subject, json.dumps(asked).encode())
        code, said = status(answer), answer.headers or {}
        if code not in (END, NONE):
            raise Unavailable(self.what, f"{self.settings.server}: it answers {dict(said)}")
        records = [record for raw in found if (record := self._record(raw)) is not None]
        at = int(_added(found[-1][0])[2]) if found else after
        return at, code == END and int(said.get("Nats-Num-Pending", 0)) > 0, records

    def _record(self, raw: Raw) -> Record | None:
        """Return a message; None for a mark of saf's destination."""
        head, body = raw
        added = _added(head)
        subject, sequence, moment = added.groups()
        if subject.startswith(self._marks):
            return None
        headers: dict[str, bytes] = {}
        for line in head[: added.start()].split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if not name.startswith(COMMANDS) or name == MESSAGE_ID:
                headers[name.decode(errors="backslashreplace")] = value.strip(b" ")
        if _is_encoded(headers):
            headers = {name: unquote_to_bytes(value) for name, value in headers.items()}
        elif self._has_wildcards:
            headers[SUBJECT] = subject
        return Record(
            position=(0, int(sequence)),
            headers=headers,
            body=body,
            created_at=datetime.fromisoformat(moment.decode()),
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


def _added(head: bytes) -> re.Match[bytes]:
    found = ADDED.match(head, head.rfind(FIRST_ADDED))
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
