"""Large bodies travel in fragments: nothing is received before the last one, and then the whole."""

from __future__ import annotations

import hashlib
import io
import os
import random
import signal
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import UUID

import pytest

import saf
from saf.broker.services import create_subscription, remove_subscription
from saf.database import Dsn, fetch
from saf.dialogs.conversations import clean_up, forget
from saf.dialogs.dialog import FRAGMENT_BYTES, count
from saf.dialogs.statements import Code
from saf.errors import InvalidMessage, SchemaViolation, TypeNotInContract, UsageError
from saf.setaside.dropped import dropped
from tests.dialog_programs import TABLES, target
from tests.dialogs import (
    ERROR,
    SHOP,
    WAREHOUSE,
    begin,
    end,
    forward,
    prepare,
    put,
    receive,
    said,
    say,
    states,
)
from tests.pipeline import connect
from tests.processes import run
from tests.receivers import dead, let_keys_be_due, let_the_server_notice
from tests.tiers import sized

PINNED = 40_960


@pytest.fixture(autouse=True)
def _ends(app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)


def send(dsn: Dsn, dialog: saf.Dialog, body: object, **options: Any) -> UUID:
    """In fragments of four bytes, unless it says otherwise."""
    with dsn.connect(role="test") as connection:
        return dialog.send(connection, body, **{"fragment_bytes": 4, **options})


def bodies(dsn: Dsn, service: str = WAREHOUSE, **options: Any) -> list[bytes]:
    """What is received, as it was when it was handed out."""
    found: list[bytes] = []
    receive(dsn, service, lambda _, message: found.append(message.body), **options)
    return found


def put_fragment(mom: Dsn, dialog: saf.Dialog, sequence: int) -> None:
    """What a transport may do: store one of the three fragments of a body again."""
    last = sequence % 3 == 0
    says = '"saf-whole": {"fragments": 3, "bytes": 6}' if last else '"saf-fragment": 1'
    headers = f'{{"saf-dialog": {{}}, {says}}}'
    put(mom, dialog, sequence, f"{sequence:02}", headers=headers)


def waiting(dsn: Dsn) -> set[tuple[int, str]]:
    """What waits for the rest of its body: the numbers, and the transactions that put it there."""
    with connect(dsn) as connection:
        return set(fetch(connection, "SELECT sequence, xmin::text FROM saf.fragment"))


def in_outbox(dsn: Dsn) -> list[int]:
    with connect(dsn) as connection:
        rows = fetch(connection, "SELECT sequence FROM saf.outbox ORDER BY id")
    return [sequence for (sequence,) in rows]


# One, two, many


@pytest.mark.parametrize(("length", "expected"), [(40_960, 1), (40_961, 2), (2**31, 52_429)])
def test_of_40_960_bytes_each_this_is_how_many_fragments_a_body_has(
    length: int, expected: int
) -> None:
    assert count(length, PINNED) == expected


@pytest.mark.parametrize("made", [bytes, io.BytesIO])
@pytest.mark.parametrize("length", [0, 40_959, 40_960, 40_961, 81_920, 81_921])
def test_a_body_is_cut_where_a_fragment_is_full_and_is_received_as_it_was(
    app: Dsn, mom: Dsn, length: int, made: Callable[[bytes], object]
) -> None:
    body = random.Random(length).randbytes(length)
    dialog, headers = begin(app), {"colour": "green"}
    sent = send(
        app, dialog, made(body), fragment_bytes=PINNED, headers=headers, message_type="picture"
    )
    assert in_outbox(app) == list(range(1, count(length, PINNED) + 1))
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        (message,) = delivery
        assert message.body == body
        assert message.open().read() == body
        assert (message.message_id, message.size) == (sent, length)
        assert (message.message_type, message.headers["colour"]) == ("picture", "green")
        assert message.content_type == "application/octet-stream"
        assert message.dialog is not None
        message.dialog.end(delivery.connection)
        assert message.body == body
    assert waiting(mom) == set()
    if length > PINNED:
        with pytest.raises(UsageError, match="read it in the block or the handler"):
            message.open().read()


@pytest.mark.parametrize("text", ["", "grün", "as long as 100 fragments"])
def test_a_file_of_text_is_refused_before_any_of_it_is_sent(app: Dsn, text: str) -> None:
    dialog = begin(app)
    with app.connect(role="test") as connection:
        with pytest.raises(InvalidMessage, match="a text file: open it in binary mode"):
            dialog.send(connection, io.StringIO(text), fragment_bytes=4)
        assert fetch(connection, "SELECT FROM saf.outbox") == []


def test_text_and_json_are_what_they_were_and_a_small_body_is_one_message(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app)
    send(app, dialog, "grüezi mitenand")
    send(app, dialog, {"amount": [1, 2, 3]})
    send(app, dialog, b"1234")
    forward(app, mom)
    got: list[object] = []
    receive(
        mom,
        WAREHOUSE,
        lambda _, one: got.append(
            one.json() if one.content_type == "application/json" else one.text()
        ),
    )
    assert got == ["grüezi mitenand", {"amount": [1, 2, 3]}, "1234"]


def test_by_default_a_body_of_more_than_a_mebibyte_is_cut_and_a_monologs_is_not(
    app: Dsn,
) -> None:
    dialog = begin(app)
    send(app, dialog, bytes(FRAGMENT_BYTES), fragment_bytes=FRAGMENT_BYTES)
    send(app, dialog, bytes(FRAGMENT_BYTES + 1), fragment_bytes=FRAGMENT_BYTES)
    assert in_outbox(app) == [1, 2, 3]
    with app.connect(role="test") as connection:
        monolog = saf.begin_monolog(connection, from_service=SHOP, topic=WAREHOUSE)
        monolog.send(connection, bytes(FRAGMENT_BYTES + 1))
    assert in_outbox(app) == [1, 2, 3, 1]


def test_a_large_reply_on_a_sqlalchemy_connection_of_a_service_with_itself(app: Dsn) -> None:
    begin(app, "1", to_service=SHOP)
    forward(app, app)
    engine = app.engine()
    for expected in (b"1", b"a large reply", b""):
        with saf.receive(engine, SHOP) as delivery:
            assert b"".join(message.body for message in delivery) == expected
            if expected == b"1":
                (message,) = delivery
                assert message.dialog is not None
                message.dialog.send(delivery.connection, b"a large reply", fragment_bytes=4)
        forward(app, app)
    engine.dispose()
    assert waiting(app) == set()


# Order, and once


@pytest.mark.parametrize("max_messages", [1, 3, 100])
def test_large_and_small_messages_are_received_in_the_order_of_sending(
    app: Dsn, mom: Dsn, max_messages: int
) -> None:
    dialog = begin(app, "1")
    send(app, dialog, b"the second")
    say(app, dialog, "3")
    send(app, dialog, b"the fourth")
    end(app, dialog)
    forward(app, mom)
    assert bodies(mom, max_messages=max_messages) == [b"1", b"the second", b"3", b"the fourth", b""]
    assert waiting(mom) == set()


def test_nothing_is_received_before_the_last_and_the_inbox_is_not_needed_meanwhile(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app)
    put_fragment(mom, dialog, 1)
    put_fragment(mom, dialog, 2)
    assert bodies(mom) == []
    assert states(mom) == ["conversing"]
    with connect(mom) as connection:
        connection.execute("TRUNCATE saf.inbox")
    put_fragment(mom, dialog, 3)
    assert bodies(mom) == [b"010203"]


@pytest.mark.parametrize("max_messages", [1, 2, 100])
@pytest.mark.parametrize("seed", range(sized(2, 4)))
def test_fragments_in_any_order_and_more_than_once_are_received_once(
    app: Dsn, mom: Dsn, max_messages: int, seed: int
) -> None:
    dialog, chance = begin(app), random.Random(seed)
    expected = [b"010203", b"040506", b"070809"]
    arrivals = [*range(1, 10), *chance.choices(range(1, 10), k=5)]
    chance.shuffle(arrivals)
    for sequence in arrivals:
        put_fragment(mom, dialog, sequence)
    assert bodies(mom, max_messages=max_messages) == expected
    for sequence in range(1, 10):
        put_fragment(mom, dialog, sequence)
    assert bodies(mom, max_messages=max_messages) == []
    assert waiting(mom) == set()
    with connect(mom) as connection:
        assert fetch(connection, "SELECT FROM saf.parked") == []


def test_a_fragment_that_is_missing_holds_the_rest_up_until_it_comes(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app)
    for sequence in (1, 3, 4):
        put_fragment(mom, dialog, sequence)
        assert bodies(mom) == []
    with connect(mom) as connection:
        connection.execute("TRUNCATE saf.inbox")
    for sequence in (5, 6):
        put_fragment(mom, dialog, sequence)
        assert bodies(mom) == []
    put_fragment(mom, dialog, 2)
    assert bodies(mom) == [b"010203", b"040506"]
    assert waiting(mom) == set()


def test_a_receiver_that_is_killed_half_way_goes_on_where_it_was(app: Dsn, mom: Dsn) -> None:
    body = "".join(f"{number:03}," for number in range(100))
    send(app, begin(app), body)
    forward(app, mom)
    with connect(mom) as connection:
        connection.execute(TABLES)
    seen: list[set[tuple[int, str]]] = [set()]
    for seed in (1, 2):
        assert run(target, mom, seed, failpoint="receive_settled:4") == -signal.SIGKILL
        let_the_server_notice(mom)
        seen.append(waiting(mom))
        assert seen[-2] < seen[-1]
        assert max(seen[-1])[0] == len(seen[-1]) < 99
    assert run(target, mom, 3) == 0
    with connect(mom) as connection:
        assert fetch(connection, "SELECT body FROM heard") == [(body,)]
    assert waiting(mom) == set()


# Failing, ending


def test_a_body_whose_handler_fails_waits_and_so_does_what_is_behind_it(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app)
    for body in (b"the first", b"the second"):
        send(app, dialog, body)
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        first, second = delivery
        assert (first.body, second.body) == (b"the first", b"the second")
        delivery.park(first, "not now")
    send(app, dialog, b"the third")
    forward(app, mom)
    assert bodies(mom) == []
    let_keys_be_due(mom)
    assert bodies(mom) == [b"the first", b"the second", b"the third"]
    assert waiting(mom) == set()


def test_a_block_that_raises_has_received_nothing(app: Dsn, mom: Dsn) -> None:
    send(app, begin(app), b"the first")
    forward(app, mom)
    with suppress(ZeroDivisionError), saf.receive(mom, WAREHOUSE) as delivery:
        assert [message.body for message in delivery] == [b"the first"]
        raise ZeroDivisionError
    let_keys_be_due(mom)
    assert bodies(mom) == [b"the first"]


def test_a_body_that_is_given_up_ends_the_dialog_with_an_error(app: Dsn, mom: Dsn) -> None:
    send(app, begin(app), b"poison")
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        (message,) = delivery
        delivery.reject(message, "no")
    forward(app, mom)
    assert said(receive(app, SHOP)) == said(receive(mom, WAREHOUSE)) == [ERROR]
    assert waiting(mom) == set()
    assert dead(mom) == [("on", "failed")]


@pytest.mark.parametrize("how", ["end", "error", "clean up"])
def test_what_has_come_of_a_body_goes_when_the_conversation_is_over(
    app: Dsn, mom: Dsn, how: str
) -> None:
    dialog, other = begin(app, "1"), begin(app)
    forward(app, mom)
    (message,) = receive(mom, WAREHOUSE)
    assert message.dialog is not None
    put_fragment(mom, dialog, 2)
    put_fragment(mom, other, 1)
    assert bodies(mom) == []
    with connect(mom) as connection:
        forget(connection, 0)
        assert len(waiting(mom)) == 2
        if how == "clean up":
            clean_up(connection, message.dialog.handle)
        elif how == "end":
            end(mom, message.dialog)
            forget(connection, 0)
        else:
            put(mom, dialog, 9, '{"code": 1, "text": "no"}', message_type=ERROR)
            assert said(receive(mom, WAREHOUSE)) == [ERROR]
            forget(connection, 0)
        assert [sequence for sequence, _ in waiting(mom)] == [1]
        counted = [
            (one.reason, one.messages, one.last_message_id)
            for one in dropped(connection)
            if one.subscription == WAREHOUSE
        ]
        assert counted == [("incomplete", 1, dialog.conversation_id)]
        put_fragment(mom, dialog, 3)
        assert bodies(mom) == []
        assert [sequence for sequence, _ in waiting(mom)] == [1]


def test_what_has_come_of_a_body_goes_with_its_reader_only_if_somebody_gives_it_up(
    app: Dsn, mom: Dsn
) -> None:
    dialog, other = begin(app, "1"), begin(app)
    forward(app, mom)
    receive(mom, WAREHOUSE)
    put_fragment(mom, dialog, 2)
    put_fragment(mom, other, 1)
    assert bodies(mom) == []
    begun = {dialog.conversation_id, other.conversation_id}
    with connect(mom) as connection:
        create_subscription(connection, "second", service=WAREHOUSE, start="now")
        remove_subscription(connection, "second")
        with pytest.raises(UsageError, match="'warehouse' has large bodies received in part"):
            remove_subscription(connection, WAREHOUSE)
        assert len(waiting(mom)) == 2
        remove_subscription(connection, WAREHOUSE, discard=True)
        ((ids, why),) = fetch(connection, "SELECT message_ids, why FROM saf.audit")
        assert set(ids) == begun
        assert why.endswith("and has 2 messages (0 unread, 0 parked, 2 incomplete)")


def test_what_waits_for_a_fragment_that_is_missing_is_counted_once_when_the_dialog_is_over(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1")
    forward(app, mom)
    (message,) = receive(mom, WAREHOUSE)
    assert message.dialog is not None
    for sequence in (4, 5):
        put_fragment(mom, dialog, sequence)
    assert bodies(mom) == []
    end(mom, message.dialog)
    with connect(mom) as connection:
        forget(connection, 0)
        assert waiting(mom) == set()
        assert dropped(connection) == []
        for sequence in (2, 3):
            put_fragment(mom, dialog, sequence)
        assert bodies(mom) == []
        assert [(one.reason, one.messages) for one in dropped(connection)] == [("ended", 4)]


@pytest.mark.parametrize("purged_first", [True, False])
def test_fragments_that_an_error_has_overtaken_are_counted_once_and_not_as_received(
    app: Dsn, mom: Dsn, purged_first: bool
) -> None:
    dialog = begin(app, "1")
    forward(app, mom)
    (message,) = receive(mom, WAREHOUSE)
    assert message.dialog is not None
    put_fragment(mom, dialog, 2)
    for sequence in (4, 5):
        put_fragment(mom, dialog, sequence)
    assert bodies(mom) == []
    put(mom, dialog, 6, '{"code": 17, "text": "no more"}', message_type=ERROR)
    with connect(mom) as connection:
        if purged_first:
            (error,) = receive(mom, WAREHOUSE, max_messages=1)
            assert error.message_type == ERROR
            forget(connection, 0)
        put_fragment(mom, dialog, 3)
        receive(mom, WAREHOUSE)
        forget(connection, 0)
        assert waiting(mom) == set()
        counted = {one.reason: one.messages for one in dropped(connection)}
        assert counted.pop("incomplete") == 1
        assert sum(counted.values()) == 3
        assert counted.keys() <= {"ended", "overtaken"}
        assert fetch(connection, "SELECT receive_sequence FROM saf.conversation") == [(2,)]


def test_of_a_dialog_that_an_error_begins_what_has_come_of_a_body_goes_too(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app)
    with app.connect(role="test") as connection:
        dialog.send(connection, b"a body", fragment_bytes=2)
        dialog.end_with_error(connection, 17, "no more")
        connection.execute("DELETE FROM saf.outbox WHERE sequence = 1")
    for sequence in (2, 3):
        put_fragment(mom, dialog, sequence)
    assert bodies(mom) == []
    assert {sequence for sequence, _ in waiting(mom)} == {2}, "the last one waits with its body"
    forward(app, mom)
    (error,) = receive(mom, WAREHOUSE)
    assert error.message_type == ERROR
    with connect(mom) as connection:
        forget(connection, 0)
        assert waiting(mom) == set()
        counted = {one.reason: one.messages for one in dropped(connection)}
        assert fetch(connection, "SELECT FROM saf.parked") == []
    # the two that waited, and the same two again, with the Error
    assert counted == {"ended": 2, "overtaken": 2}


def test_a_body_of_which_a_part_was_never_sent_is_an_error(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app)
    put_fragment(mom, dialog, 1)
    put(mom, dialog, 2, "no fragment")
    put_fragment(mom, dialog, 3)
    (first, error) = receive(mom, WAREHOUSE)
    assert first.text() == "no fragment"
    assert error.json() == {
        "code": Code.VIOLATION,
        "text": "message 3: fragments are missing",
    }


# Contracts


def test_a_type_is_checked_at_the_first_fragment_and_a_schema_on_the_whole(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, contract="ordering")
    for body in ({"amount": 12345}, io.BytesIO(b'{"amount": 12345}')):
        send(app, dialog, body, message_type="order")
    with pytest.raises(SchemaViolation, match=r"at \$\.amount"):
        send(app, dialog, io.BytesIO(b'{"amount": "many"}'), message_type="order")
    with pytest.raises(SchemaViolation, match="expected no body"):
        send(app, dialog, io.BytesIO(b"not empty"), message_type="cancel")
    with pytest.raises(TypeNotInContract):
        send(app, dialog, io.BytesIO(b"a gift"), message_type="gift")
    forward(app, mom)
    assert bodies(mom) == [b'{"amount":12345}', b'{"amount": 12345}']
    fragment = {"message_type": "gift", "headers": '{"saf-fragment": 1}'}
    put(mom, dialog, len(in_outbox(app)) + 1, "what", **fragment)
    assert said(receive(mom, WAREHOUSE)) == [ERROR]


def test_a_large_body_that_breaks_the_contract_on_arrival_is_an_error(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        saf.create_contract(connection, "notes", {"note": "any"})
    with connect(mom) as connection:
        saf.create_message_type(connection, "note", version=2, validation="json")
        saf.create_contract(connection, "notes", {"note": "any"})
    send(app, begin(app, contract="notes"), b"no JSON", message_type="note")
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == [ERROR]


# Limits


class Endless(io.RawIOBase):
    """A pipe that gives a few bytes at a time, until it has given so many or breaks."""

    def __init__(self, length: int, *, breaks: bool = False) -> None:
        self.left = length
        self.breaks = breaks
        self.digest = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        if self.breaks and not self.left:
            raise OSError("broken pipe")
        piece = random.Random(self.left).randbytes(min(size, self.left, 100_000))
        self.left -= len(piece)
        self.digest.update(piece)
        return piece


def test_a_body_that_is_too_large_or_cannot_be_read_is_not_sent_in_part(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app)
    engine = app.engine()
    with engine.begin() as connection:
        dialog.send(connection, b"before")
        with pytest.raises(InvalidMessage, match=r"body: more bytes than max_bytes .10."):
            dialog.send(connection, Endless(11), fragment_bytes=4, max_bytes=10)
        with pytest.raises(OSError, match="broken pipe"):
            dialog.send(connection, Endless(11, breaks=True), fragment_bytes=4)
        with pytest.raises(InvalidMessage, match="fragment_bytes: 0 is not from 1 to"):
            dialog.send(connection, b"", fragment_bytes=0)
        with pytest.raises(InvalidMessage, match=r"headers: saf-… is for saf's own"):
            dialog.send(connection, b"", headers={"saf-fragment": 1})
        dialog.send(connection, b"after")
    engine.dispose()
    assert in_outbox(app) == [1, 2]
    forward(app, mom)
    assert bodies(mom) == [b"before", b"after"]


def test_of_a_pipe_a_monolog_sends_all_in_one_piece(app: Dsn) -> None:
    file = Endless(300_000)
    with app.connect(role="test") as connection:
        monolog = saf.begin_monolog(connection, from_service=SHOP, topic=WAREHOUSE)
        monolog.send(connection, file)
        with pytest.raises(InvalidMessage, match="300,000 bytes are more than max_bytes"):
            monolog.send(connection, Endless(300_001), max_bytes=299_999)
    with connect(app) as connection:
        ((body,),) = fetch(connection, "SELECT body FROM saf.outbox")
    assert hashlib.sha256(body).digest() == file.digest.digest()


def test_of_a_pipe_a_body_that_the_contract_looks_into_is_read_to_its_end(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    body = b"[" + b"1, " * 100_000 + b"1]"
    for dsn in (app, mom):
        with connect(dsn) as connection:
            saf.create_message_type(connection, "list", validation="json")
            saf.create_contract(connection, "lists", {"list": "any"})
    dialog = begin(app, contract="lists")
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = Thread(target=path.write_bytes, args=(body,))
    writer.start()
    with path.open("rb", buffering=0) as pipe:
        send(app, dialog, pipe, message_type="list", fragment_bytes=FRAGMENT_BYTES)
    writer.join()
    forward(app, mom)
    assert bodies(mom) == [body]


def test_neither_end_has_more_than_some_fragments_of_a_body_in_memory(app: Dsn, mom: Dsn) -> None:
    length, fragment_bytes = 24 * 2**20, 2**18
    file = Endless(length)
    tracemalloc.start()
    try:
        send(app, begin(app), file, fragment_bytes=fragment_bytes)
        _, sending = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        forward(app, mom)
        tracemalloc.start()
        digest = hashlib.sha256()
        with saf.receive(mom, WAREHOUSE) as delivery:
            (message,) = delivery
            assert message.size == length
            body = message.open()
            while piece := body.read(2**16):
                digest.update(piece)
        _, receiving = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert digest.digest() == file.digest.digest()
    assert sending < 10 * fragment_bytes
    assert receiving < 10 * fragment_bytes


def test_a_body_that_is_too_large_for_memory_says_how_it_is_read(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saf.dialogs.assembly.DEFAULT_MAX_BYTES", 8)
    send(app, begin(app), b"123456789")
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        (message,) = delivery
        with pytest.raises(UsageError, match=r"has 9 bytes, and not more than 8 .* message.open"):
            message.body  # noqa: B018 - it is read
        assert message.open().read() == b"123456789"


def test_who_listens_in_gets_the_fragments_as_they_are(app: Dsn, mom: Dsn) -> None:
    with connect(mom) as connection:
        create_subscription(connection, "audit", service=WAREHOUSE)
    send(app, begin(app), b"123456789")
    forward(app, mom)
    assert bodies(mom, "audit") == [b"1234", b"5678", b"9"]
    assert bodies(mom) == [b"123456789"]


def test_a_message_of_no_dialog_that_says_it_is_a_fragment_is_none(app: Dsn, mom: Dsn) -> None:
    with app.connect(role="test") as connection:
        for body in (b"one", b"two"):
            saf.Outbox().send(connection, WAREHOUSE, body, key="a key", headers={"saf-fragment": 1})
    begin(app, "spoken")
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        delivery.park(next(one for one in delivery if one.body == b"one"), "not now")
    let_keys_be_due(mom)
    assert bodies(mom) == [b"one", b"two"]
