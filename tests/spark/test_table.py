"""A log as a DataFrame: all that was sent, as it was sent, of one moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg.types.json import Jsonb
from pyspark.errors import AnalysisException

from saf.database import Dsn, fetch
from tests.hostile import LONG_KEY, unbounded
from tests.pipeline import connect, run, send
from tests.spark.tables import Tables, session

PLAIN = "INSERT INTO saf.outbox (to_service, key, body) VALUES ('billing', %s, %s)"

TWO_KB = """
(SELECT convert_to(string_agg(md5(n || '.' || i), ''), 'UTF8') FROM generate_series(1, 60) AS i)
"""

HOSTILE: tuple[dict[str, Any], ...] = (
    {},
    {"body": b"", "key": ""},
    {"body": bytes(range(256)), "headers": {}},
    {"key": '\x01\'; DROP TABLE saf.outbox --\\ "${PATH}" %s {}\U0001f600e\u0301'},
    {"headers": {"": "", "a": "1", "b": 1, "c": None, "d": {"x": [1, "\u2028"]}, "e": True}},
    {"headers": {"number": 10**400, "deep": [[[[[]]]]], "text": "null"}},
    {"headers": ["no", "object"]},
    {"headers": "text"},
    {"from_service": "a" * 500, "message_type": "t\t\n", "to_broker": UUID(int=5)},
    {"deliver_at": datetime(1, 1, 3, tzinfo=UTC), "expires_at": datetime(9999, 12, 29, tzinfo=UTC)},
    {"message_id": UUID(int=0), "body": b"x" * 3_000_000},
    {"created_at": datetime(2001, 2, 3, 4, 5, 6, 789_012, UTC)},
)


@pytest.fixture
def tables(app: Dsn, mom: Dsn, tmp_path: Path) -> Tables:
    return Tables(tmp_path, mom, app=app)


def put(dsn: Dsn, *rows: dict[str, Any]) -> None:
    with connect(dsn) as connection:
        for given in rows:
            row = {"to_service": "billing", "body": b"body", **given}
            if "headers" in row:
                row["headers"] = Jsonb(row["headers"])
            connection.execute(
                f"INSERT INTO saf.outbox ({', '.join(row)}) VALUES "
                f"({', '.join(['%s'] * len(row))})",
                list(row.values()),
            )


def stored(dsn: Dsn, columns: str, log: str = "outbox") -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return fetch(connection, f"SELECT {columns} FROM saf.{log} ORDER BY id".encode())


def micros(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds


def expected_headers(headers: Any) -> dict[str, str | None] | None:
    if not isinstance(headers, dict):
        return None
    return {
        name: value
        if isinstance(value, str) or value is None
        else json.dumps(value, ensure_ascii=False)
        for name, value in headers.items()
    }


def test_each_column_of_each_message_is_what_was_sent_whatever_it_holds(
    app: Dsn, tables: Tables
) -> None:
    put(app, *HOSTILE)
    names = (
        "id, shard, message_id::text, from_service, to_service, to_broker::text, key, "
        "conversation_id::text, from_initiator, sequence, message_type, body, "
        "created_at, deliver_at, expires_at"
    )
    plain = [name.strip().removesuffix("::text") for name in names.split(",")]
    moments = ("created_at", "deliver_at", "expires_at")
    read = tables().selectExpr(
        *(f"unix_micros({name}) AS {name}" if name in moments else name for name in plain)
    )
    assert read.columns == plain
    expected = [
        tuple(micros(one) if isinstance(one, datetime) else one for one in row)
        for row in stored(app, names)
    ]
    assert len(expected) == len(HOSTILE)
    assert [tuple(row) for row in read.orderBy("id").collect()] == expected


def test_headers_are_a_map_of_texts_or_the_json_that_was_sent(app: Dsn, tables: Tables) -> None:
    put(app, *HOSTILE)
    sent = [one.get("headers") for one in HOSTILE]
    maps = [row.headers for row in tables().orderBy("id").collect()]
    assert maps == [expected_headers(one) for one in sent]
    rows = tables(schema="id long, headers string").orderBy("id").collect()
    assert [row.headers and json.loads(row.headers) for row in rows] == sent


def test_a_schema_chooses_the_columns_and_their_order(app: Dsn, tables: Tables) -> None:
    # of one key, so that one batch has both
    put(app, {"key": "k", "body": "grün".encode()}, {"key": "k", "body": b"\xff"})
    read = tables(schema="text string, key string, body binary")
    assert read.columns == ["text", "key", "body"]
    assert sorted((bytes(row.body), row.key, row.text) for row in read.collect()) == [
        ("grün".encode(), "k", "grün"),
        (b"\xff", "k", None),
    ]
    assert "text" not in tables().columns
    assert [row.shard for row in tables(schema="shard int").filter("shard >= 0").collect()]


def test_an_inbox_says_where_each_message_came_from_and_when(
    app: Dsn, mom: Dsn, tables: Tables
) -> None:
    put(app, *HOSTILE[:4])
    run(app, mom=mom)
    ((source,),) = stored_broker(app)
    rows = tables("mom", "inbox").orderBy("id").collect()
    assert [row.body for row in rows] == [body for (body,) in stored(mom, "body", "inbox")]
    assert {row.source for row in rows} == {str(source)}
    assert all(row.received_at is not None for row in rows)
    assert len(rows) == 4


def stored_broker(dsn: Dsn) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return fetch(connection, "SELECT broker_id FROM saf.broker")


def test_what_no_schema_would_take_any_more_is_read_as_a_message_without_a_body(
    app: Dsn, tables: Tables
) -> None:
    unbounded(app)
    put(app, {"key": LONG_KEY * 30}, {"key": "k"})
    rows = tables().orderBy("id").collect()
    assert [(row.key, row.body) for row in rows] == [(None, None), ("k", b"body")]


@pytest.mark.full
@pytest.mark.parametrize("partitions", [1, 3, 64, 1024])
def test_every_message_is_in_one_partition_and_each_partition_is_in_the_order_of_ids(
    app: Dsn, tables: Tables, partitions: int
) -> None:
    with connect(app) as connection:
        for number in range(200):
            send(connection, str(number), key=f"key {number % 50}")
    read = tables(schema="id long, shard int, key string", partitions=partitions)
    assert read.rdd.getNumPartitions() == min(partitions, 64)
    parts = read.rdd.glom().collect()
    assert all([row.id for row in part] == sorted(row.id for row in part) for part in parts)
    shards = [{row.shard for row in part} for part in parts]
    assert sum(map(len, shards)) == len(set().union(*shards))
    assert sorted(row.id for part in parts for row in part) == [id_ for (id_,) in stored(app, "id")]


def test_by_default_there_are_as_many_partitions_as_tasks_run_at_a_time(tables: Tables) -> None:
    assert tables().rdd.getNumPartitions() == 2


def test_an_empty_log_is_an_empty_table(tables: Tables) -> None:
    assert tables().collect() == []
    assert tables().count() == 0


def test_a_deep_log_is_read_in_windows_with_the_same_rows_in_the_same_order(
    app: Dsn, tables: Tables
) -> None:
    """It is 40 MB, more than what is sorted at the source."""
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) SELECT 'service ' || n % 3, "
            f"'key ' || n % 100, {TWO_KB} FROM generate_series(1, 20000) AS n"
        )
        connection.execute("DELETE FROM saf.outbox WHERE id % 7 = 0")
        connection.execute("VACUUM saf.outbox")
        connection.execute(  # into pages that come before those with lower ids
            "INSERT INTO saf.outbox (to_service, key, from_service, body) "
            f"SELECT 'service 1', 'late', 'somebody', {TWO_KB} FROM generate_series(1, 2000) AS n"
        )
        windows = fetch(
            connection,
            "SELECT sum(pg_table_size(('saf.outbox_' || n)::regclass)) "
            "FROM generate_series(0, 7) AS n",
        )
    assert windows[0][0] > 32 * 1024 * 1024
    names = "id, to_service, key, from_service, sequence"
    schema = "id long, to_service string, key string, from_service string, sequence long"
    read = tables(schema=schema, partitions=2)
    for condition in ("true", "to_service = 'service 1'", "key = 'late'", "key = 'key 7'"):
        parts = read.where(condition).rdd.glom().collect()
        assert all([row.id for row in part] == sorted(row.id for row in part) for part in parts)
        rows = sorted(tuple(row) for part in parts for row in part)
        with connect(app) as connection:
            query = f"SELECT {names} FROM saf.outbox WHERE {condition} ORDER BY id"
            assert rows == fetch(connection, query.encode())


def test_two_brokers_are_joined_by_what_both_have(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], tmp_path: Path
) -> None:
    other = new_broker("other")
    tables = Tables(tmp_path, mom, app=app, other=other)
    ids = [uuid4() for _ in range(20)]
    put(app, *({"message_id": one} for one in ids))
    put(other, *({"message_id": uuid4()} for _ in ids))
    run(app, mom=mom)
    run(other, mom=mom)
    sent, arrived = tables(), tables("mom", "inbox")
    joined = sent.join(arrived, "message_id").select("message_id").collect()
    assert sorted(row.message_id for row in joined) == sorted(map(str, ids))
    assert sent.unionByName(tables("other")).join(arrived, "message_id", "anti").count() == 0


def test_a_view_of_sql_is_read_with_a_file_of_brokers_alone(app: Dsn, tmp_path: Path) -> None:
    config = tmp_path / "saf.toml"
    config.write_text(f"[brokers.app]\ndsn = {json.dumps(app.conninfo)}\n")
    with connect(app) as connection:
        send(connection, "one", key="k")
    spark = session()
    spark.sql(
        "CREATE TEMPORARY VIEW sent USING saf "
        f"OPTIONS (broker 'app', log 'outbox', config '{config}')"
    )
    try:
        found = spark.sql("SELECT key, CAST(body AS STRING) FROM sent WHERE key = 'k'").collect()
    finally:
        spark.sql("DROP VIEW sent")
    assert [tuple(row) for row in found] == [("k", "one")]
    with pytest.raises(AnalysisException, match=r"makes no table.*CREATE TEMPORARY VIEW"):
        spark.sql("CREATE TABLE sent USING saf OPTIONS (broker 'app', log 'outbox')")
    spark.sql("CREATE TABLE sent (key string) USING saf OPTIONS (broker 'app', log 'outbox')")
    try:
        with pytest.raises(AnalysisException, match=r"If this is a table.*CREATE TEMPORARY VIEW"):
            spark.sql("SELECT key FROM sent").collect()
    finally:
        spark.sql("DROP TABLE sent")
