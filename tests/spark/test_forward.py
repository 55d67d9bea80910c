"""The forwarder as its operator starts it: `saf forward`, on a real Spark."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from saf.database import Dsn
from saf.log.shards import shard_of
from tests import on_spark
from tests.forwarders import configuration, fill, finish, start, wait_for
from tests.pipeline import bodies, connect, let_time_pass

HELD = """
SELECT count(*) AS held FROM saf.cursor JOIN saf.subscription USING (subscription_id)
WHERE log = 'outbox' AND owner IS NOT NULL GROUP BY owner
"""


def test_every_column_of_a_message_arrives_as_it_was_sent(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    fill(app, 500)
    with connect(app) as connection, connect(mom) as store:
        there = store.execute("SELECT broker_id FROM saf.broker").fetchone()
        connection.execute(
            "INSERT INTO saf.outbox (from_service, to_service, to_broker, key, conversation_id,"
            " from_initiator, sequence, message_type, headers, body, deliver_at, expires_at) "
            "VALUES ('shop', 'billing', %s, 'Zürich 😀', gen_random_uuid(), false,"
            " 7, 'OrderPlaced', '{\"a\": [1, null, \"ü\"]}', '\\x00ff', now(), '9998-12-31')",
            there,
        )
    summary = finish(start(configuration(tmp_path, app, mom)))
    assert summary["forwarded"] == 501
    columns = (
        "message_id, from_service, to_service, to_broker, key, conversation_id, from_initiator, "
        "sequence, message_type, headers::text, body, created_at, deliver_at, expires_at"
    )
    everything = f"SELECT {columns} FROM saf.{{}} ORDER BY message_id"
    with connect(app) as source, connect(mom) as target:
        sent = source.execute(everything.format("outbox")).fetchall()
        assert target.execute(everything.format("inbox")).fetchall() == sent
        (source_id,) = source.execute("SELECT broker_id FROM saf.broker").fetchall()
        assert target.execute("SELECT DISTINCT source FROM saf.inbox").fetchall() == [source_id]


@pytest.mark.parametrize("column", ["created_at", "deliver_at", "expires_at"])
@pytest.mark.parametrize("moment", ["infinity", "-infinity", "4713-01-01 BC", "294276-01-01"])
def test_a_moment_that_could_not_be_forwarded_is_refused_at_the_source(
    app: Dsn, column: str, moment: str
) -> None:
    with connect(app) as connection, pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(
            f"INSERT INTO saf.outbox (to_service, body, {column}) VALUES ('billing', '', %s)",
            [moment],
        )


def test_a_second_run_has_nothing_to_do(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    fill(app, 100)
    config = configuration(tmp_path, app, mom)
    assert finish(start(config))["forwarded"] == 100
    again = finish(start(config))
    assert (again["forwarded"], again["dropped"], again["cycles"]) == (0, 0, 0)
    assert len(bodies(mom)) == 100


@pytest.mark.full
def test_overlapping_runs_share_or_leave_and_neither_fails(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    fill(app, 10_000)
    config = configuration(tmp_path, app, mom, chunk_rows=500)
    summaries = [finish(process) for process in [start(config), start(config)]]
    assert any(summary["forwarded"] for summary in summaries)
    on_spark.forward(config)
    arrived = bodies(mom)
    assert len(arrived) == len(set(arrived)) == 10_000
    for key in range(20):
        numbers = [int(body) for body in arrived if int(body) % 20 == key]
        assert numbers == sorted(numbers)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_its_processes_ends_it_after_the_chunk_in_hand(
    app: Dsn, mom: Dsn, tmp_path: Path, number: signal.Signals
) -> None:
    fill(app, 10_000)
    config = configuration(tmp_path, app, mom, chunk_rows=50)
    process = start(config)
    wait_for(app, "SELECT max(position) > 0 FROM saf.cursor")
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends it to the whole group
    else:
        process.send_signal(number)
    summary = finish(process)
    assert summary["stopped"]
    done = len(bodies(mom))
    assert 0 < done < 10_000
    assert summary["forwarded"] == done
    with connect(app) as connection:
        assert connection.execute("SELECT count(*) FROM saf.member").fetchone() == (0,)
    assert on_spark.forward(config)["dropped"] == 0, "what was stored was marked too"
    arrived = bodies(mom)
    assert len(arrived) == len(set(arrived)) == 10_000


@pytest.mark.full
def test_a_loop_forwards_what_comes_until_it_is_stopped(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    process = start(configuration(tmp_path, app, mom), "--loop", "--interval", "0.1")
    for total in (10, 20, 30):
        fill(app, 10)
        wait_for(mom, f"SELECT count(*) = {total} FROM saf.inbox")
    process.send_signal(signal.SIGTERM)
    finish(process)


@pytest.mark.full
def test_of_two_forwarders_one_is_killed_and_the_other_forwards_the_rest_in_order(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    lease_seconds, messages = 20, 40_000  # who is killed loses its shards before its lease ends
    config = configuration(tmp_path, app, mom, chunk_rows=50, lease_seconds=lease_seconds)
    running = [start(config, "--loop", "--interval", "0.1") for _ in range(2)]
    try:
        wait_for(app, f"SELECT array_agg(held) = '{{32,32}}' FROM ({HELD}) AS share")
        with connect(app) as connection:
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) "
                "SELECT 'billing', 'order ' || n %% 500, convert_to(n::text, 'UTF8') "
                "FROM generate_series(1, %s) AS n",
                [messages],
            )
        # more than one of them has: both have stored some
        wait_for(mom, "SELECT count(DISTINCT shard) > 40 FROM saf.inbox")
        os.killpg(running[0].pid, signal.SIGKILL)
        wait_for(app, f"SELECT array_agg(held) = '{{64}}' FROM ({HELD}) AS share", lease_seconds)
        wait_for(mom, f"SELECT count(*) >= {messages} FROM saf.inbox")
        running[1].send_signal(signal.SIGTERM)
        finish(running[1])
    finally:
        for process in running:
            process.kill()
            process.communicate()
    arrived = [int(body) for body in bodies(mom)]
    assert sorted(arrived) == list(range(1, messages + 1)), "nothing is lost or stored twice"
    last: dict[int, int] = {}
    for number in arrived:
        assert number > last.get(number % 500, 0), "out of order"
        last[number % 500] = number


@pytest.mark.full
def test_one_source_that_is_down_does_not_stop_the_others(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    fill(app, 10)
    config = configuration(tmp_path, app, mom)
    config.write_text('[brokers.gone]\ndsn = "host=/nonexistent dbname=x"\n' + config.read_text())
    process = start(config)
    out, err = process.communicate(timeout=120)
    summary = json.loads(out)
    assert process.returncode == summary["exit_code"] == 75
    assert [problem["broker"] for problem in summary["problems"]] == ["gone"]
    assert summary["forwarded"] == 10
    assert "Traceback" not in err


@pytest.mark.full
def test_a_destination_that_is_down_leaves_everything_pending(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    fill(app, 10)
    nowhere = Dsn("host=/nonexistent dbname=mom password=canary")
    process = start(configuration(tmp_path, app, nowhere, attempts=1))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75
    assert "canary" not in out + err
    assert "destination 'mom' is unavailable" in out
    let_time_pass(app)
    assert on_spark.forward(configuration(tmp_path, app, mom))["forwarded"] == 10


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return on_spark.spark()


def test_a_key_has_the_same_shard_in_spark(spark: SparkSession) -> None:
    keys = ["N725MQ", "", "Zürich 😀", "x" * 1000, *(f"order {n}" for n in range(200))]
    rows = spark.sparkContext.parallelize(keys).map(lambda key: (key, shard_of(key, 100))).collect()
    assert dict(rows) == {key: shard_of(key, 100) for key in keys}
