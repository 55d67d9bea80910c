"""A password planted in the dsns of source and destination is found nowhere.

It is a real one, of a role that has no more than the rights of a forwarder, on a server that asks
for it; and it holds a canary between characters that URLs, shells, JSON and libpq write in other
ways, so that the canary is there whichever way it leaks.
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from psycopg import pq, sql
from psycopg.conninfo import make_conninfo
from pyspark.sql import SparkSession

from saf.broker.embedded import EmbeddedServer
from saf.broker.grants import Kind, grant
from saf.broker.migrate import migrate
from saf.config import load
from saf.database import Dsn, fetch
from saf.database.dsn import SECRETS
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.engine.context import Context
from saf.engine.source import messages
from saf.engine.task import Task
from saf.errors import ConfigurationError, SafError, Unavailable
from saf.forwarding.forwarder import Forwarder
from saf.log import stream
from saf.spark.plans import messages_of
from saf.spark.runner import SparkRunner
from saf_demo.servers import free_port
from tests import on_spark
from tests.files import files_where
from tests.pipeline import Cycle, connect, forwarding_rules
from tests.programs import BIN, environment, last_json, run, send

CANARY = "canaryH3rQ9vWz"
PASSWORD = f"p%/?#@ &=:'\"\\{CANARY}ü"
WRONG = f"wrong {PASSWORD}"
USER = "forwarder with a password"

BASE64 = [base64.b64encode(b"-" * n + CANARY.encode())[4:16] for n in range(3)]
FORMS = [CANARY.encode(), CANARY.encode("utf-16-le"), CANARY.encode().hex().encode(), *BASE64]


def shows(text: str | bytes) -> bool:
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    return any(form in data for form in FORMS)


@dataclass(frozen=True, kw_only=True)
class Locked:
    """Databases on a server that asks for the password, by socket."""

    owner: Dsn
    app: Dsn
    other: Dsn
    mom: Dsn
    bare: Dsn
    """Without schema."""
    log: Path

    def dsns(self) -> tuple[Dsn, Dsn]:
        """Of app as a URL, and of mom as parameters."""
        parts = self.app.parts
        host = quote(parts["host"], safe="")
        login = f"{quote(USER)}:{quote(PASSWORD, safe='')}"
        url = f"postgresql://{login}@{host}:{parts['port']}/{parts['dbname']}"
        return Dsn(url), self.mom


@pytest.fixture
def locked(own_server: EmbeddedServer) -> Locked:
    names = ("app", "other", "mom", "bare")
    app, other, mom, bare = (own_server.create_database(name) for name in names)
    with connect(app) as connection:
        create = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
        connection.execute(create.format(sql.Identifier(USER), PASSWORD))
        connection.execute("ALTER SYSTEM SET log_statement = 'all'")
        connection.execute("ALTER SYSTEM SET log_connections = 'on'")
        for dsn in (app, other, mom):
            migrate(dsn)
            with connect(dsn) as there:
                grant(there, USER, [Kind.FORWARDER])
        hba = f'local all "{USER}" scram-sha-256\nlocal all all trust\n'
        (own_server.data_dir / "pg_hba.conf").write_text(hba)
        connection.execute("SELECT pg_reload_conf()")
    app, other, mom, bare = (
        Dsn(make_conninfo(dsn.conninfo, user=USER, password=PASSWORD))
        for dsn in (app, other, mom, bare)
    )
    return Locked(
        owner=own_server.dsn(app.database),
        app=app,
        other=other,
        mom=mom,
        bare=bare,
        log=own_server.data_dir / "server.log",
    )


def wrong(dsn: Dsn) -> Dsn:
    return Dsn(make_conninfo(dsn.conninfo, password=WRONG))


def down(dsn: Dsn) -> Dsn:
    return Dsn(make_conninfo(dsn.conninfo, host="127.0.0.1", port=1))


@dataclass
class Watch:
    """Collects what all processes and all sessions show while it is entered."""

    owner: Dsn
    processes: set[bytes] = field(default_factory=set)
    sessions: set[tuple[str, str]] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join()

    def _watch(self) -> None:
        with connect(self.owner) as connection:
            while not self._over.wait(0.1):
                self.sessions.update(
                    (name, query)
                    for name, query in fetch(
                        connection, "SELECT application_name, query FROM pg_stat_activity"
                    )
                )
                for process in Path("/proc").glob("[0-9]*"):
                    for name in ("cmdline", "environ", "comm"):
                        try:
                            self.processes.add((process / name).read_bytes())
                        except OSError:  # it has ended
                            break


def configure(folder: Path, brokers: dict[str, Dsn], to: dict[str, Dsn], **spark: str) -> Path:
    """A saf.toml as its user would write it, with a Spark that tells all it knows."""
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.local.dir": str(folder / "local"),
        **spark,
    }
    for name in ("events", "local", "tmp"):
        (folder / name).mkdir()
    tables = {"brokers": brokers, "destinations": to}
    lines = [
        f"[{kind}.{name}]\ndsn = {json.dumps(dsn.conninfo)}"
        for kind, dsns in tables.items()
        for name, dsn in dsns.items()
    ]
    default = next(iter(to))
    lines += [f'[forwarder]\ndefault_destination = "{default}"\nmaster = "local[2]"\nattempts = 1']
    lines += [
        "[forwarder.spark]",
        *(f"{json.dumps(k)} = {json.dumps(settings[k])}" for k in settings),
    ]
    file = folder / "saf.toml"
    file.write_text("\n".join(lines))
    assert shows(file.read_bytes())
    return file


def files_that_show(folder: Path) -> list[Path]:
    return files_where(folder, shows)


def rest(port: int) -> Iterator[bytes]:
    """What Spark's UI says of a running application, to programs and to people."""
    here = f"http://127.0.0.1:{port}"
    api = f"{here}/api/v1/applications"
    (application,) = json.loads(_get(api))
    of = f"{api}/{application['id']}"
    yield _get(f"{of}/environment")
    yield _get(f"{of}/sql?details=true&planDescription=true")
    for page in ("jobs", "stages?details=true", "allexecutors", "logs"):
        yield _get(f"{of}/{page}")
    for page in ("environment/", "SQL/", "SQL/execution/?id=1", "jobs/", "stages/", "executors/"):
        yield _get(f"{here}/{page}")


def _get(url: str) -> bytes:
    try:
        with urlopen(url, timeout=30) as answer:  # noqa: S310 - Spark's, on the loopback
            return bytes(answer.read())
    except HTTPError as error:
        return error.read()


def test_a_run_shows_the_password_nowhere_while_it_works_or_afterwards(
    tmp_path: Path, locked: Locked
) -> None:
    app, mom = locked.dsns()
    port = free_port()
    config = configure(
        tmp_path,
        {"app": app},
        {"mom": mom},
        **{"spark.log.level": "INFO", "spark.ui.enabled": "true", "spark.ui.port": str(port)},
    )
    send(locked.owner, 20_000)
    with Watch(locked.owner) as watch, (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [BIN / "saf", "forward", "--config", config, "--json", "--loop"],
            env=environment(TMPDIR=str(tmp_path / "tmp")),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        assert process.stdout is not None
        summary = json.loads(process.stdout.readline())
        pages = list(rest(port))
        on_disk = files_that_show(tmp_path)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, (tmp_path / "stderr").read_text()
    assert summary["forwarded"] == 20_000

    assert not shows(json.dumps(summary) + out)
    assert [page for page in pages if shows(page)] == []
    assert on_disk == files_that_show(tmp_path) == []
    assert [process for process in watch.processes if shows(process)] == []
    assert [session for session in watch.sessions if shows("".join(session))] == []
    assert not shows(locked.log.read_bytes())

    # what would show it was there to be searched
    said = (tmp_path / "stderr").read_text()
    assert "INFO" in said
    assert "SparkListenerEnvironmentUpdate" in "".join(
        file.read_text() for file in (tmp_path / "events").rglob("*") if file.is_file()
    )
    assert b"spark.local.dir" in pages[0]
    assert b"collect" in pages[2]
    assert {"saf forward", "saf deliver"} <= {name for name, _ in watch.sessions}
    assert any(b"java" in process for process in watch.processes)
    assert b"saf deliver" in locked.log.read_bytes()


@pytest.mark.full
def test_a_run_that_meets_everything_that_can_go_wrong_shows_the_password_nowhere(
    tmp_path: Path, locked: Locked
) -> None:
    for dsn, destination in ((locked.app, "wrong"), (locked.other, "down")):
        owner = Dsn(make_conninfo(locked.owner.conninfo, dbname=dsn.database))
        send(owner, 10)
        with connect(owner) as connection:
            connection.execute("INSERT INTO saf.route (destination) VALUES (%s)", [destination])
    app, mom = locked.dsns()
    brokers = {"app": app, "other": locked.other, "wrong": wrong(locked.app), "bare": locked.bare}
    config = configure(
        tmp_path,
        {**brokers, "down": down(locked.app)},
        {"mom": mom, "wrong": wrong(locked.mom), "down": down(locked.mom)},
        **{"spark.log.level": "DEBUG"},
    )
    with Watch(locked.owner) as watch:
        done = run(
            [BIN / "saf", "forward", "--config", config],
            env={"TMPDIR": str(tmp_path / "tmp")},
        )
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("saf: ")]
    assert len(said) == 5, said
    for cause, times in {
        "password authentication failed": 2,
        "Connection refused": 2,
        "has no saf schema": 1,
    }.items():
        assert sum(cause in line for line in said) == times
    assert not shows(done.stdout + done.stderr)
    assert "DEBUG" in done.stderr
    assert files_that_show(tmp_path) == []
    assert [process for process in watch.processes if shows(process)] == []
    assert [session for session in watch.sessions if shows("".join(session))] == []
    assert not shows(locked.log.read_bytes())


def test_each_command_that_cannot_log_in_says_so_without_the_password(
    tmp_path: Path, locked: Locked
) -> None:
    away = {"wrong": wrong(locked.dsns()[0]), "down": down(locked.app), "bare": locked.bare}
    config = configure(tmp_path, away, {"mom": wrong(locked.mom)})
    login = {"SAF_DSN": wrong(locked.app).conninfo}
    commands: list[tuple[list[str | Path], dict[str, str], int]] = [
        (["forward", "--json", "--config", config], {}, 2),
        (["status", "--json", "--config", config], {}, 75),
        (["status", "--config", config], {}, 75),
        (["migrate"], login, 2),
        (["grant", "--role", "writer", USER], login, 2),
        (["grant", "--role", "writer", USER], {"SAF_DSN": locked.app.conninfo}, 2),
    ]
    for command, env, code in commands:
        done = run([BIN / "saf", *command], env=env)
        assert done.returncode == code, done.stderr
        logs_in = env.get("SAF_DSN") == locked.app.conninfo or command[0] == "forward"
        assert "authentication failed" in done.stdout + done.stderr or logs_in
        assert not shows(done.stdout + done.stderr), command
        if command[0] == "forward":
            problems = last_json(done.stdout)["problems"]
            assert isinstance(problems, list)
            assert len(problems) == 3


def test_errors_and_their_tracebacks_with_variables_do_not_hold_the_password(
    tmp_path: Path, locked: Locked
) -> None:
    app, mom = locked.dsns()
    refused, away = wrong(app), down(mom)
    attempts: list[Callable[[], object]] = [
        lambda: refused.connect(role="test"),
        lambda: away.connect(role="test"),
        lambda: refused.engine().connect(),
        lambda: migrate(refused),
        lambda: migrate(away),
        lambda: PostgresInbox("mom", refused).identity(),
        lambda: PostgresInbox("mom", away).identity(),
        lambda: _forward(refused, mom),
        lambda: _forward(locked.bare, mom),
        *(partial(load, file) for file in _mistakes(tmp_path, app)),
    ]
    for attempt in attempts:
        with pytest.raises(SafError) as caught:
            attempt()
        error = caught.value
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        for text in (str(error), repr(error), repr(vars(error)), "".join(shown.format())):
            assert not shows(text), text
        assert "self = " in "".join(shown.format()) or isinstance(error, ConfigurationError)


def _forward(app: Dsn, mom: Dsn) -> None:
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.run()


def _mistakes(folder: Path, app: Dsn) -> list[Path]:
    """A file with each mistake that one can make in a saf.toml."""
    broker = f"[brokers.app]\ndsn = {json.dumps(app.conninfo)}\n"
    destination = broker.replace("brokers", "destinations")
    texts = [
        broker,
        f"{broker}dns = 1\n{destination}",
        f"{broker}{destination}quality = 'twice'",
        f"{broker}{destination}[forwarder]\ndefault_destination = 'none'",
        f"{broker}{destination}[forwarder.spark]\nx = '${{NOT_SET_ANYWHERE}}'",
        broker + destination.replace("postgresql://", "postgresql:/"),
        broker + destination.replace("%40", "@"),
        f"{broker}[destinations.mom]\ndsn = 'password={CANARY}'",
        f"{broker}{destination}[[",
    ]
    files = [folder / f"{number}.toml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    return files


def test_nothing_that_holds_the_password_shows_it_when_printed(
    tmp_path: Path, locked: Locked
) -> None:
    app, mom = locked.dsns()
    settings = load(configure(tmp_path, {"app": app}, {"mom": mom}))
    send(locked.owner, 5)
    rules = forwarding_rules(mom=mom)
    with Cycle(app, rules) as cycle:
        (work,) = cycle.open()
        delivery = Task(Context(0, work, rules))
        with pytest.raises(Unavailable) as failure:
            list(messages(replace(work, dsn=wrong(app)), 1 << 26))
        things: list[Any] = [
            *(app, mom, settings, settings.brokers, settings.model_dump()),
            *(work, rules, delivery, cycle.broker, cycle.deliver()),
            Forwarder(settings, SparkRunner(_no_spark)),
            PostgresInbox("mom", mom),
            settings.model_dump_json(),
            failure.value,
        ]
    for thing in things:
        assert not shows(repr(thing)), type(thing)
        assert not shows(str(thing)), type(thing)
    assert "authentication failed" in str(failure.value)


def test_neither_a_plan_nor_what_it_says_of_its_functions_holds_the_password(
    locked: Locked,
) -> None:
    app, mom = locked.dsns()
    send(locked.owner, 5)
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        (work,) = cycle.open()
    rows = messages_of(on_spark.spark(), work, {"id": "long"}, [work.batch.select(["id"])])
    plans = rows._jdf.queryExecution()
    assert not shows(plans.toString())
    assert not shows(plans.logical().toJSON())
    assert len(rows.collect()) == 5


def _no_spark() -> SparkSession:
    raise NotImplementedError


def test_every_parameter_that_libpq_takes_for_a_secret_is_hidden() -> None:
    known = {
        option.keyword.decode() for option in pq.Conninfo.get_defaults() if option.dispchar == b"*"
    }
    known |= {"scram_client_key", "scram_server_key"}
    assert known == set(SECRETS)
    for name in known:
        dsn = Dsn(make_conninfo(dbname="x", **{name: PASSWORD}))
        assert not shows(str(dsn) + repr(dsn))
        assert not shows(dsn.redact(f"a driver said {PASSWORD}"))


def test_a_password_from_the_environment_may_hold_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "saf.toml"
    for password in (
        PASSWORD,
        "a@b",
        "x&host=elsewhere",
        "${OTHER}",
        "%41",
        "' host=elsewhere",
        "",
    ):
        monkeypatch.setenv("PASSWORD", password)
        file.write_text(
            '[brokers.a]\ndsn = "postgresql://u:${PASSWORD}@h:5432/db?sslmode=require"\n'
            '[brokers.b]\ndsn = "postgresql://u@h/db?password=${PASSWORD}"\n'
            "[destinations.c]\ndsn = \"host=h dbname=db user=u password='${PASSWORD}'\"\n"
        )
        settings = load(file)
        dsns = [broker.dsn for broker in settings.brokers.values()]
        there = settings.destinations["c"].broker()
        assert there is not None
        dsns.append(there)
        for dsn in dsns:
            assert (dsn.parts["password"], dsn.parts["host"]) == (password, "h")
    with pytest.raises(ConfigurationError, match="%40"):
        Dsn(f"postgresql://user:a@{CANARY}@host/db")


TABLE = """
import os
import sys
from pathlib import Path

import saf.spark
from saf.config import load
from saf.spark import session

settings = load()
folder = Path(os.environ["SAF_CONFIG"]).parent
spark = session.start("local[2]", conf=settings.forwarder.spark)
saf.spark.register(spark)


def table(broker, log="outbox"):
    return spark.read.format("saf").option("broker", broker).option("log", log).load()


read = table("app").where("key > 'a'")
read.explain(True)
read.createOrReplaceTempView("outbox")
spark.sql("EXPLAIN FORMATTED SELECT * FROM outbox").show(truncate=False)
spark.sql("SELECT key, count(*) FROM outbox GROUP BY key").collect()
print(read.join(table("app"), "message_id", "left").count(), "rows")
print(read.rdd.toDebugString())


def stream(brokers):
    query = (
        spark.readStream.format("saf").option("broker", brokers).option("log", "outbox")
        .option("subscription", "lake").load()
        .writeStream.format("noop").trigger(availableNow=True)
        .option("checkpointLocation", f"{folder}/checkpoint {brokers}").start()
    )
    query.awaitTermination()
    query.explain(True)
    print(*(one.json for one in query.recentProgress))


def send(broker):
    rows = spark.range(10).selectExpr("'billing' AS service", "CAST(id AS string) AS body")
    rows.write.format("saf").option("broker", broker).mode("append").save()


send("app")
stream("app")
for broker in ("wrong", "down", "bare"):
    try:
        send(broker)
    except Exception as error:
        print("failed:", type(error).__name__, error)
for brokers in ("wrong", "down,wrong", "bare"):
    try:
        stream(brokers)
    except Exception as error:
        print("failed:", type(error).__name__, error)
for broker in ("wrong", "down", "bare"):
    try:
        table(broker).collect()
    except Exception as error:
        print("failed:", type(error).__name__, error)
print("ready", flush=True)
sys.stdin.readline()
spark.stop()
"""


@pytest.mark.full
def test_a_table_shows_the_password_nowhere_in_plans_pages_events_or_errors(
    tmp_path: Path, locked: Locked
) -> None:
    app, mom = locked.dsns()
    port = free_port()
    brokers = {"app": app, "wrong": wrong(app), "down": down(locked.app), "bare": locked.bare}
    config = configure(
        tmp_path,
        brokers,
        {"mom": mom},
        **{"spark.log.level": "INFO", "spark.ui.enabled": "true", "spark.ui.port": str(port)},
    )
    send(locked.owner, 1_000)
    with connect(locked.owner) as connection:
        stream.create(connection, "app", "outbox", "lake", "beginning")
        grant(connection, USER, [Kind.FORWARDER, Kind.SINK])
    out: list[str] = []
    with Watch(locked.owner) as watch, (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [BIN / "python", "-c", TABLE],
            env=environment(TMPDIR=str(tmp_path / "tmp"), SAF_CONFIG=str(config)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            out.append(line)
            if line == "ready\n":
                break
        pages = list(rest(port)) if out and out[-1] == "ready\n" else []
        on_disk = files_that_show(tmp_path)
        out += process.communicate("\n", timeout=120)[:1]
    assert process.returncode == 0, (tmp_path / "stderr").read_text()
    said = "".join(out)
    assert not shows(said)
    assert [page for page in pages if shows(page)] == []
    assert on_disk == files_that_show(tmp_path) == []
    assert [process for process in watch.processes if shows(process)] == []
    assert [session for session in watch.sessions if shows("".join(session))] == []
    assert not shows(locked.log.read_bytes())

    # what would show it was there to be searched
    assert "1000 rows" in said
    assert "BatchScan" in said
    for cause in ("authentication failed", "Connection refused", "has no saf schema"):
        assert cause in said
    assert b"BatchScan" in b"".join(pages)
    assert (tmp_path / "events").exists()
    assert '"numInputRows":1010' in "".join(said.split())
    assert list((tmp_path / "checkpoint app" / "offsets").iterdir())
