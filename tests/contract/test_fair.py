"""Fair: each group gets its share of a delivery, whatever the backlog of the others."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Generator
from contextlib import closing, suppress
from threading import Event
from typing import Any, cast

import psycopg
import pytest

import saf
from saf.broker import services
from saf.database import Dsn, fetch
from saf.errors import UsageError
from saf.log.shards import Member
from saf.receiving import claim, fair
from saf.receiving.dispatch.dispatcher import Dispatcher
from saf.receiving.dispatch.dispatcher import run as run_dispatchers
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.inbox import inbox_status
from saf.receiving.link import connected
from saf.receiving.receive import Receiver
from tests.pipeline import connect
from tests.processes import run, start, wait
from tests.receivers import (
    SUBSCRIPTION,
    by_key,
    consumer,
    count_up,
    dead,
    effect,
    effects,
    impatient_consumer,
    keys_of_one_shard,
    let_keys_be_due,
    let_the_server_notice,
    prepare,
    put,
    running,
    store,
    waiting,
)
from tests.waits import until

FILL = """
INSERT INTO saf.inbox (to_service, key, headers, message_type, from_service, body)
SELECT 'billing', %(tenant)s::text || '/' || i %% %(keys)s::int,
       jsonb_build_object('tenant', %(tenant)s::text), %(tenant)s, %(tenant)s,
       convert_to(%(tenant)s || i, 'UTF8')
FROM generate_series(1, %(messages)s::int) AS i
"""
BATCHES = "SELECT count(*), max(position) FROM saf.cursor WHERE open IS NOT NULL"


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare(mom)
    return mom


def fill(mom: Dsn, tenant: str, messages: int, keys: int = 500) -> None:
    with connect(mom) as connection:
        connection.execute(FILL, {"tenant": tenant, "messages": messages, "keys": keys})


def be_fair(mom: Dsn, **how: Any) -> None:
    with connect(mom) as connection:
        services.set_fairness(connection, SUBSCRIPTION, **how)


def handle_all(mom: Dsn, **options: Any) -> list[str]:
    """Bodies in the order in which a worker has handled them."""
    worker = saf.Worker(mom, SUBSCRIPTION, **options)
    worker.handler()(lambda message, connection: effect(connection, message))
    worker.drain()
    return effects(mom)


def of_tenant(bodies: list[str], tenant: str) -> list[int]:
    """Places of a tenant's messages."""
    return [place for place, body in enumerate(bodies) if body.startswith(tenant)]


# The promise


@pytest.mark.parametrize("keys", [500, 20, 1])
@pytest.mark.parametrize("fair_by", ["key:/", "header:tenant", "message_type", "from_service"])
def test_ten_messages_behind_ten_thousand_of_another_tenant_are_among_the_first_two_hundred(
    inbox: Dsn, fair_by: str, keys: int
) -> None:
    fill(inbox, "A", 10_000, keys)
    fill(inbox, "B", 10)
    be_fair(inbox, fair_by=fair_by)
    got = handle_all(inbox)
    assert len(got) == len({*got}) == 10_010
    assert max(of_tenant(got, "B")) < 200


def test_a_tenant_whose_messages_share_the_shard_of_the_backlog_does_not_wait_for_it(
    inbox: Dsn,
) -> None:
    first, second = keys_of_one_shard(2)
    with connect(inbox) as connection:
        for key, messages in ((first, 10_000), (second, 10)):
            connection.execute(
                "INSERT INTO saf.inbox (to_service, key, body) "
                "SELECT 'billing', %s, i::text::bytea FROM generate_series(1, %s::int) AS i",
                [key, messages],
            )
    be_fair(inbox, fair_by="key")
    handle_all(inbox)
    with connect(inbox) as connection:
        places = fetch(
            connection,
            "SELECT max(number) FROM effect WHERE key = %(key)s",
            {"key": second},
        )
    assert places[0][0] <= 200
    assert by_key(inbox) == {first: list(range(1, 10_001)), second: list(range(1, 11))}


def test_one_delivery_of_saf_receive_is_fair_under_asyncio_too(inbox: Dsn) -> None:
    fill(inbox, "A", 3000)
    fill(inbox, "B", 10)
    be_fair(inbox, fair_by="key:/")
    with saf.receive(inbox, SUBSCRIPTION, max_messages=50) as delivery:
        assert Counter(message.text()[0] for message in delivery) == {"A": 40, "B": 10}
    fill(inbox, "C", 10)

    async def receive() -> Counter[str]:
        async with saf.areceive(inbox, SUBSCRIPTION, max_messages=3000) as delivery:
            return Counter(message.text()[0] for message in delivery)

    assert asyncio.run(receive()) == {"A": 2960}
    assert asyncio.run(receive()) == {"C": 10}


def test_each_of_many_tenants_has_its_share_of_each_delivery(inbox: Dsn) -> None:
    for number, tenant in enumerate("ABCDE"):
        fill(inbox, tenant, 40 * 2**number, keys=7)
    be_fair(inbox, fair_by="key:/")
    worker = saf.Worker(inbox, SUBSCRIPTION, max_messages=50)
    worker.handler()(lambda message, connection: effect(connection, message))
    first = next(worker.deliveries())
    assert Counter(message.text()[0] for message in first) == dict.fromkeys("ABCDE", 10)


def test_a_heavier_class_gets_its_share_first_and_the_lightest_stays_alive(inbox: Dsn) -> None:
    fill(inbox, "Bulk", 500)
    fill(inbox, "Order", 500)
    fill(inbox, "Alarm", 500)
    be_fair(inbox, priority={"Alarm": 10, "Bulk": 0.5})
    got = handle_all(inbox, max_messages=46)
    first = Counter(body.rstrip("0123456789") for body in got[:230])
    assert first == {"Alarm": 200, "Order": 20, "Bulk": 10}
    assert len({*got}) == 1500


def test_classes_may_be_of_senders_and_within_each_group(inbox: Dsn) -> None:
    fill(inbox, "A", 300)
    fill(inbox, "B", 300)
    be_fair(inbox, fair_by="key:/", priority={"A": 3}, priority_by="from_service")
    assert Counter(body[0] for body in handle_all(inbox)[:100]) == {"A": 75, "B": 25}


# Order, exactly once


POINTS = ("receive_read", "receive_handled", "receive_settled", "receive_committed")


def test_receivers_that_are_killed_at_random_read_each_key_from_1_to_n_once(inbox: Dsn) -> None:
    keys, each = 20, 40
    store(inbox, keys, each, transactions=5)
    be_fair(inbox, fair_by="key")
    chance = random.Random(38)
    for round_ in range(3):
        points = [f"{chance.choice(POINTS)}:{chance.randint(1, 8)}" for _ in range(4)]
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


def test_order_and_exactly_once_hold_while_messages_arrive_and_receivers_are_killed(
    inbox: Dsn,
) -> None:
    """The batches are extended at every chance."""
    be_fair(inbox, fair_by="key")
    store(inbox, 20, 10)
    chance = random.Random(39)
    for round_ in range(3):
        points = [f"{chance.choice(POINTS)}:{chance.randint(3, 12)}" for _ in range(4)]
        processes = [
            start(impatient_consumer, inbox, 10 * round_ + number, failpoint=point)
            for number, point in enumerate(points)
        ]
        for number in range(10 * round_ + 11, 10 * round_ + 21):
            put_each(inbox, 20, number)
        assert {wait(process) for process in processes} <= {0, -signal.SIGKILL}
    let_the_server_notice(inbox)
    assert run(impatient_consumer, inbox, 99) == 0
    assert by_key(inbox) == {f"k{key}": list(range(1, 41)) for key in range(1, 21)}
    assert (dead(inbox), waiting(inbox)) == ([], [])


def put_each(mom: Dsn, keys: int, number: int) -> None:
    """The next message of each key, in a transaction of its own."""
    with connect(mom) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) "
            "SELECT 'billing', 'k' || k, %s::text::bytea FROM generate_series(1, %s::int) k",
            [number, keys],
        )


def test_fair_and_other_receivers_may_work_side_by_side(inbox: Dsn) -> None:
    """As while a subscription becomes fair: some have begun before."""
    store(inbox, 12, 60, transactions=3)
    with connected(inbox) as one, connected(inbox) as two:
        before = Receiver(one, SUBSCRIPTION, saf.Policy(), 5)
        be_fair(inbox, fair_by="key")
        after = Receiver(two, SUBSCRIPTION, saf.Policy(), 5)
        found = True
        while found:
            found = False
            for receiver in (before, after):
                with receiver.delivery() as delivery:
                    for message in delivery:
                        count_up(delivery.connection, message)
                    found = found or bool(delivery)
    assert by_key(inbox) == {f"k{key}": list(range(1, 61)) for key in range(1, 13)}


def test_a_key_with_two_groups_stays_in_order(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, headers, body) "
            "SELECT 'billing', 'k' || i % 3, jsonb_build_object('tenant', "
            "       CASE WHEN i > 570 OR i % 50 < 3 THEN 'small' ELSE 'large' END), "
            "       (1 + (i - 1) / 3)::text::bytea FROM generate_series(1, 600) AS i ORDER BY i"
        )
    be_fair(inbox, fair_by="header:tenant")
    worker = saf.Worker(inbox, SUBSCRIPTION, max_messages=20)
    worker.handler()(lambda message, connection: count_up(connection, message))
    assert worker.run(drain=True) == 600
    assert by_key(inbox) == {f"k{key}": list(range(1, 201)) for key in range(3)}


def test_a_second_receiver_gets_other_messages_while_a_delivery_is_open(inbox: Dsn) -> None:
    fill(inbox, "A", 1000)
    fill(inbox, "B", 1000)
    be_fair(inbox, fair_by="key:/")
    with saf.receive(inbox, SUBSCRIPTION, max_messages=10) as first:
        one = {message.text() for message in first}
        with saf.receive(inbox, SUBSCRIPTION, max_messages=10) as second:
            two = {message.text() for message in second}
            assert {body[0] for body in two} == {"A", "B"}
        assert not one & two
    got = handle_all(inbox)
    assert len(got) == len({*got}) == 1980
    assert not {*got} & (one | two)


def test_four_receivers_together_serve_a_small_tenant_early(inbox: Dsn) -> None:
    fill(inbox, "A", 6000)
    fill(inbox, "B", 10)
    be_fair(inbox, fair_by="key:/")
    worker = saf.Worker(inbox, SUBSCRIPTION, threads=4)
    worker.handler()(lambda message, connection: effect(connection, message))
    with running(worker):
        until(lambda: len(effects(inbox)) == 6010)
    got = effects(inbox)
    assert len({*got}) == 6010
    assert max(of_tenant(got, "B")) < 1600


def test_the_next_batch_of_a_deep_shard_is_seen_while_others_are_handled(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batches are cut, and the second one is opened when the first one is complete."""
    monkeypatch.setattr(fair, "SIGHT", 1000)
    monkeypatch.setattr(fair, "REFRESH_SECONDS", 0)
    monkeypatch.setattr(fair, "REFRESH_RATIO", 0)
    monkeypatch.setattr(claim, "FEWEST", 1)
    first, second = keys_of_one_shard(2)
    for number in range(300):
        put(inbox, f"{number}", key=first)
    put(inbox, "B", key=second)
    fill(inbox, "A", 4000)
    be_fair(inbox, fair_by="key:/")
    got = handle_all(inbox, max_messages=50)
    assert len(got) == len({*got}) == 4301
    assert got.index("B") < 2000


def test_a_complete_batch_that_was_left_open_is_closed(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another receiver had completed the last messages of the batch, by an older plan."""
    monkeypatch.setattr(fair, "REFRESH_SECONDS", 0)
    monkeypatch.setattr(fair, "REFRESH_RATIO", 0)
    first, second = keys_of_one_shard(2)
    put(inbox, "1", key=first)
    be_fair(inbox, fair_by="key")
    with connect(inbox) as connection:
        connection.execute(
            "UPDATE saf.cursor c SET open = pg_current_snapshot(), batch = 1, position = i.id "
            "FROM saf.inbox i JOIN saf.subscription s ON s.name = 'billing' "
            "WHERE c.subscription_id = s.subscription_id AND c.shard = i.shard"
        )
    put(inbox, "2", key=second)
    fill(inbox, "A", 3000)
    got = handle_all(inbox, max_messages=50)
    assert "1" not in got
    assert got.index("2") < 1000
    assert len(got) == len({*got}) == 3001


def test_a_backlog_deeper_than_the_sight_is_handled_once_and_in_order(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair, "SIGHT", 300)
    monkeypatch.setattr(claim, "FEWEST", 1)
    store(inbox, 10, 400, transactions=40)
    be_fair(inbox, fair_by="key")
    worker = saf.Worker(inbox, SUBSCRIPTION, max_messages=50)
    worker.handler()(lambda message, connection: count_up(connection, message))
    assert worker.run(drain=True) == 4000
    assert by_key(inbox) == {f"k{key}": list(range(1, 401)) for key in range(1, 11)}
    with connect(inbox) as connection:
        assert fetch(connection, BATCHES) == [(0, None)]


# Failures and fates


def test_a_message_that_fails_waits_with_its_key_and_nobody_else_does(inbox: Dsn) -> None:
    store(inbox, 6, 60)
    be_fair(inbox, fair_by="key")
    worker = saf.Worker(inbox, SUBSCRIPTION, max_messages=30)
    fails = True

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        if fails and (message.key, message.text()) == ("k3", "7"):
            raise ValueError("not yet")
        count_up(connection, message)

    worker.drain()
    done = by_key(inbox)
    assert done.pop("k3") == list(range(1, 7))
    assert done == {f"k{key}": list(range(1, 61)) for key in (1, 2, 4, 5, 6)}
    assert waiting(inbox) == ["k3"]
    fails = False
    let_keys_be_due(inbox)
    worker.drain()
    assert by_key(inbox)["k3"] == list(range(1, 61))


def test_a_delivery_that_is_rolled_back_is_handed_out_again_alone_and_in_order(inbox: Dsn) -> None:
    store(inbox, 6, 60)
    be_fair(inbox, fair_by="key")
    with (
        suppress(ZeroDivisionError),
        saf.receive(inbox, SUBSCRIPTION, max_messages=30) as delivery,
    ):
        assert len({message.key for message in delivery}) == 6
        assert 1 / 0
    with saf.receive(inbox, SUBSCRIPTION, max_messages=30) as delivery:
        (message,) = delivery
        assert (message.text(), message.attempt) == ("1", 2)
        count_up(delivery.connection, message)
    worker = saf.Worker(inbox, SUBSCRIPTION)
    worker.handler()(lambda message, connection: count_up(connection, message))
    for _ in range(20):
        let_keys_be_due(inbox)
        worker.drain()
    assert by_key(inbox) == {f"k{key}": list(range(1, 61)) for key in range(1, 7)}


def test_expired_and_delayed_messages_keep_their_fates(inbox: Dsn) -> None:
    fill(inbox, "A", 300)
    put(inbox, "B expired", key="B/1", expires_at="2020-01-01 00:00:00+00")
    put(inbox, "B late", key="B/1", deliver_at="9000-01-01 00:00:00+00")
    put(inbox, "B1", key="B/1")
    be_fair(inbox, fair_by="key:/")
    got = handle_all(inbox, max_messages=20)
    assert of_tenant(got, "B")[0] < 20
    assert "B late" not in got
    assert dead(inbox) == [("B expired", "expired")]
    fill(inbox, "A", 300)
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.parked SET deliver_at = now()")
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    got = handle_all(inbox, max_messages=20)
    assert got.count("B late") == 1
    assert got.index("B late") < 350


def test_messages_that_a_stop_leaves_are_put_back(inbox: Dsn) -> None:
    fill(inbox, "A", 300)
    fill(inbox, "B", 10)
    be_fair(inbox, fair_by="key:/")
    worker = saf.Worker(inbox, SUBSCRIPTION, max_messages=50)

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)
        if len(effects_of(connection)) == 7:
            worker.stop()

    for _ in worker.deliveries():
        pass
    assert len(effects(inbox)) == 7
    assert waiting(inbox) == []
    got = handle_all(inbox)
    assert len(got) == len({*got}) == 310


def test_a_receiver_that_continues_after_it_has_put_messages_back_reads_them_again(
    inbox: Dsn,
) -> None:
    store(inbox, 5, 60)
    be_fair(inbox, fair_by="key")
    with connected(inbox) as link:
        receiver = Receiver(link, SUBSCRIPTION, saf.Policy(), 20)
        for number in range(40):
            stopping = Event()
            with receiver.delivery() as delivery:
                delivery.until(stopping)
                for place, message in enumerate(delivery):
                    count_up(delivery.connection, message)
                    if number % 2 and place == 3:
                        stopping.set()
    assert by_key(inbox) == {f"k{key}": list(range(1, 61)) for key in range(1, 6)}


def effects_of(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return fetch(connection, "SELECT body FROM effect")


def test_the_status_counts_what_is_complete_ahead_as_read(inbox: Dsn) -> None:
    fill(inbox, "A", 500)
    fill(inbox, "B", 10)
    be_fair(inbox, fair_by="key:/")
    with saf.receive(inbox, SUBSCRIPTION, max_messages=20) as delivery:
        assert len(delivery) == 20
    with connect(inbox) as connection:
        (status,) = inbox_status(connection)
    assert status.unread == 490


# Plans


def test_a_plan_is_not_trusted_after_another_receiver_has_extended_the_batches(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know what has arrived, and would close the batch over it."""
    monkeypatch.setattr(fair, "REFRESH_RATIO", 0)
    monkeypatch.setattr(fair, "REFRESH_SECONDS", 600)
    store(inbox, 10, 10)
    be_fair(inbox, fair_by="key")
    with connected(inbox) as one, connected(inbox) as two:
        first, second = (Receiver(link, SUBSCRIPTION, saf.Policy(), 20) for link in (one, two))

        def receive(receiver: Receiver) -> int:
            with receiver.delivery() as delivery:
                for message in delivery:
                    count_up(delivery.connection, message)
            return len(delivery)

        assert receive(first) == 20
        for number in range(11, 21):
            put_each(inbox, 10, number)
        monkeypatch.setattr(fair, "REFRESH_SECONDS", 0)
        assert receive(second) == 20
        monkeypatch.setattr(fair, "REFRESH_SECONDS", 600)
        while receive(first):
            pass
    assert by_key(inbox) == {f"k{key}": list(range(1, 21)) for key in range(1, 11)}


def test_a_plan_is_not_continued_over_the_trace_of_another_receivers_failure(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair, "REFRESH_SECONDS", 600)
    store(inbox, 10, 10)
    be_fair(inbox, fair_by="key")
    with connected(inbox) as one, connected(inbox) as two:
        first, second = (Receiver(link, SUBSCRIPTION, saf.Policy(), 20) for link in (one, two))
        with first.delivery() as delivery:
            assert len(delivery) == 20
        with suppress(ZeroDivisionError), second.delivery() as delivery:
            assert len({message.key for message in delivery}) == 10
            assert 1 / 0
        with first.delivery() as delivery:
            (message,) = delivery
            assert message.attempt == 2


def test_calls_of_receive_continue_with_one_plan(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[None] = []
    make = fair.Fair._make_plan
    monkeypatch.setattr(fair.Fair, "_make_plan", lambda *args: plans.append(make(*args)))
    monkeypatch.setattr(fair, "REFRESH_SECONDS", 60)
    store(inbox, 20, 40)
    be_fair(inbox, fair_by="key")
    deliveries = 0
    while True:
        with saf.receive(inbox, SUBSCRIPTION, max_messages=40) as delivery:
            if not delivery:
                break
            assert Counter(Counter(one.key for one in delivery).values()) == {2: 20}
            for message in delivery:
                count_up(delivery.connection, message)
        deliveries += 1
    assert (deliveries, len(plans)) == (20, 1)
    assert by_key(inbox) == {f"k{key}": list(range(1, 41)) for key in range(1, 21)}


def test_a_plan_of_a_database_that_was_set_back_is_thrown_away(inbox: Dsn) -> None:
    """Messages that the plan takes for complete are incomplete again, with the same batches."""
    store(inbox, 10, 60)
    be_fair(inbox, fair_by="key")

    def receive() -> list[tuple[str | None, str]]:
        with saf.receive(inbox, SUBSCRIPTION, max_messages=100) as delivery:
            return [(message.key, message.text()) for message in delivery]

    got = receive()
    with connect(inbox) as connection:
        connection.execute("CREATE TABLE backup AS SELECT * FROM saf.cursor")
        connection.execute("CREATE TABLE backup_ids AS SELECT * FROM saf.dispatched")
    receive()
    receive()
    with connect(inbox) as connection, connection.transaction():
        connection.execute(
            "UPDATE saf.cursor c SET done = b.done, open = b.open, position = b.position, "
            "       epoch = b.epoch FROM backup b "
            "WHERE (c.subscription_id, c.shard, c.batch) = (b.subscription_id, b.shard, b.batch)"
        )
        connection.execute("DELETE FROM saf.dispatched")
        connection.execute("INSERT INTO saf.dispatched SELECT * FROM backup_ids")
    (lent,) = [one for one in fair._lent.values() if one.is_fresh]
    lent._transaction += 1_000_000
    while more := receive():
        got += more
    assert Counter(got) == Counter((f"k{k}", str(n)) for k in range(1, 11) for n in range(1, 61))


# Who is not fair


def test_a_receiver_that_is_not_fair_sends_none_of_the_fair_statements(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: set[str] = set()
    execute = psycopg.Cursor.execute

    def note(self: Any, query: Any, *args: Any, **options: Any) -> Any:
        sent.add(str(query))
        return execute(self, query, *args, **options)

    fill(inbox, "A", 1000)
    monkeypatch.setattr(psycopg.Cursor, "execute", note)
    handle_all(inbox)
    assert claim.CLAIM in sent
    assert claim.MOVE_AHEAD not in sent
    assert not [query for query in sent if "dispatched" in query and "INSERT" in query]
    assert fair.PLACES not in sent
    be_fair(inbox, fair_by="key:/")
    fill(inbox, "A", 1000)
    handle_all(inbox)
    assert {claim.MOVE_AHEAD, fair.PLACES} <= sent


def test_dispatchers_do_not_read_a_fair_subscription(inbox: Dsn) -> None:
    be_fair(inbox, priority={"Alarm": 2})
    dispatcher = Dispatcher(SUBSCRIPTION, Endpoint(url="http://127.0.0.1:9/"), inbox)
    with pytest.raises(UsageError, match=r"is fair \(Alarm=2 by message_type\), and dispatchers"):
        run_dispatchers([dispatcher], drain=True)


def test_processors_do_not_read_a_fair_subscription(inbox: Dsn) -> None:
    be_fair(inbox, fair_by="key")
    runner = saf.Processors(inbox, SUBSCRIPTION, Counting)
    with pytest.raises(UsageError, match=r"is fair \(by key\).*--unfair"):
        runner.drain()


class Counting(saf.Processor):
    """A processor that does nothing."""

    @saf.handles
    def count(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        """Nothing."""


def test_a_subscription_with_processors_does_not_become_fair(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        number = services.subscription(connection, SUBSCRIPTION).subscription_id
        member = Member(subscription_id=number, lease_seconds=30)
        member.join(connection)
        with pytest.raises(UsageError, match="own the shards of subscription 'billing'"):
            services.set_fairness(connection, SUBSCRIPTION, fair_by="key")
        services.set_fairness(connection, SUBSCRIPTION)


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ({"fair_by": "tenant"}, "fair_by: 'tenant' is not one of key, key:SEPARATOR"),
        ({"fair_by": "header:"}, "fair_by: 'header:'"),
        ({"fair_by": "key:" + "x" * 300}, "fair_by: "),
        ({"priority": {"Alarm": 0}}, "'Alarm' has weight 0; a weight is a number from 0.001"),
        ({"priority": {"Alarm": float("nan")}}, "weight nan"),
        ({"priority": {"Alarm": True}}, "weight True"),
        ({"priority": {"": 1}}, "a name has 1 to 255 bytes"),
        ({"priority": {str(n): 1 for n in range(101)}}, "more than 100 weights"),
        ({"priority": {"A": 1}, "priority_by": "key"}, "priority_by: 'key' is not one of"),
    ],
)
def test_what_makes_no_groups_and_no_weight_is_refused(
    inbox: Dsn, how: dict[str, Any], wrong: str
) -> None:
    with connect(inbox) as connection:
        with pytest.raises(UsageError, match=wrong.replace("(", r"\(")):
            services.set_fairness(connection, SUBSCRIPTION, **how)
        assert not services.subscription(connection, SUBSCRIPTION).fairness


def test_a_message_that_arrives_in_the_middle_of_a_backlog_is_seen(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard has an open batch by then, which is extended."""
    monkeypatch.setattr(fair, "REFRESH_SECONDS", 0)
    monkeypatch.setattr(fair, "REFRESH_RATIO", 0)
    fill(inbox, "A", 5000, keys=20)
    be_fair(inbox, fair_by="key:/")
    worker = saf.Worker(inbox, SUBSCRIPTION, max_messages=50)
    worker.handler()(lambda message, connection: effect(connection, message))
    for number, _ in enumerate(worker.deliveries()):
        if number % 10 == 5:
            fill(inbox, f"B{number}:", 3, keys=20)
    got = effects(inbox)
    assert len(got) == len({*got}) == 5000 + 3 * len(range(5, number, 10))
    for began in range(5, 95, 10):
        places = of_tenant(got, f"B{began}:")
        assert (len(places), max(places) < 50 * (began + 4)) == (3, True), (began, places)


def test_batches_that_are_extended_again_and_again_lose_and_repeat_nothing(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While transactions commit late, in another order than that of their ids."""
    monkeypatch.setattr(fair, "REFRESH_SECONDS", 0)
    monkeypatch.setattr(fair, "REFRESH_RATIO", 0)
    be_fair(inbox, fair_by="key:/")
    chance = random.Random(1)
    late = [psycopg.connect(inbox.conninfo) for _ in range(3)]
    sent = 0
    workers = [saf.Worker(inbox, SUBSCRIPTION, max_messages=12) for _ in range(2)]
    for worker in workers:
        worker.handler()(lambda message, connection: effect(connection, message))
    for turn in range(40):
        for number, connection in enumerate(late):
            tenant = f"{turn}.{number}"
            messages = chance.randint(0, 40)
            sent += messages
            connection.execute(FILL, {"tenant": tenant, "messages": messages, "keys": 9})
            if chance.random() < 0.4:
                connection.commit()
        with closing(
            cast(Generator[Any, None, None], chance.choice(workers).deliveries())
        ) as delivering:
            for _ in range(chance.randint(1, 4)):
                next(delivering, None)
    for connection in late:
        connection.commit()
        connection.close()
    got = handle_all(inbox)
    assert len(got) == len({*got}) == sent
    with connect(inbox) as connection:
        assert fetch(connection, BATCHES) == [(0, None)]
