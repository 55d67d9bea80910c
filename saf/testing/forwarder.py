"""A forwarder without a source database: chunks for a destination, for the conformance suite.

`Forwarder` makes the chunks. `start` starts a process that stores them at a destination, and that
may be killed on the way. The process reads settings and chunks from stdin. It writes a line when it
begins, which `saf.testing.conformance` awaits, and a line for each stored chunk.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import IO, TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pyarrow as pa

from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.marks import Mark, Place
from saf.log.columns import MESSAGES
from saf.log.cursor import Batch
from saf.setaside.lane import NO_BROKER, Kind
from saf.setaside.lane_columns import LANE

if TYPE_CHECKING:
    from saf.destinations.settings import DestinationSettings

PROGRAM = "from saf.testing.forwarder import main; main()"
READY, STORED = "ready", "stored"

SERVICE = "billing"
SHARDS = 4
CREATED_AT = datetime(2026, 1, 31, 11, 59, 59, 1, tzinfo=UTC)
OPENED_AT = datetime(2026, 1, 31, 12, tzinfo=UTC)

Row = dict[str, Any]

DIALOG = "of a dialog"
"""Entry of `HARD` for destinations that take messages of dialogs."""

HARD: Mapping[str, Row] = {
    "as little as there can be": {"key": None, "body": b"", "headers": None},
    "unicode": {"key": "schlüssel ☃ 𝄞 \u2028", "body": "grüezi ☃ 𝄞 \u2028".encode()},
    "quotes and ends of lines": {
        "key": 'a"b\\c\t',
        "body": b'{"a": "\\n"}\r\n\t"\\',
        "headers": "{}",
    },
    "controls": {"key": "\x01\x1f\x7f", "body": bytes(range(1, 128))},
    "bytes that are no text": {"key": "binary", "body": bytes(range(256)) + b"\xff\xfe"},
    "zeros": {"key": "zeros", "body": b"\x00" * 5},
    "headers": {"headers": '{"n": 1.5, "deep": {"list": [null, true, "\\u00fc"]}}'},
    "headers that are null": {"headers": "null"},
    "microseconds": {"created_at": datetime(1999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)},
    "times": {
        "deliver_at": datetime(2026, 2, 1, 0, 0, 0, 1, tzinfo=UTC),
        "expires_at": datetime(2199, 2, 1, tzinfo=UTC),
    },
    DIALOG: {
        "from_service": "shop",
        "conversation_id": UUID(int=7),
        "from_initiator": False,
        "sequence": 2**62,
        "message_type": "//example.com/ordered",
    },
}
"""Columns of messages that are hard to transport unchanged, by name."""


class Forwarder:
    """Makes chunks for a destination: a source, its open batch, and the marks that it remembers."""

    def __init__(self) -> None:
        self.source = uuid4()
        self.epoch = 1
        self.number = 1
        self.opened_at = OPENED_AT
        self.known: dict[Place, Mark] = {}
        self.set_aside_at: dict[int, list[datetime]] = {}
        self._id = 0

    def message(self, **columns: Any) -> Row:
        """Return the next message of the outbox; by default in shard 0."""
        self._id += 1
        row = dict.fromkeys(MESSAGES.names) | {
            "id": self._id,
            "shard": 0,
            "message_id": uuid4(),
            "to_service": SERVICE,
            "key": "k",
            "headers": "{}",
            "body": b"%d" % self._id,
            "created_at": CREATED_AT,
        }
        return row | columns

    def messages(self, count: int, **columns: Any) -> list[Row]:
        """Return ``count`` messages, in all shards in turn unless a shard is given."""
        return [
            self.message(**{"shard": number % SHARDS, "key": f"k{number % SHARDS}", **columns})
            for number in range(count)
        ]

    def chunk(self, rows: Sequence[Row], *, lane: Kind | None = None, **fields: Any) -> Chunk:
        """Return a chunk of messages of the open batch."""
        columns: dict[str, list[Any]] = {
            name: [row[name].bytes if isinstance(row[name], UUID) else row[name] for row in rows]
            for name in MESSAGES.names
        }
        table = pa.table(columns, schema=MESSAGES)
        if lane is not None:
            values = [str(lane), "", NO_BROKER.bytes]
            for name, value in zip(LANE, values, strict=True):
                table = table.append_column(name, pa.array([value] * len(rows)))
        batch = Batch(
            log="outbox",
            subscription_id=1,
            owner=UUID(int=self.epoch),
            number=self.number,
            done="1:1:",
            open="2:2:",
            position=0,
            route_version=None,
            opened_at=self.opened_at,
            epochs=tuple((shard, self.epoch) for shard in range(SHARDS)),
            set_aside_at={shard: [*times] for shard, times in self.set_aside_at.items()},
        )
        return Chunk(
            source=self.source, batch=batch, rows=table,
            **{"known": dict(self.known), **fields},
        )  # fmt: skip

    def next_batch(self) -> None:
        """Close the batch, and open the next."""
        self.number += 1
        self.opened_at += timedelta(seconds=1)

    def learn(self, answer: Stored | Refusal) -> Stored:
        """Remember the marks that the destination has acknowledged."""
        stored = all_stored(answer)
        self.known |= stored.marks
        return stored


def all_stored(answer: Stored | Refusal) -> Stored:
    """Return the answer of a destination that has stored a chunk; raise the error of a refusal."""
    if isinstance(answer, Refusal):
        raise answer.error
    return answer


def start(
    settings: DestinationSettings, chunks: Sequence[Chunk], *, fail_point: str = ""
) -> subprocess.Popen[bytes]:
    """Start the process in its own process group; it kills itself at ``fail_point``."""
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "SAF_FAILPOINT": fail_point,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 - a pipe
    with process.stdin as given:
        pickle.dump((settings, list(chunks)), given)
    return process


def main() -> None:
    """Store all chunks."""
    settings, chunks = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own bytes  # nosec B301
    _say(READY, sys.stdout)
    with closing(settings.open("conformance")) as destination:
        for number, chunk in enumerate(chunks):
            destination.store(chunk, exactly_once=settings.capabilities.exactly_once)
            _say([STORED, number], sys.stdout)


def _say(report: object, out: IO[str]) -> None:
    out.write(json.dumps(report) + "\n")
    out.flush()
