"""Receiving: in order, exactly once, whatever rolls back, dies, waits or hangs."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import saf
from saf.broker import services
from saf.broker.services import create_subscription
from saf.database import Dsn, fetch
from saf.errors import Unavailable, UnreadableBody, UsageError
from saf.failpoints import arm
from saf.log.shards import Member
from saf.operating.maintenance import purge_broker
from saf.receiving import claim, hand, reading, retries
from saf.receiving.inbox import inbox_status, peek
from saf.receiving.link import connected
from saf.receiving.receive import Receiver
from saf.testing.clock import let_time_pass
from tests.pipeline import connect
from tests.processes import run, start, wait
from tests.receivers import (
    SUBSCRIPTION,
    by_key,
    consumer,
    count_up,
    dead,
    doomed,
    effect,
    effects,
    keys_of_one_shard,
    let_keys_be_due,
    let_the_server_notice,
    put,
    store,
    waiting,
    worker,
)
from tests.tiers import sized
from tests.waits import blocked, until

POINTS = ("receive_read", "receive_handled", "receive_settled", "receive_committed")
every_postgresql = pytest.mark.every_postgresql


def receive_all(inbox: Dsn, max_messages: int = 100, **options: object) -> list[str]:
    """Receive until nothing is due, with an effect of each; return the bodies in order."""
    bodies: list[str] = []
    while True:
        with saf.receive(inbox, SUBSCRIPTION, max_messages=max_messages, **options) as delivery:  # type: ignore[arg-type]
            if not delivery:
                return bodies
            for message in delivery:
                effect(delivery.connection, message)
                bodies.append(message.text())


def roll_back(inbox: Dsn, poison: str = "", max_messages: int = 200) -> int:
    """A delivery whose block has effects, and raises if there is a message that says so."""
    messages: list[saf.Received] = []
    with (
        suppress(ZeroDivisionError),
        saf.receive(inbox, SUBSCRIPTION, max_messages=max_messages) as delivery,
    ):
        messages += delivery
        for message in delivery:
            effect(delivery.connection, message)
            if message.text().startswith(poison):
                raise ZeroDivisionError
    return len(messages)


# Exactly once


@every_postgresql
def test_the_settings_of_the_applications_transaction_are_its_own(inbox: Dsn) -> None:
    names = ("plan_cache_mode", "enable_seqscan", "enable_bitmapscan")
    shown = ", ".join(f"current_setting('{name}')" for name in names)
    settings = {"plan_cache_mode": "force_custom_plan", "enable_bitmapscan": "off"}
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    mine = Dsn(make_conninfo(inbox.conninfo, options=options))
    store(inbox, 1, 1)
    for expected in (1, 0):
        with saf.receive(mine, SUBSCRIPTION) as delivery:
            assert len(delivery) == expected
            found = fetch(delivery.connection, f"SELECT {shown}".encode())
        assert found == [("force_custom_plan", "on", "off")]


def test_what_the_block_writes_and_the_position_commit_together(inbox: Dsn) -> None:
    put(inbox, "1", "2", "3", key="k")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert [message.text() for message in delivery] == ["1", "2", "3"]
        for message in delivery:
            effect(delivery.connection, message)
        assert effects(inbox) == []
    assert effects(inbox) == ["1", "2", "3"]
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert not delivery
        assert list(delivery) == []


@every_postgresql
def test_what_the_block_sends_to_the_inbox_it_reads_is_received_next(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot counts the transaction that takes it as complete, if a later one is."""

    def later_first(connection: psycopg.Connection[Any], query: str, params: Any) -> Any:
        if query == claim.LOCKED:
            put(inbox, "3", key="k")
        return fetch(connection, query, params)

    put(inbox, "1", key="k")
    with monkeypatch.context() as patch:
        patch.setattr(claim, "fetch", later_first)
        with saf.receive(inbox, SUBSCRIPTION) as delivery:
            assert [message.text() for message in delivery] == ["1", "3"]
            delivery.connection.execute(
                "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'k', '2')"
            )
    assert receive_all(inbox) == ["2"]


@every_postgresql
def test_an_exception_rolls_everything_back_and_the_messages_come_again(inbox: Dsn) -> None:
    put(inbox, "1", "2", key="k")
    assert roll_back(inbox) == 2
    assert effects(inbox) == []
    assert receive_all(inbox) == ["1", "2"]


@pytest.mark.slow
@every_postgresql
def test_eight_receivers_with_rollbacks_and_kills_read_each_key_from_1_to_n_once(
    inbox: Dsn,
) -> None:
    keys, each = 20, 30
    store(inbox, keys, each, transactions=5)
    chance = random.Random(7)
    for round_ in range(2):
        points = [f"{chance.choice(POINTS)}:{chance.randint(1, 8)}" for _ in range(8)]
        processes = [
            start(consumer, inbox, 10 * round_ + number, failpoint=point)
            for number, point in enumerate(points)
        ]
        assert {wait(process) for process in processes} <= {0, -signal.SIGKILL}
    let_the_server_notice(inbox)
    assert run(consumer, inbox, 99) == 0
    assert by_key(inbox) == {f"k{key}": list(range(1, each + 1)) for key in range(1, keys + 1)}
    assert dead(inbox) == []
    assert waiting(inbox) == []


@pytest.mark.parametrize("point", [*POINTS, "attempt_counted"])
def test_a_consumer_killed_at_a_point_loses_nothing_and_repeats_nothing(
    inbox: Dsn, point: str
) -> None:
    store(inbox, 3, 10, transactions=2)
    points = [f"{point}:1", f"{point}:2"]
    if point == "attempt_counted":
        points = ["receive_handled", point, point]
    for one in points:
        assert run(worker, inbox, failpoint=one) == -signal.SIGKILL
        let_the_server_notice(inbox)
        let_keys_be_due(inbox)
    while run(worker, inbox) == 0 and waiting(inbox):
        let_keys_be_due(inbox)
    assert by_key(inbox) == {f"k{key}": list(range(1, 11)) for key in range(1, 4)}


def test_a_receiver_that_dies_frees_its_shards_at_once(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    assert run(doomed, inbox, failpoint="receive_read") == -signal.SIGKILL
    let_the_server_notice(inbox)
    started = time.monotonic()
    assert receive_all(inbox) == ["1"]
    assert time.monotonic() - started < 10


# Order


@every_postgresql
def test_an_older_transaction_that_got_the_lock_later_comes_later(inbox: Dsn) -> None:
    insert = "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'k', %s)"
    with inbox.connect(role="test") as older, inbox.connect(role="test") as newer:
        older.execute("SELECT pg_current_xact_id()")
        newer.execute(insert, [b"first"])
        newer.commit()
        older.execute(insert, [b"second"])
        older.commit()
    assert receive_all(inbox, max_messages=1) == ["first", "second"]


@every_postgresql
def test_a_late_committer_is_not_lost(inbox: Dsn) -> None:
    with inbox.connect(role="test") as late:
        late.execute("INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'a', '1')")
        put(inbox, "2", key="b")
        assert receive_all(inbox) == ["2"]
        late.commit()
    assert receive_all(inbox) == ["1"]


def test_what_is_committed_while_its_batch_is_in_hand_comes_once_and_after_that_batch(
    inbox: Dsn,
) -> None:
    key, late_key = keys_of_one_shard(2)
    with inbox.connect(role="test") as late:
        put(inbox, "1", "2", key=key)
        for of_late, body in ((late_key, b"late"), ("another shard's", b"elsewhere")):
            late.execute(
                "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', %s, %s)",
                [of_late, body],
            )
        put(inbox, "3", key=key)
        with saf.receive(inbox, SUBSCRIPTION, max_messages=1) as delivery:
            assert [message.text() for message in delivery] == ["1"]
        late.commit()
    got = receive_all(inbox, max_messages=1)
    assert [body for body in got if body != "elsewhere"] == ["2", "3", "late"]
    assert got.count("elsewhere") == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(sized(1, 3)))
def test_a_deep_backlog_of_transactions_that_overlap_is_read_in_the_order_of_ids(
    inbox: Dsn, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches end at cuts, none of which may part two messages the wrong way round."""
    monkeypatch.setattr(reading, "CUT_ROWS", 3)
    monkeypatch.setattr(reading, "CUTS", 4)
    chance = random.Random(seed)
    with ExitStack() as stack:
        writers = [stack.enter_context(inbox.connect(role="test")) for _ in range(4)]
        for number in range(400):
            writer = chance.choice(writers)
            writer.execute(
                "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'k', %s)",
                [str(number).encode()],
            )
            if chance.random() < 0.3:
                writer.commit() if chance.random() < 0.9 else writer.rollback()
            if number % 80 == 0:
                for one in writers:
                    one.commit()
        for writer in writers[1:]:
            writer.commit()
        with connect(inbox) as connection:
            expected = fetch(connection, "SELECT body FROM saf.inbox ORDER BY id")
        got = receive_all(inbox, max_messages=2)
        with connect(inbox) as connection:
            assert fetch(connection, "SELECT max(batch) > 5 FROM saf.cursor") == [(True,)]
        writers[0].commit()
    assert got == [bytes(body).decode() for (body,) in expected]
    with connect(inbox) as connection:
        everything = fetch(connection, "SELECT count(*) FROM saf.inbox")
    assert len(got) + len(receive_all(inbox)) == everything[0][0]


def test_a_deep_shard_of_many_small_transactions_is_read_in_few_batches(inbox: Dsn) -> None:
    with inbox.connect(role="test") as writer:
        for number in range(1000):
            writer.execute(
                "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'k', %s)",
                [str(number).encode()],
            )
            writer.commit()
    assert receive_all(inbox, max_messages=100) == [str(number) for number in range(1000)]
    with connect(inbox) as connection:
        ((batches,),) = fetch(connection, "SELECT max(batch) FROM saf.cursor")
    assert batches <= 1000 / reading.CUT_ROWS + 2


# Side by side


@every_postgresql
def test_a_key_is_never_in_two_hands_and_other_shards_stay_free(inbox: Dsn) -> None:
    """Six take some seven of 64 shards each, at random: by chance alone, two would meet."""
    store(inbox, 200, 2)
    with ExitStack() as stack:
        deliveries = [
            stack.enter_context(saf.receive(inbox, SUBSCRIPTION, max_messages=40)) for _ in range(6)
        ]
        keys = [{message.key for message in delivery} for delivery in deliveries]
        assert all(len(delivery) == 40 for delivery in deliveries)
    assert sum(map(len, keys)) == len(set.union(*keys))


def test_a_shard_that_a_member_owns_is_nobody_elses_to_receive_from(inbox: Dsn) -> None:
    """Also for a receiver that was there before the member came."""
    put(inbox, "1", key="k")
    with connect(inbox) as connection, connected(inbox) as link:
        number = services.subscription(connection, SUBSCRIPTION).subscription_id
        receiver = Receiver(link, SUBSCRIPTION, saf.Policy(), 10)
        member = Member(subscription_id=number, lease_seconds=30)
        member.join(connection)
        member.balance(connection)
        with receiver.delivery() as delivery:
            assert not delivery
        member.leave(connection)
        with receiver.delivery() as delivery:
            assert [message.text() for message in delivery] == ["1"]


def test_a_shard_that_a_member_owns_is_nobody_elses_to_try(inbox: Dsn) -> None:
    """It was chosen because it failed, and found its owner before it was claimed."""
    put(inbox, "1", key="k")
    with connect(inbox) as connection, connected(inbox) as link:
        ((shard,),) = fetch(connection, "SELECT shard FROM saf.inbox")
        number = services.subscription(connection, SUBSCRIPTION).subscription_id
        member = Member(subscription_id=number, lease_seconds=30)
        member.join(connection)
        member.balance(connection)
        reader = hand.Reader(subscription_id=number, name=SUBSCRIPTION, service=SUBSCRIPTION)
        with link.transaction():
            assert claim.claim_shard(link.raw, reader, shard, 1) is None
            assert claim.claim_shard(link.raw, replace(reader, owner=member.member_id), shard, 1)


def test_the_inbox_says_what_is_left_of_a_batch_in_hand(inbox: Dsn) -> None:
    store(inbox, 1, 10)
    with saf.receive(inbox, SUBSCRIPTION, max_messages=3) as delivery:
        assert len(delivery) == 3
    with connect(inbox) as connection:
        (status,) = inbox_status(connection)
        assert status.unread == 7
        assert [one.id for one in peek(connection, SUBSCRIPTION, 2)] == [4, 5]


def test_the_inbox_says_what_is_left_of_batches_that_a_dispatcher_has_in_hand(inbox: Dsn) -> None:
    put(inbox, "1", "2", "3", key="a")
    put(inbox, "4", "5", "6", key="b")
    with connect(inbox) as connection:
        connection.execute(
            "UPDATE saf.cursor c SET open = pg_current_snapshot(), batch = 1 "
            "FROM saf.subscription s WHERE s.subscription_id = c.subscription_id "
            "AND s.name = 'billing'"
        )
        connection.execute(
            "INSERT INTO saf.dispatched (subscription_id, shard, batch, ids) "
            "SELECT s.subscription_id, i.shard, 1, int8multirange(int8range(i.id, i.id, '[]')) "
            "FROM saf.subscription s, saf.inbox i WHERE s.name = 'billing' AND i.body IN ('2', '5')"
        )
        (status,) = inbox_status(connection)
        assert status.unread == 4
        assert [one.id for one in peek(connection, SUBSCRIPTION)] == [1, 3, 4, 6]
        connection.execute("UPDATE saf.dispatched SET batch = 0")  # of a batch before a set-back
        (status,) = inbox_status(connection)
        assert status.unread == 6


def test_what_is_committed_late_is_left_though_a_batch_in_hand_is_past_its_id(inbox: Dsn) -> None:
    late, key = keys_of_one_shard(2)
    with connect(inbox) as one, one.transaction():
        one.execute(
            "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', %s, 'late')", [late]
        )
        put(inbox, "1", "2", key=key)
        with saf.receive(inbox, SUBSCRIPTION, max_messages=2) as delivery:
            assert [message.text() for message in delivery] == ["1", "2"]
    with connect(inbox) as connection:
        (status,) = inbox_status(connection)
        assert status.unread == 1
        assert [waiting.key for waiting in peek(connection, SUBSCRIPTION)] == [late]
        with pytest.raises(UsageError, match="messages to be read"):
            services.remove_subscription(connection, SUBSCRIPTION)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_delivery_that_failed_is_not_forgotten_for_a_key_that_waits_in_its_shard(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The trace of it is in the last version of the cursor, which any write replaces."""
    waits, key = keys_of_one_shard(2)
    put(inbox, "waits", key=waits)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        delivery.park(delivery[0], "not yet")
    put(inbox, "1", "2", key=key)
    let_keys_be_due(inbox)

    def fail() -> None:
        with connected(inbox) as link, link.transaction():
            number = services.subscription(link.raw, SUBSCRIPTION).subscription_id
            reader = hand.Reader(subscription_id=number, name=SUBSCRIPTION, service=SUBSCRIPTION)
            assert claim.claim(link.raw, reader, 2) is not None
            raise psycopg.Rollback

    monkeypatch.setattr("saf.receiving.receive._toss", lambda: True)  # what waits comes first
    arm("attempt_counted", fail)
    if when == "before":
        arm("")
        fail()
    try:
        with saf.receive(inbox, SUBSCRIPTION) as delivery:
            given = [(message.text(), message.attempt) for message in delivery]
    finally:
        arm("")
    assert given == ([("1", 2)] if when == "before" else [("waits", 2)])
    with connect(inbox) as connection:
        noted = fetch(connection, "SELECT allowance FROM saf.cursor WHERE allowance IS NOT NULL")
    assert noted == ([(2,)] if when == "before" else [(1,)])


def test_a_slow_key_does_not_delay_others(inbox: Dsn) -> None:
    put(inbox, "slow", key="slow")
    with saf.receive(inbox, SUBSCRIPTION) as slow:
        assert len(slow) == 1
        with connect(inbox) as connection:
            ((shard,),) = fetch(connection, "SELECT shard FROM saf.inbox")
        store(inbox, 50, 2)
        started = time.monotonic()
        received = receive_all(inbox)
        assert time.monotonic() - started < 10
        with connect(inbox) as connection:
            ((other,),) = fetch(
                connection,
                "SELECT count(*) FROM saf.inbox WHERE shard <> %(shard)s",
                {"shard": shard},
            )
        assert len(received) == other


def test_waiting_ends_with_the_first_message(inbox: Dsn) -> None:
    timer = threading.Timer(0.3, put, [inbox, "at last"])
    timer.start()
    started = time.monotonic()
    with saf.receive(inbox, SUBSCRIPTION, wait_seconds=20) as delivery:
        assert [message.text() for message in delivery] == ["at last"]
    assert time.monotonic() - started < 10
    timer.join()


@pytest.mark.full
@pytest.mark.slow
def test_many_subscriptions_on_one_inbox_each_get_everything(inbox: Dsn) -> None:
    names = [f"reader {number}" for number in range(sized(100, 1000))]
    with connect(inbox) as connection:
        with connection.transaction():
            for name in names:
                create_subscription(connection, name, service="billing")
        store(inbox, 10, 2)
        started = time.monotonic()
        for name in names:
            with saf.receive(partial(psycopg.connect, inbox.conninfo), name) as delivery:
                assert len(delivery) == 20
        assert time.monotonic() - started < 120
        connection.execute("SELECT max(nextval('saf.inbox_id_seq')) FROM generate_series(1, 1<<20)")
        outcome = purge_broker(connection, retention_seconds=0, rotate_after_seconds=1e9)
        needed = [slot for slot in outcome.slots if slot.log == "inbox" and slot.number == 0]
        assert [slot.subscription for slot in needed] == ["billing"]
        receive_all(inbox)
        outcome = purge_broker(connection, retention_seconds=0, rotate_after_seconds=1e9)
        assert [s.state for s in outcome.slots if s.log == "inbox" and s.number == 0] == ["purged"]


@pytest.mark.full
@pytest.mark.slow
def test_a_held_xmin_horizon_does_not_slow_receiving_down(inbox: Dsn) -> None:
    """A forgotten transaction keeps every old version of the cursors."""

    def seconds() -> float:
        store(inbox, 20, 10)
        started = time.monotonic()
        receive_all(inbox, max_messages=5)
        return time.monotonic() - started

    seconds()
    before = min(seconds() for _ in range(2))
    with inbox.connect(role="test") as forgotten:
        forgotten.execute("SELECT pg_current_xact_id()")
        during = [seconds() for _ in range(5)]
    assert min(during[-2:]) < 3 * before + 0.5


# Later, or never


def test_deliver_at_is_honoured_and_nobody_waits_for_it(inbox: Dsn) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    put(inbox, "later", key="k", deliver_at=later)
    put(inbox, "latest", key="k", deliver_at=later + timedelta(hours=1))
    put(inbox, "now", key="k")
    assert receive_all(inbox) == ["now"]
    assert receive_all(inbox) == []
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.parked SET deliver_at = deliver_at - interval '61 min'")
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now() - interval '1 min'")
    put(inbox, "next", key="k")
    assert receive_all(inbox) == ["later", "next"]
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.parked SET deliver_at = now()")
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    assert receive_all(inbox) == ["latest"]
    assert effects(inbox) == ["now", "later", "next", "latest"]
    with connect(inbox) as connection:
        assert fetch(connection, "SELECT FROM saf.backoff") == []


def test_what_was_delayed_comes_in_the_order_of_its_times_and_before_the_rest(inbox: Dsn) -> None:
    now = datetime.now(UTC)
    for body, hours in (("third", 3), ("first", 1), ("second", 2)):
        put(inbox, body, key="k", deliver_at=now + timedelta(hours=hours))
    put(inbox, "soon", key="k", deliver_at=now + timedelta(minutes=30))
    assert receive_all(inbox) == []
    let_time_pass(inbox, timedelta(minutes=40))
    assert receive_all(inbox) == ["soon"]
    let_time_pass(inbox, timedelta(hours=4))
    put(inbox, "now", key="k")
    with saf.receive(inbox, SUBSCRIPTION, max_messages=1) as delivery:
        assert [message.text() for message in delivery] == ["first"]
    assert receive_all(inbox) == ["second", "third", "now"]


def test_a_delivery_of_many_keys_is_in_the_order_of_their_ids(inbox: Dsn) -> None:
    sent = [str(number) for number in range(30)]
    for body in sent:
        put(inbox, body, key=f"k{body}")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert [message.text() for message in delivery] == sent


def test_neither_what_is_set_aside_nor_what_is_behind_it_counts_as_handled(inbox: Dsn) -> None:
    put(inbox, "1", "2", key="k")
    put(inbox, "other", key="other")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert delivery.handled == 3
        delivery.park(delivery[0], "not now")
        assert delivery.handled == 1


def test_a_message_that_is_set_aside_again_counts_once(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    counts = []
    for _ in range(2):
        with saf.receive(inbox, SUBSCRIPTION) as delivery:
            delivery.park(delivery[0], "not yet")
        counts.append(delivery.parked)
        let_keys_be_due(inbox)
    assert counts == [1, 0]


def test_a_delivery_that_is_handled_counts_nothing_as_set_aside(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert len(delivery) == 1
    assert (delivery.handled, delivery.parked, delivery.buried) == (1, 0, 0)


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_a_key_waits_for_the_first_of_its_messages_that_were_set_aside(
    inbox: Dsn, order: tuple[int, int]
) -> None:
    put(inbox, "1", "2", "3", key="k")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        for place in order:
            delivery.park(delivery[place], "not yet")
    assert (delivery.handled, delivery.parked) == (0, 3)
    let_keys_be_due(inbox)
    assert receive_all(inbox) == ["1", "2", "3"]


def test_an_expired_message_is_a_dead_letter(inbox: Dsn) -> None:
    put(inbox, "too late", key="k", expires_at=datetime.now(UTC) - timedelta(seconds=1))
    put(inbox, "in time", key="k", expires_at=datetime.now(UTC) + timedelta(hours=1))
    assert receive_all(inbox) == ["in time"]
    assert dead(inbox) == [("too late", "expired")]


# What fails every time


@every_postgresql
def test_five_rollbacks_on_one_message_make_it_a_dead_letter_and_others_go_on(inbox: Dsn) -> None:
    put(inbox, "poison", "after it", key="k")
    assert roll_back(inbox, "poison") == 2
    for attempt in range(2, 6):
        assert dead(inbox) == []
        assert roll_back(inbox, "poison", max_messages=1) == 1
        put(inbox, f"other {attempt}", key="other")
        while roll_back(inbox, "nothing"):  # what is not due stays where it is
            assert effects(inbox)[-1] == f"other {attempt}" or attempt == 5
        assert ("after it" in effects(inbox)) == (attempt == 5)
        let_keys_be_due(inbox)
    assert dead(inbox) == [("poison", "failed")]
    with connect(inbox) as connection:
        ((error,),) = fetch(connection, "SELECT error FROM saf.dead_letter")
    assert error == "ZeroDivisionError"


def test_a_message_that_kills_whoever_handles_it_is_found_among_others_and_set_aside(
    inbox: Dsn,
) -> None:
    store(inbox, 5, 3)
    put(inbox, "poison", key="k3")
    put(inbox, "4", key="k3")
    kills = 0
    while len(effects(inbox)) < 16:
        let_keys_be_due(inbox)
        kills += run(doomed, inbox) == -signal.SIGKILL
        let_the_server_notice(inbox)
        assert kills < 30
    assert dead(inbox) == [("poison", "failed")]
    assert by_key(inbox)["k3"] == [1, 2, 3, 4]
    assert {key: len(numbers) for key, numbers in by_key(inbox).items()} == {
        **{f"k{key}": 3 for key in (1, 2, 4, 5)},
        "k3": 4,
    }
    assert kills <= 10


@pytest.mark.parametrize("most", [1, 3])
def test_a_message_that_kills_its_receiver_is_handed_out_as_often_as_the_policy_says(
    inbox: Dsn, most: int
) -> None:
    """The attempt is counted before it is made, also the last one."""
    put(inbox, "poison", key="k")
    policy = saf.Policy(max_attempts=most)
    handed_out = 0
    for _ in range(20):
        let_keys_be_due(inbox)
        with suppress(psycopg.Error), saf.receive(inbox, SUBSCRIPTION, policy=policy) as delivery:
            handed_out += len(delivery)
            if delivery:
                delivery.connection.close()  # as if the process had died
        let_the_server_notice(inbox)
    # that of a delivery with others is not known to be its own, so there is one more at least
    assert dead(inbox) == [("poison", "failed")]
    assert handed_out == max(most, 2)


def take_all_shards(connection: psycopg.Connection[Any]) -> None:
    connection.execute("SELECT FROM saf.cursor FOR UPDATE")


@pytest.mark.usefixtures("disarmed")
def test_an_attempt_that_another_receiver_is_in_the_way_of_does_not_count(inbox: Dsn) -> None:
    put(inbox, "late", key="k")
    policy = saf.Policy(max_attempts=2)
    with suppress(ValueError), saf.receive(inbox, SUBSCRIPTION, policy=policy):
        raise ValueError
    for _ in range(5):
        let_keys_be_due(inbox)
        with connect(inbox) as other, other.transaction():
            arm("attempt_counted", partial(take_all_shards, other))
            with saf.receive(inbox, SUBSCRIPTION, policy=policy) as delivery:
                assert not delivery
    assert dead(inbox) == []
    assert receive_all(inbox) == ["late"]


@pytest.mark.usefixtures("disarmed")
def test_of_two_receivers_that_count_an_attempt_the_first_hands_nothing_out(inbox: Dsn) -> None:
    def another_counts() -> None:
        with connect(inbox) as other:
            other.execute("UPDATE saf.backoff SET attempts = attempts + 1")

    put(inbox, "1", key="k")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        delivery.park(delivery[0], "not yet")
    let_keys_be_due(inbox)
    arm("attempt_counted", another_counts)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert not delivery


def test_an_error_of_a_lane_that_cannot_be_read_is_raised(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise psycopg.DataError("no such number")

    put(inbox, "1", key="k")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        delivery.park(delivery[0], "not yet")
    let_keys_be_due(inbox)
    monkeypatch.setattr(reading, "read_lane", fails)
    with (
        pytest.raises(psycopg.DataError, match="no such number"),
        saf.receive(inbox, SUBSCRIPTION),
    ):
        pass


def test_of_very_many_lanes_that_are_due_one_of_the_oldest_is_tried(inbox: Dsn) -> None:
    with connected(inbox) as link:
        reader = Receiver(link, SUBSCRIPTION, saf.Policy(), 1).reader
        lanes = {
            str(age): retries.Waiting(
                lane=str(age), shard=age % 64, attempts=1, error="no", wait=-60.0 * age
            )
            for age in range(1, 201)
        }
        retries.wait(link.raw, reader, lanes)
        suspect = retries.choose(link.raw, reader)
    assert suspect is not None
    assert int(suspect.lane or 0) > 100


def test_a_message_that_raises_among_others_is_found_and_set_aside(inbox: Dsn) -> None:
    put(inbox, "1", "2", "3", "poison", "5", key="k")
    policy = saf.Policy(max_attempts=3, first_wait_seconds=0.0)
    for _ in range(20):
        with suppress(ZeroDivisionError), saf.receive(inbox, SUBSCRIPTION, policy=policy) as some:
            for message in some:
                if message.text() == "poison":
                    raise ZeroDivisionError
                effect(some.connection, message)
    assert effects(inbox) == ["1", "2", "3", "5"]
    assert dead(inbox) == [("poison", "failed")]


def test_what_rolls_back_once_comes_again_in_order_and_is_soon_handed_out_in_full(
    inbox: Dsn,
) -> None:
    store(inbox, 1, 200)
    assert roll_back(inbox) == 200
    sizes: list[int] = []
    while sum(sizes) < 200:
        with saf.receive(inbox, SUBSCRIPTION, max_messages=200) as delivery:
            for message in delivery:
                count_up(delivery.connection, message)
            sizes.append(len(delivery))
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 73]
    assert by_key(inbox) == {"k1": list(range(1, 201))}


# Connections


def test_it_receives_on_what_the_application_has(inbox: Dsn) -> None:
    put(inbox, "engine", "dsn", "text", "factory", key="k")
    engine = inbox.engine()
    sources: list[Any] = [engine, inbox, inbox.conninfo, partial(psycopg.connect, inbox.conninfo)]
    for source in sources:
        with saf.receive(source, SUBSCRIPTION, max_messages=1) as delivery:
            raw = delivery.connection
            if source is engine:
                raw = delivery.connection.connection.driver_connection
            effect(raw, delivery[0])
    engine.dispose()
    assert effects(inbox) == ["engine", "dsn", "text", "factory"]


def test_what_cannot_be_received_from_is_named(inbox: Dsn) -> None:
    seven: Any = 7
    with (
        pytest.raises(UsageError, match=r"cannot receive from a builtins\.int"),
        saf.receive(seven, "a"),
    ):
        pass
    with (
        pytest.raises(UsageError, match="max_messages: 0"),
        saf.receive(inbox, SUBSCRIPTION, max_messages=0),
    ):
        pass
    with pytest.raises(Unavailable), saf.receive("host=/nowhere dbname=x", SUBSCRIPTION):
        pass


@pytest.fixture
def engines(inbox: Dsn) -> Iterator[list[Any]]:
    engine = inbox.engine()
    yield [engine]
    engine.dispose()


def test_a_block_that_commits_by_itself_is_refused_and_its_messages_come_again(
    inbox: Dsn, engines: list[Any]
) -> None:
    put(inbox, "1", key="k")
    (engine,) = engines
    with (
        pytest.raises(Exception, match=r"inside of its block|closed transaction"),
        saf.receive(engine, SUBSCRIPTION) as delivery,
    ):
        delivery.connection.commit()
    with (
        pytest.raises(psycopg.ProgrammingError, match="Explicit commit"),
        saf.receive(inbox, SUBSCRIPTION) as delivery,
    ):
        delivery.connection.commit()
    let_keys_be_due(inbox)
    assert receive_all(inbox) == ["1"]


# Messages


def test_a_message_has_what_was_sent_and_says_what_cannot_be_read(app: Dsn, inbox: Dsn) -> None:
    from tests.pipeline import forward

    outbox = saf.Outbox(from_service="shop")
    with app.connect(role="test") as connection:
        first = outbox.send(
            connection, SUBSCRIPTION, {"total": 90}, key="A-1", message_type="Placed",
            headers={"tenant": 7},
        )  # fmt: skip
        outbox.send(
            connection, SUBSCRIPTION, b"\xff{", key="A-1",
            headers={"content-type": "application/json"},
        )  # fmt: skip
    forward(app, mom=inbox)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        message, bad = delivery
        assert (message.message_id, message.key, message.message_type) == (first, "A-1", "Placed")
        assert (message.service, message.from_service) == (SUBSCRIPTION, "shop")
        assert message.headers == {"content-type": "application/json", "tenant": 7}
        assert message.json() == {"total": 90}
        assert (datetime.now(UTC) - message.created_at).total_seconds() < 60
        assert message.attempt == 1
        assert str(first) in repr(message)
        with pytest.raises(UnreadableBody, match=rf"{bad.message_id} .* application/json"):
            bad.json()
        with pytest.raises(UnreadableBody):
            bad.text()


def test_an_engine_that_commits_each_statement_is_refused(inbox: Dsn) -> None:
    engine = inbox.engine(isolation_level="AUTOCOMMIT")
    with pytest.raises(UsageError, match="in AUTOCOMMIT"), saf.receive(engine, SUBSCRIPTION):
        pass
    engine.dispose()


def test_a_message_that_fails_alone_makes_nobody_careful_with_its_shard(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        delivery.park(delivery[0], "not yet")
    let_keys_be_due(inbox)
    with suppress(ZeroDivisionError), saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert delivery[0].attempt == 2
        raise ZeroDivisionError
    with connect(inbox) as connection:
        noted = fetch(connection, "SELECT allowance FROM saf.cursor WHERE allowance IS NOT NULL")
    assert noted == []


def test_an_error_that_is_none_of_the_message_makes_no_dead_letter(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_lane = reading.read_lane

    def fails(*arguments: Any) -> None:
        read_lane(*arguments)
        raise psycopg.errors.QueryCanceled("statement timeout")

    put(inbox, "1", key="k")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        delivery.park(delivery[0], "not yet")
    let_keys_be_due(inbox)
    policy = saf.Policy(max_attempts=1)  # as if the last attempt had ended its process
    with monkeypatch.context() as patch:
        patch.setattr(reading, "read_lane", fails)
        with pytest.raises(psycopg.errors.QueryCanceled):
            receive_all(inbox, policy=policy)
    assert (dead(inbox), len(waiting(inbox))) == ([], 1)


SLOW_RANDOM = """
CREATE SCHEMA slow;
CREATE FUNCTION slow.random() RETURNS float8 LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN 0.5; END $$
"""


def test_a_shard_that_a_member_takes_while_it_is_claimed_is_the_members(inbox: Dsn) -> None:
    """A claim has seen that it is free, and is about to lock it."""
    put(inbox, "1", key="k")
    with connect(inbox) as connection, connected(inbox) as link, ThreadPoolExecutor(1) as thread:
        connection.execute(SLOW_RANDOM)
        reader = Receiver(link, SUBSCRIPTION, saf.Policy(), 1).reader
        member = Member(subscription_id=reader.subscription_id, lease_seconds=60)

        def claimed() -> hand.Hand | None:
            with link.transaction():
                link.raw.execute("SET LOCAL search_path = slow, pg_catalog")
                return claim.claim(link.raw, reader, 1)

        connection.execute("SELECT pg_advisory_lock(1)")
        try:
            found = thread.submit(claimed)
            until(lambda: blocked(connection) == 1)
            member.join(connection)
            member.balance(connection)
        finally:
            connection.execute("SELECT pg_advisory_unlock(1)")
        assert found.result() is None


def test_who_fails_again_with_its_shard_handed_out_more_carefully_has_failed_once(
    inbox: Dsn,
) -> None:
    put(inbox, "1", "2", "3", key="k")
    seen: list[list[tuple[str, int]]] = []
    for fails in (True, False, True, False):
        let_keys_be_due(inbox)
        with suppress(ZeroDivisionError), saf.receive(inbox, SUBSCRIPTION) as delivery:
            seen.append([(message.text(), message.attempt) for message in delivery])
            if fails:
                raise ZeroDivisionError
    assert seen == [[("1", 1), ("2", 1), ("3", 1)], [("1", 2)], [("2", 1), ("3", 1)], [("2", 2)]]
