"""What reconciling counts as complete: to the position, up to a moment, of one source."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from saf.database import Dsn
from saf.log.side import open_side
from saf.operating import decide
from saf.operating.repair.reconcile import Outcome, reconcile
from saf.setaside.dropped import Reason, add
from saf.setaside.selection import DeadLetters
from tests.pipeline import Cycle, connect, forward, forwarding_rules, send, stores
from tests.ring import leave_slot

Broker = Callable[[str], Dsn]

FIRST = "SELECT message_id FROM saf.outbox ORDER BY id LIMIT 1"
SUBSCRIPTIONS = """
INSERT INTO saf.subscription (log, name) VALUES ('inbox', 'billing')
RETURNING (SELECT subscription_id FROM saf.subscription WHERE name = 'forwarder'), subscription_id
"""
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def compare(
    app: Dsn, mom: Dsn, since: datetime | None = None, until: datetime | None = None
) -> Outcome:
    return reconcile("app", app, stores(mom=mom), since=since, until=until, retention_seconds=86400)


def counts(outcome: Outcome) -> dict[str, int]:
    return {kind: count for kind, count in outcome.counts.items() if count}


def total(outcome: Outcome, figure: str) -> int:
    return sum(getattr(shard, figure) for shard in outcome.shards)


def test_what_is_marked_of_a_batch_in_hand_is_complete_to_the_last_message(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key=str(number))
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.open()
            before = compare(app, mom)
            cycle.deliver()  # and not closed
            outcome = compare(app, mom)
    assert (total(before, "complete"), total(before, "pending")) == (0, 10)
    assert all(shard.same for shard in before.shards), "pending messages are none that differ"
    assert (total(outcome, "complete"), total(outcome, "pending")) == (10, 0)
    assert counts(outcome) == {}


def test_where_something_is_lost_it_says_how_much_transforms_have_left_out(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection, connect(mom) as there:
        send(connection, "left out")
        send(connection, "kept")
        forward(app, mom=mom)
        ((one,),) = connection.execute(FIRST).fetchall()
        ((forwarder, stranger),) = connection.execute(SUBSCRIPTIONS).fetchall()
        add(connection, stranger, {(0, Reason.LEFT_OUT): (5, one)})
        kept = {(0, Reason.LEFT_OUT): (1, one), (1, Reason.LEFT_OUT): (1, one)}
        add(connection, forwarder, {**kept, (0, Reason.EXPIRED): (9, one)})
        assert compare(app, mom).left_out == 0  # nothing to explain
        there.execute("DELETE FROM saf.inbox WHERE message_id = %s", [one])
    outcome = compare(app, mom)
    assert (counts(outcome), outcome.left_out) == ({"lost": 1}, 2)


def test_since_is_included_and_until_is_not(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for minutes in (0, 1, 2):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, body, created_at) VALUES ('billing', '', %s)",
                [NOON + timedelta(minutes=minutes)],
            )
    forward(app, mom=mom)
    outcome = compare(app, mom, since=NOON, until=NOON + timedelta(minutes=2))
    assert (total(outcome, "complete"), total(outcome, "stored")) == (2, 2)
    outcome = compare(app, mom, until=NOON + timedelta(minutes=2))
    assert outcome.range.since is None, "nothing was purged, however old it is"
    assert (total(outcome, "complete"), total(outcome, "stored")) == (2, 2)
    outcome = compare(app, mom, since=NOON + timedelta(minutes=1))
    assert (total(outcome, "complete"), total(outcome, "stored")) == (2, 2)


def test_since_that_was_given_counts_although_the_log_was_purged(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        leave_slot(connection)
        connection.execute("TRUNCATE saf.outbox_0")
    assert compare(app, mom).range.purged
    given = compare(app, mom, since=NOON).range
    assert (given.since, given.purged) == (NOON, ())


def test_a_log_that_has_left_a_slot_was_not_purged_and_one_whose_slot_is_empty_was(
    app: Dsn,
) -> None:
    """Otherwise only what is younger than the retention would be compared."""

    def may_be_purged() -> bool:
        with open_side("source", "it", app, "outbox") as side:
            return side.may_be_purged()

    with connect(app) as connection:
        for body in ("first", "second"):
            send(connection, body)
            leave_slot(connection)
            assert not may_be_purged()
        connection.execute("TRUNCATE saf.outbox_0")
    assert may_be_purged()


def test_what_was_retried_is_not_given_up_and_so_may_be_lost(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, connect(mom) as store:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, body, expires_at) "
            "VALUES ('billing', 'late', now() - interval '1 s')"
        )
        forward(app, mom=mom)
        decide.retry(connection, DeadLetters(), "better late")
        forward(app, mom=mom)
        assert counts(compare(app, mom)) == {}
        store.execute("DELETE FROM saf.inbox")
        assert counts(compare(app, mom)) == {"lost": 1}


def test_what_other_sources_have_stored_there_is_theirs(
    app: Dsn, mom: Dsn, new_broker: Broker
) -> None:
    other = new_broker("other")
    for dsn in (app, other):
        with connect(dsn) as connection:
            send(connection, "x")
        forward(dsn, mom=mom)
    outcome = compare(app, mom)
    assert counts(outcome) == {}
    assert total(outcome, "stored") == 1
