"""Of a shard there is one cursor in a subscription, and one watermark in a lane: never a second."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from saf.database import Dsn
from tests.destinations import run
from tests.pipeline import bodies, connect, send

# As the row that is there, of another batch, so that the key with the batch has nothing against it
SECOND = {
    "cursor": "INSERT INTO saf.cursor (subscription_id, shard, batch) "
    "SELECT subscription_id, shard, batch + 1 FROM saf.cursor LIMIT 1",
    "watermark": "INSERT INTO saf.watermark (source, shard, lane, epoch, batch, position) "
    "SELECT source, shard, lane, epoch, batch + 1, 0 FROM saf.watermark LIMIT 1",
}


@pytest.mark.every_postgresql
@pytest.mark.parametrize("table", SECOND)
def test_a_second_row_of_a_place_is_refused_however_far_the_first_has_got(
    app: Dsn, mom: Dsn, table: str
) -> None:
    for text in "ab":
        with connect(app) as source:
            send(source, text)
        run(app, mom=mom)
    where = app if table == "cursor" else mom
    with connect(where) as connection:
        with pytest.raises(psycopg.errors.UniqueViolation) as refused:
            connection.execute(SECOND[table])
        assert refused.value.diag.constraint_name == "actual_key_pkey"
        assert f"({table}, {{" in (refused.value.diag.message_detail or "")
    with connect(app) as source:
        send(source, "c")
    run(app, mom=mom)
    assert bodies(mom) == ["a", "b", "c"]


def test_of_two_who_write_the_first_row_at_once_one_is_refused(app: Dsn) -> None:
    first = (
        "INSERT INTO saf.watermark (source, shard, lane, epoch, batch, position) "
        "VALUES ('00000000-0000-4000-8000-000000000001', 7, '', 0, %s, 0)"
    )
    refused: list[Any] = []

    def second() -> None:
        with connect(app) as connection:
            try:
                connection.execute(first, [2])
            except psycopg.errors.UniqueViolation as error:
                refused.append(error.diag.constraint_name)

    with app.connect(role="test") as connection:
        connection.execute(first, [1])
        other = threading.Thread(target=second)
        other.start()
        connection.commit()
        other.join(timeout=60)
    assert refused == ["actual_key_pkey"]


def test_what_is_gone_may_come_again(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("DELETE FROM saf.cursor WHERE shard = 7")
        connection.execute(
            "INSERT INTO saf.cursor (subscription_id, shard) SELECT subscription_id, 7 "
            "FROM saf.subscription"
        )
        connection.execute("DELETE FROM saf.subscription")
        assert connection.execute("SELECT FROM saf.actual_key").rowcount == 0
        place = (
            "INSERT INTO saf.watermark (source, shard, lane, epoch, batch, position) "
            "VALUES ('00000000-0000-4000-8000-000000000001', 7, '', 0, 1, 0)"
        )
        connection.execute(place)
        connection.execute("TRUNCATE saf.watermark")
        connection.execute(place)
        connection.execute("DELETE FROM saf.watermark")
        assert connection.execute("SELECT FROM saf.actual_key").rowcount == 0
