"""The checker finds what is wrong: planted bugs, each with the scenario that brings it out.

Each scenario is run as it is, and must come out clean, and then with its bug.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import sql

import saf
import saf.engine.delivery
from saf import Outbox
from saf.database import Dsn
from saf.destinations import Chunk, postgresql
from saf.destinations.postgresql import PostgresInbox
from saf.dialogs import arrival
from saf.dialogs.facts import Facts, Verdict, judge
from saf.engine.aside import Aside
from saf.engine.at_source import AtSource
from saf.engine.storing import Storing
from saf.errors import Fenced, Rejected
from saf.failpoints import arm
from saf.log import cursor, ring
from saf.log.cursor import Batch
from saf.operating.maintenance import purge_broker
from saf.setaside import dead, parking
from tests.crash.checker import check, left, listen
from tests.crash.plan import QUALITIES
from tests.crash.site import POLITE
from tests.crash.talks import DESK, STOCK, hear, hear_and_answer, introduce, talk
from tests.crash.writers import ACCOUNTS, TABLES, _count_up
from tests.pipeline import Cycle, connect, let_time_pass, policy
from tests.receivers import consume

NOWHERE = Dsn("host=/nonexistent dbname=mom")


class Crash(Exception):
    """The process dies here."""


@dataclass
class World:
    """Two stores and an application, driven step by step."""

    app: Dsn
    mom: Dsn
    other: Dsn
    patch: pytest.MonkeyPatch
    outbox: Outbox = field(default_factory=Outbox)
    talks: bool = False

    def send(self, account: str = "orders-0", times: int = 1, *, poison: bool = False) -> None:
        with self.app.connect(role="test") as connection:
            for _ in range(times):
                _count_up(connection, self.outbox, account, poison)

    @contextmanager
    def late(self, account: str) -> Iterator[None]:
        """A transaction that has its ids before what is done meanwhile, and commits after."""
        with self.app.connect(role="test") as connection:
            _count_up(connection, self.outbox, account, False)
            yield

    def cycle(self, **destinations: Dsn) -> Cycle:
        stores = {"mom": self.mom, "other": self.other, **destinations}
        rules = policy("exactly_once", 100, **stores)
        return Cycle(self.app, rules)

    def forward(self, times: int = 1, **destinations: Dsn) -> None:
        for _ in range(times):
            with self.cycle(**destinations) as cycle:
                cycle.run()
            let_time_pass(self.app)

    def crash(self, point: str) -> None:
        with suppress(Crash):
            arm(point, _crash)
            self.forward()

    def take_over(self) -> None:
        """Another forwarder, as if the lease of the one at work were over."""
        with connect(self.app) as connection:
            connection.execute("DELETE FROM saf.member")
        self.forward(2)

    def findings(self) -> set[str]:
        stores = [self.mom.conninfo, self.other.conninfo]
        verdict = check(self.app.conninfo, stores, QUALITIES)
        if self.talks:
            listen(self.app.conninfo, self.mom.conninfo, verdict)
        return set(verdict.findings) | ({"left"} if left(self.app.conninfo) else set())

    def talk(self) -> None:
        """Say something to the MOM store, in a dialog."""
        if not self.talks:
            introduce(self.app, self.mom)
            self.talks = True
        with self.app.connect(role="test") as connection:
            talk(connection, random.Random(1))

    def hear(self) -> None:
        """All that has been said to the MOM store; and at the application, its answers."""
        consume(self.mom, 1, STOCK, hear_and_answer)
        with Cycle(self.mom, policy("exactly_once", 100, app=self.app)) as back:
            back.run()
        consume(self.app, 1, DESK, hear)


def _crash() -> None:
    raise Crash


@pytest.fixture
def world(new_broker: Callable[[str], Dsn], monkeypatch: pytest.MonkeyPatch) -> Callable[[], World]:
    def build() -> World:
        made = World(new_broker("app"), new_broker("mom"), new_broker("other"), monkeypatch)
        with connect(made.app) as connection:
            connection.execute(TABLES)
            connection.execute("INSERT INTO account SELECT unnest(%s::text[]), 0", [ACCOUNTS])
            for service, quality in QUALITIES.items():
                destination = "other" if service == "audit" else "mom"
                connection.execute(
                    "INSERT INTO saf.route (service, destination, quality) VALUES (%s, %s, %s)",
                    [service, destination, quality],
                )
        for store in (made.mom, made.other):
            with connect(store) as connection:
                connection.execute(POLITE)
        return made

    return build


# Scenarios


def a_crash_after_the_store(world: World) -> None:
    world.send(times=5)
    world.crash("mom_commit")
    world.forward()


def a_crash_before_the_store(world: World) -> None:
    world.send(times=5)
    world.crash("mom_insert")
    world.forward()


def a_late_committer(world: World) -> None:
    with world.late("orders-0"):
        world.send("orders-1", 3)
        world.forward()
    world.forward()


def a_commit_during_a_batch(world: World) -> None:
    world.send(times=3)
    with world.cycle() as cycle:
        cycle.open()
        receipts = cycle.deliver()
        world.send(times=2)
        cycle.close(receipts)
    world.forward()


def a_store_that_is_down(world: World) -> None:
    for _ in range(3):
        world.send("orders-0")
        world.send("audit-0", 2)
    world.forward(other=NOWHERE)
    world.forward(2)


def a_poison_message(world: World) -> None:
    world.send(times=2)
    world.send(poison=True)
    world.send(times=2)
    world.forward()


def a_crash_after_a_poison_message(world: World) -> None:
    world.send(times=2)
    world.send(poison=True)
    world.send(times=2)
    world.crash("mark_forwarded")
    world.forward()


def a_commit_at_the_source_without_answer(world: World) -> None:
    at_source = AtSource.__call__

    def twice(self: AtSource, write: Callable[[psycopg.Connection[Any]], Any]) -> Any:
        at_source(self, write)
        return at_source(self, write)

    world.patch.setattr(AtSource, "__call__", twice)
    a_poison_message(world)


def at_most_once_and_a_crash(world: World) -> None:
    world.send("metrics-0", 3)
    world.crash("mom_commit")
    world.forward()


def at_most_once_and_a_pause_before_the_store(world: World) -> None:
    world.send("metrics-0")
    store_once = Storing.store_once
    paused: list[bool] = []

    def after_a_pause(self: Storing, *arguments: Any) -> None:
        if not paused:
            paused.append(True)
            world.take_over()
            world.send("metrics-0")
            world.forward()
        store_once(self, *arguments)

    world.patch.setattr(Storing, "store_once", after_a_pause)
    world.forward()


def a_pause_before_the_mark_and_a_late_committer(world: World) -> None:
    at_source = AtSource.__call__
    marks: list[Callable[[], None]] = []

    def paused(self: AtSource, write: Callable[[psycopg.Connection[Any]], Any]) -> Any:
        if not write.__qualname__.endswith("settle") or marks:
            return at_source(self, write)

        def mark() -> None:
            with suppress(Fenced):
                at_source(self, write)
            self.close()

        marks.append(mark)
        world.take_over()
        raise Crash

    world.patch.setattr(AtSource, "__call__", paused)
    with world.late("orders-0"):
        world.send("orders-1", 3)
        with suppress(Crash):
            world.forward()
    with world.cycle() as new:
        new.open()
        marks[0]()
    world.forward()


def a_purge_of_what_is_pending(world: World) -> None:
    world.send(times=3)
    with connect(world.app) as connection:
        for _ in range(2):
            purge_broker(connection, retention_seconds=0, rotate_after_seconds=0.001)
    world.forward()


def a_rollback(world: World) -> None:
    with world.app.connect(role="test") as connection:
        _count_up(connection, world.outbox, "orders-0", False)
        connection.rollback()
    world.forward()


def a_crash_after_the_store_of_a_talk(world: World) -> None:
    for _ in range(3):
        world.talk()
    world.crash("mom_commit")
    world.forward()
    world.hear()


# Bugs


def watermark_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(postgresql, "MOVE", "SELECT 1")


def watermark_moved_and_a_row_not_stored(patch: pytest.MonkeyPatch) -> None:
    whole = postgresql.inbox_rows
    patch.setattr(postgresql, "inbox_rows", lambda rows, source: whole(rows, source).slice(1))


def marked_before_sent(patch: pytest.MonkeyPatch) -> None:
    store = Storing.store

    def early(self: Storing, part: Any, mark: tuple[int, int], aside: Aside) -> None:
        self.at_source(lambda source: cursor.advance(source, self.work.batch, mark[1]))
        store(self, part, mark, aside)

    patch.setattr(Storing, "store", early)


def no_fence_at_the_destination(patch: pytest.MonkeyPatch) -> None:
    blind = postgresql.LOCK.replace("epoch,", "0::bigint AS epoch,", 1)
    patch.setattr(postgresql, "LOCK", blind)


def no_fence_at_the_source(patch: pytest.MonkeyPatch) -> None:
    fence = "\n  AND c.owner = %(owner)s AND c.epoch = mine.epoch AND c.batch = %(batch)s"
    for name in ("ADVANCE", "CLOSE", "HOLD"):
        statement = getattr(cursor, name)
        assert fence in statement
        patch.setattr(cursor, name, statement.replace(fence, ""))


def id_used_as_cursor(patch: pytest.MonkeyPatch) -> None:
    def beyond_the_last(table: str, shards: list[int], done: str) -> sql.Composed:
        query = (
            "SELECT * FROM saf.{} WHERE shard = ANY ({}::smallint[]) AND id > coalesce((SELECT "
            "max(id) FROM saf.outbox WHERE pg_visible_in_snapshot(txid, {}::pg_snapshot)), 0)"
        )
        return sql.SQL(query).format(sql.Identifier(table), sql.Literal(shards), sql.Literal(done))

    patch.setattr(cursor, "since", beyond_the_last)


def transactions_in_progress_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cursor, "ENDED_SINCE", "")


def done_is_the_snapshot_of_now(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        cursor, "CLOSE", cursor.CLOSE.replace("done = c.open", "done = pg_current_snapshot()")
    )


def read_in_no_order(patch: pytest.MonkeyPatch) -> None:
    def select(self: Batch, columns: Any) -> str:
        return f"{self.rows(columns)} ORDER BY id DESC"

    patch.setattr(Batch, "select", select)


def moved_past_a_chunk_that_failed(patch: pytest.MonkeyPatch) -> None:
    store = Storing.store

    def carefree(self: Storing, part: Any, mark: tuple[int, int], _: Aside) -> None:
        store(self, part, mark, Aside(work=self.work))

    patch.setattr(Storing, "store", carefree)


def parked_messages_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parking, "park", lambda *_: None)


def a_lane_released_in_no_order(patch: pytest.MonkeyPatch) -> None:
    backwards = parking.IN_LANES.replace("BY {order}", "BY parked_id DESC")
    patch.setattr(parking, "IN_LANES", backwards)


def purged_without_the_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ring, "_obstacle", lambda *_: None)


def neighbours_rejected_too(patch: pytest.MonkeyPatch) -> None:
    store = PostgresInbox.store
    bury = Aside.bury

    def all_or_nothing(self: Storing, part: Any, _: tuple[int, int], aside: Aside) -> None:
        chunk = Chunk(
            source=self.work.source,
            batch=self.work.batch,
            rows=part.rows,
            number=_[0],
        )
        try:
            store(self._destination(part.destination), chunk, exactly_once=True)  # type: ignore[arg-type]
        except Rejected as error:
            bury(aside, part.rows, part.destination, "rejected", str(error))

    patch.setattr(Storing, "store", all_or_nothing)


def a_rejected_message_below_the_watermark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Aside, "ahead", False)


def set_aside_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dead, "known", lambda *_: set())


def attempts_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saf.engine.delivery, "attempt", lambda *_: {})


def sent_outside_of_the_transaction(patch: pytest.MonkeyPatch) -> None:
    send = Outbox.send

    def apart(self: Outbox, conn: Any, *arguments: Any, **more: Any) -> Any:
        with psycopg.connect(conn.info.dsn) as another:
            return send(self, another, *arguments, **more)

    patch.setattr(Outbox, "send", apart)


def repeats_in_a_dialog_taken(patch: pytest.MonkeyPatch) -> None:
    def trusting(before: Facts, message: saf.Received, **more: Any) -> tuple[Verdict, Facts]:
        repeat = (message.sequence or 0) <= before.receive_sequence
        return (Verdict.TAKE, before) if repeat else judge(before, message, **more)

    patch.setattr(arrival, "judge", trusting)


PLANTED = [
    (repeats_in_a_dialog_taken, a_crash_after_the_store_of_a_talk, "duplicated"),
    (watermark_not_moved, a_crash_after_the_store, "duplicated"),
    (watermark_moved_and_a_row_not_stored, a_crash_after_the_store, "lost"),
    (marked_before_sent, a_crash_before_the_store, "lost"),
    (no_fence_at_the_destination, at_most_once_and_a_pause_before_the_store, "out_of_order"),
    (no_fence_at_the_source, a_pause_before_the_mark_and_a_late_committer, "lost"),
    (id_used_as_cursor, a_late_committer, "lost"),
    (transactions_in_progress_forgotten, a_late_committer, "lost"),
    (done_is_the_snapshot_of_now, a_commit_during_a_batch, "lost"),
    (read_in_no_order, a_commit_during_a_batch, "out_of_order"),
    (moved_past_a_chunk_that_failed, a_store_that_is_down, "lost"),
    (parked_messages_forgotten, a_store_that_is_down, "lost"),
    (a_lane_released_in_no_order, a_store_that_is_down, "out_of_order"),
    (purged_without_the_check, a_purge_of_what_is_pending, "lost"),
    (neighbours_rejected_too, a_poison_message, "dead_wrongly"),
    (a_rejected_message_below_the_watermark, a_crash_after_a_poison_message, "lost"),
    (set_aside_twice, a_commit_at_the_source_without_answer, "dead_wrongly"),
    (attempts_forgotten, at_most_once_and_a_crash, "duplicated"),
    (sent_outside_of_the_transaction, a_rollback, "unexpected"),
]


@pytest.mark.parametrize("scenario", list(dict.fromkeys(scenario for _, scenario, _ in PLANTED)))
def test_a_scenario_without_a_bug_has_no_findings(
    world: Callable[[], World], scenario: Callable[[World], None]
) -> None:
    made = world()
    scenario(made)
    assert made.findings() == set()


@pytest.mark.parametrize(("bug", "scenario", "finding"), PLANTED)
def test_a_planted_bug_is_found(
    world: Callable[[], World],
    bug: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[[World], None],
    finding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = world()
    bug(monkeypatch)
    scenario(made)
    assert finding in made.findings()
