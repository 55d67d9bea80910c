"""`saf reconcile`: a difference is found and named, and a difference there is not is not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from saf.broker.grants import Kind, grant
from saf.broker.migrate import migrate
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, Restored, Unavailable
from saf.log.ring import SLOT_ROWS, purge
from saf.operating import decide
from saf.operating.repair.reconcile import Outcome, missing, reconcile
from saf.operating.repair.reconcile.outcome import read_both
from saf.routing.routes import add_route, add_topic, remove_topic
from saf.setaside.selection import DeadLetters
from tests.pipeline import Cycle, connect, forward, forwarding_rules, stores
from tests.programs import configuration, last_json, saf, send
from tests.tiers import sized

SAME, DIFFERENT, USAGE, TRY_AGAIN = 0, 1, 2, 75
WEEK = 7 * 86400.0
NOWHERE = Dsn("host=/nonexistent dbname=mom")

WAITS = """
SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'saf.cursor'::regclass
"""
NEWEST = """
SELECT broker_id, to_service, key, body, message_id, o.created_at
FROM saf.broker, saf.outbox o ORDER BY id DESC LIMIT 1
"""
STORE = """
INSERT INTO saf.inbox (source, to_service, key, body, message_id, created_at)
VALUES (%s, %s, %s, %s, %s, %s)
"""

Broker = Callable[[str], Dsn]


def compare(app: Dsn, since: datetime | None = None, **destinations: Dsn) -> Outcome:
    return reconcile("app", app, stores(**destinations), since=since, retention_seconds=WEEK)


def counts(outcome: Outcome) -> dict[str, int]:
    return {kind: count for kind, count in outcome.counts.items() if count}


def total(outcome: Outcome, figure: str) -> int:
    return sum(getattr(shard, figure) for shard in outcome.shards)


def execute(dsn: Dsn, statement: str) -> list[Any]:
    with connect(dsn) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def lose(mom: Dsn, count: int) -> set[Any]:
    """Delete some messages of the inbox; return their ids."""
    return {
        message_id
        for (message_id,) in execute(
            mom,
            "DELETE FROM saf.inbox WHERE id IN (SELECT id FROM saf.inbox ORDER BY id DESC "
            f"OFFSET 10 LIMIT {count}) RETURNING message_id",
        )
    }


def copy_one(mom: Dsn, to: Dsn) -> None:
    """Store a message of one inbox once more, in the same or in another."""
    columns = "to_service, key, body, message_id, source, created_at"
    with connect(mom) as here, connect(to) as there:
        (row,) = fetch(here, f"SELECT {columns} FROM saf.inbox ORDER BY id DESC LIMIT 1")
        there.execute(f"INSERT INTO saf.inbox ({columns}) VALUES (%s, %s, %s, %s, %s, %s)", row)


@pytest.mark.every_postgresql
def test_what_was_forwarded_is_the_same_and_what_is_pending_is_not_missed(
    app: Dsn, mom: Dsn
) -> None:
    send(app, 200)
    forward(app, mom=mom)
    send(app, 30)
    outcome = compare(app, mom=mom)
    assert outcome.same
    assert counts(outcome) == {}
    assert (total(outcome, "complete"), total(outcome, "stored")) == (200, 200)
    assert total(outcome, "pending") == 30
    assert outcome.range.since is None, "nothing was ever purged, so everything is compared"


@pytest.mark.every_postgresql
def test_each_lost_message_is_named_and_found_again(app: Dsn, mom: Dsn) -> None:
    send(app, 200)
    forward(app, mom=mom)
    lost = lose(mom, 7)
    outcome = compare(app, mom=mom)
    assert not outcome.same
    assert counts(outcome) == {"lost": 7}
    assert {one.message_id for one in outcome.named} == lost
    sent = {row[:2]: row[2:] for row in execute(app, "SELECT shard, id, * FROM saf.outbox")}
    assert {one.message_id for one in outcome.named} == {
        sent[place][3] for place in missing("app", app, stores(mom=mom), retention_seconds=WEEK)
    }
    one = outcome.named[0]
    assert (one.service, one.stored) == ("billing", ())
    assert (one.key or "").startswith("order ")


def test_no_more_are_named_than_asked_for_but_all_are_counted(app: Dsn, mom: Dsn) -> None:
    send(app, 200)
    forward(app, mom=mom)
    lose(mom, 50)
    outcome = reconcile("app", app, stores(mom=mom), retention_seconds=WEEK, limit=3)
    assert (len(outcome.named), counts(outcome)) == (3, {"lost": 50})


def test_a_loss_that_a_duplicate_makes_up_for_in_number_is_seen(app: Dsn, mom: Dsn) -> None:
    execute(
        app,
        "INSERT INTO saf.outbox (to_service, key, body) "
        "SELECT 'billing', 'one key', '' FROM generate_series(1, 20)",
    )
    forward(app, mom=mom)
    lose(mom, 1)
    copy_one(mom, mom)
    outcome = compare(app, mom=mom)
    assert total(outcome, "complete") == total(outcome, "stored")
    assert counts(outcome) == {"lost": 1, "duplicate": 1}
    (duplicate,) = [one for one in outcome.named if one.kind == "duplicate"]
    assert duplicate.stored == ("mom", "mom")


def test_a_message_that_the_source_never_sent_is_unexpected(app: Dsn, mom: Dsn) -> None:
    send(app, 20)
    forward(app, mom=mom)
    gone = execute(app, "DELETE FROM saf.outbox WHERE id = 5 RETURNING message_id")
    outcome = compare(app, mom=mom)
    assert counts(outcome) == {"unexpected": 1}
    assert [(one.message_id,) for one in outcome.named] == gone


def test_what_two_destinations_hold_together_is_compared(app: Dsn, mom: Dsn, other: Dsn) -> None:
    execute(app, "INSERT INTO saf.route (service, destination) VALUES ('shipping', 'other')")
    for service in ("billing", "shipping"):
        execute(
            app,
            "INSERT INTO saf.outbox (to_service, key, body) "
            f"SELECT '{service}', n::text, '' FROM generate_series(1, 50) AS n",
        )
    forward(app, mom=mom, other=other)
    assert compare(app, mom=mom, other=other).same
    assert counts(compare(app, mom=mom)) == {"lost": 50}

    copy_one(mom, other)
    outcome = compare(app, mom=mom, other=other)
    assert counts(outcome) == {"duplicate": 1}
    assert set(outcome.named[0].stored) == {"mom", "other"}
    lose(other, 2)
    assert counts(compare(app, mom=mom, other=other)) == {"duplicate": 1, "lost": 2}


def test_the_copies_of_a_topic_are_no_duplicates_and_its_losses_are_seen(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        add_topic(connection, "billing")
        add_route(connection, "other", service="billing")
        add_route(connection, "mom")
    for service, count in (("billing", 30), ("shipping", 20)):
        execute(
            app,
            "INSERT INTO saf.outbox (to_service, key, body) "
            f"SELECT '{service}', n::text, '' FROM generate_series(1, {count}) AS n",
        )
    forward(app, mom=mom, other=other)
    outcome = compare(app, mom=mom, other=other)
    assert (outcome.same, dict(outcome.counts)) == (True, {})
    assert (total(outcome, "complete"), total(outcome, "stored")) == (50, 80)

    copy_one(other, other)
    outcome = compare(app, mom=mom, other=other)
    assert counts(outcome) == {"duplicate": 1}
    assert sorted(outcome.named[0].stored) == ["mom", "other", "other"]
    execute(mom, "DELETE FROM saf.inbox WHERE to_service = 'shipping' AND key = '7' RETURNING 1")
    for dsn in (mom, other):
        execute(dsn, "DELETE FROM saf.inbox WHERE to_service = 'billing' AND key = '3' RETURNING 1")
    assert counts(compare(app, mom=mom, other=other))["lost"] == 2
    # no longer a topic, and still known to have been one
    with connect(app) as connection:
        remove_topic(connection, "billing")
    assert counts(compare(app, mom=mom, other=other))["lost"] == 2


def test_a_destination_with_another_number_of_shards_is_the_same(
    app: Dsn, new_database: Broker
) -> None:
    few = new_database("few")
    migrate(few, shards=7)
    send(app, 200)
    forward(app, few=few)
    assert compare(app, few=few).same
    lose(few, 3)
    outcome = compare(app, few=few)
    assert counts(outcome) == {"lost": 3}
    sent = dict(execute(app, "SELECT message_id, shard FROM saf.outbox"))
    assert all(sent[one.message_id] == one.shard for one in outcome.named)


def test_what_is_parked_dead_or_discarded_is_not_lost(app: Dsn, mom: Dsn, other: Dsn) -> None:
    execute(app, "INSERT INTO saf.route (service, destination) VALUES ('shipping', 'other')")
    send(app, 20)
    execute(
        app,
        "INSERT INTO saf.outbox (to_service, body, expires_at) VALUES "
        "('shipping', '', NULL), ('billing', '', now() - interval '1 s'), "
        "('billing', '', now() - interval '1 s')",
    )
    forward(app, mom=mom, other=NOWHERE)
    with connect(app) as connection:
        one = DeadLetters().rows(connection)[0]
        decide.discard(connection, DeadLetters(numbers=[one.dead_letter_id]), "test")
    outcome = compare(app, mom=mom, other=other)
    assert outcome.same
    assert (total(outcome, "complete"), total(outcome, "aside")) == (20, 3)


def test_what_is_stored_and_not_marked_is_in_flight(app: Dsn, mom: Dsn) -> None:
    send(app, 50)
    with Cycle(app, forwarding_rules("exactly_once", 1000, mom=mom)) as cycle:
        cycle.open()
        cycle.deliver()
        execute(app, "UPDATE saf.cursor SET position = 0")
        outcome = compare(app, mom=mom)
        assert outcome.same
        assert counts(outcome) == {"in_flight": 50}


def test_there_is_no_false_alarm_while_messages_are_sent_and_forwarded(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    execute(app, "INSERT INTO saf.route (service, destination) VALUES ('shipping', 'other')")
    over = threading.Event()
    failures: list[BaseException] = []

    def until_over(work: Callable[[], object]) -> threading.Thread:
        def loop() -> None:
            try:
                while not over.is_set():
                    work()
            except BaseException as error:  # reported by the test
                failures.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def write() -> None:
        with app.connect(role="test") as connection:
            for service in ("billing", "shipping"):
                connection.execute(
                    "INSERT INTO saf.outbox (to_service, key, body) "
                    "SELECT %s, n::text, '' FROM generate_series(1, 20) AS n",
                    [service],
                )

    rules = forwarding_rules("exactly_once", 50, mom=mom, other=other)
    in_flight = 0
    with Cycle(app, rules) as cycle:
        threads = [until_over(write), until_over(write), until_over(cycle.run)]
        try:
            for _ in range(sized(10, 30)):
                outcome = compare(app, mom=mom, other=other)
                assert outcome.same, outcome.named[:3]
                in_flight += outcome.counts["in_flight"]
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert failures == []
    assert total(outcome, "complete") > 0
    assert in_flight > 0, "nothing was forwarded meanwhile, so the test has shown nothing"


def test_what_was_sent_and_stored_between_the_two_snapshots_is_in_flight(
    app: Dsn, mom: Dsn
) -> None:
    send(app, 5)
    forward(app, mom=mom)
    with ThreadPoolExecutor() as pool, connect(app) as holder:
        with holder.transaction():
            # read after the source's snapshot is taken, and before the destination's
            holder.execute("LOCK TABLE saf.cursor")
            future = pool.submit(compare, app, mom=mom)
            while not execute(app, WAITS):
                assert not future.done()
            send(app, 1)
            (source, *row) = execute(app, NEWEST)[0]
            with connect(mom) as there:
                there.execute(STORE, [source, *row])
        outcome = future.result()
    assert outcome.same
    assert counts(outcome) == {"in_flight": 1}


def test_a_restored_destination_lacks_what_came_after_its_backup(app: Dsn, mom: Dsn) -> None:
    send(app, 100)
    forward(app, mom=mom)
    send(app, 40)
    forward(app, mom=mom)
    execute(mom, "DELETE FROM saf.inbox WHERE id > 100")
    found = missing("app", app, stores(mom=mom), retention_seconds=WEEK)
    assert sorted(id_ for _, id_ in found) == list(range(101, 141))


# The range


def test_only_messages_created_in_the_range_are_compared(app: Dsn, mom: Dsn) -> None:
    send(app, 20)
    forward(app, mom=mom)
    between = datetime.now(UTC)
    send(app, 20)
    forward(app, mom=mom)
    execute(mom, "DELETE FROM saf.inbox WHERE id = 1")
    assert compare(app, since=between, mom=mom).same
    before = reconcile("app", app, stores(mom=mom), until=between, retention_seconds=WEEK)
    assert (counts(before), total(before, "stored")) == ({"lost": 1}, 19)


@pytest.mark.every_postgresql
@pytest.mark.parametrize("side", ["outbox", "inbox"])
def test_what_was_purged_on_one_side_is_neither_lost_nor_unexpected(
    app: Dsn, mom: Dsn, side: str
) -> None:
    send(app, 20)
    execute(app, "UPDATE saf.outbox SET created_at = now() - interval '8 days'")
    forward(app, mom=mom)
    purged = app if side == "outbox" else mom
    execute(purged, f"SELECT setval('saf.{side}_id_seq', {SLOT_ROWS}, false)")
    execute(purged, f"TRUNCATE saf.{side}_0")
    send(app, 30)
    forward(app, mom=mom)
    outcome = compare(app, mom=mom)
    assert outcome.same
    assert total(outcome, "stored") == 30
    assert outcome.range.since is not None
    age = datetime.now(UTC) - outcome.range.since
    assert timedelta(0) <= age - timedelta(days=7) < timedelta(minutes=5)
    (why,) = outcome.range.purged
    assert why.startswith(side)

    lose(mom, 1)
    assert counts(compare(app, mom=mom)) == {"lost": 1}


def test_nothing_is_purged_while_the_two_sides_are_read(app: Dsn, mom: Dsn) -> None:
    send(app, 5)
    forward(app, mom=mom)
    execute(app, f"SELECT setval('saf.outbox_id_seq', {SLOT_ROWS}, false)")
    with connect(app) as connection:
        with read_both("app", app, stores(mom=mom), since=None, until=None, retention_seconds=WEEK):
            assert purge(connection, "outbox", retention_seconds=0)[0].state == "locked"
        assert purge(connection, "outbox", retention_seconds=0)[0].state == "purged"


def test_a_row_that_came_late_into_an_emptied_slot_does_not_make_it_look_whole(
    app: Dsn, mom: Dsn
) -> None:
    send(app, 5)
    forward(app, mom=mom)
    execute(app, "TRUNCATE saf.outbox_0")
    send(app, 5)
    assert compare(app, mom=mom).range.purged == ("outbox of broker 'app'",)


def test_cursors_of_another_cluster_prove_nothing(app: Dsn, mom: Dsn) -> None:
    execute(app, "UPDATE saf.broker SET system_identifier = 1")
    with pytest.raises(Restored, match="saf rebase"):
        compare(app, mom=mom)


def test_two_names_of_one_destination_are_refused(app: Dsn, mom: Dsn) -> None:
    with pytest.raises(ConfigurationError, match="same broker"):
        compare(app, mom=mom, again=mom)


def test_a_destination_that_is_down_leaves_it_open(app: Dsn, mom: Dsn) -> None:
    with pytest.raises(Unavailable):
        compare(app, mom=mom, other=NOWHERE)


def test_an_operator_of_both_sides_may_reconcile(app: Dsn, mom: Dsn) -> None:
    send(app, 20)
    forward(app, mom=mom)
    lose(mom, 1)
    execute(app, "CREATE ROLE reconciler LOGIN")
    try:
        for dsn in (app, mom):
            with connect(dsn) as connection:
                grant(connection, "reconciler", [Kind.OPERATOR])
        here, there = (Dsn(make_conninfo(dsn.conninfo, user="reconciler")) for dsn in (app, mom))
        assert counts(compare(here, mom=there)) == {"lost": 1}
        with connect(mom) as connection:
            grant(connection, "reconciler", [Kind.FORWARDER])
        with pytest.raises(ConfigurationError, match="destination 'mom' refuses this user"):
            compare(here, mom=there)
    finally:
        for dsn in (app, mom):
            execute(dsn, "DROP OWNED BY reconciler")
        execute(app, "DROP ROLE reconciler")


# The command


def test_the_exit_code_and_the_json_say_the_result(tmp_path: Path, app: Dsn, mom: Dsn) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    send(app, 50)
    forward(app, mom=mom)
    done = saf("reconcile", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (SAME, "")
    assert "compared all messages" in done.stdout

    lost = lose(mom, 2)
    done = saf("reconcile", "--json", cwd=tmp_path)
    assert done.returncode == DIFFERENT
    (said,) = json.loads(done.stdout)["brokers"]
    assert (said["same"], said["lost"], said["duplicate"]) == (False, 2, 0)
    assert {one["message_id"] for one in said["differences"]} == set(map(str, lost))
    assert [shard["same"] for shard in said["shards"]] in ([False], [False] * 2)
    (whole,) = last_json(saf("reconcile", "--json", "--shards", cwd=tmp_path).stdout)["brokers"]
    assert len(whole["shards"]) == 64
    assert (whole["complete"], whole["stored"]) == (said["complete"], said["stored"])

    done = saf("reconcile", cwd=tmp_path)
    assert done.returncode == DIFFERENT
    assert all(f"lost        {message_id}  billing" in done.stdout for message_id in lost)
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert saf("reconcile", "--since", tomorrow, cwd=tmp_path).returncode == SAME


def test_wrong_usage_and_what_does_not_answer_have_codes_of_their_own(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    assert saf("reconcile", "--broker", "shop", cwd=tmp_path).returncode == USAGE
    assert saf("reconcile", "--since", "noon", cwd=tmp_path).returncode == USAGE
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": NOWHERE})
    assert saf("reconcile", cwd=tmp_path).returncode == TRY_AGAIN
