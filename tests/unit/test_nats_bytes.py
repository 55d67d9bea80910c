"""What a NATS server sends: messages of a batch, however their bytes arrive, and their headers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saf.database import pinned
from saf.destinations.nats.connection import Connection, Raw
from saf.sources.nats.stream import Headers

ADDED = (
    b"Nats-Stream: %b\r\nNats-Subject: %b\r\nNats-Sequence: %d\r\n"
    b"Nats-Time-Stamp: 2026-01-31T12:00:00.5Z\r\n%b\r\n"
)
FURTHER = (b"", b"Nats-Num-Pending: 5\r\nNats-Last-Sequence: 4\r\n", b"Nats-New: x\r\n")
NAMES = (b"a", b"b.c", b"Nats-Msg-Id", b"Nats-TTL", b"Nats-Stream", b"Nats-Subject", b"a\xff", b"")
VALUES = (b"1", b"", b" 1", b"1 ", b"1  2", b"a: b", b"\n", b"%41", b"\xff", b" ")
LINE = st.tuples(st.sampled_from(NAMES), st.sampled_from((b": ", b":")), st.sampled_from(VALUES))
HEAD = st.tuples(st.lists(LINE, max_size=4), st.integers(1, 999), st.sampled_from(FURTHER))


def head_of(lines: list[tuple[bytes, bytes, bytes]], sequence: int, further: bytes) -> bytes:
    own = b"".join(b"".join(line) + b"\r\n" for line in lines)
    return b"NATS/1.0\r\n" + own + ADDED % (b"S", b"orders.eu", sequence, further)


@given(st.lists(HEAD, min_size=1, max_size=3))
def test_headers_do_not_depend_on_those_that_were_read_before(
    heads: list[tuple[list[tuple[bytes, bytes, bytes]], int, bytes]],
) -> None:
    headers = Headers()
    for lines, sequence, further in heads:
        for turn in range(len(VALUES)):
            others = [
                (name, colon, VALUES[VALUES.index(value) - turn]) for name, colon, value in lines
            ]
            head = head_of(others, sequence, further)
            found = headers.read(head)
            assert found == Headers().read(head)
            assert found[1:3] == (b"orders.eu", str(sequence).encode())


@pytest.mark.parametrize("own", [
    b"NATS/1.0\r\na: b", b"NATS/1.0\r\na: b\r\n", b"NATS/1.0\r\n", b"abcdef", b"NATS/1.0\r\na: b\n",
    b"NATS/1.0\r\na: b\r\n" + (ADDED % (b"X", b"forged", 999, b""))[:-2] + b"c: d",
])  # fmt: skip
def test_headers_that_do_not_end_are_read_and_forge_nothing(own: bytes) -> None:
    head = own + ADDED % (b"S", b"orders.eu", 7, b"")
    headers = Headers()
    for before in (head_of([(b"a", b": ", b"b")], 1, b""), head):
        for _ in range(3):
            headers.read(before)
    found, *added = headers.read(head)
    assert added == [b"orders.eu", b"7", b"2026-01-31T12:00:00.5Z"]
    assert found.get("a", b"b").rstrip() == b"b"


def test_a_message_with_many_headers_or_others_than_before_makes_no_pattern() -> None:
    headers = Headers()
    before = headers._alike
    headers.read(head_of([(b"a", b": ", b"1")], 1, b""))
    headers.read(head_of([(b"b", b": ", b"1")], 2, b""))
    assert headers._alike is before
    for _ in range(3):
        headers.read(head_of([(b"h%d" % n, b": ", b"1") for n in range(51)], 3, b""))
    assert headers._alike is before
    for _ in range(3):
        headers.read(head_of([(b"a", b": ", b"1")], 1, b""))
    assert headers._alike.fullmatch(head_of([(b"a", b": ", b"2")], 1, b""))


def test_commands_to_the_server_are_not_headers_of_further_messages() -> None:
    lines = [(b"a", b": ", b"1"), (b"Nats-TTL", b": ", b"never"), (b"Nats-Msg-Id", b": ", b"7")]
    headers = Headers()
    for _ in range(3):
        found, *_ = headers.read(head_of(lines, 7, b""))
        assert found == {"a": b"1", "Nats-Msg-Id": b"7"}


def operation(subject: bytes, head: bytes, body: bytes, reply: bytes = b"") -> bytes:
    sizes = b"%d %d" % (len(head), len(head) + len(body))
    return b"HMSG " + subject + b" 1 " + reply + sizes + b"\r\n" + head + body + b"\r\n"


MESSAGES = [
    (head_of([], 1, b""), b""),
    (head_of([], 2, b""), b"x"),
    (head_of([], 3, b""), b"\r\nHMSG inbox.1 1 5 5\r\n" * 20),
]
END = b"NATS/1.0 204 EOB\r\n\r\n"
SENT = b"".join(
    [
        b"+OK\r\n",
        operation(b"inbox.1", *MESSAGES[0]),
        operation(b"inbox.1", *MESSAGES[1], b"answer.to "),
        operation(b"inbox.11", *MESSAGES[0]),
        operation(b"inbox.1", *MESSAGES[2]),
        b"+OK\r\n",
        operation(b"inbox.1", *MESSAGES[1]),
        operation(b"inbox.1", END, b""),
    ]
)
"""What a server sends; the batch goes to ``inbox.1``."""


def received(pieces: Iterable[bytes]) -> tuple[list[Raw], list[bytes], int]:
    """What a connection keeps of a batch, what it leaves, and how much its client looks at."""
    connection = Connection.__new__(Connection)
    connection._subject, connection._batch = b"inbox.1", list[Raw]()
    others: list[bytes] = []
    by_the_client = 0

    def take(subject: bytes, head: bytes, body: bytes) -> bool:
        nonlocal by_the_client
        by_the_client += 1
        if not connection._take(subject, head, body):
            others.append(subject + b" " + head[:12])
        return True

    async def receive() -> None:
        client = pinned.nats_client(take, connection._take_all)
        for piece in pieces:
            await client._ps.parse(piece)

    asyncio.run(receive())
    return list(connection._batch), others, by_the_client


@given(st.sets(st.integers(0, len(SENT))))
def test_messages_of_a_batch_arrive_whole_however_their_bytes_do(cuts: set[int]) -> None:
    ends = sorted({0, *cuts, len(SENT)})
    kept, others, _ = received(SENT[begin:end] for begin, end in pairwise(ends))
    assert kept == [*MESSAGES, MESSAGES[1]]
    assert others == [b"inbox.11 NATS/1.0\r\nNa", b"inbox.1 NATS/1.0 204"]


def test_the_client_does_not_look_at_the_messages_of_a_batch() -> None:
    sent = b"".join(operation(b"inbox.1", *message) for message in MESSAGES)
    assert received([sent, sent[:-9], sent[-9:]]) == (2 * MESSAGES, [], 0)
