"""Names and held messages where several act at the same time: senders, cancellers and movers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import saf
from saf.database import Dsn, fetch
from saf.sending import held
from tests.pipeline import bodies, connect, run
from tests.waits import blocked, until

RACERS = 8
LATER = datetime(2199, 1, 1, tzinfo=UTC)
PAST = datetime(2001, 1, 1, tzinfo=UTC)
OVERDUE = "UPDATE saf.held SET due = now() - interval '1 minute' WHERE due IS NOT NULL"
DUE = "UPDATE saf.held SET due = now() - interval '1 second' WHERE due IS NOT NULL"

outbox = saf.Outbox()

Act = Callable[[psycopg.Connection[Any]], Any]


def sent(dsn: Dsn) -> list[str]:
    with connect(dsn) as connection:
        found = fetch(connection, "SELECT convert_from(body, 'UTF8') FROM saf.outbox ORDER BY id")
    return [body for (body,) in found]


def hold(dsn: Dsn, name: str | None = "n", *, statement: str = DUE) -> saf.Sent:
    with dsn.connect(role="test") as connection:
        message_id = outbox.send(connection, "billing", "1", name=name, deliver_at=LATER)
        connection.execute(statement.encode())
    return message_id


def move(connection: psycopg.Connection[Any]) -> int:
    ((found,),) = fetch(connection, held.MOVE, {"most": 100})
    return int(found)


def cancel(connection: psycopg.Connection[Any]) -> bool:
    return outbox.cancel(connection, "billing", "n")


@contextmanager
def waiting(dsn: Dsn, act: Act) -> Iterator[Future[Any]]:
    """Another transaction that does something and commits, and that waits for this one."""

    def done() -> Any:
        with dsn.connect(role="test") as connection:
            return act(connection)

    with ThreadPoolExecutor(1) as pool, connect(dsn) as watcher:
        future = pool.submit(done)
        until(lambda: future.done() or blocked(watcher) == 1)
        assert not future.done()
        yield future


def race(dsn: Dsn, names: int) -> None:
    """Racers send each name at about the same time, each in a transaction of its own."""
    found: list[list[saf.Sent]] = [[] for _ in range(RACERS)]
    barrier = threading.Barrier(RACERS)

    def send(number: int) -> None:
        with psycopg.connect(dsn.conninfo) as connection:
            for name in range(names):
                if name % 50 == 0:
                    barrier.wait()
                ids = found[number]
                deliver_at = LATER if name % 2 else None
                ids.append(
                    outbox.send(
                        connection,
                        *("billing", str(name)),
                        name=f"name {name}",
                        deliver_at=deliver_at,
                    )
                )
                connection.commit()

    with ThreadPoolExecutor(RACERS) as pool:
        list(pool.map(send, range(RACERS)))
    for ids in zip(*found, strict=True):
        assert len({*ids}) == 1
        assert sum(one.is_new for one in ids) == 1
    with connect(dsn) as connection:
        assert fetch(connection, held.MOVE, {"most": names}) == [(0,)]
        connection.execute(DUE.encode())
        assert fetch(connection, held.MOVE, {"most": names}) == [(names // 2,)]
    assert sorted(map(int, sent(dsn))) == [*range(names)]


@pytest.mark.every_postgresql
def test_of_eight_senders_of_a_name_one_sends(app: Dsn) -> None:
    race(app, 200)


@pytest.mark.full
def test_of_eight_senders_of_ten_thousand_names_one_sends_each(app: Dsn) -> None:
    race(app, 10_000)


@pytest.mark.parametrize("deliver_at", [None, LATER])
@pytest.mark.parametrize("first_commits", [True, False])
def test_a_sender_waits_for_another_of_the_name_and_then_acts_on_what_is_there(
    app: Dsn, first_commits: bool, deliver_at: datetime | None
) -> None:
    def send(body: str) -> Act:
        return lambda connection: outbox.send(
            connection, "billing", body, name="n", deliver_at=deliver_at
        )

    with app.connect(role="test") as connection:
        first = send("1")(connection)
        with waiting(app, send("2")) as other:
            (connection.commit if first_commits else connection.rollback)()
            second = other.result()
    assert (second == first, second.is_new) == (first_commits, not first_commits)
    with connect(app) as connection:
        connection.execute(DUE.encode())
        move(connection)
    assert sent(app) == (["1"] if first_commits else ["2"])


CHANGES: dict[str, Act] = {
    "cancel": cancel,
    "reschedule": lambda c: outbox.reschedule(c, "billing", "n", LATER),
    "replace": lambda c: (
        not outbox.send(c, "billing", "2", name="n", deliver_at=LATER, if_there="replace").is_new
    ),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.every_postgresql
def test_what_is_being_moved_is_sent_or_changed_but_never_both(
    app: Dsn, moves: bool, how: str
) -> None:
    hold(app)
    with app.connect(role="test") as mover:
        assert move(mover) == 1
        with waiting(app, CHANGES[how]) as other:
            (mover.commit if moves else mover.rollback)()
            assert other.result() == (not moves or how == "replace")
    with connect(app) as connection:
        assert move(connection) == 0
        left = fetch(connection, "SELECT convert_from(body, 'UTF8'), due FROM saf.held")
    assert sent(app) == (["1"] if moves else [])
    if moves:
        assert left == [("", None)]
    else:
        assert left == {"cancel": [], "reschedule": [("1", LATER)]}.get(how, [("2", LATER)])


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("changes", [True, False])
def test_what_is_being_changed_does_not_move_and_nobody_waits(
    app: Dsn, changes: bool, how: str
) -> None:
    hold(app)
    with app.connect(role="test") as changer, connect(app) as mover:
        assert CHANGES[how](changer)
        mover.execute("SET statement_timeout = '10s'")
        assert move(mover) == 0
        (changer.commit if changes else changer.rollback)()
        assert move(mover) == (not changes)
    assert sent(app) == ([] if changes else ["1"])


def test_cancelled_or_sent_never_both_never_neither(app: Dsn, mom: Dsn) -> None:
    names = [f"name {n}" for n in range(300)]
    with app.connect(role="test") as connection:
        for name in names:
            outbox.send(connection, "billing", name, name=name, deliver_at=LATER)
        connection.execute(DUE.encode())
    taken: set[str] = set()
    left = threading.Event()

    def cancels(seed: int) -> set[str]:
        order = random.Random(seed).sample(names, len(names))
        mine = set()
        with psycopg.connect(app.conninfo) as connection:
            for name in order[:150]:
                if outbox.cancel(connection, "billing", name):
                    mine.add(name)
                connection.commit()
        return mine

    def moves(_: int) -> None:
        with connect(app) as connection:
            while not left.is_set():
                fetch(connection, held.MOVE, {"most": 5})

    with ThreadPoolExecutor(6) as pool:
        movers = [pool.submit(moves, n) for n in range(2)]
        results = [*pool.map(cancels, range(4))]
        left.set()
        for mover in movers:
            mover.result()
    for mine in results:
        assert not taken & mine
        taken |= mine
    run(app, mom=mom)
    assert sorted(bodies(mom)) == sorted({*names} - taken)


def test_a_commit_whose_answer_is_lost_is_not_done_again(app: Dsn) -> None:
    hold(app)
    with connect(app) as connection:
        move(connection)  # the answer does not arrive
    with connect(app) as connection:
        assert move(connection) == 0
    assert sent(app) == ["1"]


def test_one_moves_at_a_time_so_that_nothing_is_overtaken(app: Dsn) -> None:
    hold(app, "1")
    hold(app, "2", statement="SELECT")
    with app.connect(role="test") as first, connect(app) as second:
        assert move(first) == 1
        second.execute(DUE.encode() + b" AND name = '2'")
        assert move(second) == 0
        first.commit()
        assert move(second) == 1


def test_who_finds_a_message_there_does_not_keep_it_from_moving(app: Dsn) -> None:
    first = hold(app)
    with app.connect(role="test") as connection, connect(app) as mover:
        assert outbox.send(connection, "billing", "2", name="n") == first
        assert move(mover) == 1
    assert sent(app) == ["1"]


def test_who_finds_a_message_there_waits_for_its_cancelling(app: Dsn) -> None:
    hold(app)
    with app.connect(role="test") as connection:
        assert cancel(connection)
        again = waiting(app, lambda other: outbox.send(other, "billing", "2", name="n"))
        with again as other:
            connection.commit()
            assert other.result().is_new
    assert sent(app) == ["2"]


def test_a_message_that_senders_keep_locked_is_waited_for_once_it_is_overdue(app: Dsn) -> None:
    hold(app)
    later: Act = lambda c: outbox.send(  # noqa: E731
        c, "billing", "2", name="n", if_there="later", later_limit=timedelta(0)
    )
    with connect(app) as connection:
        connection.execute("ALTER FUNCTION saf.lock_overdue SET lock_timeout = '60s'")
    with app.connect(role="test") as connection:
        later(connection)
        with connect(app) as mover:
            assert move(mover) == 0  # not overdue
    with connect(app) as connection:
        connection.execute(OVERDUE.encode())
    with app.connect(role="test") as connection:
        later(connection)
        with waiting(app, move) as mover_:
            connection.commit()
            assert mover_.result() == 1
    assert sent(app) == ["2"]


def test_an_overdue_message_that_stays_locked_is_left_for_the_next_time(app: Dsn) -> None:
    hold(app, statement=OVERDUE)
    hold(app, "other")
    with app.connect(role="test") as connection:
        assert cancel(connection)
        with connect(app) as mover:
            assert move(mover) == 1
            assert move(mover) == 0
        connection.rollback()
    with connect(app) as mover:
        assert move(mover) == 1


def test_a_storm_of_later_sends_is_one_message_not_later_than_its_limit(app: Dsn) -> None:
    sends = 40

    def storm(number: int) -> int:
        new = 0
        with psycopg.connect(app.conninfo) as connection:
            for n in range(sends):
                new += outbox.send(
                    connection,
                    *("search", f"{number} {n}"),
                    name="reindex",
                    deliver_at=datetime.now(UTC) + timedelta(hours=1 + n),
                    if_there="later",
                    later_limit=timedelta(hours=5),
                ).is_new
                connection.commit()
        return new

    with ThreadPoolExecutor(RACERS) as pool:
        assert sum(pool.map(storm, range(RACERS))) == 1
    with connect(app) as connection:
        ((limit,),) = fetch(connection, "SELECT due - created_at FROM saf.held")
        assert limit == timedelta(hours=5)
        connection.execute(DUE.encode())
        assert move(connection) == 1
    (body,) = sent(app)
    assert body.endswith(f" {sends - 1}")


def test_two_who_send_many_names_in_different_orders_do_not_wait_in_a_circle(app: Dsn) -> None:
    def many(*names: str) -> Act:
        messages = [saf.Message(service="billing", body=name, name=name) for name in names]
        return lambda connection: [one.is_new for one in outbox.send_many(connection, messages)]

    with app.connect(role="test") as holder:
        outbox.send(holder, "billing", "m", name="m")
        with waiting(app, many("a", "m", "z")) as first, ThreadPoolExecutor(1) as pool:

            def second() -> Any:
                with app.connect(role="test") as connection:
                    return many("z", "a")(connection)

            other = pool.submit(second)
            with connect(app) as watcher:
                until(lambda: blocked(watcher) == 2)
            holder.rollback()
            assert first.result() == [True] * 3
            assert other.result() == [False] * 2
    assert sorted(sent(app)) == ["a", "m", "z"]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_with_one_snapshot_a_name_that_was_taken_meanwhile_is_the_servers_error(
    app: Dsn, level: str
) -> None:
    with app.connect(role="test") as connection:
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        connection.execute("SELECT FROM saf.held")
        with app.connect(role="test") as other:
            outbox.send(other, "billing", "1", name="n")
        with pytest.raises(psycopg.errors.SerializationFailure):
            outbox.send(connection, "billing", "2", name="n")
        connection.rollback()
        assert not outbox.send(connection, "billing", "2", name="n").is_new
    assert sent(app) == ["1"]
