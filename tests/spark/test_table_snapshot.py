"""A read is of one moment, whatever is sent, committed, tried again or purged meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark import TaskContext
from pyspark.sql import Row

from saf.database import Dsn, fetch
from saf.engine.source import given
from saf.errors import PurgedMeanwhile
from saf.log import ring
from saf.spark.table import part as parts
from saf.spark.table.part import Part, read
from saf.spark.table.query import Query
from saf.spark.table.source import Messages, Scan
from tests.pipeline import connect, run, send
from tests.ring import leave_slot
from tests.spark.tables import Tables

ATTEMPTS = 3


@pytest.fixture
def tables(app: Dsn, mom: Dsn, tmp_path: Path) -> Tables:
    return Tables(tmp_path, mom, app=app)


def fill(dsn: Dsn, number: int = 100, what: str = "before") -> None:
    with connect(dsn) as connection:
        for one in range(number):
            send(connection, f"{what} {one}", key=f"key {one}")


def test_what_is_sent_while_tasks_run_and_fail_and_run_again_is_not_read(
    app: Dsn, tables: Tables
) -> None:
    fill(app)
    conninfo = app.conninfo

    def fails_twice(rows: Iterable[Row]) -> Iterator[bytes]:
        context = TaskContext.get()
        assert context is not None
        for number, row in enumerate(rows):
            yield bytes(row.body)
            if number == 5 and context.attemptNumber() < ATTEMPTS - 1:
                with psycopg.connect(conninfo) as connection:
                    for key in range(100):
                        connection.execute(
                            "INSERT INTO saf.outbox (to_service, key, body) VALUES (%s, %s, %s)",
                            ["billing", f"key {key}", b"meanwhile"],
                        )
                raise RuntimeError("to be tried again")

    found = tables(partitions=2).rdd.mapPartitions(fails_twice).collect()
    assert sorted(found) == sorted(f"before {one}".encode() for one in range(100))
    with connect(app) as connection:
        ((meanwhile,),) = fetch(
            connection, "SELECT count(*) FROM saf.outbox WHERE body = 'meanwhile'"
        )
    assert meanwhile == 2 * (ATTEMPTS - 1) * 100


def test_a_late_committer_with_a_lower_id_is_in_the_next_read_and_not_in_this_one(
    app: Dsn, tables: Tables
) -> None:
    with app.connect(role="test") as late:
        send(late, "late", key="k")
        with app.connect(role="test") as lost:
            send(lost, "rolled back", key="k")
            fill(app, 10)
            planned = tables(schema="body binary").rdd
            assert planned.getNumPartitions() == 2
            late.commit()
            lost.rollback()
    before = sorted(f"before {one}".encode() for one in range(10))
    assert sorted(bytes(row.body) for row in planned.collect()) == before
    assert sorted(bytes(row.body) for row in planned.collect()) == before
    assert sorted(bytes(row.body) for row in tables().collect()) == [*before, b"late"]


def test_nothing_is_open_at_the_source_between_the_plan_and_its_tasks_or_afterwards(
    app: Dsn, tables: Tables
) -> None:
    fill(app, 10)
    planned = tables().rdd
    assert planned.getNumPartitions() == 2
    assert sessions(app) == []
    planned.count()
    assert sessions(app) == []


def sessions(dsn: Dsn) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return fetch(
            connection,
            "SELECT application_name, state FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND datname = current_database() AND backend_type = 'client backend'",
        )


def purge(dsn: Dsn) -> set[str]:
    with connect(dsn) as connection:
        slots = ring.purge(connection, "outbox", retention_seconds=0)
    return {slot.state for slot in slots}


def test_a_read_that_a_purge_has_taken_rows_from_fails_and_says_what_to_do(
    app: Dsn, mom: Dsn, tables: Tables
) -> None:
    fill(app, 20)
    run(app, mom=mom)
    with connect(app) as connection:
        leave_slot(connection)
    fill(app, 5, "after")
    planned = tables().rdd
    assert planned.getNumPartitions() == 2
    assert "purged" in purge(app)
    with pytest.raises(Exception, match=r"purged after this read was planned.*load\(\) it again"):
        planned.count()
    assert tables().count() == 5


def scan(config: Path, **options: str) -> tuple[Scan, Query]:
    source = Messages({"broker": "app", "config": str(config), "log": "outbox", **options})
    schema = source.schema()
    return source.reader(schema), Query(asked=schema)


def parts_of(one: Scan) -> list[Part]:
    return [part for part in one.partitions() if isinstance(part, Part)]


@pytest.mark.every_postgresql
def test_a_partition_in_hand_keeps_its_rows_from_being_purged(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables(tmp_path, mom, app=app)
    fill(app, 20)
    run(app, mom=mom)
    with connect(app) as connection:
        leave_slot(connection)
    one, query = scan(tables.config, partitions="2")
    first, second = parts_of(one)
    said: list[set[str]] = []

    def ask_late(*asked: Any) -> Any:
        said.append(purge(app))
        return given(*asked)

    monkeypatch.setattr(parts, "given", ask_late)  # after the check for purges
    rows = read(first, query)
    count = next(rows).num_rows
    monkeypatch.undo()
    assert ["purged" in one for one in said] == [False]
    assert "locked" in purge(app)
    count += sum(more.num_rows for more in rows)
    assert "purged" in purge(app)
    assert 0 < count < 20
    with pytest.raises(PurgedMeanwhile):
        next(read(second, query))


def test_slots_that_are_purged_before_the_plan_are_no_error(
    app: Dsn, mom: Dsn, tables: Tables
) -> None:
    fill(app, 3)
    run(app, mom=mom)
    with connect(app) as connection:
        leave_slot(connection)
    fill(app, 2, "after")
    assert "purged" in purge(app)
    assert tables().count() == 2


def test_a_database_that_goes_between_the_plan_and_its_tasks_is_named(
    app: Dsn, tmp_path: Path, mom: Dsn
) -> None:
    tables = Tables(tmp_path, mom, app=app)
    planned = tables().rdd
    assert planned.getNumPartitions() == 2
    allow = f'ALTER DATABASE "{app.database}" ALLOW_CONNECTIONS {{}}'
    with connect(mom) as connection:
        connection.execute(allow.format("false").encode())
        try:
            with pytest.raises(Exception, match=r"broker 'app' (is unavailable|refuses)"):
                planned.count()
        finally:
            connection.execute(allow.format("true").encode())
