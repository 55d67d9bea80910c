"""Forwarding over Spark Connect: a client without a JVM, and a server that is not its own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from saf.database import Dsn
from saf.errors import JobFailed, SparkGone
from saf.routing.matching import Routes
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.spark import remote
from saf.spark.remote import ConnectRunner
from saf.spark.table.query import schema_of
from tests.connect_server import ConnectServer, connect_server
from tests.delta_table import rows
from tests.files import files_where
from tests.pipeline import bodies, connect
from tests.programs import BIN, configuration, environment, last_json, received, run, send
from tests.waits import until

pytestmark = pytest.mark.slow  # its server takes seconds to start

NO_JAVA = {"JAVA_HOME": "/nowhere", "PATH": "/nowhere"}
PASSWORD = "canary-of-a-password"
TABLES = """
import json, sys
import saf.spark
from pyspark.sql import SparkSession
folder, remote = sys.argv[1:]
spark = SparkSession.builder.remote(remote).getOrCreate()
spark.conf.set("spark.sql.leafNodeDefaultParallelism", "3")
saf.spark.register(spark)
assert spark.conf.get("spark.sql.leafNodeDefaultParallelism") == "3"
spark.conf.unset("spark.sql.leafNodeDefaultParallelism")
saf.spark.register(spark)
assert not spark.conf.get("spark.sql.leafNodeDefaultParallelism", None)
options = {"broker": "app", "config": f"{folder}/saf.toml"}
said = {}

outbox = spark.read.format("saf").options(log="outbox", **options)
said["columns"] = outbox.load().columns
some = outbox.schema("id bigint, key string, text string").load().where("key = 'order 7'")
said["read"] = [row.text for row in some.orderBy("id").collect()]

def stream(name):
    reader = spark.readStream.format("saf").options(log="outbox", subscription=name, **options)
    rows = reader.option("maxRowsPerTrigger", 150).schema("id bigint, text string").load()
    writer = rows.writeStream.option("checkpointLocation", f"{folder}/{name}")
    return writer.trigger(availableNow=True)

stream("files").format("parquet").option("path", f"{folder}/parquet").start().awaitTermination()
said["files"] = sorted(row.text for row in spark.read.parquet(f"{folder}/parquet").collect())

try:
    stream("none").foreachBatch(saf.spark.to_delta(f"{folder}/none")).start().awaitTermination()
except Exception as error:
    said["needed"] = "give to_delta an application" in str(error)
for run in range(2):
    into = saf.spark.to_delta(f"{folder}/delta", application="lake")
    stream("delta").foreachBatch(into).start().awaitTermination()

rows = spark.range(10).selectExpr("'billing' AS service", "'sent ' || id AS body")
for run in range(2):
    (rows.orderBy("body").write.format("saf").options(txnAppId="job", txnVersion=1, **options)
     .mode("append").save())
epochs = spark.readStream.format("saf").options(log="inbox", subscription="copy", **options)
epochs = epochs.schema("text string").load()
epochs = epochs.selectExpr("'billing' AS service", "'copy of ' || text AS body")
epochs = epochs.writeStream.format("saf").options(**options)
epochs = epochs.option("checkpointLocation", f"{folder}/copy").trigger(availableNow=True)
epochs.start().awaitTermination()
print(json.dumps(said))
"""
LEAVING = """
from pyspark.sql.connect.client.reattach import ExecutePlanResponseReattachableIterator as Execution
from saf.cli import main
# as if it died before it says so
Execution._release_all = lambda self: setattr(self, "_result_complete", True)
main()
"""
SLOWER = """
CREATE FUNCTION slower() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN PERFORM pg_sleep(0.1); RETURN NULL; END $$;
CREATE TRIGGER slower AFTER INSERT ON saf.inbox FOR EACH STATEMENT EXECUTE FUNCTION slower()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    with connect_server(tmp_path_factory.mktemp("connect")) as one:
        yield one


def forward(
    server: ConnectServer, config: Path, program: Sequence[str | Path] = (BIN / "saf",)
) -> subprocess.CompletedProcess[str]:
    """What a run says that has no Java."""
    options: list[str | Path] = ["--config", config, "--json", "--remote", server.remote]
    done = run([*program, "forward", *options], env=NO_JAVA, timeout=250)
    assert "canary" not in done.stdout + done.stderr
    return done


def in_order(mom: Dsn, sent: list[str]) -> None:
    """All of them are there, once, and those of a key in their order."""
    arrived = received(mom)
    assert sorted(body for _, body in arrived) == sorted(sent)
    numbers = defaultdict(list)
    for key, body in arrived:
        source, number = body.split()
        numbers[source, key].append(int(number))
    assert all(some == sorted(some) for some in numbers.values())


def with_password(dsn: Dsn) -> Dsn:
    return Dsn(f"{dsn.conninfo} password={PASSWORD}")


@pytest.mark.full
def test_it_forwards_without_a_jvm_and_shows_no_password(
    server: ConnectServer, app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], tmp_path: Path
) -> None:
    other = new_broker("other")
    sent = [*send(app, 3_000), *send(other, 200, "other")]
    sources = {"app": with_password(app), "other": with_password(other)}
    config = configuration(
        tmp_path / "saf.toml", sources, {"mom": with_password(mom)}, chunk_rows=300
    )
    done = forward(server, config)
    assert done.returncode == 0, done.stderr
    assert last_json(done.stdout)["forwarded"] == len(sent)
    in_order(mom, sent)
    assert files_where(server.folder, lambda content: PASSWORD.encode() in content) == []


def test_a_plan_that_the_server_writes_to_its_log_holds_no_password(
    server: ConnectServer, app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    sent = send(app, 100)
    config = configuration(
        tmp_path / "saf.toml", {"app": with_password(app)}, {"mom": with_password(mom)}
    )
    done = forward(server, config, (sys.executable, "-c", LEAVING))
    assert done.returncode == 0, done.stderr
    assert bodies(mom) == sent
    until(lambda: b"map_partitions" in (server.folder / "output").read_bytes())
    assert files_where(server.folder, lambda content: PASSWORD.encode() in content) == []


@pytest.mark.full
def test_what_it_cannot_do_is_said_and_everything_else_is_done(
    server: ConnectServer, app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    sent = send(app, 10)
    with connect(app) as connection:
        add_router(connection, "planes", "sql", "key")
        add_route(connection, "mom", service="billing")
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) VALUES ('planes', 'x', '')"
        )
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    done = forward(server, config)
    assert bodies(mom) == sent
    assert "classifiers in SQL are not evaluated over Spark Connect" in done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.full
def test_tables_streams_and_sinks_work_there_as_everywhere(
    server: ConnectServer, app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    sent = send(app, 400)
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('billing', 'one')")
    configuration(tmp_path / "saf.toml", {"app": with_password(app)}, {"mom": mom})
    done = run(
        [sys.executable, "-c", TABLES, str(tmp_path), server.remote],
        env={"JAVA_HOME": "/nowhere", "PATH": "/nowhere"},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    said = last_json(done.stdout)
    assert said["columns"] == schema_of("outbox").fieldNames()
    assert said["read"] == [one for one in sent if int(one.split()[1]) % 20 == 7]
    assert said["files"] == sorted(sent)
    assert said["needed"] is True
    there = [row["text"] for row in rows(tmp_path / "delta")]
    assert there == sent
    with connect(app) as connection:
        more = connection.execute(
            "SELECT convert_from(body, 'UTF8') FROM saf.outbox ORDER BY id OFFSET 400"
        ).fetchall()
    assert more == [*((f"sent {number}",) for number in range(10)), ("copy of one",)]
    assert files_where(server.folder, lambda content: PASSWORD.encode() in content) == []


@pytest.mark.full
def test_after_its_server_was_killed_the_next_run_goes_on(
    server: ConnectServer, app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    sent = send(app, 5_000)
    with connect(mom) as connection:
        connection.execute(SLOWER)
    config = configuration(
        tmp_path / "saf.toml", {"app": app}, {"mom": mom}, chunk_rows=100, lease_seconds=3.0
    )
    with subprocess.Popen(
        [BIN / "saf", "forward", "--config", config, "--json", "--remote", server.remote],
        env=environment(**NO_JAVA),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forwarder:
        while not bodies(mom):
            assert forwarder.poll() is None
            time.sleep(0.01)
        server.kill()
        said, complaint = forwarder.communicate(timeout=120)
    assert forwarder.returncode == 75
    assert "Spark has ended" in said + complaint
    assert "Traceback" not in complaint
    assert 0 < len(bodies(mom)) < len(sent)
    with connect(mom) as connection:
        connection.execute("DROP TRIGGER slower ON saf.inbox")
    server.start()
    done = forward(server, config)
    while last_json(done.stdout)["idle"]:  # until the lease of the killed tasks ends
        done = forward(server, config)
    assert done.returncode == 0, done.stderr
    in_order(mom, sent)


@pytest.mark.full
def test_a_server_that_is_not_there_is_named_without_its_token(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    send(app, 1)
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    absent = ConnectServer(folder=tmp_path)
    done = forward(absent, config)
    assert done.returncode == 75
    assert f"Spark Connect sc://127.0.0.1:{absent.port} is unavailable" in done.stderr
    assert bodies(mom) == []


@pytest.mark.full
def test_a_cluster_with_another_saf_is_told_apart(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    send(app, 1)
    place = tmp_path / "other"
    (place / "saf" / "spark").mkdir(parents=True)
    (place / "saf" / "__init__.py").touch()
    (place / "saf" / "spark" / "__init__.py").touch()
    (place / "saf" / "spark" / "remote.py").write_text(
        "import pyarrow\n"
        "def greet(partition):\n"
        "    for batch in partition:\n"
        "        pass\n"
        "    yield pyarrow.RecordBatch.from_pydict({'version': ['0.0.1']})\n"
    )
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    with connect_server(tmp_path, PYTHONPATH=str(place)) as server:
        done = forward(server, config)
    assert done.returncode == 2
    assert "the Python of the cluster's tasks has saf 0.0.1" in done.stderr
    assert bodies(mom) == []


@dataclass(frozen=True)
class Item:
    """As much of an item of work as a runner looks at."""

    routes: Routes = field(default_factory=Routes)


@pytest.mark.full
def test_a_job_that_hangs_can_be_cancelled_and_a_server_given_up(
    server: ConnectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hanging(*_: Any) -> Callable[[Any], Iterator[Any]]:
        def run(partition: Any) -> Iterator[Any]:
            import time

            time.sleep(600)
            yield from partition

        return run

    monkeypatch.setattr(remote, "task", hanging)
    runner: Any = ConnectRunner(server.remote, {})
    runner.start([])
    assert runner.slots() == 2
    work = [Item()]

    def until_it_ends(end: Callable[[], None], error: type[Exception]) -> None:
        over = threading.Event()

        def often() -> None:
            while not over.wait(0.5):
                end()

        thread = threading.Thread(target=often)
        thread.start()
        try:
            with pytest.raises(error):
                runner.run(work, None, "group-1")
        finally:
            over.set()
            thread.join()

    until_it_ends(lambda: runner.cancel("group-1"), JobFailed)
    until_it_ends(runner.abandon, SparkGone)
