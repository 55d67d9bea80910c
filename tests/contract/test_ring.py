"""The ring: purging frees what everyone has completed, and never a message that someone needs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from psycopg.conninfo import make_conninfo

from saf.database import Dsn
from saf.errors import UsageError
from saf.log.archive import ParquetArchive
from saf.log.ring import SLOT_ROWS, SLOTS, Contents, Slot, purge, rotate
from saf.operating.maintenance import Outcome, purge_broker
from saf.routing.route_choices import Asker, choose
from saf.routing.routes import add_route, add_topic, current_routes, freeze
from tests.dialogs import begin
from tests.pipeline import Cycle, bodies, connect, forward, forwarding_rules, send
from tests.processes import start, wait
from tests.ring import in_slot, leave_slot
from tests.waits import until

NOW = 1e-9
"""Seconds: any message is older."""


@contextmanager
def transaction(app: Dsn) -> Iterator[psycopg.Connection[Any]]:
    with app.connect(role="test") as connection:
        yield connection


def subscribe(connection: psycopg.Connection[Any], name: str, log: str = "outbox") -> None:
    """A subscription that has read nothing yet."""
    connection.execute(
        "WITH s AS (INSERT INTO saf.subscription (name, log) VALUES (%s, %s) RETURNING *) "
        "INSERT INTO saf.cursor (subscription_id, shard) "
        "SELECT subscription_id, generate_series(0, 63) FROM s",
        [name, log],
    )


def catch_up(connection: psycopg.Connection[Any], name: str) -> None:
    """Let a subscription have completed everything."""
    connection.execute(
        "UPDATE saf.cursor SET done = pg_current_snapshot() WHERE subscription_id = "
        "(SELECT subscription_id FROM saf.subscription WHERE name = %s)",
        [name],
    )


def purge_now(connection: psycopg.Connection[Any], log: str = "outbox", **options: Any) -> Slot:
    """Purge whatever its age; what was done with the first slot."""
    return purge(connection, log, **{"retention_seconds": 0, **options})[0]


def purge_all(app: Dsn, **options: Any) -> Outcome:
    with connect(app) as connection:
        return purge_broker(
            connection, **{"retention_seconds": 0, "rotate_after_seconds": 86400, **options}
        )


def wait_until_it_waits(connection: psycopg.Connection[Any]) -> None:
    """Until a purge waits for its lock on the first slot."""
    waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'saf.outbox_0'::regclass \
        AND mode = 'AccessExclusiveLock' AND NOT granted)"
    while connection.execute(waits).fetchone() != (True,):
        pass


# What goes, and what stays


@pytest.mark.every_postgresql
def test_a_slot_goes_once_every_subscription_has_completed_it(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        subscribe(connection, "audit")
        for body in ("a", "b", "c"):
            send(connection, body)
        forward(app, mom=mom)
        assert purge_now(connection).state == "current"
        leave_slot(connection)
        send(connection, "later")

        slow = purge_now(connection)
        assert (slow.state, slow.subscription) == ("needed", "audit")
        assert in_slot(connection, "outbox_0") == ["a", "b", "c"]

        catch_up(connection, "audit")
        gone = purge_now(connection)
        assert (gone.state, gone.messages, gone.archive) == ("purged", 3, None)
        assert in_slot(connection, "outbox") == ["later"]
        assert purge_now(connection).state == "empty"
        size = connection.execute("SELECT pg_total_relation_size('saf.outbox_0') < 65536")
        assert size.fetchone() == (True,)
        forward(app, mom=mom)
    assert bodies(mom) == ["a", "b", "c", "later"]


@pytest.mark.parametrize("slow", ["a", "b", "forwarder", "z"])
def test_a_slot_stays_whichever_subscription_it_is_that_needs_it(app: Dsn, slow: str) -> None:
    with connect(app) as connection:
        for name in ("a", "b", "z"):
            subscribe(connection, name)
        send(connection, "x")
        leave_slot(connection)
        for name in {"a", "b", "forwarder", "z"} - {slow}:
            catch_up(connection, name)
        kept = purge_now(connection)
        assert (kept.state, kept.subscription) == ("needed", slow)
        assert in_slot(connection, "outbox_0") == ["x"]


def test_a_batch_in_hand_keeps_its_rows_whatever_its_position(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, Cycle(app, forwarding_rules(mom=mom)) as cycle:
        send(connection, "in hand")
        leave_slot(connection)
        cycle.open()
        assert purge_now(connection).state == "needed"
        receipts = cycle.deliver()  # now at its end, and still open
        assert purge_now(connection).state == "needed"
        cycle.close(receipts)
        assert purge_now(connection).state == "purged"


def test_a_shard_without_its_cursor_has_completed_nothing(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "one", key="key")
        forward(app, mom=mom)
        leave_slot(connection)
        connection.execute("DELETE FROM saf.cursor USING saf.outbox o WHERE cursor.shard = o.shard")
        assert purge_now(connection).state == "needed"


def test_an_inbox_that_nobody_has_subscribed_to_keeps_everything(app: Dsn, mom: Dsn) -> None:
    with connect(app) as source, connect(mom) as connection:
        send(source, "stored")
        forward(app, mom=mom)
        leave_slot(connection, "inbox")
        assert purge_now(connection, "inbox").state == "unread"
        subscribe(connection, "billing", "inbox")
        assert purge_now(connection, "inbox").state == "needed"
        catch_up(connection, "billing")
        assert purge_now(connection, "inbox").state == "purged"


def test_a_slot_goes_when_its_newest_message_is_older_than_the_retention(
    app: Dsn, mom: Dsn
) -> None:
    insert = (
        "INSERT INTO saf.outbox (to_service, key, body, created_at) "
        "VALUES ('billing', 'same shard', '', now() - %s * interval '1 day')"
    )
    with connect(app) as connection:
        # the young one is neither the first nor the last of its shard
        for age in (9, 5, 8):
            connection.execute(insert, [age])
        forward(app, mom=mom)
        leave_slot(connection)
        for days, state in ((9.5, "retained"), (6.0, "retained"), (4.0, "purged")):
            assert purge_now(connection, retention_seconds=days * 86400).state == state
    with connect(mom) as connection:
        subscribe(connection, "billing", "inbox")
        catch_up(connection, "billing")
        leave_slot(connection, "inbox")
        # an inbox counts from the arrival
        assert purge_now(connection, "inbox", retention_seconds=3600).state == "retained"


def test_nobody_waits_for_a_lock_on_a_slot_that_stays_for_its_age(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, transaction(app) as slow:
        send(connection, "young")
        send(slow, "in progress")
        leave_slot(connection)
        forward(app, mom=mom)
        assert purge_now(connection, retention_seconds=3600).state == "retained"
        assert purge_now(connection).state in ("locked", "needed")


def test_a_slot_that_is_still_needed_when_the_ring_comes_round_is_kept(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "first round")
        for _ in range(SLOTS):
            leave_slot(connection)
        send(connection, "second round")
        assert in_slot(connection, "outbox_0") == ["first round", "second round"]
        leave_slot(connection)
        assert purge_now(connection).state == "needed"
        forward(app, mom=mom)
        assert purge_now(connection).messages == 2
    assert bodies(mom) == ["first round", "second round"]


# Late rows, and who holds a slot


@pytest.mark.every_postgresql
@pytest.mark.parametrize("prepared", [False, True], ids=["open", "prepared"])
def test_a_message_that_is_committed_late_into_a_left_slot_is_not_lost(
    app: Dsn, mom: Dsn, prepared: bool
) -> None:
    with connect(app) as connection, connect(app) as late:
        send(connection, "early")
        late.execute("BEGIN")
        send(late, "late")
        if prepared:
            late.execute(f"PREPARE TRANSACTION '{app.database}'")
        leave_slot(connection)
        forward(app, mom=mom)
        assert purge_now(connection).state == "locked"
        late.execute(f"COMMIT PREPARED '{app.database}'" if prepared else "COMMIT")
        assert purge_now(connection).state == "needed"
        forward(app, mom=mom)
        assert purge_now(connection).messages == 2
    assert bodies(mom) == ["early", "late"]


def test_an_id_that_was_drawn_before_the_purge_and_inserted_after_it_is_a_message(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        send(connection, "early")
        ((drawn,),) = connection.execute("SELECT nextval('saf.outbox_id_seq')").fetchall()
        leave_slot(connection)
        forward(app, mom=mom)
        assert purge_now(connection).state == "purged"
        connection.execute(
            "INSERT INTO saf.outbox (id, to_service, body) OVERRIDING SYSTEM VALUE "
            "VALUES (%s, 'billing', 'late')",
            [drawn],
        )
        assert purge_now(connection).state == "needed"
        forward(app, mom=mom)
    assert bodies(mom) == ["early", "late"]


@pytest.mark.every_postgresql
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_a_reader_who_comes_while_the_purge_waits_for_its_lock_keeps_its_rows(
    app: Dsn, mom: Dsn, isolation: str
) -> None:
    """The slot was found to be complete before; the check that counts comes after the lock."""
    with connect(app) as connection, transaction(app) as reader, connect(app) as other:

        def come() -> None:
            wait_until_it_waits(other)
            subscribe(other, "audit")
            other.execute(
                "UPDATE saf.cursor SET open = pg_current_snapshot(), batch = 1 WHERE open IS NULL"
            )
            reader.rollback()

        coming = threading.Thread(target=come)

        def let_it_wait(_: Contents) -> Path:
            reader.execute("SELECT count(*) FROM saf.outbox")
            coming.start()
            return Path("unused")

        connection.execute(f"SET default_transaction_isolation = '{isolation}'")
        send(connection, "wanted by two")
        forward(app, mom=mom)
        leave_slot(connection)
        kept = purge_now(connection, archive=let_it_wait, lock_timeout_seconds=10)
        coming.join()
        assert (kept.state, kept.subscription) == ("needed", "audit")
        assert in_slot(connection, "outbox_0") == ["wanted by two"]


def test_a_message_that_comes_after_the_archive_keeps_the_slot_even_if_it_is_forwarded(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection, transaction(app) as late:
        send(connection, "archived")
        forward(app, mom=mom)
        ((drawn,),) = connection.execute("SELECT nextval('saf.outbox_id_seq')").fetchall()
        leave_slot(connection)

        def overtaken(_: Contents) -> Path:
            late.execute(
                "INSERT INTO saf.outbox (id, to_service, body) OVERRIDING SYSTEM VALUE "
                "VALUES (%s, 'billing', 'not archived')",
                [drawn],
            )
            late.commit()
            forward(app, mom=mom)
            return Path("unused")

        assert purge_now(connection, archive=overtaken).state == "changed"
        assert in_slot(connection, "outbox_0") == ["archived", "not archived"]
        assert purge_now(connection).messages == 2


@pytest.mark.slow
def test_a_slot_that_someone_reads_is_skipped_in_time_and_no_writer_waits(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection, transaction(app) as reader, connect(app) as writer:
        send(connection, "read for long")
        forward(app, mom=mom)
        leave_slot(connection)
        reader.execute("SELECT count(*) FROM saf.outbox")

        found: list[Slot] = []
        purging = threading.Thread(
            target=lambda: found.append(purge_now(connection, lock_timeout_seconds=5))
        )
        purging.start()
        wait_until_it_waits(writer)
        began = time.monotonic()
        send(writer, "meanwhile")
        assert time.monotonic() - began < 4
        assert purging.is_alive()
        purging.join()
        assert found[0].state == "locked"

        began = time.monotonic()
        assert purge_now(connection).state == "locked"
        assert time.monotonic() - began < 4


def test_a_purge_waits_for_its_lock_as_long_as_it_may(app: Dsn) -> None:
    waits = (
        "SELECT count(*) FROM pg_locks WHERE relation = 'saf.outbox_0'::regclass AND NOT granted"
    )
    with connect(app) as connection, transaction(app) as reader, connect(app) as watch:
        send(reader, "never")
        reader.rollback()
        leave_slot(connection)
        reader.execute("SELECT count(*) FROM saf.outbox")
        with ThreadPoolExecutor(1) as threads:
            purging = threads.submit(purge_now, connection, lock_timeout_seconds=60)
            until(lambda: purging.done() or watch.execute(waits).fetchone() == (1,))
            reader.rollback()
        assert purging.result().state == "purged"


def test_an_empty_slot_is_not_locked(app: Dsn) -> None:
    with connect(app) as connection, transaction(app) as reader:
        reader.execute("LOCK TABLE saf.outbox IN SHARE MODE")
        states = [slot.state for slot in purge(connection, "outbox", retention_seconds=0)]
        assert states == ["current"] + ["empty"] * (SLOTS - 1)


def test_a_slot_of_rolled_back_messages_goes_too(app: Dsn) -> None:
    with connect(app) as connection, transaction(app) as rolled_back:
        send(rolled_back, "never")
        rolled_back.rollback()
        leave_slot(connection)
        purged = purge_now(connection)
        assert (purged.state, purged.messages) == ("purged", 0)


@pytest.mark.every_postgresql
def test_a_transaction_that_holds_the_xmin_horizon_does_not_hold_up_the_purge(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection, transaction(app) as horizon:
        send(connection, "one")
        forward(app, mom=mom)
        leave_slot(connection)
        horizon.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        horizon.execute("SELECT pg_current_xact_id(), count(*) FROM saf.subscription")
        assert purge_now(connection).state == "purged"
        # TRUNCATE is not MVCC: the row was there when its snapshot was taken
        assert in_slot(horizon, "outbox") == []


# Rotation


def test_a_quiet_log_leaves_its_slot_which_then_goes(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "before")
        forward(app, mom=mom)
        young = purge_all(app)
        assert [slot.state for slot in young.slots[:2]] == ["current", "empty"]
        rotated = purge_all(app, rotate_after_seconds=NOW)
        assert [slot.state for slot in rotated.slots[:2]] == ["rotated", "empty"]
        send(connection, "after")
        assert in_slot(connection, "outbox_1") == ["after"]
        purged = purge_all(app, rotate_after_seconds=86400)
        assert [slot.state for slot in purged.slots[:2]] == ["purged", "current"]
        forward(app, mom=mom)
    assert bodies(mom) == ["before", "after"]


def test_a_log_without_messages_does_not_rotate(app: Dsn) -> None:
    """Also if a message was rolled back, which makes the slot's file longer."""
    with transaction(app) as rolled_back:
        send(rolled_back, "never")
        rolled_back.rollback()
    states = {slot.state for slot in purge_all(app, rotate_after_seconds=NOW).slots}
    assert states == {"current", "empty"}


def test_a_log_does_not_rotate_into_a_slot_that_still_holds_messages(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        leave_slot(connection)
        send(connection, "ahead")
        for _ in range(SLOTS - 1):
            leave_slot(connection)
        send(connection, "behind it")
        assert not rotate(connection, "outbox", rotate_after_seconds=NOW)
        assert in_slot(connection, "outbox_0") == ["behind it"]
        forward(app, mom=mom)
        states = [slot.state for slot in purge_all(app, rotate_after_seconds=NOW).slots[:2]]
        assert states == ["rotated", "purged"]


def test_open_and_prepared_transactions_do_not_hold_up_the_rotation(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, transaction(app) as slow:
        send(connection, "old")
        send(slow, "still open")
        connection.execute("BEGIN")
        send(connection, "prepared")
        connection.execute(f"PREPARE TRANSACTION '{app.database}'")
        assert rotate(connection, "outbox", rotate_after_seconds=NOW)
        send(slow, "in the next slot")
        slow.commit()
        assert in_slot(connection, "outbox_1") == ["in the next slot"]
        forward(app, mom=mom)
    assert bodies(mom) == ["old", "still open", "in the next slot"]


@pytest.mark.slow
@pytest.mark.every_postgresql
def test_ids_are_unique_and_rise_while_the_log_rotates_under_its_writers(app: Dsn) -> None:
    done = threading.Event()
    drawn: list[list[int]] = [[] for _ in range(4)]

    def write(ids: list[int]) -> None:
        with connect(app) as connection:
            while not done.is_set():
                row = connection.execute(
                    "INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '') RETURNING id"
                ).fetchone()
                assert row is not None
                ids.append(row[0])

    def keep_rotating() -> None:
        with connect(app) as connection:
            for _ in range(3):
                # False until a writer is in the slot that the last rotation came to
                until(lambda: rotate(connection, "outbox", rotate_after_seconds=NOW))

    writers = [threading.Thread(target=write, args=(ids,)) for ids in drawn]
    # two at once, though a purge takes turns
    rotators = [threading.Thread(target=keep_rotating) for _ in range(2)]
    for thread in (*writers, *rotators):
        thread.start()
    for thread in rotators:
        thread.join()
    try:
        until(lambda: all(ids and ids[-1] >= 3 * SLOT_ROWS for ids in drawn))
    finally:
        done.set()
    for thread in writers:
        thread.join()
    for ids in drawn:
        assert ids == sorted(ids)
    every = [id_ for ids in drawn for id_ in ids]
    assert len(set(every)) == len(every)


# All of it at once


def write_at_random(app: Dsn, seed: int) -> None:
    """Transactions of one or two messages, some of them long, some prepared, some rolled back."""
    chance = random.Random(seed)
    number = 0
    with connect(app) as connection:
        while connection.execute("SELECT FROM enough").fetchone() is None:
            number += 1
            connection.execute("BEGIN")
            for part in range(chance.randint(1, 2)):
                send(connection, f"{seed}-{number}-{part}")
                connection.execute("INSERT INTO sent VALUES (%s)", [f"{seed}-{number}-{part}"])
                if chance.random() < 0.05:
                    time.sleep(chance.random())
            fate = chance.random()
            if fate < 0.1:
                connection.execute("ROLLBACK")
            elif fate < 0.2:
                gid = f"{app.database}-{seed}-{number}"
                connection.execute(f"PREPARE TRANSACTION '{gid}'")
                time.sleep(chance.random() / 2)
                connection.execute(f"COMMIT PREPARED '{gid}'")
            else:
                connection.execute("COMMIT")
            time.sleep(chance.random() / 100)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.every_postgresql
def test_writers_a_forwarder_and_a_purge_that_race_lose_nothing(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    """The ring turns more than once, and each message is delivered, once, and archived or there."""
    with connect(app) as connection:
        connection.execute("CREATE TABLE sent (body text)")
        connection.execute("CREATE TABLE enough ()")
    done = threading.Event()
    states: list[str] = []

    def keep_forwarding() -> None:
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            while not done.is_set():
                cycle.run()

    def keep_purging() -> None:
        while not done.is_set():
            outcome = purge_all(
                app, rotate_after_seconds=NOW, archive=ParquetArchive(app, tmp_path)
            )
            states.extend(slot.state for slot in outcome.slots if slot.log == "outbox")
            if states.count("purged") > SLOTS:
                with connect(app) as connection:
                    connection.execute("INSERT INTO enough DEFAULT VALUES")

    threads = [threading.Thread(target=target) for target in (keep_forwarding, keep_purging)]
    writers = [start(write_at_random, app, seed) for seed in range(3)]
    for thread in threads:
        thread.start()
    assert [wait(writer) for writer in writers] == [0, 0, 0]
    done.set()
    for thread in threads:
        thread.join()
    forward(app, mom=mom)

    with connect(app) as connection:
        sent = sorted(body for (body,) in connection.execute("SELECT body FROM sent").fetchall())
        left = set(in_slot(connection, "outbox"))
    assert sorted(bodies(mom)) == sent
    files = tmp_path.glob("*/outbox-*.parquet")
    archived = {body.decode() for file in files for body in pq.read_table(file)["body"].to_pylist()}
    assert archived | left == set(sent)
    assert {"needed", "locked"} & set(states)


# A broker's maintenance


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "old")
        leave_slot(connection)
        send(connection, "current")
        forward(app, mom=mom)
        state = "SELECT (SELECT last_value FROM saf.outbox_id_seq), \
            pg_relation_filenode('saf.outbox_0'), (SELECT count(*) FROM saf.outbox)"
        before = connection.execute(state).fetchone()
        outcome = purge_all(app, rotate_after_seconds=NOW, dry_run=True)
        assert connection.execute(state).fetchone() == before
    first, second = outcome.slots[:2]
    assert (first.state, first.messages) == ("purgeable", 1)
    assert second.state == "rotatable"


def test_a_dry_run_forgets_nothing(app: Dsn) -> None:
    with connect(app) as connection:
        add_route(connection, "a")
        for name in ("t", "u"):
            freeze(connection, current_routes(connection))
            add_topic(connection, name)
        with connection.transaction():
            choose(connection, {Asker("s", None, "k"): ["a"]})
        dialog = begin(app, from_service="s", to_service="s")
        with connection.transaction():
            dialog.end(connection)
        connection.execute("UPDATE saf.route_choice SET used_at = now() - interval '9 days'")
        connection.execute("UPDATE saf.route_version SET created_at = now() - interval '9 days'")
        connection.execute("UPDATE saf.conversation SET changed_at = now() - interval '9 days'")
        tables = ("route_version", "route_choice", "conversation")

        def rows() -> list[int]:
            found = [connection.execute(f"SELECT count(*) FROM saf.{table}") for table in tables]
            return [row[0] for cursor in found if (row := cursor.fetchone())]

        before = rows()
        purge_all(app, dry_run=True)
        assert rows() == before == [2, 1, 1]
        purge_all(app)
        assert rows() == [1, 0, 0]


@pytest.mark.parametrize(
    "moved",
    [
        "UPDATE saf.broker SET system_identifier = 1",
        "UPDATE saf.cursor SET done = '9000000000:9000000000:' WHERE shard = 0",
        "UPDATE saf.cursor SET open = '9000000000:9000000000:' WHERE shard = 0",
    ],
)
def test_nothing_is_purged_where_transaction_ids_are_those_of_another_cluster(
    app: Dsn, mom: Dsn, moved: str
) -> None:
    with connect(app) as connection:
        send(connection, "one")
        forward(app, mom=mom)
        leave_slot(connection)
        connection.execute(moved)
        with pytest.raises(UsageError, match="saf rebase"):
            purge_all(app)
        assert in_slot(connection, "outbox") == ["one"]


FORGOTTEN = """
saf.route_version, saf.route_choice, saf.resolved_conversation, saf.conversation,
saf.conversation_group, saf.fragment, saf.kept_result, saf.staged, saf.sink
"""


@pytest.mark.every_postgresql
def test_a_role_needs_the_rights_that_the_operations_page_names(app: Dsn, mom: Dsn) -> None:
    role = app.database
    as_role = Dsn(make_conninfo(app.conninfo, user=role))
    partitions = ", ".join(f"saf.{log}_{n}" for log in ("outbox", "inbox") for n in range(SLOTS))
    with connect(app) as connection:
        send(connection, "one")
        forward(app, mom=mom)
        connection.execute(f"CREATE ROLE {role} LOGIN")
        connection.execute(f"GRANT USAGE ON SCHEMA saf TO {role}")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA saf TO {role}")
        with pytest.raises(UsageError, match=f"role '{role}' may not purge .*sequence"):
            purge_all(as_role)
        sequences = "saf.outbox_id_seq, saf.inbox_id_seq"
        connection.execute(f"GRANT SELECT, USAGE ON SEQUENCE {sequences} TO {role}")
        connection.execute(f"GRANT DELETE ON {FORGOTTEN} TO {role}")
        connection.execute(f"GRANT INSERT, UPDATE ON saf.dropped TO {role}")
        connection.execute(f"GRANT EXECUTE ON FUNCTION saf.forget_names TO {role}")
        purge_all(as_role, rotate_after_seconds=NOW)
        with pytest.raises(UsageError, match="outbox_0"):
            purge_all(as_role)
        connection.execute(f"GRANT TRUNCATE ON {partitions} TO {role}")
        assert purge_all(as_role).slots[0].state == "purged"
        connection.execute(f"DROP OWNED BY {role}")
        connection.execute(f"DROP ROLE {role}")


def test_of_two_purges_at_once_one_does_nothing(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "one")
        forward(app, mom=mom)
        leave_slot(connection)
        second: list[Outcome] = []

        def meanwhile(_: Contents) -> Path:
            second.append(purge_all(app))
            return Path("unused")

        assert purge_all(app, archive=meanwhile).slots[0].state == "purged"
        assert (second[0].busy, second[0].slots) == (True, ())
        assert not purge_all(app).busy


def test_versions_of_the_routes_go_when_no_cursor_refers_to_them(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route_version (routes, created_at) "
            "SELECT '[]', now() - n * interval '1 day' FROM generate_series(9, 1, -1) AS n"
        )
        connection.execute("UPDATE saf.cursor SET route_version = 2 WHERE shard = 0")
        assert purge_all(app, retention_seconds=5.5 * 86400).route_versions == 2
        versions = "SELECT array_agg(version ORDER BY version) FROM saf.route_version"
        # 4 was the latest for another day, until 5 days ago
        assert connection.execute(versions).fetchone() == ([2, 4, 5, 6, 7, 8, 9],)
        assert purge_all(app).route_versions == 5
        assert connection.execute(versions).fetchone() == ([2, 9],)
