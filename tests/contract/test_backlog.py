"""Backlogs: exact while little is left, about right when much is, and cheap in either case."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from saf.broker.services import create_service, create_subscription
from saf.database import Dsn, fetch
from saf.log import backlog
from saf.log.backlog import Backlog, backlogs
from saf.log.cursor import advance, close, open_batch
from saf.log.ring import SLOT_ROWS
from saf.log.shards import Member
from tests.pipeline import connect, forward, new_member, send

every_postgresql = pytest.mark.every_postgresql

SENT = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT CASE WHEN n %% 4 = 0 THEN 'shipping' ELSE 'billing' END, n::text, ''
FROM generate_series(1, %s) AS n
"""


def left(connection: psycopg.Connection[Any], **options: Any) -> Backlog:
    """That of the forwarder."""
    (mine,) = (one for one in backlogs(connection, **options) if one.log == "outbox")
    return mine


@every_postgresql
def test_what_is_pending_is_counted_by_service_with_the_age_of_the_oldest(app: Dsn) -> None:
    with connect(app) as connection:
        assert (left(connection).messages, left(connection).oldest) == (0, None)
        connection.execute(SENT, [40])
        found = left(connection)
        ((oldest,),) = fetch(connection, "SELECT min(created_at) FROM saf.outbox")
    assert (found.messages, found.exact, found.oldest) == (40, True, oldest)
    counts = {service: part.messages for (service, _), part in found.by_address.items()}
    assert counts == {"billing": 30, "shipping": 10}
    assert len(found.shards) == 64


def test_what_is_forwarded_or_of_transactions_that_go_on_is_not_left(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, connect(app) as other:
        send(connection, "before")
        other.execute("BEGIN")
        send(other, "long")
        forward(app, mom=mom)
        assert left(connection).messages == 0
        send(connection, "after")
        other.execute("COMMIT")
        found = left(connection)
    assert (found.messages, found.exact) == (2, True)


def test_of_a_batch_in_hand_only_what_is_beyond_the_position_is_left(app: Dsn) -> None:
    with connect(app) as connection:
        for number in range(100):
            send(connection, str(number), key=str(number))
        member = new_member(connection)
        member.balance(connection)
        (batch,) = open_batch(connection, "outbox", member)
        oldest = "SELECT min(created_at) FROM saf.outbox WHERE id > %(done)s"
        for done in (0, 1, 50, 99, 100):
            with connection.transaction():
                advance(connection, batch, done)
            # read from the middle, and from the beginning with a member that looks far
            found = left(connection)
            assert found.messages == 100 - done
            assert [(found.oldest,)] == fetch(connection, oldest, {"done": done})
            by_address = [part.oldest for part in found.by_address.values()]
            assert by_address == [found.oldest] * (done < 100)
        close(connection, [batch])
        assert left(connection).messages == 0


def send_at_once(connection: psycopg.Connection[Any], count: int, keys: int = 1) -> list[int]:
    """Send messages of some keys in one statement; return the ids of the outbox."""
    connection.execute(
        "INSERT INTO saf.outbox (to_service, key, body) SELECT 'billing', (n %% %s)::text, '' "
        "FROM generate_series(1, %s) AS n",
        [keys, count],
    )
    return [i for (i,) in fetch(connection, "SELECT id FROM saf.outbox ORDER BY id")]


@every_postgresql
@pytest.mark.parametrize("look", [200, 5000])
def test_of_a_transaction_that_the_position_lies_in_the_rest_is_left(app: Dsn, look: int) -> None:
    """Such as a COPY: more of it than is read, and less."""
    with connect(app) as connection:
        send(connection, "before", key="0")
        send_at_once(connection, 3000)
        send(connection, "after", key="0")
        member = new_member(connection)
        member.balance(connection)
        (batch,) = open_batch(connection, "outbox", member)
        ids = [i for (i,) in fetch(connection, "SELECT id FROM saf.outbox ORDER BY id")]
        for done in (1, 2, 1500, 2900, 3000, 3001, 3002):
            with connection.transaction():
                advance(connection, batch, ids[done - 1])
            found = left(connection, look=look)
            assert found.messages == 3002 - done
            assert found.exact is (look > 3002 or done == 3002)


def test_a_transaction_that_the_open_batch_does_not_have_is_left_wherever_the_position_is(
    app: Dsn,
) -> None:
    with connect(app) as connection, connect(app) as long:
        long.execute("BEGIN")
        send_at_once(long, 300)
        send(connection, "in the batch", key="0")
        member = new_member(connection)
        member.balance(connection)
        close(connection, open_batch(connection, "outbox", member))
        send(connection, "in the next batch", key="0")
        (batch,) = open_batch(connection, "outbox", member)
        long.execute("COMMIT")
        ((last,),) = fetch(connection, "SELECT max(id) FROM saf.outbox")
        with connection.transaction():
            advance(connection, batch, last)
        for look in (100, 1000):
            assert left(connection, look=look).messages == 300


def begun_before_the_last_batch(
    connection: psycopg.Connection[Any], long: psycopg.Connection[Any]
) -> Member:
    """Begin a transaction, then open and close a batch; return the member that did."""
    long.execute("BEGIN")
    long.execute("SELECT pg_current_xact_id()")
    member = new_member(connection)
    member.balance(connection)
    close(connection, open_batch(connection, "outbox", member))
    return member


@pytest.mark.parametrize("slot", [1, 8])
def test_a_transaction_in_two_slots_is_left_by_what_it_has_in_each(app: Dsn, slot: int) -> None:
    """Also where the ring comes round."""
    with connect(app) as connection, connect(app) as long:
        member = begun_before_the_last_batch(connection, long)
        fetch(long, f"SELECT setval('saf.outbox_id_seq', {slot * SLOT_ROWS - 501})")
        send_at_once(long, 1000)
        long.execute("COMMIT")
        assert left(connection, look=100).messages == 1000
        (batch,) = open_batch(connection, "outbox", member)
        for done in (200, 800):
            with connection.transaction():
                advance(connection, batch, slot * SLOT_ROWS - 501 + done)
            assert left(connection, look=100).messages == 1000 - done


def test_the_rest_of_a_transaction_in_many_shards_is_about_right(app: Dsn) -> None:
    with connect(app) as connection:
        member = new_member(connection)
        member.balance(connection)
        ids = send_at_once(connection, 20_000, keys=500)
        (batch,) = open_batch(connection, "outbox", member)
        for done in (5_000, 15_000, 19_900):
            with connection.transaction():
                advance(connection, batch, ids[done - 1])
            found = left(connection, look=100)
            assert found.messages == pytest.approx(20_000 - done, rel=0.15)
            assert left(connection).messages == 20_000 - done


def test_of_a_transaction_that_went_on_at_the_last_batch_the_rest_is_left(app: Dsn) -> None:
    with connect(app) as connection, connect(app) as long:
        member = begun_before_the_last_batch(connection, long)
        send_at_once(long, 300)
        long.execute("COMMIT")
        for look in (100, 1000):
            assert left(connection, look=look).messages == 300
        (batch,) = open_batch(connection, "outbox", member)
        ids = [i for (i,) in fetch(connection, "SELECT id FROM saf.outbox ORDER BY id")]
        with connection.transaction():
            advance(connection, batch, ids[249])
        for look in (100, 1000):
            assert left(connection, look=look).messages == 50


def test_the_message_at_the_position_is_not_left_where_an_older_transaction_wrote_after_it(
    app: Dsn,
) -> None:
    """Reading begins at the older transaction, so the one at the position is met too."""
    with connect(app) as connection, connect(app) as older:
        with older.transaction():
            older.execute("SELECT pg_current_xact_id()")
            send(connection, "1", key="k")
            send(older, "2", key="k")
        member = new_member(connection)
        member.balance(connection)
        (batch,) = open_batch(connection, "outbox", member)
        first, second = (i for (i,) in fetch(connection, "SELECT id FROM saf.outbox ORDER BY id"))
        for position, expected in ((first - 1, 2), (first, 1), (second, 0)):
            with connection.transaction():
                advance(connection, batch, position)
            assert left(connection).messages == expected


@every_postgresql
def test_shards_that_are_each_at_a_place_of_their_own_are_read_by_two_statements(
    app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a dispatcher's are: what is asked every few seconds may not cost most in a backlog."""
    of_its_own = "UPDATE saf.cursor SET position = shard * 4 + 1 WHERE open IS NOT NULL"
    beyond = "SELECT count(*) FROM saf.outbox o JOIN saf.cursor c USING (shard) \
              WHERE o.id > c.position AND c.open IS NOT NULL"
    asked = []

    def counted(*given: Any) -> Any:
        asked.append(given)
        return fetch(*given)

    with connect(app) as connection:
        for number in range(300):
            send(connection, str(number), key=str(number))
        member = new_member(connection)
        member.balance(connection)
        open_batch(connection, "outbox", member)
        connection.execute(of_its_own)
        ((expected,),) = fetch(connection, beyond)
        monkeypatch.setattr(backlog, "fetch", counted)
        found = left(connection)
    assert (found.messages, found.exact) == (expected, True)
    assert 0 < expected < 300
    assert len(asked) == 2


def test_what_is_more_than_is_read_is_estimated_across_slots_that_were_left_early(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(SENT, [10_000])
        ((sequence,),) = fetch(connection, "SELECT pg_get_serial_sequence('saf.outbox', 'id')")
        # ids go on to the next slot, as when a quiet outbox rotates
        connection.execute("SELECT setval(%s, %s)", [sequence, SLOT_ROWS])
        connection.execute(SENT, [10_000])
        found = left(connection, look=50)
        assert not found.exact
        assert found.messages == pytest.approx(20_000, rel=0.1)
        shares = {service: part.messages for (service, _), part in found.by_address.items()}
        assert shares["shipping"] == pytest.approx(5_000, rel=0.3)
        assert left(connection, look=1_000).messages == 20_000


def test_an_inbox_has_a_backlog_for_each_subscription_of_its_service_alone(mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, "billing")
        create_subscription(connection, "everything", service=None)
        connection.execute(
            "INSERT INTO saf.inbox (to_service, body) SELECT s, '' FROM "
            "unnest(ARRAY['billing', 'billing', 'shipping']) AS s"
        )
        found = {one.subscription: one.messages for one in backlogs(connection)}
    assert found == {"forwarder": 0, "billing": 2, "everything": 3}


def test_what_a_dispatcher_has_completed_beyond_its_position_is_not_left(mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, "billing")
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) SELECT 'billing', 'k', '' "
            "FROM generate_series(1, 10)"
        )
        connection.execute(
            "UPDATE saf.cursor c SET open = pg_current_snapshot(), batch = 1 "
            "FROM saf.subscription s WHERE s.subscription_id = c.subscription_id "
            "AND s.name = 'billing'"
        )
        connection.execute(
            "INSERT INTO saf.dispatched (subscription_id, shard, batch, ids) "
            "SELECT s.subscription_id, i.shard, 1, '{[2,5)}' FROM saf.subscription s, saf.inbox i "
            "WHERE s.name = 'billing' AND i.id = 1"
        )
        (found,) = (one for one in backlogs(connection) if one.subscription == "billing")
    assert found.messages == 7


def test_a_statement_has_a_bound(app: Dsn) -> None:
    with connect(app) as connection, connect(app) as other:
        send(connection, "x")
        other.execute("BEGIN")
        other.execute("LOCK TABLE saf.outbox IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(psycopg.errors.QueryCanceled):
            backlogs(connection, seconds=timedelta(milliseconds=50).total_seconds())
        other.execute("ROLLBACK")
        assert left(connection).messages == 1


def test_an_idle_log_is_asked_without_reading_a_row_of_it(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(SENT, [1000])
        forward(app, mom=mom)
        asked: list[str] = []
        connection.add_notice_handler(lambda notice: asked.append(notice.message_primary or ""))
        assert left(connection, look=backlog.LOOK).messages == 0
        query = (
            "SELECT coalesce(sum(idx_tup_fetch + seq_tup_read), 0) FROM pg_stat_user_tables "
            "WHERE relname ~ '^outbox_[0-9]$'"
        )
        connection.execute("SELECT pg_stat_force_next_flush()")
        ((before,),) = fetch(connection, query)
        assert left(connection).messages == 0
        connection.execute("SELECT pg_stat_force_next_flush()")
        connection.execute("SELECT pg_stat_clear_snapshot()")
        ((after,),) = fetch(connection, query)
    assert before == after
