"""What a rebase keeps: what is pending, in hand, read and unread, and the order of owners."""

from __future__ import annotations

import psycopg
import pytest

import saf
from saf.broker.embedded import EmbeddedServer
from saf.database import Dsn, fetch
from saf.destinations.postgresql import known_at
from saf.errors import Restored
from saf.operating.repair.rebase import rebase
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, run, send
from tests.receivers import SUBSCRIPTION, prepare, put
from tests.restored import burn_transaction_ids, elsewhere, repair, restore

__all__ = ["elsewhere"]


def received(inbox: Dsn) -> list[str]:
    """What is received now, until nothing is left."""
    found: list[str] = []
    while True:
        with saf.receive(inbox, SUBSCRIPTION) as delivery:
            if not delivery:
                return found
            found += [message.text() for message in delivery]


@pytest.fixture
def copy(app: Dsn, elsewhere: EmbeddedServer) -> Dsn:
    """A restored source, not repaired yet."""
    burn_transaction_ids(app)
    return restore(app, elsewhere)


def test_what_is_in_progress_is_not_lost_though_younger_transactions_have_ended(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    burn_transaction_ids(app)
    with connect(app) as connection:
        send(connection, "early")
    run(app, mom=mom)
    copy = restore(app, elsewhere)
    with psycopg.connect(copy.conninfo) as late:
        late.execute("SELECT pg_current_xact_id()")
        burn_transaction_ids(copy, 3)
        repair(copy, mom)
        late.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', 'late')")
        late.commit()
    run(copy, mom=mom)
    assert bodies(mom) == ["early", "late"]


def test_a_batch_in_hand_of_which_nothing_was_delivered_is_delivered(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    burn_transaction_ids(app)
    with connect(app) as connection:
        send(connection, "in hand")
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.open()
            restored = restore(app, elsewhere)
    repair(restored, mom)
    run(restored, mom=mom)
    assert bodies(mom) == ["in hand"]


def test_a_dump_is_refused_also_where_transaction_ids_have_got_farther_than_its_own(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    """Its rows look as if they had been written long ago, which not all of them were."""
    with connect(app) as connection:
        send(connection, "x")
    restored = restore(app, elsewhere)
    burn_transaction_ids(restored, 20_000)
    with pytest.raises(Restored):
        run(restored, mom=mom)
    assert bodies(mom) == []


def test_what_was_not_in_the_batch_in_hand_is_not_taken_for_complete_by_its_position(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    """It has a lower id, and committed after the batch was opened."""
    burn_transaction_ids(app)
    with connect(app) as connection, app.connect(role="test") as late:
        send(late, "late", key="a")
        send(connection, "early", key="a")
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.open()
            cycle.deliver()  # and not closed
            late.commit()
            restored = restore(app, elsewhere)
    repair(restored, mom)
    run(restored, mom=mom)
    assert bodies(mom) == ["early", "late"]


def test_of_ids_that_were_given_twice_only_the_younger_message_gets_a_new_one(app: Dsn) -> None:
    """What is pending and older keeps its id, and so its place before what is younger."""
    with connect(app) as connection, app.connect(role="test") as late:
        send(connection, "1")
        with connection.transaction():
            connection.execute("SELECT pg_current_xact_id()")
            send(late, "2, of a younger transaction")
            send(connection, "3")
        late.commit()
        fetch(connection, "SELECT setval('saf.outbox_id_seq', 3, false)")
        send(connection, "3 as well")
        rebased = rebase(connection, {})
        assert rebased is not None
        assert rebased.new_ids == 1


def test_a_repair_waits_for_who_is_sending(app: Dsn) -> None:
    with connect(app) as connection, app.connect(role="test") as sender:
        send(sender, "not committed")
        connection.execute("SET lock_timeout = 100")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            rebase(connection, {}, force=True)


def test_where_there_are_no_messages_a_repair_rewrites_none(app: Dsn) -> None:
    with connect(app) as connection:
        rebased = rebase(connection, {}, force=True)
    assert rebased is not None
    assert rebased.rows == 0


@pytest.mark.slow
def test_the_restored_source_is_newer_than_any_owner_that_the_destination_has_heard_of(
    app: Dsn, mom: Dsn, server: EmbeddedServer
) -> None:
    with connect(app) as connection:
        send(connection, "before", key="k")
        run(app, mom=mom)
    backup = restore(app, server, f"backup_{app.database}")
    with connect(app) as connection:
        for number in range(8):
            send(connection, f"lost with the source {number}", key="k")
            run(app, mom=mom)
    with connect(backup) as connection, connect(mom) as store:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        rebase(connection, {"mom": known_at(store, source)})
        send(connection, "after", key="k")
        epochs = "SELECT max(epoch) FROM saf.{}"
        ((heard,),) = fetch(store, epochs.format("watermark"))
        ((epoch,),) = fetch(connection, epochs.format("cursor"))
        assert epoch > heard
    run(backup, mom=mom)
    assert bodies(mom)[-1] == "after"


def test_of_a_restored_inbox_the_unread_is_received_and_the_read_is_not(
    mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    prepare(mom)
    burn_transaction_ids(mom)
    put(mom, "read", key="a")
    assert received(mom) == ["read"]
    put(mom, "unread", key="b")
    restored = restore(mom, elsewhere, "mom")
    with connect(restored) as connection:
        rebase(connection, {})
    put(restored, "new", key="c")
    assert sorted(received(restored)) == ["new", "unread"]


def test_a_restored_inbox_is_not_received_from(mom: Dsn, elsewhere: EmbeddedServer) -> None:
    prepare(mom)
    burn_transaction_ids(mom)
    put(mom, "1", key="a")
    restored = restore(mom, elsewhere, "mom")
    with pytest.raises(Restored):
        received(restored)
