"""Guarantee 5: of two owners of a shard, only the newer can write, at the source and beyond."""

from __future__ import annotations

import psycopg
import pytest

from saf.database import Dsn
from saf.engine.work import Receipt
from saf.errors import Fenced
from saf.log import cursor
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, new_member, outlive_lease, send

pytestmark = pytest.mark.every_postgresql


def errors(receipts: list[Receipt]) -> set[str]:
    return {receipt.error_kind for receipt in receipts if receipt.error_kind}


def test_a_zombie_cannot_write_at_the_destination_after_the_new_owner_did(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key="k")
    with (
        Cycle(app, forwarding_rules(mom=mom)) as zombie,
        Cycle(app, forwarding_rules(mom=mom)) as owner,
    ):
        zombie.open()
        outlive_lease(app)
        owner.run()
        with connect(mom) as connection:
            before = connection.execute("TABLE saf.watermark").fetchall()
        assert errors(zombie.deliver()) == {"Fenced"}
        with connect(mom) as connection:
            assert connection.execute("TABLE saf.watermark").fetchall() == before
    assert bodies(mom) == [str(number) for number in range(10)]


def test_a_zombie_that_is_first_at_the_destination_still_duplicates_nothing(
    app: Dsn, mom: Dsn
) -> None:
    """It stores rows of the same, unchanged batch; the new owner finds them by the watermark."""
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key="k")
    with (
        Cycle(app, forwarding_rules(mom=mom)) as zombie,
        Cycle(app, forwarding_rules(mom=mom)) as owner,
    ):
        zombie.open()
        outlive_lease(app)
        owner.open()
        assert errors(zombie.deliver()) == {"Fenced"}, "it stores, and learns it when it marks"
        receipts = owner.deliver()
        owner.close(receipts)
        assert sum(receipt.dropped for receipt in receipts) == 10
    assert bodies(mom) == [str(number) for number in range(10)]


def test_a_zombie_cannot_advance_attempt_hold_or_close_at_the_source(app: Dsn) -> None:
    with connect(app) as one, connect(app) as two:
        send(one, "x")
        zombie = new_member(one)
        zombie.balance(one)
        cursor.open_batch(one, "outbox", zombie)
        (batch,) = cursor.in_hand(one, "outbox", zombie)
        outlive_lease(app)
        new_member(two).balance(two)
        before = one.execute("TABLE saf.cursor").fetchall()
        for write in (
            lambda: cursor.advance(one, batch, 99),
            lambda: cursor.attempt(one, batch, 99),
            lambda: cursor.close(one, [batch]),
            lambda: cursor.lock_cursors(one, batch),
        ):
            with pytest.raises(Fenced) as caught, one.transaction():
                write()
            assert caught.value.shards == batch.shards
        assert one.execute("TABLE saf.cursor").fetchall() == before
        with pytest.raises(Fenced):
            zombie.renew(one)
        with pytest.raises(Fenced):
            zombie.balance(one)


def test_a_task_of_a_closed_batch_cannot_move_the_position_of_the_next(app: Dsn, mom: Dsn) -> None:
    """The same owner and epoch: only the batch tells a task that Spark gave up from today's."""
    with Cycle(app, forwarding_rules(mom=mom)) as cycle, connect(app) as connection:
        send(connection, "old")
        (late, *_) = cycle.open()
        cycle.close(cycle.deliver())
        send(connection, "new")
        cycle.open()
        with pytest.raises(Fenced), connection.transaction():
            cursor.advance(connection, late.batch, 1 << 40)
        cycle.close(cycle.deliver())
    assert bodies(mom) == ["old", "new"]


def test_a_killed_member_loses_its_shards_at_once_and_a_hanging_one_at_the_end_of_its_lease(
    app: Dsn,
) -> None:
    with connect(app) as one, connect(app) as two, connect(app) as three:
        hanging, killed = new_member(one), new_member(two)
        assert (hanging.balance(one), killed.balance(two)) == (32, 32)
        three.execute("SELECT pg_terminate_backend(%s, 5000)", [two.info.backend_pid])
        heir = new_member(three)
        assert heir.balance(three) == 32
        outlive_lease(app)
        heir.renew(three)
        assert heir.balance(three) == 64


def test_two_members_never_own_the_same_shard(app: Dsn) -> None:
    connections = [connect(app) for _ in range(5)]
    members = [new_member(connection) for connection in connections]
    for _ in range(2):
        for member, connection in zip(members, connections, strict=True):
            member.balance(connection)
    with connect(app) as connection:
        owners = connection.execute(
            "SELECT count(*), count(DISTINCT owner) FROM saf.cursor WHERE owner IS NOT NULL"
        ).fetchone()
    assert owners == (64, 5)
    for connection in connections:
        connection.close()


def test_the_epoch_rises_with_each_change_of_owner(app: Dsn) -> None:
    def epochs(connection: psycopg.Connection[object]) -> set[object]:
        return {row[0] for row in connection.execute("SELECT epoch FROM saf.cursor").fetchall()}  # type: ignore[index]

    with connect(app) as connection:
        seen = []
        for _ in range(3):
            member = new_member(connection)
            member.balance(connection)
            seen.append(epochs(connection))
            member.leave(connection)
    assert seen == [{1}, {2}, {3}]
