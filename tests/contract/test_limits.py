"""Limits: how much the receivers of a subscription take, counted over all processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psycopg
import pytest

import saf
from saf.broker import services
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, UsageError
from saf.log import rates
from saf.receiving import allotment
from saf.setaside.audit import audited
from tests.pipeline import connect
from tests.processes import start
from tests.receivers import SUBSCRIPTION, by_key, count_up, effect, effects, put, running, store
from tests.waits import until

SECONDS = 4.0
"""For how long a rate is measured here."""


def limit(dsn: Dsn, **limits: Any) -> None:
    with connect(dsn) as connection:
        services.limit(connection, SUBSCRIPTION, **limits)


def worker(inbox: Dsn, **options: Any) -> saf.Worker:
    made = saf.Worker(inbox, SUBSCRIPTION, **options)
    made.handler()(lambda message, connection: effect(connection, message))
    return made


def number(inbox: Dsn) -> int:
    with connect(inbox) as connection:
        ((number,),) = fetch(connection, "SELECT count(*) FROM effect")
    return int(number)


def many(inbox: Dsn, messages: int) -> None:
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) SELECT 'billing', 'k' || n %% 500, "
            "n::text::bytea FROM generate_series(1, %s::int) AS n",
            [messages],
        )


def counting(inbox: Dsn) -> None:
    """A program: a worker with small deliveries, until it is killed."""
    worker(inbox, max_messages=20).run()


def test_six_processes_of_which_two_are_killed_keep_the_rate(inbox: Dsn) -> None:
    limit(inbox, rate="100/s")
    many(inbox, 1000)
    ones = [start(counting, inbox) for _ in range(6)]
    try:
        until(lambda: number(inbox) > 50)
        before, began = number(inbox), time.monotonic()
        for one in ones[:2]:
            assert one.pid is not None
            os.kill(one.pid, signal.SIGKILL)
        threading.Event().wait(SECONDS)
        per_second = (number(inbox) - before) / (time.monotonic() - began)
    finally:
        for one in ones:
            one.kill()
            one.join()
    assert 85 <= per_second <= 115


def test_a_killed_process_takes_no_more_than_a_share_with_it(inbox: Dsn) -> None:
    limit(inbox, rate="2/s")
    with connect(inbox) as connection:
        number = services.subscription(connection, SUBSCRIPTION).subscription_id
        taken = [rates.take(connection, number, 2.0, 100) for _ in range(5)]
    # the first is free at once, two more are reserved, and nobody reserves further ahead
    assert [share.permits for share in taken] == [1, 1, 1, 0, 0]
    assert taken[0].wait_seconds == 0
    assert [round(share.wait_seconds, 1) for share in taken[1:]] == [0.5, 1.0, 0.5, 0.5]


def test_what_is_not_used_is_given_back(inbox: Dsn) -> None:
    limit(inbox, rate="100/s")
    with connect(inbox) as connection:
        number = services.subscription(connection, SUBSCRIPTION).subscription_id
        before = rates.take(connection, number, 100.0, 100)
        rates.give_back(connection, number, 100.0, before.permits)
        assert rates.take(connection, number, 100.0, 100).wait_seconds < 0.02
    put(inbox, "1")
    for _ in range(30):
        with saf.receive(inbox, SUBSCRIPTION):
            pass
    with connect(inbox) as connection:
        ((ahead,),) = fetch(
            connection,
            "SELECT next_free_at > clock_timestamp() + interval '0.2 s' FROM saf.allotment",
        )
    assert not ahead


def test_a_receiver_that_finds_nothing_gives_all_its_permits_back(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(inbox, rate="100/s")
    taken, back = [], []
    take, give_back = rates.take, rates.give_back

    def taking(*arguments: Any) -> rates.Share:
        share = take(*arguments)
        taken.append(share.permits)
        return share

    def giving(connection: Any, number: int, rate: float, permits: int) -> None:
        back.append(permits)
        give_back(connection, number, rate, permits)

    monkeypatch.setattr(rates, "take", taking)
    monkeypatch.setattr(rates, "give_back", giving)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert not delivery
    assert sum(taken) == sum(back) > 0


def test_each_attempt_at_a_message_that_fails_needs_a_permit(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(inbox, "1", key="k")
    limit(inbox, rate="100/s")
    shares = [rates.Share(permits=3, wait_seconds=0.0)]
    nothing = rates.Share(permits=0, wait_seconds=0.01)
    monkeypatch.setattr(rates, "take", lambda *_: shares.pop() if shares else nothing)
    made = saf.Worker(
        inbox, SUBSCRIPTION, policy=saf.Policy(max_attempts=9, first_wait_seconds=0.0)
    )
    attempts = []

    @made.handler()
    def handle(message: saf.Received, connection: Any) -> None:  # noqa: ARG001 - fails first
        attempts.append(message.attempt)
        raise ValueError("no")

    made.run(drain=True)
    assert attempts == [1, 2, 3]


def test_a_clock_that_was_set_back_stops_nobody(inbox: Dsn) -> None:
    limit(inbox, rate="100/s")
    put(inbox, *map(str, range(20)))
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.allotment SELECT subscription_id, '', now() + interval '1 h' "
            "FROM saf.subscription WHERE name = 'billing'"
        )
    began = time.monotonic()
    assert worker(inbox).drain() == 20
    assert time.monotonic() - began < 5


def test_a_quiet_time_saves_little(inbox: Dsn) -> None:
    limit(inbox, rate="50/s")
    put(inbox, *map(str, range(40)))
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.allotment SELECT subscription_id, '', now() - interval '1 h' "
            "FROM saf.subscription WHERE name = 'billing'"
        )
    began = time.monotonic()
    assert worker(inbox).drain() == 40
    assert time.monotonic() - began > (40 - 50 * rates.SAVED_SECONDS - 3) / 50


def test_a_delivery_has_no_more_messages_than_permits(inbox: Dsn) -> None:
    limit(inbox, rate="100/s")
    store(inbox, keys=3, each=10)
    sizes = [len(delivery) for delivery in worker(inbox).deliveries()]
    assert (sum(sizes), max(sizes)) == (30, rates.share(100.0))
    assert number(inbox) == 30


def test_order_stays_and_nothing_is_lost_at_a_limit(inbox: Dsn) -> None:
    limit(inbox, rate="500/s", concurrency=2)
    store(inbox, keys=10, each=20)
    made = saf.Worker(inbox, SUBSCRIPTION, max_messages=7, threads=4)
    made.handler()(lambda message, connection: count_up(connection, message))
    with running(made):
        until(lambda: made.summary.handled == 200)
    assert by_key(inbox) == {f"k{key}": list(range(1, 21)) for key in range(1, 11)}


class Crowd:
    """Handles messages, and notes how many are in hand at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = 0
        self.goes_on = threading.Event()

    def handle(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        effect(connection, message)
        self.goes_on.wait(0.05)
        with self._lock:
            self.now -= 1


def test_no_more_deliveries_are_handled_at_a_time_than_the_limit(inbox: Dsn) -> None:
    limit(inbox, concurrency=2)
    many(inbox, 60)
    crowd = Crowd()
    made = saf.Worker(inbox, SUBSCRIPTION, max_messages=3, threads=6)
    made.handler()(crowd.handle)
    with running(made):
        until(lambda: made.summary.handled == 60)
    assert crowd.most == 2


def test_a_concurrency_that_is_lowered_holds(inbox: Dsn) -> None:
    limit(inbox, concurrency=5)
    limit(inbox, concurrency=1)
    many(inbox, 10)
    crowd = Crowd()
    made = saf.Worker(inbox, SUBSCRIPTION, max_messages=1, threads=3)
    made.handler()(crowd.handle)
    with running(made):
        until(lambda: made.summary.handled == 10)
    assert crowd.most == 1


def test_a_killed_process_frees_its_seat(inbox: Dsn) -> None:
    limit(inbox, concurrency=1)
    put(inbox, "hang", "1", "2")
    one = start(hanging, inbox)
    try:
        with connect(inbox) as connection:
            until(lambda: fetch(connection, "SELECT count(*) FROM begun") == [(1,)])
        with saf.receive(inbox, SUBSCRIPTION) as delivery:
            assert not delivery
    finally:
        one.kill()
        one.join()
    until(lambda: worker(inbox).drain() > 0)
    assert {*effects(inbox)} == {"hang", "1", "2"}


def hanging(inbox: Dsn) -> None:
    """A program: it has a delivery in hand until it is killed."""
    with saf.receive(inbox, SUBSCRIPTION, max_messages=1) as delivery:
        assert delivery
        with connect(inbox) as other:
            other.execute("INSERT INTO begun VALUES (1)")
        threading.Event().wait()


@pytest.fixture
def inbox(inbox: Dsn) -> Dsn:
    with connect(inbox) as connection:
        connection.execute("CREATE TABLE begun (number int)")
    return inbox


def test_a_limit_that_changes_is_obeyed_at_once(inbox: Dsn) -> None:
    limit(inbox, rate="1/h")
    put(inbox, "1", "2", "3")
    made = worker(inbox, max_messages=1)
    with running(made):
        until(lambda: len(effects(inbox)) == 1)
        limit(inbox, rate=None)
        until(lambda: len(effects(inbox)) == 3, 10)


def test_a_drain_at_its_limit_says_so(inbox: Dsn) -> None:
    limit(inbox, rate="1/h")
    put(inbox, "1", "2")
    made = worker(inbox)
    made.run(drain=True)
    assert (made.summary.handled, made.summary.exit_code) == (1, 75)
    limit(inbox, rate="100/s")
    again = worker(inbox)
    again.run(drain=True)
    assert (again.summary.handled, again.summary.exit_code) == (1, 0)


def test_who_is_not_limited_runs_no_statement_for_it(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a statement of limits")

    monkeypatch.setattr(rates, "fetch", refuse)
    monkeypatch.setattr(allotment, "fetch", refuse)
    store(inbox, keys=3, each=10)
    assert worker(inbox, max_messages=3).drain() == 30


def test_limits_are_set_recorded_and_refused(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        after = services.limit(
            connection, SUBSCRIPTION, rate="30/min", concurrency=4, why="the ledger is slow"
        )
        assert after.limits == "30/min, 4 at a time"
        services.limit(connection, SUBSCRIPTION, rate=None)
        (service,) = services.services(connection)
        assert (service.rate, service.concurrency) == (None, 4)
        for wrong, said in (
            ({"rate": "100"}, "rate: '100' is not a rate"),
            ({"rate": "0/s"}, "is not a rate"),
            ({"concurrency": 0}, "between 1 and 1000"),
        ):
            with pytest.raises(UsageError, match=said):
                services.limit(connection, SUBSCRIPTION, **wrong)
        with pytest.raises(ConfigurationError, match="has no subscription"):
            services.limit(connection, "biling", rate="1/s")
        assert [(entry.action, entry.why) for entry in audited(connection)] == [
            ("limit subscription billing to 4 at a time", ""),
            ("limit subscription billing to 30/min, 4 at a time", "the ledger is slow"),
        ]


def test_a_lane_that_is_tried_obeys_the_rate(inbox: Dsn) -> None:
    put(inbox, "1", "2", "3", key="k")
    made = saf.Worker(inbox, SUBSCRIPTION, policy=saf.Policy(first_wait_seconds=0.0))
    fails = [True]

    @made.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        if fails.pop() if fails else False:
            raise ValueError("no")
        effect(connection, message)

    limit(inbox, rate="1/h")
    made.run(drain=True)
    assert effects(inbox) == [], "the only permit was used for the attempt that failed"
    limit(inbox, rate="10/s")
    made.run(drain=True)
    assert effects(inbox) == ["1", "2", "3"]
