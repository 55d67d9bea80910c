"""A destination's watermarks: taken in turn, moved with every chunk, the same moment everywhere."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import pyarrow as pa
import pytest
from psycopg.types.json import Jsonb

from saf.database import Dsn, fetch
from saf.database.bounds import Bounds
from saf.destinations import Chunk, Stored
from saf.destinations.marks import AGAIN, MAIN, Mark
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.engine.acknowledged import acknowledge, acknowledged
from saf.engine.source import messages, read
from saf.engine.work import Work
from saf.errors import Fenced, Rejected, RowsGone, Unavailable
from saf.failpoints import arm
from saf.testing.forwarder import all_stored
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, outlive_lease, send
from tests.waits import blocked, until

pytestmark = pytest.mark.usefixtures("disarmed")


def chunk_of(work: Work, rows: int | None = None) -> Chunk:
    """All that is left of a batch, or only its first rows, for the destination's own lane."""
    whole = pa.Table.from_batches(list(messages(work, 1 << 20)))
    some = whole if rows is None else whole.slice(0, rows)
    return Chunk(source=work.source, batch=work.batch, rows=some)


def test_of_two_that_store_the_same_chunk_at_the_same_time_the_second_stores_nothing(
    app: Dsn, mom: Dsn
) -> None:
    """A task that Spark runs twice: neither has committed when the other one looks."""
    with connect(app) as connection:
        for number in range(5):
            send(connection, str(number), key="k")
    first_is_in, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        first_is_in.set()
        go_on.wait(30)

    outcomes: list[Stored] = []

    def store(chunk: Chunk) -> None:
        inbox = PostgresInbox("mom", mom)
        outcomes.append(all_stored(inbox.store(chunk, exactly_once=True)))
        inbox.close()

    with Cycle(app, forwarding_rules(mom=mom)) as cycle, connect(mom) as connection:
        (work,) = cycle.open()
        store(chunk_of(work, rows=1))
        arm("mom_insert", wait)
        threads = [threading.Thread(target=store, args=[chunk_of(work)]) for _ in range(2)]
        threads[0].start()
        first_is_in.wait(30)
        threads[1].start()
        until(lambda: blocked(connection))
        go_on.set()
        for thread in threads:
            thread.join()
    assert bodies(mom) == ["0", "1", "2", "3", "4"]
    assert sorted(one.messages for one in outcomes) == [0, 1, 4]
    assert sorted(one.dropped for one in outcomes) == [0, 1, 5]


def test_first_watermarks_are_made_by_one_delivery_at_a_time(app: Dsn, mom: Dsn) -> None:
    """Nothing else forbids two of one shard."""
    with connect(app) as connection, connect(mom) as holder:
        send(connection, "x")
        impatient = Dsn(mom.conninfo, bounds=Bounds(lock_seconds=0.2))
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            (work,) = cycle.open()
            inbox = PostgresInbox("mom", impatient)
            with holder.transaction():
                holder.execute("SELECT pg_advisory_xact_lock(hashtextextended('saf.watermark', 0))")
                with pytest.raises(Unavailable, match="lock timeout"):
                    inbox.store(chunk_of(work), exactly_once=True)
            assert all_stored(inbox.store(chunk_of(work), exactly_once=True)).messages == 1
            inbox.close()


def test_the_owner_before_is_fenced_also_where_the_new_one_found_everything_stored(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key="k")
    with (
        Cycle(app, forwarding_rules(mom=mom)) as zombie,
        Cycle(app, forwarding_rules(mom=mom)) as owner,
    ):
        (old,) = zombie.open()
        chunk = chunk_of(old)
        zombie.deliver()
        with connect(app) as connection:
            connection.execute("UPDATE saf.cursor SET position = 0")
        outlive_lease(app)
        owner.open()
        assert sum(receipt.dropped for receipt in owner.deliver()) == 10
        inbox = PostgresInbox("mom", mom)
        with pytest.raises(Fenced):
            inbox.store(chunk, exactly_once=True)
        inbox.close()


def test_at_least_once_raises_the_epoch_and_leaves_the_position(app: Dsn, mom: Dsn) -> None:
    """A route that becomes exactly_once must not find its messages stored already."""
    with connect(app) as connection:
        send(connection, "x", key="k")
    with Cycle(app, forwarding_rules("at_least_once", mom=mom)) as cycle:
        cycle.run()
    own = f"SELECT DISTINCT epoch FROM saf.watermark WHERE lane = '{AGAIN}' AND position > 0"
    moved = (
        f"SELECT lane FROM saf.watermark WHERE position > 0 AND NOT starts_with(lane, '{AGAIN}')"
    )
    with connect(mom) as connection:
        assert fetch(connection, own) == [(1,)]
        assert fetch(connection, moved) == []


def test_a_batch_is_the_same_one_whatever_the_time_zones_of_its_databases(
    app: Dsn, mom: Dsn
) -> None:
    """Its number and the moment at which it was opened tell a source that was set back."""
    for dsn, zone in ((app, "Asia/Tokyo"), (mom, "America/New_York")):
        with connect(dsn) as connection:
            connection.execute(f"ALTER DATABASE {dsn.database} SET timezone = '{zone}'")
    with connect(app) as connection:
        send(connection, "x")
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.run()
        ((opened,),) = fetch(
            connection, "SELECT DISTINCT opened_at FROM saf.cursor WHERE batch > 0"
        )
    with connect(mom) as connection:
        ((stored,),) = fetch(connection, "SELECT opened_at FROM saf.watermark WHERE position > 0")
    assert stored.astimezone(UTC) == opened.astimezone(UTC)


# What a driver says


@pytest.fixture
def quoted(mom: Dsn) -> Dsn:
    """A database that is not there, whose name is the password too; the server quotes the name."""
    parts = {name: value for name, value in mom.parts.items() if name != "dbname"}
    rest = " ".join(f"{name}={value}" for name, value in parts.items())
    return Dsn(f"{rest} dbname=hunter2 password=hunter2")


def test_what_a_destination_says_is_shown_without_the_password(quoted: Dsn) -> None:
    with pytest.raises(Unavailable) as caught:
        PostgresInbox("mom", quoted).connect()
    assert "does not exist" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_what_a_destination_says_of_messages_is_shown_without_the_password(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection, connect(mom) as store:
        send(connection, "x")
        store.execute("ALTER TABLE saf.inbox ADD CONSTRAINT hunter2 CHECK (body IS NULL)")
    inbox = PostgresInbox("mom", Dsn(f"{mom.conninfo} password=hunter2"))
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        (work,) = cycle.open()
        with pytest.raises(Rejected) as caught:
            inbox.store(chunk_of(work), exactly_once=True)
    assert "violates check constraint" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_what_a_source_says_to_its_reader_is_shown_without_the_password(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "x")
    secret = Dsn(f"{app.conninfo} password=hunter2")
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        (work,) = cycle.open()
        with pytest.raises(Unavailable) as caught:
            list(read(replace(work, dsn=secret), "SELECT CAST('hunter2' AS integer)"))
    assert "invalid input syntax" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_task_that_lags_behind_its_twin_sets_no_mark_back(app: Dsn) -> None:
    destination, here = UUID(int=7), (MAIN, 0)
    at = datetime(2026, 1, 31, tzinfo=UTC)
    first, second, third = (Mark(batch=1, position=n, opened_at=at) for n in (1, 2, 3))
    with connect(app) as connection:
        acknowledge(connection, destination, {here: first}, {})
        known = acknowledged(connection, destination, [here])
        for mark in (third, second):
            acknowledge(connection, destination, {here: mark}, known)
        assert acknowledged(connection, destination, [here])[here].number == (1, 3)


@pytest.mark.parametrize("kept", [True, False])
def test_a_destination_whose_broker_is_being_restored_in_place_is_refused_and_rejects_nothing(
    app: Dsn, mom: Dsn, kept: bool
) -> None:
    """`pg_restore --clean` makes the tables before it fills them, each in a transaction."""
    with connect(app) as connection, connect(mom) as store:
        for number in range(3):
            send(connection, str(number))
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            (work,) = cycle.open()
            inbox = PostgresInbox("mom", mom)
            if kept:
                inbox.connect()
            ((columns,),) = fetch(store, "SELECT to_jsonb(b) FROM saf.broker b")
            store.execute("DELETE FROM saf.broker")
            with pytest.raises(RowsGone, match=r"saf\.broker has no row.*wait for its end"):
                inbox.store(chunk_of(work), exactly_once=True)
            store.execute(
                "INSERT INTO saf.broker SELECT (jsonb_populate_record(NULL::saf.broker, %s)).*",
                [Jsonb(columns)],
            )
            assert all_stored(inbox.store(chunk_of(work), exactly_once=True)).messages == 3
            inbox.close()
    assert bodies(mom) == ["0", "1", "2"]
