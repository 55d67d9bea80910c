"""Sagas: processes over several dialogs, whose state, messages, rows and position are one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import BaseModel, Field
from structlog.testing import capture_logs

import saf
from saf.database import Dsn
from saf.errors import NotCorrelated, UsageError
from saf.operating.maintenance import purge_broker
from saf.testing.clock import let_time_pass
from tests import sagas
from tests.dialogs import END, ERROR, receive, said
from tests.pipeline import connect
from tests.programs import url
from tests.receivers import let_keys_be_due
from tests.sagas import ORDERS, PAYMENT, STOCK, rows
from tests.waits import until

every_postgresql = pytest.mark.every_postgresql

DEAD = "SELECT message_type, reason, error FROM saf.dead_letter ORDER BY dead_letter_id"
STATES = "SELECT state -> 'state' FROM saf.conversation_group WHERE state IS NOT NULL"
OPEN_HERE = "service = 'orders' AND state <> 'closed'"
OWN_ENDS = "SELECT state FROM saf.conversation WHERE service = far_service ORDER BY created_at"


@dataclass
class Count:
    """A state that needs no value."""

    number: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class Named:
    """A state that needs one."""

    name: str


@pytest.fixture
def shop(app: Dsn) -> Dsn:
    """One database with three services and local routes."""
    sagas.prepare(app)
    return app


def send(dsn: Dsn, message_type: str, body: object = None, key: str | None = "A-1") -> None:
    with dsn.connect(role="test") as connection:
        saf.Outbox().send(connection, ORDERS, body or {}, key=key, message_type=message_type)


def counting(dsn: Dsn, **options: Any) -> saf.Saga[Count]:
    """A saga that counts: "Start" begins, "Add" goes on, "Stop" ends."""
    saga = saf.Saga(dsn, ORDERS, state=Count, **options)

    @saga.starts("Start")
    def start(process: saf.Process[Count], _: saf.Received) -> None:
        process.state.number = 1

    @saga.handler("Add")
    def add(process: saf.Process[Count], _: saf.Received) -> None:
        process.state.number += 1

    @saga.handler("Stop")
    def stop(process: saf.Process[Count], _: saf.Received) -> None:
        process.end()

    return saga


def number(dsn: Dsn) -> list[int]:
    return sorted(state["number"] for (state,) in rows(dsn, STATES))


@every_postgresql
def test_an_order_is_done_or_leaves_nothing_behind(shop: Dsn) -> None:
    expected = {"1": "done", "2": "sold out", "3": "no money", "4": "done"}
    sagas.place(shop, "1")
    sagas.place(shop, "2", article="rare")
    sagas.place(shop, "3", customer="poor")
    sagas.place(shop, "4", amount=3)
    sagas.drain(shop)
    sagas.check(shop, expected)
    assert rows(shop, "SELECT amount FROM article WHERE name = 'book'") == [(996,)]
    assert rows(shop, DEAD) == []


def test_state_messages_rows_and_position_are_one_transaction(shop: Dsn) -> None:
    saga = saf.Saga(shop, ORDERS, state=Count)
    fails = [True]

    @saga.starts("Start")
    def start(process: saf.Process[Count], _: saf.Received) -> None:
        process.state.number = 7
        process.connection.execute("INSERT INTO outcome VALUES ('A-1', 'begun')")
        process.send(STOCK, {}, message_type="Reserve")
        process.start_timer(600)
        if fails:
            raise ValueError

    saga.timer(lambda _: None)
    send(shop, "Start")
    assert saga.drain() == 0
    everything = [STATES, OWN_ENDS, "SELECT FROM outcome", "SELECT FROM saf.inbox OFFSET 1"]
    assert [rows(shop, one) for one in everything] == [[], [], [], []]
    fails.clear()
    let_keys_be_due(shop)
    assert saga.drain() == 1
    assert [len(rows(shop, one)) for one in everything] == [1, 1, 1, 2]


def test_messages_with_its_key_find_a_process_and_others_another_one(shop: Dsn) -> None:
    for key in ("A-1", "A-2"):
        send(shop, "Start", key=key)
    send(shop, "Add", key="A-2")
    assert asyncio.run(counting(shop).arun(drain=True)) == 3
    assert number(shop) == [1, 2]


def test_a_second_start_finds_the_running_process_and_is_a_dead_letter(shop: Dsn) -> None:
    saga = counting(shop)
    for message_type in ("Start", "Add", "Start"):
        send(shop, message_type)
    saga.drain()
    assert number(shop) == [2]
    ((message_type, reason, error),) = rows(shop, DEAD)
    assert (message_type, reason) == ("Start", "failed")
    assert "fits no process of saga 'orders': process 'A-1' runs already" in error


def test_a_type_may_start_a_process_and_go_on_with_it(shop: Dsn) -> None:
    saga = counting(shop)

    @saga.handler("Start")
    def again(process: saf.Process[Count], _: saf.Received) -> None:
        process.state.number += 10

    @saga.starts("Add")
    def first(process: saf.Process[Count], _: saf.Received) -> None:
        assert process.is_new
        process.state.number = 5

    for message_type in ("Add", "Start", "Start"):
        send(shop, message_type)
    assert saga.drain() == 3
    assert number(shop) == [25]


@pytest.mark.parametrize("message_type", ["Start", "Add"])
def test_a_message_whose_process_has_ended_is_a_dead_letter(shop: Dsn, message_type: str) -> None:
    saga = counting(shop)
    for one in ("Start", "Stop", message_type):
        send(shop, one)
    saga.drain()
    assert number(shop) == [1]
    ((found, _, error),) = rows(shop, DEAD)
    assert found == message_type
    assert "its process has ended" in error


@pytest.mark.parametrize("key", ["A-1", None])
def test_a_message_without_a_process_is_a_dead_letter_after_one_attempt(
    shop: Dsn, key: str | None
) -> None:
    send(shop, "Add", key=key)
    counting(shop).drain()
    ((_, _, error),) = rows(shop, DEAD)
    assert f"message type 'Add', key {key!r}, fits no process of saga 'orders'" in error
    assert rows(shop, "SELECT FROM saf.conversation_group") == []


def test_a_dialog_without_a_process_gets_an_error(shop: Dsn) -> None:
    with shop.connect(role="test") as connection:
        dialog = saf.begin_dialog(connection, from_service=STOCK, to_service=ORDERS)
        dialog.send(connection, {}, message_type="Add")
    counting(shop).drain()
    assert [one[0] for one in rows(shop, DEAD)] == ["Add"]
    (error,) = receive(shop, STOCK)
    assert (error.message_type, error.json()["code"]) == (ERROR, -2)


def test_a_function_decides_about_messages_without_a_process(shop: Dsn) -> None:
    saga = counting(shop)

    @saga.missing
    def missing(message: saf.Received, connection: Any, error: NotCorrelated) -> None:
        if message.json():
            raise error
        connection.execute("INSERT INTO outcome VALUES (%s, %s)", [message.key, error.why])

    send(shop, "Add", key="A-1")
    send(shop, "Add", {"dead": True}, key="A-2")
    assert saga.drain() == 1
    assert sagas.outcomes(shop) == {"A-1": "no process has its key, or its dialog"}
    assert len(rows(shop, DEAD)) == 1


def test_a_key_may_be_used_again_once_its_process_is_forgotten(shop: Dsn) -> None:
    saga = counting(shop)

    def purge() -> None:
        let_time_pass(shop, timedelta(days=4))
        with connect(shop) as connection:
            purge_broker(connection, retention_seconds=3 * 86400, rotate_after_seconds=1e9)

    send(shop, "Start", key="A-1")
    send(shop, "Start", key="A-2")
    send(shop, "Stop", key="A-2")
    saga.drain()
    purge()
    assert len(rows(shop, STATES)) == 1, "the running process stays, though it has no dialog"
    send(shop, "Add", key="A-1")
    send(shop, "Start", key="A-2")
    assert saga.drain() == 2
    assert number(shop) == [1, 2]


def asking(dsn: Dsn, engine: Any = None) -> saf.Saga[Count]:
    """A saga that asks both services when it starts."""
    saga = saf.Saga(engine or dsn, ORDERS, state=Count)

    @saga.starts("Start")
    def start(process: saf.Process[Count], _: saf.Received) -> None:
        process.send(STOCK, "1", message_type="Reserve")
        process.send(PAYMENT, "1", message_type="Pay")

    @saga.handler("Answer")
    def answer(process: saf.Process[Count], message: saf.Received) -> None:
        assert message.from_service is not None
        process.state.notes.append(message.from_service)

    send(dsn, "Start")
    assert saga.drain() == 1
    return saga


def reply(
    dsn: Dsn, service: str, act: Callable[[saf.Dialog, Any], object] = lambda *_: None
) -> list[saf.Received]:
    """Receive what a service has got, and answer the first of it."""
    done: list[saf.Received] = []

    def handle(connection: Any, message: saf.Received) -> None:
        assert message.dialog is not None
        if not done:
            act(message.dialog, connection)
        done.append(message)

    receive(dsn, service, handle)
    return done


def answer(dialog: saf.Dialog, connection: Any) -> None:
    dialog.send(connection, {}, message_type="Answer")


def test_a_process_works_on_a_connection_of_sqlalchemy(shop: Dsn) -> None:
    engine = sa.create_engine(url(shop))
    try:
        saga = asking(shop, engine)

        @saga.on_error
        def failed(process: saf.Process[Count], error: saf.DialogFailed) -> None:
            process.connection.execute(sa.text("INSERT INTO outcome VALUES ('A-1', 'no')"))
            process.start_timer(600)
            process.stop_timer()
            process.fail(error.code, error.text)

        saga.timer(lambda _: None)
        for service in (STOCK, PAYMENT):
            reply(shop, service, answer)
        stock_end = "SELECT handle FROM saf.conversation WHERE service = 'stock'"
        ((handle,),) = rows(shop, stock_end)
        with shop.connect(role="test") as connection:
            saf.open_dialog(connection, handle).end_with_error(connection, 3, "no")
        assert saga.drain() >= 1
    finally:
        engine.dispose()
    assert sagas.outcomes(shop) == {"A-1": "no"}
    assert [one.json()["code"] for one in receive(shop, PAYMENT)] == [3]


def test_a_process_sends_to_a_service_on_one_dialog(shop: Dsn) -> None:
    saga = asking(shop)

    @saga.handler("More")
    def more(process: saf.Process[Count], _: saf.Received) -> None:
        process.send(STOCK, "2", message_type="Reserve")

    send(shop, "More")
    assert saga.drain() == 1
    first, second = receive(shop, STOCK)
    assert (first.text(), second.text()) == ("1", "2")
    assert first.conversation_id == second.conversation_id


def test_an_error_of_one_service_fails_the_process_and_reaches_the_others(shop: Dsn) -> None:
    saga = asking(shop)
    reply(shop, PAYMENT)
    reply(shop, STOCK, lambda dialog, connection: dialog.end_with_error(connection, 11, "no"))
    with capture_logs() as logs:
        assert saga.drain() == 1
    (error,) = receive(shop, PAYMENT)
    assert (error.message_type, error.json()) == (ERROR, {"code": 11, "text": "no"})
    (logged,) = [one for one in logs if one["event"] == "process_failed"]
    assert (logged["saga"], logged["key"], logged["code"]) == (ORDERS, "A-1", 11)
    assert rows(
        shop, "SELECT state -> 'ended' FROM saf.conversation_group WHERE state ? 'key'"
    ) == [({"code": 11, "text": "no"},)]
    assert receive(shop, STOCK) == [], "who has failed hears nothing more"


def test_a_message_that_cannot_be_handled_fails_the_process(shop: Dsn) -> None:
    saga = asking(shop)

    @saga.handler("Bad")
    def bad(*_: object) -> None:
        raise ValueError

    saga.policy = saf.Policy(max_attempts=1)
    reply(shop, STOCK, lambda dialog, db: dialog.send(db, {}, message_type="Bad"))
    reply(shop, PAYMENT)
    saga.drain()
    assert [one.json()["code"] for one in receive(shop, PAYMENT)] == [-2]
    assert [one.json()["code"] for one in receive(shop, STOCK)] == [-2]


def test_an_error_goes_to_the_handler_of_its_service_or_of_any(shop: Dsn) -> None:
    saga = asking(shop)

    @saga.on_error(STOCK)
    def of_stock(process: saf.Process[Count], error: saf.DialogFailed) -> None:
        process.state.notes.append(f"stock: {error.code} {error.text}")

    @saga.on_error
    def of_any(process: saf.Process[Count], error: saf.DialogFailed) -> None:
        process.state.notes.append(f"any: {error.code} {error.text}")

    for service in (PAYMENT, STOCK):
        reply(shop, service, lambda dialog, db: dialog.end_with_error(db, 5, "no"))
    assert saga.drain() == 2
    ((state,),) = rows(shop, STATES)
    assert sorted(state["notes"]) == ["any: 5 no", "stock: 5 no"]
    assert rows(shop, OWN_ENDS) == [("started_outbound",)], "the process goes on"
    assert rows(shop, f"SELECT count(*) FROM saf.conversation WHERE {OPEN_HERE}") == [(1,)]


def test_an_end_closes_the_dialog_and_goes_to_its_handler(shop: Dsn) -> None:
    saga = asking(shop)

    @saga.on_end(PAYMENT)
    def ended(process: saf.Process[Count]) -> None:
        process.state.notes.append("ended")

    for service in (PAYMENT, STOCK):
        reply(shop, service, lambda dialog, connection: dialog.end(connection))
    assert saga.drain() == 2
    assert rows(shop, STATES) == [({"number": 0, "notes": ["ended"]},)]
    assert rows(shop, f"SELECT count(*) FROM saf.conversation WHERE {OPEN_HERE}") == [(1,)]


def test_the_end_of_a_process_ends_its_dialogs_in_order(shop: Dsn) -> None:
    saga = asking(shop)
    reply(shop, STOCK)
    reply(shop, PAYMENT)
    saga.handler("Stop")(lambda process, _: process.end())
    send(shop, "Stop")
    assert saga.drain() == 1
    assert said(receive(shop, STOCK)) == said(receive(shop, PAYMENT)) == [END]
    assert rows(shop, OWN_ENDS) == [("closed",)]


def test_a_message_in_the_delivery_that_ends_its_process_is_dropped_and_counted(shop: Dsn) -> None:
    saga = asking(shop)
    answers: list[str] = []

    @saga.handler("Last")
    def last(process: saf.Process[Count], message: saf.Received) -> None:
        answers.append(str(message.from_service))
        process.end()

    for service in (STOCK, PAYMENT):
        reply(shop, service, lambda dialog, db: dialog.send(db, {}, message_type="Last"))
    saga.drain()
    assert len(answers) == 1
    assert rows(shop, "SELECT reason, messages FROM saf.dropped") == [("ended", 1)]
    assert rows(shop, DEAD) == []


def test_after_its_end_a_process_neither_sends_nor_ends_again(shop: Dsn) -> None:
    saga = asking(shop)
    refused: list[str] = []

    @saga.handler("Stop")
    def stop(process: saf.Process[Count], _: saf.Received) -> None:
        process.end()
        for act in (
            process.end,
            lambda: process.fail(1, "x"),
            lambda: process.send(STOCK, {}),
            lambda: process.begin_dialog(STOCK),
            lambda: process.start_timer(1),
        ):
            with pytest.raises(UsageError, match="process 'A-1' of saga 'orders' has ended"):
                act()
            refused.append("one")

    send(shop, "Stop")
    assert saga.drain() == 1
    assert len(refused) == 5


def test_a_process_does_not_fail_with_a_code_that_no_error_has(shop: Dsn) -> None:
    saga = counting(shop)

    @saga.handler("Fail")
    def fail(process: saf.Process[Count], _: saf.Received) -> None:
        with pytest.raises(UsageError, match="error code 0"):
            process.fail(0, "no")

    send(shop, "Start")
    send(shop, "Fail")
    assert saga.drain() == 2


def test_a_service_starts_a_process_by_a_dialog_and_gets_its_answers(shop: Dsn) -> None:
    saga = saf.Saga(shop, ORDERS, state=Count)

    @saga.starts("Start")
    def start(process: saf.Process[Count], _: saf.Received) -> None:
        process.send(PAYMENT, "begun")
        process.send(STOCK, "asked", message_type="Reserve")

    @saga.handler("Answer")
    def answered(process: saf.Process[Count], _: saf.Received) -> None:
        process.fail(9, "enough")

    with shop.connect(role="test") as connection:
        dialog = saf.begin_dialog(connection, from_service=PAYMENT, to_service=ORDERS)
        dialog.send(connection, {}, message_type="Start")
    assert saga.drain() == 1
    (begun,) = receive(shop, PAYMENT)
    assert (begun.text(), begun.dialog) == ("begun", dialog)
    reply(shop, STOCK, answer)
    assert saga.drain() == 1
    (error,) = receive(shop, PAYMENT)
    assert error.json() == {"code": 9, "text": "enough"}


@every_postgresql
def test_a_timer_reminds_its_process_and_only_the_newest_does(shop: Dsn) -> None:
    saga = counting(shop)

    @saga.handler("Wait")
    def wait(process: saf.Process[Count], message: saf.Received) -> None:
        process.start_timer(message.json()["seconds"])

    @saga.handler("Stay")
    def stay(process: saf.Process[Count], _: saf.Received) -> None:
        process.stop_timer()

    @saga.timer
    def late(process: saf.Process[Count]) -> None:
        process.state.notes.append("late")

    for key in ("A-1", "A-2", "A-3"):
        send(shop, "Start", key=key)
        send(shop, "Wait", {"seconds": 0.2}, key=key)
    send(shop, "Wait", {"seconds": 600}, key="A-2")
    send(shop, "Stay", key="A-3")
    assert saga.drain() in (8, 9)
    found = (
        "SELECT state ->> 'key', state #> '{state,notes}' FROM saf.conversation_group ORDER BY 1"
    )

    def is_late() -> bool:
        saga.drain()
        return bool(rows(shop, found)[0] == ("A-1", ["late"]))

    until(is_late)
    assert rows(shop, found)[1:] == [("A-2", []), ("A-3", [])]


def test_a_timer_needs_a_handler(shop: Dsn) -> None:
    saga = counting(shop)

    @saga.handler("Wait")
    def wait(process: saf.Process[Count], _: saf.Received) -> None:
        with pytest.raises(UsageError, match=r"write @saga\.timer"):
            process.start_timer(1)

    send(shop, "Start")
    send(shop, "Wait")
    assert saga.drain() == 2


def test_a_timer_that_cannot_be_handled_fails_the_process(shop: Dsn) -> None:
    saga = saf.Saga(shop, ORDERS, state=Count, policy=saf.Policy(max_attempts=1))

    @saga.starts("Start")
    def start(process: saf.Process[Count], _: saf.Received) -> None:
        process.send(STOCK, {})
        process.start_timer(0)

    @saga.timer
    def late(_: saf.Process[Count]) -> None:
        raise ValueError

    @saga.on_error
    def error(process: saf.Process[Count], _: saf.DialogFailed) -> None:
        raise AssertionError(process)

    send(shop, "Start")

    def is_over() -> bool:
        saga.drain()
        return rows(shop, OWN_ENDS) == [("closed",)]

    until(is_over)
    assert [one.json()["code"] for one in receive(shop, STOCK) if one.message_type == ERROR] == [-2]


def test_a_state_that_needs_values_is_set_by_the_handler_that_starts(shop: Dsn) -> None:
    saga = saf.Saga(shop, ORDERS, state=Named)

    @saga.starts("Start")
    def start(process: saf.Process[Named], message: saf.Received) -> None:
        if message.json():
            process.state = Named(message.json()["name"])

    send(shop, "Start", {"name": "Ada"}, key="A-1")
    send(shop, "Start", key="A-2")
    assert saga.drain() == 1
    assert rows(shop, STATES) == [({"name": "Ada"},)]
    ((error,),) = rows(shop, "SELECT error FROM saf.backoff")
    assert "process 'A-2' of saga 'orders' has no state yet" in error


def test_a_state_that_could_not_be_read_is_not_stored(shop: Dsn) -> None:
    saga = counting(shop)

    @saga.handler("Break")
    def spoil(process: saf.Process[Count], _: saf.Received) -> None:
        process.state.number = "secret"  # type: ignore[assignment] # what is tested

    send(shop, "Start")
    send(shop, "Break")
    saga.drain()
    ((_, _, error),) = rows(shop, DEAD)
    assert "state.number: Input should be a valid integer" in error
    assert "secret" not in error
    assert number(shop) == [1]


def test_an_unreadable_state_makes_dead_letters_that_name_the_field(shop: Dsn) -> None:
    saga = asking(shop)
    reply(shop, STOCK, answer)
    with connect(shop) as connection:
        connection.execute(
            "UPDATE saf.conversation_group SET state = jsonb_set(state, '{state,number}', '\"x\"') "
            "WHERE state IS NOT NULL"
        )
    saga.drain()
    assert [one[0] for one in rows(shop, DEAD)] == ["Answer", ERROR]
    assert all(
        "the state of process 'A-1' of saga 'orders' cannot be read, as version 1: state.number: "
        "Input should be a valid integer" in one[2]
        for one in rows(shop, DEAD)
    )


class Older(BaseModel):
    """A state as it was."""

    total: int


@saf.event("Priced", version=2)
class Priced(BaseModel):
    """The state as it is."""

    price: int = Field(alias="total-price")


@saf.upcaster(Priced, 1)
def renamed(body: dict[str, Any]) -> dict[str, Any]:
    return {"total-price": body["total"]}


def pricing(dsn: Dsn, state: Any) -> saf.Saga[Any]:
    saga = saf.Saga(dsn, ORDERS, state=state)

    @saga.starts("Start")
    def start(process: saf.Process[Any], _: saf.Received) -> None:
        process.state = state(**{"total": 3, "total-price": 4})

    @saga.handler("Add")
    def add(process: saf.Process[Any], _: saf.Received) -> None:
        process.connection.execute("INSERT INTO outcome VALUES ('A-1', %s)", [process.state.price])

    return saga


def test_an_older_state_passes_its_upcasters_and_a_newer_one_waits(shop: Dsn) -> None:
    send(shop, "Start")
    pricing(shop, Older).drain()
    send(shop, "Add")
    assert pricing(shop, Priced).drain() == 1
    assert sagas.outcomes(shop) == {"A-1": "3"}
    assert rows(
        shop, "SELECT state -> 'version', state -> 'state' FROM saf.conversation_group"
    ) == [(2, {"total-price": 3})]
    send(shop, "Add")
    assert pricing(shop, Older).drain() == 0
    assert rows(shop, DEAD) == []
    ((error,),) = rows(shop, "SELECT error FROM saf.backoff")
    assert "has version 2, newer than version 1 here: update this worker" in error


@saf.event("Placed", key="number")
@dataclass(frozen=True)
class Placed:
    """A message type."""

    number: str


def test_handlers_get_events(shop: Dsn) -> None:
    saga = saf.Saga(shop, ORDERS, state=Named)

    @saga.starts(Placed)
    def start(process: saf.Process[Named], placed: Placed) -> None:
        process.state = Named(placed.number)

    @saga.handler(Placed)
    def again(process: saf.Process[Named], placed: Placed) -> None:
        process.state.name += placed.number

    with shop.connect(role="test") as connection:
        for _ in range(2):
            saf.Outbox().send(connection, ORDERS, Placed("A-1"))
    assert saga.drain() == 2
    assert rows(shop, STATES) == [({"name": "A-1A-1"},)]
    assert saga.message_types == ("Placed",)


def test_receivers_of_one_process_take_turns(shop: Dsn) -> None:
    saga = asking(shop)
    inside = threading.Barrier(2, timeout=2)
    met: list[bool] = []

    @saga.handler("Meet")
    def meet(process: saf.Process[Count], _: saf.Received) -> None:
        process.state.number += 1
        try:
            inside.wait()
            met.append(True)
        except threading.BrokenBarrierError:
            met.append(False)

    reply(shop, STOCK, lambda dialog, db: dialog.send(db, {}, message_type="Meet"))
    send(shop, "Meet")
    saga.threads, saga.max_messages = 2, 1
    runner = threading.Thread(target=saga.run)
    runner.start()
    until(lambda: len(met) == 2)
    saga.stop()
    runner.join()
    assert met == [False, False]
    assert number(shop) == [2]


def test_another_subject_in_the_state_of_a_group_is_not_taken_for_a_process(shop: Dsn) -> None:
    saga = asking(shop)
    reply(shop, STOCK, answer)
    with connect(shop) as connection:
        connection.execute("UPDATE saf.conversation_group SET state = '[1]'")
    assert saga.drain() == 0
    ((error,),) = rows(shop, "SELECT error FROM saf.backoff")
    assert "was not stored by a saf.Saga" in error


def test_two_sagas_of_one_database_have_processes_of_their_own(shop: Dsn) -> None:
    other = saf.Saga(shop, STOCK, state=Count)
    other.starts("Start")(lambda *_: None)
    send(shop, "Start")
    with shop.connect(role="test") as connection:
        saf.Outbox().send(connection, STOCK, {}, key="A-1", message_type="Start")
    assert counting(shop).drain() == other.drain() == 1
    assert number(shop) == [0, 1]


@pytest.mark.parametrize(
    ("register", "problem"),
    [
        (
            lambda saga: saga.starts("Start")(lambda *_: None),
            "has a handler for starts 'Start' already",
        ),
        (lambda saga: saga.handler("Other")(lambda _: None), "process, message"),
        (lambda saga: saga.on_error(lambda _: None), "process, error"),
        (lambda saga: saga.on_end(lambda _, __: None), "process"),
        (lambda saga: saga.timer(lambda: None), "process"),
        (lambda saga: saga.missing(lambda _: None), "message, connection, error"),
        (lambda saga: saga.handler(7), "a handler's message type is text"),
        (lambda saga: saga.batch_handler("Other"), "each message of a saga belongs to a process"),
        (lambda saga: saga.handler(Placed)(lambda _: None), "process, event"),
    ],
)
def test_a_wrong_handler_is_refused_when_it_is_registered(
    mom: Dsn, register: Callable[[Any], object], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        register(counting(mom))


def test_a_handler_that_is_async_is_refused(mom: Dsn) -> None:
    async def later(process: object, message: object) -> None: ...

    with pytest.raises(UsageError, match="is async"):
        counting(mom).handler("Later")(later)


def test_a_state_is_a_dataclass_or_a_model(mom: Dsn) -> None:
    with pytest.raises(UsageError, match="its state dict is neither a dataclass nor a pydantic"):
        saf.Saga(mom, ORDERS, state=dict)


def test_a_saga_without_a_start_does_not_run(shop: Dsn) -> None:
    with pytest.raises(UsageError, match="nothing starts a process of saga 'orders'"):
        saf.Saga(shop, ORDERS, state=Count).drain()


def test_an_operator_sees_the_state_of_a_process(shop: Dsn) -> None:
    send(shop, "Start")
    counting(shop).drain()
    with connect(shop) as connection:
        (listed,) = saf.conversations(connection, service=ORDERS)
        assert listed.group_state is None
        (shown,) = saf.conversations(connection, handle=listed.handle)
    assert shown.state == "started_outbound"
    assert shown.as_dict()["group_state"] == {
        "saga": ORDERS,
        "key": "A-1",
        "own": str(shown.handle),
        "version": 1,
        "state": {"number": 1, "notes": []},
    }
