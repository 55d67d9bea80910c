"""The forwarder on a Spark standalone cluster: a master and two workers on the loopback."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyspark
import pytest

from saf.database import Dsn
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.spark import java
from saf_demo.servers import free_port
from tests.files import files_where
from tests.programs import ROOT, configuration, environment, last_json, received, send

pytestmark = pytest.mark.full

CANARY = f"canary-{uuid4()}"
"""Of this process, because one beside it may run the test that shows its own."""
SPARK = Path(pyspark.__file__).parent
START_SECONDS = 60

_run = itertools.count(1)


@dataclass
class Cluster:
    """Where it is, and the folder with everything that it writes."""

    master: str
    folder: Path

    def submit(self, config: Path, *options: str) -> Submission:
        """Run the forwarder on it, watching all processes meanwhile."""
        folder = self.folder / f"run-{next(_run)}"
        events = folder / "events"
        events.mkdir(parents=True)
        conf = {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": events.as_uri(),
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            # work starts when both executors are there
            "spark.cores.max": "2",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        }
        command = [
            str(SPARK / "bin/spark-submit"),
            *("--master", self.master),
            *options,
            *(word for name, value in conf.items() for word in ("--conf", f"{name}={value}")),
            *(str(ROOT / "jobs/forward.py"), "--config", str(config), "--json"),
        ]
        with (
            (folder / "stdout").open("w") as out,
            (folder / "stderr").open("w") as err,
            Watch() as watch,
        ):
            code = subprocess.run(
                command, env=_spark_environment(), stdout=out, stderr=err, timeout=180, check=False
            ).returncode
        return Submission(
            code=code,
            stdout=(folder / "stdout").read_text(),
            stderr=(folder / "stderr").read_text(),
            events=[
                json.loads(line)
                for file in events.rglob("*")
                if file.is_file() and file.name.startswith(("events_", "app-"))
                for line in file.read_text().splitlines()
            ],
            processes=watch.seen,
            leaks=watch.leaks,
        )

    def files_with(self, text: str) -> list[Path]:
        """The files below the cluster's folder that hold ``text``."""
        return files_where(self.folder, lambda content: text.encode() in content)


@dataclass
class Submission:
    """What is known of a run after its end."""

    code: int
    stdout: str
    stderr: str
    events: list[dict[str, Any]]
    processes: set[str]
    """The programs that were seen to run meanwhile."""
    leaks: set[str]
    """The processes that showed the canary in their command line or environment."""

    @property
    def executors(self) -> set[str]:
        """The executors that ended tasks."""
        ends = (event for event in self.events if event["Event"] == "SparkListenerTaskEnd")
        return {event["Task Info"]["Executor ID"] for event in ends}


@dataclass
class Watch:
    """Looks for the canary in all processes of the machine while it is entered."""

    seen: set[str] = field(default_factory=set)
    leaks: set[str] = field(default_factory=set)
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
        while not self._over.wait(0.2):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    command = (process / "cmdline").read_bytes()
                    shown = command + (process / "environ").read_bytes()
                except OSError:  # it has ended, or is another user's
                    continue
                words = command.decode(errors="replace").split("\0")
                self.seen.update(words)
                if CANARY.encode() in shown:
                    self.leaks.add(" ".join(words)[:200])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A master and two workers of one core each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="saf-cluster-")))
        port = free_port()
        master = f"spark://127.0.0.1:{port}"
        here = ("--host", "127.0.0.1", "--webui-port", "0")
        _start(stack, folder / "master", "master.Master", *here, "--port", str(port))
        for number in (1, 2):
            work = ("--work-dir", str(folder / f"work-{number}"), "-c", "1", "-m", "1g")
            _start(stack, folder / f"worker-{number}", "worker.Worker", *here, *work, master)
        _until(
            lambda: (folder / "master").read_text().count("Registering worker") == 2,
            f"two workers at the master:\n{(folder / 'master').read_text()}",
        )
        yield Cluster(master=master, folder=folder)


@pytest.fixture
def folder(cluster: Cluster) -> Path:
    """Where a test keeps its saf.toml."""
    folder = cluster.folder / f"test-{next(_run)}"
    folder.mkdir()
    return folder


def test_two_workers_forward_two_databases_once_and_show_no_password(
    cluster: Cluster, folder: Path, new_broker: Callable[[str], Dsn]
) -> None:
    shop, billing, mom = new_broker("shop"), new_broker("billing"), new_broker("mom")
    expected = sorted(send(shop, 5000, "shop") + send(billing, 5000, "billing"))
    brokers = {"shop": _secret(shop), "billing": _secret(billing)}
    config = configuration(folder / "saf.toml", brokers, {"mom": _secret(mom)}, chunk_rows=500)

    done = cluster.submit(config)

    assert done.code == 0, done.stderr
    assert last_json(done.stdout)["forwarded"] == 10_000
    assert sorted(body for _, body in received(mom)) == expected
    assert _out_of_order(received(mom)) == []
    assert len(done.executors) == 2
    _assert_not_shown(cluster, done)
    # what would show it was there to be searched
    assert "org.apache.spark.executor.CoarseGrainedExecutorBackend" in done.processes
    assert any(event["Event"] == "SparkListenerEnvironmentUpdate" for event in done.events)
    assert any(event["Event"] == "SparkListenerJobStart" for event in done.events)
    assert len(list(cluster.folder.glob("work-*/app-*/*/stderr"))) == 2


def test_classifiers_run_on_the_executors_that_get_their_module_with_the_job(
    cluster: Cluster, folder: Path, app: Dsn, new_broker: Callable[[str], Dsn]
) -> None:
    even, odd = new_broker("even"), new_broker("odd")
    module = folder / "parity.py"
    module.write_text(
        "def classify(message):\n    return ('even', 'odd')[int(message.text().split()[-1]) % 2]\n"
    )
    send(app, 1000, "shop")
    config = configuration(folder / "saf.toml", {"shop": app}, {"even": even, "odd": odd})
    with app.connect(role="test") as connection:
        for name in ("even", "odd"):
            add_route(connection, name, service=name)
        add_router(connection, "billing", "python", "parity:classify")
        add_router(connection, "not asked", "sql", "text")
    done = cluster.submit(config, "--py-files", str(module))
    assert done.code == 0, done.stderr
    for remainder, dsn in enumerate((even, odd)):
        numbers = sorted(int(body.split()[-1]) for _, body in received(dsn))
        assert numbers == [n for n in range(1, 1001) if n % 2 == remainder]


@pytest.mark.full
def test_each_database_that_is_not_there_is_one_sentence_without_its_password(
    cluster: Cluster, folder: Path, new_broker: Callable[[str], Dsn]
) -> None:
    shop, billing = new_broker("shop"), new_broker("billing")
    misnamed = _secret(shop, dbname="no_such_database")
    unreachable = _secret(shop, host="127.0.0.1", port="1")
    send(shop, 10)
    send(billing, 10)
    with billing.connect(role="test") as connection:
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('billing', 'm')")
    config = configuration(
        folder / "saf.toml",
        {
            "shop": _secret(shop),
            "billing": _secret(billing),
            "misnamed": misnamed,
            "unreachable": unreachable,
        },
        {"u": unreachable, "m": misnamed},
        attempts=1,
    )

    done = cluster.submit(config)

    assert done.code == 2, done.stderr  # of two a person has to mend the name
    summary = last_json(done.stdout)
    # a broker with one destination leaves its messages where they are, one with two parks them
    (waiting,) = (lane for lane in summary["waiting"] if lane["broker"] == "billing")
    assert "destination 'm'" in waiting["error"]
    problems = {problem["broker"]: problem["error"] for problem in summary["problems"]}
    said = {**problems, "billing": waiting["error"]}
    assert set(said) == {"shop", "billing", "misnamed", "unreachable"}
    for name, error in said.items():
        named_wrong = name in ("billing", "misnamed")
        assert ("refuses the login" if named_wrong else "is unavailable") in error
        assert "\n" not in error
    assert "destination 'u'" in said["shop"]
    assert "destination 'm'" in said["billing"]
    assert "no_such_database" in said["billing"]
    assert "no_such_database" in said["misnamed"]
    assert "127.0.0.1" in said["unreachable"]
    assert "Traceback" not in done.stderr
    _assert_not_shown(cluster, done)


@pytest.mark.parametrize("place", ["command line", "environment"])
def test_a_password_that_a_process_shows_would_be_noticed(place: str) -> None:
    words = [CANARY] if place == "command line" else []
    shown = {"PASSWORD": CANARY} if place == "environment" else {}
    with Watch() as watch:
        subprocess.run(
            [sys.executable, "-c", "import time; time.sleep(2)", *words],
            env=environment(**shown),
            check=True,
        )
    assert len(watch.leaks) == 1


def _secret(dsn: Dsn, **changes: str) -> Dsn:
    """The same place with a password, which a server that trusts everyone does not ask for."""
    return Dsn(psycopg.conninfo.make_conninfo(dsn.conninfo, password=CANARY, **changes))


def _assert_not_shown(cluster: Cluster, done: Submission) -> None:
    assert CANARY not in done.stdout
    assert CANARY not in done.stderr
    assert cluster.files_with(CANARY) == []
    assert done.leaks == set()


def _out_of_order(messages: list[tuple[str, str]]) -> list[str]:
    """Bodies that arrived after a later one of the same source and key."""
    last: dict[tuple[str, str], int] = {}
    wrong = []
    for key, body in messages:
        source, number = body.split()
        if last.get((source, key), 0) >= int(number):
            wrong.append(body)
        last[source, key] = int(number)
    return wrong


def _spark_environment() -> dict[str, str]:
    return environment(
        **java.find().environment(),
        PYSPARK_PYTHON=sys.executable,
        SPARK_HOME=str(SPARK),
        SPARK_LOCAL_IP="127.0.0.1",
        SPARK_DAEMON_MEMORY="256m",
        PYTHONPATH=os.environ.get("PYTHONPATH", ""),
    )


def _start(stack: ExitStack, log: Path, name: str, *arguments: str) -> None:
    """Start one of the cluster's processes; it ends with the stack."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(SPARK / "bin/spark-class"), f"org.apache.spark.deploy.{name}", *arguments],
            env=_spark_environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
        )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    _until(
        lambda: re.search("Starting Spark (master|worker) ", log.read_text()), f"{name} to start"
    )


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {START_SECONDS} s for {what}"
        time.sleep(0.1)
