"""Who owns a shard: by epoch, in turn, for the length of a lease; what is written only rises."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from saf.broker import services
from saf.broker.embedded import EmbeddedServer, programs
from saf.broker.migrate import migrate
from saf.database import Dsn, fetch
from saf.errors import Fenced
from saf.forwarding.broker import SourceBroker
from saf.log import cursor
from saf.log.cursor import Batch
from saf.log.shards import TAKE_TURN, Member, living
from saf.receiving import claim, hand
from saf.receiving.link import connected
from saf.receiving.membership import Membership
from tests.pipeline import connect, new_member, send
from tests.receivers import put
from tests.waits import blocked, until

SHARDS = 64


@pytest.fixture
def owner(source: psycopg.Connection[Any]) -> Member:
    member = new_member(source)
    assert member.balance(source) == SHARDS
    return member


@pytest.fixture
def batch(source: psycopg.Connection[Any], owner: Member) -> Batch:
    """Of all shards, with a message in one of them."""
    send(source, "x")
    cursor.open_batch(source, "outbox", owner)
    (batch,) = cursor.in_hand(source, "outbox", owner)
    return batch


def outlive_lease(connection: psycopg.Connection[Any]) -> None:
    connection.execute("UPDATE saf.member SET lease_until = now() - interval '1 second'")


# What is written only rises


def test_a_late_mark_does_not_take_a_position_back(
    source: psycopg.Connection[Any], batch: Batch
) -> None:
    """As of a task that Spark has started twice, the slower one."""
    for position in (10, 3):
        with source.transaction():
            cursor.advance(source, batch, position)
    assert fetch(source, "SELECT DISTINCT position FROM saf.cursor") == [(10,)]


def test_a_late_attempt_does_not_take_back_what_was_attempted(
    source: psycopg.Connection[Any], batch: Batch
) -> None:
    """What an earlier attempt may have sent would be sent again."""
    before = []
    for position in (10, 3, 0):
        with source.transaction():
            before.append(set(cursor.attempt(source, batch, position).values()))
    assert before == [{0}, {10}, {10}]


def test_closing_begins_the_next_batch_from_nothing(
    source: psycopg.Connection[Any], batch: Batch
) -> None:
    with source.transaction():
        cursor.attempt(source, batch, 7)
        cursor.advance(source, batch, 7)
    cursor.close(source, [batch])
    marks = "SELECT DISTINCT position, attempted, open IS NULL FROM saf.cursor"
    assert fetch(source, marks) == [(0, 0, True)]


def test_batches_are_closed_all_or_none(source: psycopg.Connection[Any], batch: Batch) -> None:
    good, lost = batch.split(2)
    other = replace(lost, epochs=tuple((shard, epoch + 1) for shard, epoch in lost.epochs))
    with pytest.raises(Fenced):
        cursor.close(source, [good, other])
    assert fetch(source, "SELECT count(*) FROM saf.cursor WHERE open IS NULL") == [(0,)]


# A batch


def test_shards_that_are_opened_together_are_one_batch(
    source: psycopg.Connection[Any], owner: Member, batch: Batch
) -> None:
    """Also if some of them have had more batches than others."""
    few = replace(batch, epochs=batch.epochs[:5])
    for _ in range(2):
        cursor.close(source, [few])
        cursor.open_batch(source, "outbox", owner)
        (few, *_) = [b for b in cursor.in_hand(source, "outbox", owner) if len(b.epochs) == 5]
    cursor.close(source, cursor.in_hand(source, "outbox", owner))
    # what they had completed then, they have all completed now
    source.execute("UPDATE saf.cursor SET done = pg_current_snapshot()")
    (whole,) = cursor.open_batch(source, "outbox", owner)
    assert len(cursor.in_hand(source, "outbox", owner)) == 1
    assert whole.number > few.number, "a destination drops a batch whose number did not rise"


def test_a_batch_read_again_has_not_what_committed_since(
    app: Dsn, source: psycopg.Connection[Any], owner: Member
) -> None:
    with app.connect(role="test") as late:
        send(late, "late")
        send(source, "early")
        cursor.open_batch(source, "outbox", owner)
        late.commit()
    (batch,) = cursor.in_hand(source, "outbox", owner)
    assert fetch(source, batch.select(["body"])) == [(b"early",)]


def test_what_is_complete_is_not_read_again(source: psycopg.Connection[Any], owner: Member) -> None:
    for body in ("1", "2", "3"):
        send(source, body, key="k")
    cursor.open_batch(source, "outbox", owner)
    (batch,) = cursor.in_hand(source, "outbox", owner)
    ((_, second, _),) = [[id_ for (id_,) in fetch(source, batch.select(["id"]))]]
    with source.transaction():
        cursor.advance(source, batch, second)
    (batch,) = cursor.in_hand(source, "outbox", owner)
    assert fetch(source, batch.select(["body"])) == [(b"3",)]


# Two that write at the same time


def test_of_two_that_attempt_at_the_same_time_only_one_hears_that_nobody_has_before(
    app: Dsn, source: psycopg.Connection[Any], batch: Batch
) -> None:
    """As a task and its twin: each would send at most once, and both together twice."""
    with connect(app) as task, connect(app) as twin, ThreadPoolExecutor(1) as threads:

        def attempt_too() -> dict[int, int]:
            with twin.transaction():
                return cursor.attempt(twin, batch, 7)

        with task.transaction():
            assert set(cursor.attempt(task, batch, 7).values()) == {0}
            second = threads.submit(attempt_too)
            until(lambda: blocked(source))
        assert set(second.result().values()) == {7}


def test_cursors_that_are_locked_are_so_until_the_transaction_ends(
    app: Dsn, source: psycopg.Connection[Any], batch: Batch
) -> None:
    """What is set aside with them is looked for and written by one owner at a time."""
    with connect(app) as other:
        with source.transaction():
            assert cursor.lock_cursors(source, batch) == 0
            with pytest.raises(psycopg.errors.LockNotAvailable):
                other.execute("SELECT FROM saf.cursor WHERE shard = 9 FOR UPDATE NOWAIT")
        other.execute("SELECT FROM saf.cursor WHERE shard = 9 FOR UPDATE NOWAIT")


def test_a_batch_is_finished_once_all_of_its_shards_are_closed(
    source: psycopg.Connection[Any], batch: Batch
) -> None:
    """Whoever has not heard the answer to a commit asks this."""
    assert not cursor.is_finished(source, batch)
    some, others = batch.split(2)
    cursor.close(source, [some])
    assert cursor.is_finished(source, some)
    assert not cursor.is_finished(source, batch)
    cursor.close(source, [others])
    assert cursor.is_finished(source, batch)


def test_a_batch_has_more_than_as_many_rows_as_it_has_left_and_not_one_more(
    source: psycopg.Connection[Any], owner: Member
) -> None:
    for body in ("1", "2", "3"):
        send(source, body, key="k")
    assert cursor.new_rows(source, "outbox", cursor.owned(source, "outbox", owner).idle, 2) == 2
    assert cursor.new_rows(source, "outbox", cursor.owned(source, "outbox", owner).idle, 9) == 3
    (batch,) = cursor.open_batch(source, "outbox", owner)
    assert [cursor.has_more_than(source, batch, rows) for rows in (2, 3)] == [True, False]


# A lease and a session


def test_a_lease_lasts_its_term_from_when_the_member_was_last_heard_of(
    source: psycopg.Connection[Any], owner: Member
) -> None:
    """A driver that was stopped for 20 seconds may not have the full term after it."""
    left = "SELECT extract(epoch FROM lease_until - clock_timestamp())::float FROM saf.member"
    long = replace(owner, lease_seconds=1000.0)
    for silent_seconds in (0.0, 900.0):
        long.renew(source, silent_seconds)
        ((seconds,),) = fetch(source, left)
        assert 900 - silent_seconds < seconds <= 1000 - silent_seconds


def test_a_member_is_not_kept_alive_by_its_session_in_another_database(
    source: psycopg.Connection[Any], owner: Member, other: Dsn
) -> None:
    """A database that was copied from a template has the members of the other one."""
    with connect(other) as copy:
        copy.execute(
            "INSERT INTO saf.member (member_id, subscription_id, name, lease_until) "
            "SELECT %s, subscription_id, 'copied', now() + interval '1 h' "
            "FROM saf.subscription WHERE name = 'forwarder'",
            [owner.member_id],
        )
        ((number,),) = fetch(copy, "SELECT subscription_id FROM saf.member")
        assert living(copy, number) == []
    assert living(source, owner.subscription_id) == [owner.name]


# By owner and epoch


def test_a_shard_that_went_and_came_back_takes_no_writes_of_before(
    app: Dsn, source: psycopg.Connection[Any], owner: Member, batch: Batch
) -> None:
    """The same owner and batch: only the epoch tells what others may have done meanwhile."""
    with connect(app) as elsewhere:
        other = new_member(elsewhere)
        other.balance(elsewhere)
        assert owner.balance(source) == SHARDS // 2
        other.balance(elsewhere)
        other.leave(elsewhere)
    assert owner.balance(source) == SHARDS
    with pytest.raises(Fenced) as caught, source.transaction():
        cursor.advance(source, batch, 99)
    assert len(caught.value.shards) == SHARDS // 2


def test_a_member_holds_a_shard_only_by_the_epoch_that_it_has_now(
    source: psycopg.Connection[Any], owner: Member
) -> None:
    with source.transaction():
        assert owner.hold(source, [(3, 1), (4, 1)]) == {(3, 1), (4, 1)}
        assert owner.hold(source, [(3, 0), (4, 1)]) == {(4, 1)}
        assert owner.hold(source, [(3, 2)]) == set()


def test_a_shard_that_nobody_owns_takes_no_writes(
    source: psycopg.Connection[Any], owner: Member, batch: Batch
) -> None:
    """Its member has left, and nobody has raised the epoch yet."""
    owner.leave(source)
    with pytest.raises(Fenced), source.transaction():
        cursor.advance(source, batch, 99)


def test_who_leaves_frees_its_shards_at_once(app: Dsn) -> None:
    with connect(app) as one, connect(app) as two:
        leaving = new_member(one)
        leaving.balance(one)
        leaving.leave(one)
        assert fetch(two, "SELECT count(owner) FROM saf.cursor") == [(0,)]
        assert fetch(two, "SELECT FROM saf.member") == []


def test_a_member_that_is_asked_to_stop_gets_no_share(
    app: Dsn, source: psycopg.Connection[Any], owner: Member
) -> None:
    with connect(app) as elsewhere:
        other = new_member(elsewhere)
        owner.stop(source)
        other.balance(elsewhere)
        shares = fetch(elsewhere, "SELECT count(*) FROM saf.cursor WHERE owner IS NULL")
        assert shares == [(0,)], "the one that stops keeps what it has in hand"
        with pytest.raises(Fenced):
            owner.balance(source)
        owner.take_back_stop(source)
        assert owner.balance(source) == SHARDS // 2


# In turn, and with the fewest moves


def test_members_balance_one_at_a_time(app: Dsn, source: psycopg.Connection[Any]) -> None:
    """What each decides rests on what all hold."""
    with connect(app) as elsewhere:
        member = new_member(elsewhere)
        elsewhere.execute("SET lock_timeout = '200ms'")
        with source.transaction():
            source.execute(TAKE_TURN, {"subscription_id": member.subscription_id})
            with pytest.raises(psycopg.errors.LockNotAvailable):
                member.balance(elsewhere)
        assert member.balance(elsewhere) == SHARDS


def test_a_member_shares_only_the_shards_of_its_own_subscription(
    app: Dsn, source: psycopg.Connection[Any]
) -> None:
    """Otherwise shards would be without an owner, or have one that reads another log's rows."""
    with connect(app) as elsewhere:
        services.create_service(elsewhere, "billing")
        number = services.subscription(elsewhere, "billing").subscription_id
        receiver = Member(subscription_id=number, lease_seconds=30)
        receiver.join(elsewhere)
        forwarder = new_member(source)
        assert forwarder.balance(source) == SHARDS
        owners = "SELECT subscription_id, owner, count(*) FROM saf.cursor GROUP BY 1, 2 ORDER BY 1"
        first = (forwarder.subscription_id, forwarder.member_id, SHARDS)
        assert fetch(elsewhere, owners) == [first, (number, None, SHARDS)]
        assert receiver.balance(elsewhere) == SHARDS
        assert fetch(elsewhere, owners) == [first, (number, receiver.member_id, SHARDS)]
        assert forwarder.settled(source)


def test_shards_without_an_open_batch_go_first(
    app: Dsn, source: psycopg.Connection[Any], owner: Member, batch: Batch
) -> None:
    """The next owner of an open one has to read it again."""
    low = batch.epochs[: SHARDS // 2]
    cursor.close(source, [replace(batch, epochs=low)])
    with connect(app) as elsewhere:
        new_member(elsewhere)
        released: list[int] = []
        owner.balance(source, released.extend)
    assert sorted(released) == [shard for shard, _ in low]


# For the length of a lease


def test_a_membership_is_renewed_well_before_its_lease_is_over(app: Dsn) -> None:
    with connect(app) as connection:
        services.create_service(connection, "billing")
        subscription = services.subscription(connection, "billing")
        membership = Membership(app, subscription.subscription_id, lease_seconds=3)
        ((first,),) = fetch(connection, "SELECT lease_until FROM saf.member")
        renewed = "SELECT lease_until > %(first)s, clock_timestamp() < %(first)s FROM saf.member"
        while not (state := fetch(connection, renewed, {"first": first})[0])[0]:
            time.sleep(0.02)
        membership.leave()
    assert state == (True, True), "the first lease was over before it was renewed"


def test_a_forwarder_renews_its_lease_well_before_it_is_over(
    app: Dsn, source: psycopg.Connection[Any]
) -> None:
    broker = SourceBroker("app", app, lease_seconds=3)
    broker.tend()
    ((first,),) = fetch(source, "SELECT lease_until FROM saf.member")
    while not broker.renewal_due:
        time.sleep(0.02)
    in_time = "SELECT clock_timestamp() < %(first)s"
    assert fetch(source, in_time, {"first": first}) == [(True,)]
    broker.renew()
    renewed = "SELECT lease_until > %(first)s FROM saf.member"
    assert fetch(source, renewed, {"first": first}) == [(True,)]
    assert not broker.renewal_due
    broker.leave()


def test_a_forgotten_forwarder_comes_back_as_a_new_member_at_once(
    app: Dsn, source: psycopg.Connection[Any]
) -> None:
    broker = SourceBroker("app", app, lease_seconds=0)
    broker.tend()
    assert broker.shards == SHARDS
    outlive_lease(source)
    other = new_member(source)
    assert other.balance(source) == SHARDS
    other.leave(source)
    broker.tend()
    assert broker.shards == SHARDS
    assert fetch(source, "SELECT count(owner) FROM saf.cursor") == [(SHARDS,)]
    broker.leave()


# Whose delivery failed


@pytest.mark.parametrize("how", ["leaves", "gives some away", "is forgotten", "takes them"])
def test_that_a_delivery_failed_is_not_forgotten_when_its_shard_changes_hands(
    mom: Dsn, how: str
) -> None:
    """The trace of it is in the last version of the cursor, which any write replaces."""
    with connect(mom) as connection, connect(mom) as elsewhere, connected(mom) as link:
        services.create_service(connection, "billing")
        put(mom, "1", key="k46")
        ((shard,),) = fetch(connection, "SELECT shard FROM saf.inbox")
        assert shard == SHARDS - 1
        number = services.subscription(connection, "billing").subscription_id
        members = [Member(subscription_id=number, lease_seconds=30) for _ in range(2)]
        members[0].join(connection)
        if how != "takes them":
            members[0].balance(connection)
        owner = None if how == "takes them" else members[0].member_id
        reader = hand.Reader(subscription_id=number, name="billing", service="billing", owner=owner)
        with link.transaction():
            assert claim.claim_shard(link.raw, reader, shard, 1) is not None
            raise psycopg.Rollback
        if how == "leaves":
            members[0].leave(connection)
        elif how == "is forgotten":
            outlive_lease(connection)
            living(elsewhere, number)
        elif how == "takes them":
            members[0].balance(connection)
        else:
            members[1].join(elsewhere)
            members[0].balance(connection)  # the highest go
        noted = "SELECT shard FROM saf.cursor WHERE allowance = 1"
        assert fetch(connection, noted) == [(shard,)]


def test_a_delivery_that_failed_is_told_by_its_transaction_also_after_ids_have_wrapped_around(
    own_server: EmbeddedServer,
) -> None:
    """A row's xmax has 32 bits, so many transactions share it: the latest of them is meant."""
    own_server.stop()
    owner = own_server.data_dir.stat()
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:
        identity = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    subprocess.run(
        [programs(own_server.version) / "pg_resetwal", "-e", "3", own_server.data_dir],
        check=True,
        capture_output=True,
        cwd="/",
        **identity,
    )
    own_server.start()
    inbox = own_server.create_database("mom")
    migrate(inbox)
    with connect(inbox) as connection:
        services.create_service(connection, "billing")
        assert fetch(connection, "SELECT pg_current_xact_id()::text::bigint >> 32") == [(3,)]
        reader = hand.Reader(
            subscription_id=services.subscription(connection, "billing").subscription_id,
            name="billing",
            service="billing",
        )
    put(inbox, "1", key="k")
    with connected(inbox) as link:
        with link.transaction():
            assert claim.claim(link.raw, reader, 10) is not None
            raise psycopg.Rollback
        with link.transaction():
            again = claim.claim(link.raw, reader, 10)
    assert again is not None
    assert len(again.failed) == 1
