"""Waiting for the answer of a dialog."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from time import monotonic
from uuid import uuid4

import pytest
import sqlalchemy as sa

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.errors import DialogEnded, DialogFailed, UnexpectedMessage
from saf.log.pauses import Turn
from saf.receiving.link import switch
from saf.routing.routes import add_route
from tests import dialogs
from tests.dialogs import SHOP, WAREHOUSE, receive, said
from tests.pipeline import connect
from tests.programs import environment

every_postgresql = pytest.mark.every_postgresql


@pytest.fixture
def house(app: Dsn) -> Dsn:
    """A database with two services that talk without a forwarder."""
    with connect(app) as connection:
        for service in (SHOP, WAREHOUSE):
            create_service(connection, service)
            add_route(connection, "here", service=service, local=True)
    return app


@pytest.fixture
def dialog(house: Dsn) -> saf.Dialog:
    """A dialog of the shop with the warehouse, which has received the question."""
    dialog = dialogs.begin(house, "question")
    receive(house, WAREHOUSE)
    return dialog


def other_end(dsn: Dsn, call: Callable[[saf.Dialog, object], object]) -> None:
    """Let the warehouse do something on its end, in a transaction."""
    with dsn.connect(role="test") as connection:
        find = "SELECT handle FROM saf.conversation WHERE NOT is_initiator"
        ((handle,),) = connection.execute(find).fetchall()
        call(saf.open_dialog(connection, handle), connection)


def answer(dsn: Dsn, body: object = "yes", message_type: str = "delivery") -> None:
    other_end(dsn, lambda end, conn: end.send(conn, body, message_type=message_type))  # type: ignore[arg-type]


@every_postgresql
@pytest.mark.parametrize("notifies", [False, True])
def test_a_wait_returns_the_answer_and_has_received_it(
    house: Dsn, dialog: saf.Dialog, notifies: bool
) -> None:
    with connect(house) as connection:
        switch(connection, notifies)
    timer = threading.Timer(0.5, answer, [house])
    timer.start()
    found = dialog.wait(house, "delivery", timeout=60)
    timer.join()
    assert found is not None
    assert (found.text(), found.dialog) == ("yes", dialog)
    assert receive(house, SHOP) == []
    assert dialog.wait(house, timeout=0.1) is None


def test_a_notification_wakes_a_wait(
    house: Dsn, dialog: saf.Dialog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Turn, "next", lambda *_: 600.0)
    with connect(house) as connection:
        switch(connection, True)
    timer = threading.Timer(1.0, answer, [house])
    timer.start()
    began = monotonic()
    assert dialog.wait(house, timeout=60) is not None
    assert monotonic() - began < 50
    timer.join()


def test_a_connection_is_given_back_without_listening(house: Dsn, dialog: saf.Dialog) -> None:
    with connect(house) as connection:
        switch(connection, True)
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: house.connect(role="test"))
    answer(house)
    assert dialog.wait(engine, timeout=1) is not None
    assert dialog.wait(engine, timeout=0.1) is None
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT pg_listening_channels()")).all() == []
    engine.dispose()


def test_a_task_waits_too(house: Dsn, dialog: saf.Dialog) -> None:
    async def wait() -> saf.Received | None:
        return await dialog.wait_async(house, "delivery", timeout=60)

    timer = threading.Timer(0.5, answer, [house])
    timer.start()
    found = asyncio.run(wait())
    timer.join()
    assert found is not None
    assert found.text() == "yes"


def test_a_large_answer_is_in_memory_when_it_is_received(house: Dsn, dialog: saf.Dialog) -> None:
    body = bytes(range(256)) * 12_000
    answer(house, body)
    found = dialog.wait(house, timeout=5)
    assert found is not None
    assert found.body == body
    with connect(house) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.fragment") == [(0,)]


def test_another_process_waits_by_the_handle(house: Dsn, dialog: saf.Dialog) -> None:
    program = """
import sys, uuid, psycopg, saf
dsn, handle = sys.argv[1:]
with psycopg.connect(dsn) as connection:
    dialog = saf.open_dialog(connection, uuid.UUID(handle))
print(dialog.wait(dsn, "delivery", timeout=60).text())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, house.conninfo, str(dialog.handle)],
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    ) as process:
        answer(house)
        out, _ = process.communicate()
    assert out == "yes\n"


def test_an_error_is_raised_and_again_by_the_next_wait(house: Dsn, dialog: saf.Dialog) -> None:
    other_end(house, lambda end, conn: end.end_with_error(conn, 17, "no"))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(DialogFailed, match="17: no") as failure:
            dialog.wait(house, "delivery", timeout=60)
        assert (failure.value.code, failure.value.text) == (17, "no")
    dialogs.end(house, dialog)
    with pytest.raises(DialogFailed):
        dialog.wait(house, timeout=60)


def test_an_end_is_raised_at_once_and_by_later_waits(house: Dsn, dialog: saf.Dialog) -> None:
    other_end(house, lambda end, conn: end.end(conn))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(DialogEnded, match="the other end has ended it"):
            dialog.wait(house, timeout=20)
    dialogs.end(house, dialog)
    with pytest.raises(DialogEnded, match="closed"):
        dialog.wait(house, timeout=20)


def test_a_message_of_another_type_stays_the_next_one(house: Dsn, dialog: saf.Dialog) -> None:
    answer(house, "first", "note")
    answer(house, "second", "delivery")
    for _ in range(3):
        with pytest.raises(UnexpectedMessage, match="'note', and not 'delivery'"):
            dialog.wait(house, "delivery", timeout=1)
    note, delivery = dialog.wait(house, "note", timeout=1), dialog.wait(house, "delivery")
    assert note is not None
    assert delivery is not None
    assert said([note, delivery]) == ["first", "second"]


def test_a_handle_of_another_database_is_refused(house: Dsn, dialog: saf.Dialog, mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, SHOP)
    with pytest.raises(saf.DialogNotFound):
        dialog.wait(mom, timeout=1)
    with pytest.raises(saf.DialogNotFound), connect(house) as connection:
        saf.open_dialog(connection, uuid4())
