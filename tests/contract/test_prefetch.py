"""Prefetching: what was read ahead is delivered only if it is still what comes next."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

import saf
from saf.broker.services import create_subscription
from saf.database import Dsn, fetch
from saf.errors import Unavailable, UsageError
from saf.operating import decide
from saf.operating.maintenance import purge_broker
from saf.receiving import claim, prefetch
from saf.receiving.link import connected
from saf.receiving.receive import Receiver
from saf.setaside.selection import DeadLetters
from tests.pipeline import connect
from tests.processes import run, start, wait
from tests.receivers import (
    SUBSCRIPTION,
    by_key,
    count_up,
    dead,
    effect,
    effects,
    let_keys_be_due,
    let_the_server_notice,
    put,
    store,
    waiting,
)
from tests.waits import until


@contextmanager
def receiving(inbox: Any, max_messages: int = 1, **policy: Any) -> Iterator[Receiver]:
    """A receiver that stays, as a worker's does."""
    with connected(inbox) as link:
        yield Receiver(link, SUBSCRIPTION, saf.Policy(**policy), max_messages)


def take(receiver: Receiver, count: int) -> list[str]:
    """So many deliveries, with an effect of each message; the bodies in order."""
    bodies: list[str] = []
    for _ in range(count):
        with receiver.delivery() as delivery:
            for message in delivery:
                effect(delivery.connection, message)
                bodies.append(message.text())
    return bodies


def prefetched(receiver: Receiver) -> int:
    """How many messages it holds."""
    return sum(len(one.rows) for one in receiver._prefetch._shards)


def rest(receiver: Receiver) -> list[str]:
    """Everything that is left."""
    bodies: list[str] = []
    while some := take(receiver, 1):
        bodies += some
    return bodies


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(1, count + 1)]


@pytest.fixture
def filled(inbox: Dsn) -> Dsn:
    """Messages 1 … 60 of one key."""
    store(inbox, 1, 60)
    return inbox


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, what was prefetched is not given up for its age."""
    monkeypatch.setattr(prefetch, "STAY_SECONDS", 60.0)


@pytest.mark.every_postgresql
def test_a_backlog_is_read_ahead_and_delivered_in_order_and_once(filled: Dsn) -> None:
    with receiving(filled) as receiver:
        first = take(receiver, 10)
        assert prefetched(receiver) > 0
        assert first + rest(receiver) == numbers(60)
    assert effects(filled) == numbers(60)


def test_deliveries_of_what_was_read_ahead_read_no_message(filled: Dsn) -> None:
    with receiving(filled) as receiver, connect(filled) as other:
        take(receiver, 10)
        held = prefetched(receiver)
        with other.transaction():
            # whoever reads the inbox would wait for this lock
            other.execute("LOCK TABLE saf.inbox IN ACCESS EXCLUSIVE MODE")
            receiver._look_at = time.monotonic() + 60
            assert take(receiver, held) == numbers(10 + held)[10:]


@pytest.mark.every_postgresql
def test_what_another_receiver_has_delivered_meanwhile_is_not_delivered_again(filled: Dsn) -> None:
    """As if the first had been frozen, and thawed after the other went on."""
    with receiving(filled) as frozen, receiving(filled, 3) as other:
        before = take(frozen, 10)
        assert prefetched(frozen) > 3
        between = take(other, 2)
        after = rest(frozen) + rest(other)
    assert before + between + after == numbers(60)
    assert effects(filled) == numbers(60)


def test_of_two_who_have_read_the_same_ahead_one_delivers_each_message(inbox: Dsn) -> None:
    store(inbox, 1, 200)
    with receiving(inbox) as one, receiving(inbox) as two:
        got = take(one, 10)
        got += take(two, 10)
        assert prefetched(one) > 0
        assert prefetched(two) > 0
        for _ in range(100):
            got += take(one, 1)
            got += take(two, 1)
        got += rest(one) + rest(two)
    assert got == numbers(200)


def test_what_another_receiver_has_in_hand_is_passed_by(filled: Dsn) -> None:
    with receiving(filled) as one, receiving(filled) as two:
        take(one, 10)
        with two.delivery() as in_hand:
            assert [message.text() for message in in_hand] == ["11"]
            assert take(one, 1) == []
        assert rest(one) == numbers(60)[11:]


def test_a_message_that_came_late_with_a_lower_id_is_not_lost(inbox: Dsn) -> None:
    with inbox.connect(role="test") as slow:
        slow.execute(
            "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'k1', 'late')"
        )
        store(inbox, 1, 30)
        with receiving(inbox) as receiver:
            got = take(receiver, 10)
            assert prefetched(receiver) > 0
            slow.commit()
            got += rest(receiver)
    assert sorted(got) == sorted([*numbers(30), "late"])


def test_a_block_that_raises_rolls_its_delivery_back_and_it_comes_again_with_care(
    filled: Dsn,
) -> None:
    with receiving(filled, first_wait_seconds=0.0) as receiver:
        got = take(receiver, 10)
        with suppress(ZeroDivisionError), receiver.delivery() as delivery:
            (message,) = delivery
            effect(delivery.connection, message)
            raise ZeroDivisionError
        assert effects(filled) == got == numbers(10)
        attempts: list[int] = []
        while not attempts:
            with receiver.delivery() as delivery:
                attempts = [one.attempt for one in delivery]
                got += [one.text() for one in delivery]
                for one in delivery:
                    effect(delivery.connection, one)
        assert attempts == [2]
        got += rest(receiver)
    assert got == numbers(60)
    assert effects(filled) == numbers(60)


def killed_with_prefetched_in_hand(inbox: Dsn) -> None:
    with receiving(inbox) as receiver:
        take(receiver, 10)
        assert prefetched(receiver) > 0
        with receiver.delivery() as delivery:
            for message in delivery:
                effect(delivery.connection, message)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.every_postgresql
def test_who_is_killed_between_taking_and_committing_is_noticed_and_counted(filled: Dsn) -> None:
    assert run(killed_with_prefetched_in_hand, filled) == -signal.SIGKILL
    let_the_server_notice(filled)
    assert effects(filled) == numbers(10)
    with receiving(filled, first_wait_seconds=0.0) as receiver:
        with receiver.delivery(wait_seconds=5) as delivery:
            (message,) = delivery
            assert (message.text(), message.attempt) == ("11", 2)
            effect(delivery.connection, message)
        rest(receiver)
    assert effects(filled) == numbers(60)


def killed_at_once(inbox: Dsn) -> None:
    with receiving(inbox) as receiver, receiver.delivery() as delivery:
        assert [message.text() for message in delivery] == ["11"]
        os.kill(os.getpid(), signal.SIGKILL)


def test_who_died_with_what_another_has_read_ahead_is_noticed_and_counted(filled: Dsn) -> None:
    with receiving(filled, first_wait_seconds=0.0) as receiver:
        take(receiver, 10)
        assert prefetched(receiver) > 0
        assert run(killed_at_once, filled) == -signal.SIGKILL
        receiver._look_at = time.monotonic() + 60
        with receiver.delivery(wait_seconds=5) as delivery:
            assert [(message.text(), message.attempt) for message in delivery] == [("11", 2)]


def test_who_died_is_noticed_and_counted_though_another_has_noticed_it_before(filled: Dsn) -> None:
    def notices() -> bool:
        """Claim the shard, with care from now on, and hand nothing out."""
        with receiving(filled) as other, other._transaction():
            hand = other._claim()
            if hand is not None:
                claim.move(other.link.raw, hand)
            return hand is not None and bool(hand.failed)

    with receiving(filled, first_wait_seconds=0.0) as receiver:
        take(receiver, 10)
        assert prefetched(receiver) > 0
        assert run(killed_at_once, filled) == -signal.SIGKILL
        until(notices)
        receiver._look_at = time.monotonic() + 60
        with receiver.delivery(wait_seconds=5) as delivery:
            assert [(message.text(), message.attempt) for message in delivery] == [("11", 2)]


@pytest.mark.parametrize("point", ["receive_read", "receive_handled", "receive_settled"])
def test_a_worker_that_is_killed_at_a_point_loses_nothing_and_repeats_nothing(
    inbox: Dsn, point: str
) -> None:
    store(inbox, 3, 40)
    assert run(one_by_one, inbox, failpoint=f"{point}:37") == -signal.SIGKILL
    let_the_server_notice(inbox)
    let_keys_be_due(inbox)
    one_by_one(inbox)
    assert by_key(inbox) == {f"k{key}": list(range(1, 41)) for key in (1, 2, 3)}


def one_by_one(inbox: Dsn) -> None:
    with receiving(inbox, first_wait_seconds=0.01, longest_wait_seconds=0.05) as receiver:
        while True:
            with receiver.delivery(wait_seconds=0.5) as delivery:
                if not delivery:
                    return
                for message in delivery:
                    count_up(delivery.connection, message)


@pytest.mark.slow
def test_several_workers_one_by_one_keep_each_key_in_order(inbox: Dsn) -> None:
    store(inbox, 7, 60, transactions=3)
    processes = [start(one_by_one, inbox) for _ in range(3)]
    for process in processes:
        assert wait(process) == 0
    assert by_key(inbox) == {f"k{key}": list(range(1, 61)) for key in range(1, 8)}


# What may have changed since it was read


def test_a_key_that_waits_by_now_is_not_overtaken_by_what_was_read_ahead(filled: Dsn) -> None:
    with receiving(filled) as receiver:
        got = take(receiver, 10)
        with receiver.delivery() as delivery:
            (message,) = delivery
            delivery.park(message, "not now")
        assert message.text() == "11"
        assert rest(receiver) == []
        let_keys_be_due(filled)
        got += rest(receiver)
    assert got == numbers(60)


def test_a_dead_letter_that_is_retried_goes_before_what_was_read_ahead(filled: Dsn) -> None:
    with receiving(filled) as receiver:
        take(receiver, 10)
        with receiver.delivery() as delivery:
            (message,) = delivery
            delivery.reject(message, "never")
        assert take(receiver, 5) == numbers(16)[11:]
        assert prefetched(receiver) > 0
        with connect(filled) as connection:
            decide.retry(connection, DeadLetters(), "the test says so")
        assert rest(receiver) == ["11", *numbers(60)[16:]]


def test_what_has_expired_since_it_was_read_is_a_dead_letter(inbox: Dsn) -> None:
    store(inbox, 1, 12)
    soon = datetime.now(UTC) + timedelta(seconds=3)
    put(inbox, "13", key="k1", expires_at=soon)
    put(inbox, "14", key="k1")
    with receiving(inbox) as receiver:
        got = take(receiver, 8)
        assert prefetched(receiver) > 4
        time.sleep(max(0.0, (soon - datetime.now(UTC)).total_seconds()) + 0.1)
        got += rest(receiver)
    assert got == [*numbers(12), "14"]
    assert dead(inbox) == [("13", "expired")]


def test_what_is_delayed_among_what_is_read_ahead_comes_in_its_time(inbox: Dsn) -> None:
    store(inbox, 1, 15)
    put(inbox, "16", key="k1", deliver_at=datetime.now(UTC) + timedelta(hours=1))
    put(inbox, *numbers(30)[16:], key="k1")
    with receiving(inbox) as receiver:
        assert rest(receiver) == [*numbers(15), *numbers(30)[16:]]
        with connect(inbox) as connection:
            connection.execute("UPDATE saf.parked SET deliver_at = now()")
            connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
        assert rest(receiver) == ["16"]


def test_a_shard_that_a_member_has_taken_over_is_not_delivered_from(filled: Dsn) -> None:
    from saf.log.shards import Member

    with receiving(filled) as receiver, filled.connect(role="test", autocommit=True) as other:
        take(receiver, 10)
        member = Member(subscription_id=receiver.reader.subscription_id, lease_seconds=60)
        member.join(other)
        member.balance(other)
        assert rest(receiver) == []
        member.leave(other)
        assert rest(receiver) == numbers(60)[10:]


def test_a_cursor_that_was_set_back_is_read_anew(filled: Dsn) -> None:
    with receiving(filled) as receiver:
        take(receiver, 10)
        with connect(filled) as connection:
            connection.execute(
                "UPDATE saf.cursor SET batch = batch + 1, open = NULL, position = 0, done = '1:1:'"
                " WHERE open IS NOT NULL"
            )
        assert rest(receiver) == numbers(60)


def test_the_purge_keeps_what_was_read_ahead_and_is_not_delivered(filled: Dsn) -> None:
    with receiving(filled) as receiver, connect(filled) as connection:
        take(receiver, 10)
        connection.execute("SELECT max(nextval('saf.inbox_id_seq')) FROM generate_series(1, 1<<20)")
        outcome = purge_broker(connection, retention_seconds=0, rotate_after_seconds=1e9)
        needed = [slot for slot in outcome.slots if slot.log == "inbox" and slot.number == 0]
        assert [slot.subscription for slot in needed] == [SUBSCRIPTION]
        assert rest(receiver) == numbers(60)[10:]


# What it costs the others


def test_a_stop_among_several_moves_the_cursor_back_to_what_was_handled(filled: Dsn) -> None:
    stopping = threading.Event()
    with receiving(filled, 10) as receiver:
        take(receiver, 2)
        assert prefetched(receiver) >= 10
        with receiver.delivery() as delivery:
            delivery.until(stopping)
            for message in delivery:
                effect(delivery.connection, message)
                if message.text() == "23":
                    stopping.set()
        assert effects(filled) == numbers(23)
        rest(receiver)
    assert effects(filled) == numbers(60)
    assert waiting(filled) == []


def test_a_newcomer_gets_shards_although_somebody_has_read_ahead_of_all(inbox: Dsn) -> None:
    store(inbox, 40, 10)
    with receiving(inbox) as first, receiving(inbox) as newcomer:
        for _ in range(100):
            take(first, 1)
            if prefetched(first) > 10:
                break
        assert prefetched(first) > 10
        with first.delivery() as in_hand:
            assert in_hand
            assert len(take(newcomer, 20)) == 20


def test_a_receiver_gives_a_shard_up_after_a_while(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(prefetch, "time", SimpleNamespace(monotonic=lambda: now))
    store(inbox, 2, 600)
    seen: list[str | None] = []
    with receiving(inbox) as receiver:

        def deliver() -> None:
            with receiver.delivery() as delivery:
                seen.extend(message.key for message in delivery)

        while prefetched(receiver) < 200:
            deliver()
        assert len({*seen}) == 1
        for _ in range(25):  # it may take up the same shard again, by chance
            now += prefetch.STAY_SECONDS + 1.0
            for _ in range(4):
                deliver()
    assert len({*seen}) == 2


def test_large_bodies_are_read_ahead_by_their_size(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body)"
            " SELECT 'billing', 'k', convert_to(repeat('x', 3 << 20), 'UTF8')"
            " FROM generate_series(1, 12)"
        )
    with receiving(inbox) as receiver:
        sizes = []
        for _ in range(12):
            with receiver.delivery() as delivery:
                sizes += [message.size for message in delivery]
            assert prefetched(receiver) <= prefetch.MOST_BYTES // (3 << 20) + 1
    assert sizes == [3 << 20] * 12


def test_a_shard_is_read_on_where_the_bodies_read_have_exactly_the_size_to_be_read(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MOST_BYTES", 30)
    bodies = [f"{number:010}" for number in range(12)]
    put(inbox, *bodies, key="k")
    with receiving(inbox) as receiver:
        assert rest(receiver) == bodies


def test_no_more_messages_are_read_ahead_than_may_be(
    filled: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "FEWEST", 8)
    monkeypatch.setattr(prefetch, "MOST", 16)
    held = []
    with receiving(filled) as receiver:
        while take(receiver, 1):
            held.append(prefetched(receiver))
    assert 8 < max(held) <= 16


def test_a_key_that_waits_elsewhere_keeps_no_shard_from_being_read_ahead(inbox: Dsn) -> None:
    """Elsewhere: in another shard, or in the same shard of another subscription."""
    policy = saf.Policy(first_wait_seconds=600.0)
    with connect(inbox) as connection:
        create_subscription(connection, "another", service=SUBSCRIPTION)
    put(inbox, "waits", key="another shard's")
    with saf.receive(inbox, SUBSCRIPTION, policy=policy) as delivery:
        delivery.park(delivery[0], "not yet")
    store(inbox, 1, 60)
    with saf.receive(inbox, "another", policy=policy) as delivery:
        delivery.park(next(message for message in delivery if message.key == "k1"), "not yet")
    with receiving(inbox) as receiver:
        assert take(receiver, 10) == numbers(10)
        assert prefetched(receiver) > 0


def test_a_delivery_of_many_keys_that_were_read_ahead_is_in_the_order_of_their_ids(
    inbox: Dsn,
) -> None:
    store(inbox, 30, 3)
    of_several = 0
    with receiving(inbox, 10) as receiver:
        while True:
            ahead = prefetched(receiver)
            with receiver.delivery() as delivery:
                ids = [message.id for message in delivery]
                shards = {message.shard for message in delivery}
            if not ids:
                break
            assert ids == sorted(ids)
            of_several += ahead > 0 and len(shards) > 1
    assert of_several


# On what the application has


def test_a_block_that_commits_what_was_read_ahead_by_itself_is_refused(filled: Dsn) -> None:
    with receiving(filled) as receiver:
        take(receiver, 10)
        for statements in ("COMMIT", "COMMIT; BEGIN", "COMMIT AND CHAIN", "ROLLBACK; BEGIN"):
            take(receiver, 1)
            with (
                pytest.raises(UsageError, match="inside of its block"),
                receiver.delivery() as delivery,
            ):
                delivery.connection.execute(statements)
        with (
            pytest.raises(psycopg.ProgrammingError, match="Explicit commit"),
            receiver.delivery() as delivery,
        ):
            delivery.connection.commit()


def test_what_another_default_of_isolation_reads_is_read_committed_all_the_same(
    filled: Dsn,
) -> None:
    engine = filled.engine(isolation_level="REPEATABLE READ")
    with ExitStack() as stack:
        stack.callback(engine.dispose)
        receiver = stack.enter_context(receiving(engine))
        for number in numbers(60):
            with receiver.delivery() as delivery:
                assert [message.text() for message in delivery] == [number]
                level = delivery.connection.exec_driver_sql("SHOW transaction_isolation").scalar()
                assert level == "read committed"
        assert prefetched(receiver) == 0


def test_it_reads_ahead_on_an_engine_of_sqlalchemy_too(filled: Dsn) -> None:
    engine = filled.engine()
    with ExitStack() as stack:
        stack.callback(engine.dispose)
        receiver = stack.enter_context(receiving(engine))
        got = []
        for _ in range(60):
            with receiver.delivery() as delivery:
                got += [message.text() for message in delivery]
        assert got == numbers(60)


def test_a_table_that_is_locked_while_messages_are_read_ahead_is_waited_for_within_the_bound(
    filled: Dsn,
) -> None:
    with ExitStack() as stack:
        link = stack.enter_context(connected(filled))
        object.__setattr__(link, "lock_seconds", 0.5)
        receiver = Receiver(link, SUBSCRIPTION, saf.Policy(), 1)
        take(receiver, 10)
        assert prefetched(receiver) > 0
        with connect(filled) as other, other.transaction():
            other.execute("LOCK TABLE saf.cursor IN ACCESS EXCLUSIVE MODE")
            receiver._look_at = time.monotonic() + 60
            with pytest.raises(Unavailable, match="lock timeout"):
                take(receiver, 1)
        assert rest(receiver) == numbers(60)[10:]


def test_a_shard_with_nothing_for_this_service_is_left_without_a_batch_in_hand(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) VALUES ('another', 'k', '1')"
        )
    with receiving(inbox) as receiver:
        receiver._prefetch.committed(receiver.max_messages)
        assert receiver._prefetch.is_used_up
        with receiver.link.transaction():
            receiver._prefetch.read(receiver.link.raw, receiver.reader)
    with connect(inbox) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.cursor WHERE open IS NOT NULL") == [(0,)]
        moved = "SELECT count(*) FROM saf.cursor WHERE batch > 0"
        assert fetch(connection, moved) == [(1,)]


def test_a_table_that_is_locked_when_more_is_to_be_read_ahead_is_waited_for_within_the_bound(
    filled: Dsn,
) -> None:
    with connected(filled) as link:
        object.__setattr__(link, "lock_seconds", 0.5)
        link.raw.execute("SET statement_timeout = '20s'")
        receiver = Receiver(link, SUBSCRIPTION, saf.Policy(), 1)
        got = take(receiver, 2)
        while not receiver._prefetch.is_used_up:
            got += take(receiver, 1)
        with connect(filled) as other, other.transaction():
            other.execute("LOCK TABLE saf.cursor IN ACCESS EXCLUSIVE MODE")
            receiver._look_at = time.monotonic() + 60
            with pytest.raises(Unavailable, match="lock timeout"):
                take(receiver, 1)
        assert got + rest(receiver) == numbers(60)
