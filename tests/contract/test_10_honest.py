"""Guarantee 10: a restored broker is noticed, refused and repaired, and nothing is skipped."""

from __future__ import annotations

import psycopg
import pytest

from saf import Ahead, Restored, receive
from saf.broker.embedded import EmbeddedServer
from saf.broker.services import create_subscription
from saf.database import Dsn, fetch
from saf.errors import UsageError
from saf.operating.repair.rebase import rebase
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass, run, send
from tests.restored import burn_transaction_ids, elsewhere, repair, restore

__all__ = ["elsewhere"]


def test_a_dump_in_another_cluster_is_refused_and_goes_on_after_a_rebase(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    burn_transaction_ids(app)
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key=str(number % 3))
        run(app, mom=mom)
        for number in range(10, 20):
            send(connection, str(number), key=str(number % 3))
    copy = restore(app, elsewhere)
    with pytest.raises(Restored, match="saf rebase"):
        run(copy, mom=mom)
    assert len(bodies(mom)) == 10, "nothing was written"
    repair(copy, mom)
    with connect(copy) as connection:
        send(connection, "20", key="2")
    run(copy, mom=mom)
    assert sorted(map(int, bodies(mom))) == list(range(21))
    for key in range(3):
        mine = [int(body) for body in bodies(mom) if int(body) % 3 == key]
        assert mine == sorted(mine)


def test_a_batch_in_hand_stays_the_same_batch_so_that_nothing_is_stored_twice(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    burn_transaction_ids(app)
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key=str(number))
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.open()
            cycle.deliver()  # stored and marked, but not closed
            send(connection, "10", key="1")
            copy = restore(app, elsewhere)
        # what was stored is not marked: as if the dump had been taken in between
        with connect(copy) as restored:
            restored.execute("UPDATE saf.cursor SET position = 0")
    repair(copy, mom)
    run(copy, mom=mom)
    assert sorted(map(int, bodies(mom))) == list(range(11))


def test_a_transaction_that_is_in_progress_during_a_rebase_is_not_lost(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    burn_transaction_ids(app)
    copy = restore(app, elsewhere)
    with psycopg.connect(copy.conninfo) as late:
        late.execute("SELECT pg_current_xact_id()")
        repair(copy, mom)
        late.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', 'late')")
        with connect(copy) as connection:
            send(connection, "early")
        run(copy, mom=mom)
        assert bodies(mom) == ["early"]
        late.commit()
    run(copy, mom=mom)
    assert bodies(mom) == ["early", "late"]


def test_what_is_sent_between_a_restore_and_the_rebase_is_forwarded_and_nothing_twice(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    burn_transaction_ids(app)
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key=str(number % 3))
        run(app, mom=mom)
    copy = restore(app, elsewhere)
    with connect(copy) as connection:
        for number in range(10, 25):
            send(connection, str(number), key=str(number % 3))
        connection.execute("VACUUM (FREEZE) saf.outbox")
    repair(copy, mom)
    run(copy, mom=mom)
    assert sorted(map(int, bodies(mom))) == list(range(25))
    # and a dump of that, once more
    again = restore(copy, elsewhere, "again")
    with connect(again) as connection:
        send(connection, "25", key="1")
        # nothing was written here since by any of its own transactions but this one
        assert rebase(connection, {}, force=True) is not None
    run(again, mom=mom)
    assert sorted(map(int, bodies(mom))) == list(range(26))


def test_a_row_whose_transaction_id_is_by_chance_that_of_the_restore_is_not_sent_again(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    burn_transaction_ids(app)
    with connect(app) as connection:
        send(connection, "0", key="k")
        run(app, mom=mom)
    copy = restore(app, elsewhere)
    with connect(copy) as connection:
        ((brought, last),) = fetch(
            connection,
            "SELECT o.xmin::text::bigint, t.xmin::text::bigint FROM saf.outbox o, saf.timeline t",
        )
        assert brought < last, "a dump brings the logs before their timeline"
        # as such a row would be
        connection.execute("UPDATE saf.outbox SET txid = pg_current_xact_id()")
        connection.execute("UPDATE saf.timeline SET written = '3'")
        connection.execute("UPDATE saf.cursor SET done = pg_current_snapshot()")
    repair(copy, mom)
    run(copy, mom=mom)
    assert bodies(mom) == ["0"]


def test_a_cluster_that_was_upgraded_keeps_its_transaction_ids_and_sends_nothing_again(
    app: Dsn, mom: Dsn
) -> None:
    """After pg_upgrade the cluster is another one, and rows have the xmin that they had."""
    with connect(app) as connection:
        send(connection, "0", key="k")
        run(app, mom=mom)
        send(connection, "1", key="k")
        connection.execute("UPDATE saf.broker SET system_identifier = 1")
    with pytest.raises(Restored):
        run(app, mom=mom)
    repair(app, mom)
    run(app, mom=mom)
    assert bodies(mom) == ["0", "1"]


def test_a_restored_store_is_refused_by_name_and_its_receivers_get_everything_once(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    burn_transaction_ids(mom)
    with connect(mom) as store:
        store.execute("INSERT INTO saf.service (name) VALUES ('billing')")
        create_subscription(store, "billing", service="billing")
    with connect(app) as connection:
        for number in range(5):
            send(connection, str(number), key=str(number % 3))
    run(app, mom=mom)
    copy = restore(mom, elsewhere)
    with connect(app) as connection:
        for number in range(5, 15):
            send(connection, str(number), key=str(number % 3))
    with Cycle(app, forwarding_rules(mom=copy)) as cycle:
        (error,) = [r.error for r in cycle.run() if r.error]
    assert "destination 'mom'" in error
    assert "saf rebase" in error
    assert len(bodies(copy)) == 5, "nothing was written"
    # somebody else's program has stored all the same
    with connect(copy) as store:
        store.execute(
            "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'x', 'by hand')"
        )
        rebase(store, {})
    let_time_pass(app)
    run(app, mom=copy)
    with receive(copy, "billing", max_messages=100) as delivery:
        got = [bytes(message.body).decode() for message in delivery]
    assert sorted(got) == sorted([*map(str, range(15)), "by hand"])


@pytest.mark.parametrize("batches_after_the_backup", [1, 3])
def test_a_source_set_back_to_an_older_backup_is_refused_by_the_destination_until_rebased(
    app: Dsn, mom: Dsn, server: EmbeddedServer, batches_after_the_backup: int
) -> None:
    with connect(app) as connection:
        send(connection, "before", key="k")
        run(app, mom=mom)
    backup = restore(app, server, f"backup_{batches_after_the_backup}_{app.database}")
    with connect(app) as connection:
        for number in range(batches_after_the_backup):
            send(connection, f"lost with the source {number}", key="k")
            run(app, mom=mom)
    with connect(backup) as connection:
        for number in range(3):
            send(connection, f"after {number}", key="k")
    stored = bodies(mom)
    with Cycle(backup, forwarding_rules(mom=mom)) as cycle:
        assert {r.error_kind for r in cycle.run() if r.error_kind} == {Ahead.__name__}
    assert bodies(mom) == stored
    repair(backup, mom)
    run(backup, mom=mom)
    assert bodies(mom) == [*stored, "after 0", "after 1", "after 2"]


def test_what_was_not_restored_is_left_alone(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "one")
    run(app, mom=mom)
    assert repair(app, mom) is None


def test_a_rebase_beside_a_member_at_work_is_refused(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.open()
        with pytest.raises(UsageError, match="stop all forwarders"):
            rebase(connection, {}, force=True)
