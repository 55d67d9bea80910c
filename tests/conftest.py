"""Real PostgreSQL servers, and a fresh broker database for whoever asks.

Each server is started when the first test needs it, and each holds one migrated template
database, so that a broker costs one CREATE DATABASE. Ordinary servers run without fsync, for
speed alone; tests that are about durability ask for `own_server`. All temporary files, and with
them the servers' data, are in memory where there is room: see `tests.memory`.

A test that hangs fails after ``timeout`` seconds; where it cannot be interrupted, its process ends
after ``faulthandler_timeout``, with the stacks of all its threads, and xdist names the test.

    def test_something(app: Dsn, mom: Dsn) -> None             two brokers on PostgreSQL 18
    @pytest.mark.every_postgresql                              the same test on each of VERSIONS
    @pytest.mark.slow                                          takes seconds, alone
    @pytest.mark.check                                         `make test` leaves it out
    @pytest.mark.full                                          only `make full` runs it
    def test_a_crash(own_server: EmbeddedServer) -> None       durable, and the test's to stop
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import settings

from saf.broker.embedded import DEFAULT_VERSION, EmbeddedServer, programs
from saf.broker.migrate import migrate
from saf.database import Dsn
from saf.destinations.redis import Redis
from saf.errors import UsageError
from saf.failpoints import arm
from saf.testing.databases import Copies, Database, Databases, embedded_server
from tests import memory
from tests.kafka_server import KafkaServer, kafka_server
from tests.needed import absent, summary
from tests.object_store import ObjectStore, object_store
from tests.rabbitmq_server import Queues, RabbitmqServer, rabbitmq_server
from tests.receivers import prepare
from tests.redis_server import RedisServer, redis_server
from tests.tiers import FULL, LATER, TEST, TIER, is_later

SUPPORTED = (15, 16, 18)
VERSIONS = {TEST: SUPPORTED[-1:], FULL: SUPPORTED}.get(TIER, (SUPPORTED[0], SUPPORTED[-1]))
"""The versions of PostgreSQL that this tier runs `every_postgresql` on."""
HERE = Path(__file__).parent
SPARK = HERE / "spark"
SETTINGS = {"max_prepared_transactions": 20, "max_connections": 200}
AT_ONCE_LINES = 30
ENDING_SECONDS = 120
"""After its last test a run has so long for its end, which no test's timeout covers."""

LENT = "SAF_TESTS_TEMPLATE"
"""The environment variable that names a migrated template on a server that is running already, for
who runs tests many times; see `tests.mutants`."""


# No deadline: a busy machine is slow. The gate gives the same verdict each time, so its examples
# are the same each time; only the full tier draws new ones.
settings.register_profile("saf", deadline=None, derandomize=TIER != FULL)
settings.load_profile("saf")


def pytest_configure(config: pytest.Config) -> None:
    # a shell lets what it runs in the background ignore Ctrl-C, and so would what the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "every_postgresql: on the oldest and the newest, or on each")
    config.addinivalue_line("markers", "slow: takes seconds, so it begins early")
    config.addinivalue_line("markers", "check: `make test` leaves it out; see tests/tiers.py")
    config.addinivalue_line("markers", "full: only `make full` runs it; see tests/tiers.py")
    if not hasattr(config, "workerinput"):
        memory.use()
        config.pluginmanager.register(AtOnce(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: to look for garbage in it took a tenth of the run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files of later tiers before they import anything, unless they are named."""
    if collection_path.is_dir() or collection_path.suffix != ".py":
        return None
    return is_later(collection_path) or None


def pytest_sessionfinish() -> None:
    faulthandler.dump_traceback_later(ENDING_SECONDS, exit=True)
    if "tests.on_spark" in sys.modules:
        from tests import on_spark

        on_spark.stop()


class AtOnce:
    """Says what has failed as soon as it has: a run that is stopped never comes to its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} has failed ({report.when}):")
            for line in report.longreprtext.splitlines()[-AT_ONCE_LINES:]:
                terminal.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long comes first, so that two workers end at the same time."""
    for item in items:
        if item.path.is_relative_to(SPARK):
            item.add_marker("slow")
    later = LATER[TIER]
    left_out = [item for item in items if any(map(item.get_closest_marker, later))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not any(map(item.get_closest_marker, later))]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [one.longrepr[2] for one in skipped if isinstance(one.longrepr, tuple)]
    if line := summary(reasons):
        terminalreporter.write_line(line)


def pytest_report_header() -> list[str]:
    return [
        f"tier: {TIER}",
        f"PostgreSQL: {', '.join(map(_server_version, VERSIONS))}; "
        f"psycopg {psycopg.__version__}, libpq {psycopg.pq.version_pretty(psycopg.pq.version())}",
        f"temporary files: {tempfile.gettempdir()}",
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("every_postgresql"):
        if "pg_version" not in metafunc.fixturenames:
            metafunc.fixturenames.append("pg_version")
        slow = metafunc.definition.get_closest_marker("slow") and TIER != FULL
        versions = VERSIONS[-1:] if slow else VERSIONS
        ids = [f"postgresql-{version}" for version in versions]
        metafunc.parametrize("pg_version", versions, indirect=True, ids=ids)


def _server_version(version: int) -> str:
    try:
        program = programs(version) / "postgres"
    except UsageError:
        return f"{version} is not here"
    out = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return out.split()[2]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A running server with a migrated template."""

    server: EmbeddedServer
    databases: Databases
    template: Database


class Servers:
    """One ordinary server per version, started at its first use."""

    def __init__(self, running: ExitStack) -> None:
        self._running = running
        self._servers: dict[int, Prepared] = {}

    def __getitem__(self, version: int) -> Prepared:
        if version == DEFAULT_VERSION and LENT in os.environ and version not in self._servers:
            template = Database(Dsn(os.environ[LENT]))
            self._add(version, EmbeddedServer(template.dsn.parts["host"]), template)
        if version not in self._servers:
            self._add(version, self._running.enter_context(embedded_server(version)))
        return self._servers[version]

    def _add(self, version: int, server: EmbeddedServer, lent: Database | None = None) -> None:
        databases = self._running.enter_context(closing(Databases(server.dsn("postgres"))))
        template = lent or databases.create("template")
        if lent is None:
            migrate(template.dsn)
        self._servers[version] = Prepared(server=server, databases=databases, template=template)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with ExitStack() as running:
        yield Servers(running)


@pytest.fixture
def pg_version(request: pytest.FixtureRequest) -> int:
    version = int(getattr(request, "param", DEFAULT_VERSION))
    try:
        programs(version)
    except UsageError as missing:
        absent(f"PostgreSQL {version} ({missing})", f"apt install postgresql-{version}")
    return version


@pytest.fixture
def migrated(servers: Servers, pg_version: int) -> Prepared:
    return servers[pg_version]


@pytest.fixture
def server(migrated: Prepared) -> EmbeddedServer:
    """The running server that the test's brokers are on; shared, so not to be stopped."""
    return migrated.server


@pytest.fixture
def new_copy(migrated: Prepared) -> Iterator[Callable[..., Dsn]]:
    """Creates databases, empty ones or copies of another one, which go with the test."""
    created: list[Database] = []

    def new(name: str, of: str = "template0") -> Dsn:
        created.append(migrated.databases.create(name, of))
        return created[-1].dsn

    yield new
    for database in created:
        migrated.databases.drop(database)


@pytest.fixture
def new_database(new_copy: Callable[..., Dsn]) -> Callable[[str], Dsn]:
    """Creates empty databases, which go with the test."""
    return new_copy


@pytest.fixture
def backup(new_copy: Callable[..., Dsn]) -> Callable[[Dsn], Dsn]:
    """Copies a broker as it is at this moment: what a backup, or a standby, has."""
    return lambda broker: new_copy("backup", broker.database)


@pytest.fixture
def new_broker(migrated: Prepared) -> Iterator[Callable[[str], Dsn]]:
    """Creates migrated databases with 64 shards, which go with the test."""
    copies = Copies(migrated.databases, migrated.template)
    yield lambda name: copies(name).dsn
    copies.drop()


@pytest.fixture(scope="module")
def shared_broker(servers: Servers) -> Iterator[Callable[[str], Dsn]]:
    """Creates migrated databases for a module whose tests only read them."""
    prepared = servers[DEFAULT_VERSION]
    copies = Copies(prepared.databases, prepared.template)
    yield lambda name: copies(name).dsn
    copies.drop()


@pytest.fixture
def app(new_broker: Callable[[str], Dsn]) -> Dsn:
    """A fresh application database."""
    return new_broker("app")


@pytest.fixture
def mom(new_broker: Callable[[str], Dsn]) -> Dsn:
    """A fresh MOM store, on the same server as the application database."""
    return new_broker("mom")


@pytest.fixture
def other(new_broker: Callable[[str], Dsn]) -> Dsn:
    """A second MOM store."""
    return new_broker("other")


@pytest.fixture
def source(app: Dsn) -> Iterator[psycopg.Connection[Any]]:
    """A connection to the application database, in autocommit."""
    with app.connect(role="test", autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def running_queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server for all tests; without one, they are skipped, or fail in CI."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def queue(running_queue: RedisServer) -> RedisServer:
    """A Redis server that is empty and durable."""
    running_queue.empty()
    return running_queue


@pytest.fixture
def events(queue: RedisServer) -> Redis:
    """It as a destination."""
    return Redis(server=queue.address)


@pytest.fixture(scope="session")
def running_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A Kafka broker for all tests, which some kill and start again."""
    with kafka_server(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture(scope="session")
def objects() -> Iterator[ObjectStore]:
    """An object store that speaks S3 for all tests; each test takes a bucket of its own."""
    with object_store() as store:
        yield store


@pytest.fixture(scope="session")
def running_rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitmqServer]:
    """A RabbitMQ server for all tests, because it takes seconds to start."""
    with rabbitmq_server(tmp_path_factory.mktemp("rabbitmq")) as server:
        yield server


@pytest.fixture
def rabbitmq(running_rabbitmq: RabbitmqServer) -> RabbitmqServer:
    """A RabbitMQ server that is empty."""
    running_rabbitmq.empty()
    return running_rabbitmq


@pytest.fixture
def rabbitmq_queues(running_rabbitmq: RabbitmqServer) -> Queues:
    """Its queues, which are empty."""
    queues = Queues(server=running_rabbitmq)
    queues.empty()
    return queues


@pytest.fixture
def disarmed() -> Iterator[None]:
    """For tests that arm fail points of this process: none is armed after the test."""
    yield
    arm("")


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    """A MOM store with what the receivers of tests need; see tests/receivers.py."""
    prepare(mom)
    return mom


@pytest.fixture
def own_server(pg_version: int) -> Iterator[EmbeddedServer]:
    """A durable server for this test alone, to stop, crash and start again; holds no broker."""
    with _durable_server(pg_version) as server:
        yield server


@pytest.fixture(scope="module")
def modules_server() -> Iterator[EmbeddedServer]:
    """A durable server for the tests of a module, none of which stops it; holds no broker."""
    with _durable_server(DEFAULT_VERSION) as server:
        yield server


@contextmanager
def _durable_server(version: int) -> Iterator[EmbeddedServer]:
    folder = Path(tempfile.mkdtemp(prefix="saf-test-"))
    server = EmbeddedServer(folder / "data", version, SETTINGS)
    server.start()
    yield server
    server.stop_immediately()
    shutil.rmtree(folder, ignore_errors=True)
