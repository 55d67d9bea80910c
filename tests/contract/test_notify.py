"""Notifications: who listens learns of a message at once, however seldom it polls."""

from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

import saf
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from saf.receiving import link as notify
from saf.receiving.link import connected
from saf.receiving.receive import Receiver
from saf.testing.databases import Database
from tests.pipeline import connect, forward, send
from tests.programs import configuration
from tests.programs import saf as command
from tests.receivers import SUBSCRIPTION, effect, effects, prepare, put, running

SELDOM = 60.0
POLLING = importlib.import_module("saf.receiving.receive")
PAUSES = importlib.import_module("saf.log.pauses")


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare(mom)
    with connect(mom) as connection:
        notify.switch(connection, True)
    return mom


def listening(inbox: Dsn) -> saf.Worker:
    worker = saf.Worker(inbox, SUBSCRIPTION, listen=True)
    worker.handler()(lambda message, connection: effect(connection, message))
    return worker


def handled(inbox: Dsn, count: int, within: float) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if len(effects(inbox)) == count:
            return True
        time.sleep(0.02)
    return False


def test_a_listening_worker_handles_what_is_stored_by_any_means_without_polling(
    app: Dsn, inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PAUSES, "SHORTEST_SECONDS", SELDOM)
    monkeypatch.setattr(POLLING, "LISTENING_PAUSE_SECONDS", SELDOM)
    with running(listening(inbox)):
        time.sleep(1)
        put(inbox, "a row")
        assert handled(inbox, 1, within=SELDOM / 4)
        with connect(app) as connection:
            send(connection, "a chunk of a forwarder")
        forward(app, mom=inbox)
        assert handled(inbox, 2, within=SELDOM / 4)


def test_a_listening_worker_stops_as_soon_as_it_is_told_to(inbox: Dsn) -> None:
    with running(listening(inbox)):
        time.sleep(1)
        started = time.monotonic()
    assert time.monotonic() - started < 4


def test_to_listen_where_nobody_notifies_is_refused_with_the_command_that_lets_it(
    inbox: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": inbox}, {"mom": inbox})
    assert command("inbox", "notify", "off", "--config", config).returncode == 0
    worker = saf.Worker(inbox, SUBSCRIPTION, listen=True)
    worker.handler()(lambda *_: None)
    with pytest.raises(ConfigurationError, match="`saf inbox notify on`"):
        worker.run()
    assert command("inbox", "notify", "on", "--config", config).returncode == 0
    put(inbox, "1")
    assert worker.drain() == 1


def test_a_connection_goes_back_to_its_pool_without_listening(inbox: Dsn) -> None:
    engine = Database(dsn=inbox).engine
    worker = saf.Worker(engine, SUBSCRIPTION, listen=True)
    worker.handler()(lambda *_: None)
    put(inbox, "1")
    assert worker.drain() == 1
    with engine.connect() as connection:
        assert connection.scalars(sa.text("SELECT pg_listening_channels()")).all() == []
    engine.dispose()


def test_a_connection_goes_back_without_listening_though_its_worker_has_failed(inbox: Dsn) -> None:
    engine = Database(dsn=inbox).engine
    worker = saf.Worker(engine, SUBSCRIPTION, listen=True)

    @worker.handler()
    def handle(_: object, __: object) -> None:
        raise SystemExit

    put(inbox, "1")
    with pytest.raises(SystemExit):
        worker.drain()
    with engine.connect() as connection:
        assert connection.scalars(sa.text("SELECT pg_listening_channels()")).all() == []
    engine.dispose()


def test_a_receiver_that_is_never_idle_keeps_no_notifications(inbox: Dsn) -> None:
    with connected(inbox) as link:
        receiver = Receiver(link, SUBSCRIPTION, saf.Policy(), 1, listen=True)
        for number in range(20):
            put(inbox, str(number))
            with receiver.delivery() as delivery:
                assert len(delivery) == 1
        assert len(link.raw._notifies_backlog or ()) < 3


def test_of_several_threads_that_fail_alike_the_next_run_hears_nothing(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        notify.switch(connection, False)
    worker = saf.Worker(inbox, SUBSCRIPTION, listen=True, threads=3)
    worker.handler()(lambda *_: None)
    with pytest.raises(ConfigurationError, match="sends no notifications"):
        worker.run()
    with connect(inbox) as connection:
        notify.switch(connection, True)
    put(inbox, "1")
    assert worker.run(drain=True) == 1


def test_an_inbox_notifies_nobody_unless_it_is_told_to(mom: Dsn) -> None:
    with connect(mom) as connection:
        assert fetch(connection, notify.IS_ON) == [(False,)]


def test_a_trigger_of_the_application_is_not_taken_for_the_one_that_notifies(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        connection.execute(
            "CREATE TRIGGER own BEFORE UPDATE ON saf.inbox FOR EACH ROW "
            "EXECUTE FUNCTION suppress_redundant_updates_trigger()"
        )
        assert notify.listen_if_it_notifies(connection)
        assert fetch(connection, "SELECT pg_listening_channels()") == [("saf_inbox",)]


def test_who_is_not_notified_waits_for_as_long_as_it_was_told(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        connection.execute(notify.LISTEN)
        began = time.monotonic()
        notify.await_notification(connection, 3 * notify.TICK_SECONDS, threading.Event())
        assert time.monotonic() - began >= 3 * notify.TICK_SECONDS
