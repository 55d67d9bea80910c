"""A message of a log is found by its id, wherever it lies; what was not looked at is said."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from saf.database import Dsn, fetch
from saf.errors import UsageError
from saf.log import finding
from saf.log.finding import Search, written
from saf.log.ring import SLOT_ROWS
from tests.pipeline import connect

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
EACH = 100


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "STEP_PAGES", 2)
    monkeypatch.setattr(finding, "BEFORE_PAGES", 1)


def find(connection: psycopg.Connection[Any], log: str, message_id: UUID, **options: Any) -> Search:
    slots = written(connection)[log]
    return finding.find(connection, log, message_id, slots, **options)


def fill(connection: psycopg.Connection[Any], log: str) -> list[UUID]:
    """Messages of a minute each, in three slots, of which the last is the first of the ring."""
    found: list[UUID] = []
    for number, slot in enumerate((3, 7, 8)):
        connection.execute(
            f"SELECT setval(pg_get_serial_sequence('saf.{log}', 'id')::regclass, %s::bigint)",
            [slot * SLOT_ROWS + 5],
        )
        age = "created_at" if log == "outbox" else "received_at"
        rows = fetch(
            connection,
            f"""INSERT INTO saf.{log} (to_service, key, body, {age})
                SELECT 'billing', CASE WHEN n % 2 = 0 THEN 'k' || n END, repeat('x', 500)::bytea,
                       %(noon)s + make_interval(mins => n)
                FROM generate_series(%(first)s::int, %(last)s) AS n RETURNING message_id""".replace(
                "n % 2", "n %% 2"
            ),
            {"noon": NOON, "first": number * EACH, "last": number * EACH + EACH - 1},
        )
        found += [one for (one,) in rows]
    return found


@pytest.mark.parametrize("log", ["outbox", "inbox"])
def test_a_message_is_found_wherever_it_lies(app: Dsn, log: str) -> None:
    with connect(app) as connection:
        ids = fill(connection, log)
        for place in (0, 1, EACH - 1, EACH, 2 * EACH - 1, 2 * EACH, 3 * EACH - 1):
            search = find(connection, log, ids[place], seconds=60)
            assert search.row is not None
            assert fetch(
                connection,
                f"SELECT message_id FROM saf.{log} WHERE (id, shard, txid) = "
                "(%(id)s, %(shard)s, %(txid)s::xid8)",
                vars(search.row),
            ) == [(ids[place],)]
        assert find(connection, log, uuid4(), seconds=60) == Search()


def test_of_two_messages_of_an_id_the_newest_is_found(app: Dsn) -> None:
    """As after a message was stored again by a repair."""
    twice = uuid4()
    with connect(app) as connection:
        insert = "INSERT INTO saf.inbox (to_service, message_id, body) VALUES ('a', %s, '')"
        for _ in range(2):
            connection.execute(insert, [twice])
        ((newest,),) = fetch(connection, "SELECT max(id) FROM saf.inbox")
        row = find(connection, "inbox", twice, seconds=60).row
    assert row is not None
    assert row.id == newest


def test_a_search_whose_time_is_over_says_how_far_it_was_and_goes_on_there(app: Dsn) -> None:
    with connect(app) as connection:
        oldest, *_ = fill(connection, "outbox")
        steps: list[Search] = [find(connection, "outbox", oldest, seconds=0)]
        while (place := steps[-1].place) is not None:
            steps.append(find(connection, "outbox", oldest, seconds=0, place=place))
        *before, last = steps
        assert last.row is not None
        assert len(before) > 3
        since = [one.since for one in before if one.since is not None]
        assert since == sorted(set(since), reverse=True)
        assert NOON < since[-1] < since[0] <= NOON + timedelta(minutes=3 * EACH)
        parts = [one.part for one in before]
        assert parts == sorted(set(parts))
        assert 0 < parts[0] < parts[-1] < 1
        with pytest.raises(UsageError, match="not a place"):
            find(connection, "outbox", oldest, seconds=0, place="(0,1)")


def test_a_message_is_found_at_once_by_about_when_it_was_sent(app: Dsn) -> None:
    with connect(app) as connection:
        ids = fill(connection, "outbox")
        for minute in (0, 1, EACH // 2, EACH, 2 * EACH + 1, 3 * EACH - 1):
            about = NOON + timedelta(minutes=minute)
            assert find(connection, "outbox", ids[minute], seconds=0, about=about).row is not None
        assert find(connection, "outbox", ids[0], seconds=0).row is None


def test_an_id_that_says_when_it_was_made_needs_no_other_word(app: Dsn) -> None:
    made = NOON + timedelta(days=1)
    seven = UUID(int=int(made.timestamp() * 1000) << 80 | 7 << 76 | 2 << 62 | 5)
    with connect(app) as connection:
        fill(connection, "outbox")
        connection.execute(
            """INSERT INTO saf.outbox (to_service, body, message_id, created_at)
               SELECT 'billing', repeat('x', 500)::bytea,
                      CASE n WHEN 1 THEN %s ELSE gen_random_uuid() END,
                      %s::timestamptz + make_interval(mins => n)
               FROM generate_series(1, 100) AS n""",
            [seven, made],
        )
        assert find(connection, "outbox", seven, seconds=0).row is not None
        found = fetch(connection, "SELECT message_id FROM saf.outbox WHERE id % 8 = 2")
        assert any(find(connection, "outbox", one, seconds=0).row is None for (one,) in found)


@pytest.mark.parametrize("hours", [-14, 0, 14])
def test_a_time_at_an_end_of_the_calendar_finds_a_message_as_any_other_does(
    app: Dsn, hours: int
) -> None:
    zone = timezone(timedelta(hours=hours))
    with connect(app) as connection:
        ids = fill(connection, "outbox")
        for about in (datetime.min, datetime.max):
            when = about.replace(tzinfo=zone)
            assert find(connection, "outbox", ids[7], seconds=60, about=when).row is not None


def test_a_message_that_lies_elsewhere_than_its_time_says_is_found_all_the_same(app: Dsn) -> None:
    with connect(app) as connection:
        ids = fill(connection, "outbox")
        for minute, about in ((0, 3 * EACH), (3 * EACH - 1, -5), (EACH, 2 * EACH)):
            when = NOON + timedelta(minutes=about)
            assert find(connection, "outbox", ids[minute], seconds=60, about=when).row is not None
