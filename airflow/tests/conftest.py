"""A real Airflow on SQLite, and two real databases that the command saf knows.

The command saf is that of the repository's environment (`make install`), or `SAF_COMMAND`, never of
this environment, where Airflow is installed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SAF = Path(os.environ.get("SAF_COMMAND", ROOT / ".venv" / "bin" / "saf"))
PYTHON = SAF.with_name("python")
AIRFLOW = Path(sys.executable).with_name("airflow")


def until(condition: Callable[[], Any], seconds: float = 120) -> None:
    """Wait until a condition is true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it never came to that"
        time.sleep(0.05)


def saf(*words: object) -> None:
    """Run the command; fail if it fails."""
    command = [str(word) for word in (SAF, *words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def server() -> Iterator[dict[str, str]]:
    """Run a PostgreSQL server; yield the environment for its clients."""
    # not in pytest's folder, which is private to one user: as root, the server runs as another user
    with tempfile.TemporaryDirectory(prefix="saf-airflow-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield from serving(folder)


def serving(folder: Path) -> Iterator[dict[str, str]]:
    """Run a PostgreSQL server with its data in a folder; yield the environment for its clients."""
    out = folder / "env"
    with (
        out.open("w") as file,
        subprocess.Popen(
            [PYTHON, ROOT / "examples" / "postgresql.py", folder, "shop", "mom"], stdout=file
        ) as process,
    ):
        try:
            until(lambda: "MOM_URL" in out.read_text())
            lines = [shlex.split(line)[1] for line in out.read_text().splitlines()]
            yield dict(line.split("=", 1) for line in lines if "_DSN=" in line)
        finally:
            process.send_signal(signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Two databases, a saf.toml, and an Airflow whose DAGs are in a folder."""

    folder: Path
    config: Path
    shop: str
    mom: str

    @property
    def environment(self) -> dict[str, str]:
        home = self.folder / "airflow"
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("AIRFLOW", "SAF_", "PG"))}
        return {
            **kept,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.folder / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
            "AIRFLOW__CORE__UNIT_TEST_MODE": "false",
            "PYTHONUNBUFFERED": "1",
        }

    def sql(self, dsn: str, *statements: str) -> list[list[Any]]:
        """Run statements; return the rows of the last statement."""
        script = (
            "import json, sys, psycopg\n"
            "with psycopg.connect(sys.argv[1], autocommit=True) as connection:\n"
            "    for one in sys.argv[2:]: cursor = connection.execute(one)\n"
            "    print(json.dumps(cursor.fetchall() if cursor.description else [], default=str))"
        )
        done = subprocess.run(
            [PYTHON, "-c", script, dsn, *statements], capture_output=True, text=True, check=True
        )
        rows: list[list[Any]] = json.loads(done.stdout)
        return rows

    def send(self, count: int = 1, service: str = "billing") -> None:
        self.sql(
            self.shop,
            "INSERT INTO saf.outbox (to_service, body) "
            f"SELECT '{service}', 'x' FROM generate_series(1, {count})",
        )

    def stored(self) -> int:
        return int(self.sql(self.mom, "SELECT count(*) FROM saf.inbox")[0][0])

    def dag(self, name: str, body: str) -> None:
        """Write a file with one DAG; ``body`` is not indented."""
        text = "\n".join(f"    {line}" for line in body.strip().splitlines())
        head = (
            "from datetime import datetime, timedelta\n"
            "from airflow.sdk import DAG, Asset, AssetAlias, AssetWatcher\n"
            "from airflow.providers.standard.operators.python import PythonOperator\n"
            "from saf_airflow import *\n\n"
            f"SAF = Saf(command={str(SAF)!r}, config={str(self.config)!r})\n\n"
            f"with DAG({name!r}, start_date=datetime(2026, 1, 1), schedule=None):\n"
        )
        (self.folder / "dags" / f"{name}.py").write_text(head + text + "\n")

    def start(self, name: str) -> subprocess.Popen[str]:
        """Start ``airflow dags test``, in its own process group."""
        return subprocess.Popen(
            [AIRFLOW, "dags", "test", name],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def test(self, name: str) -> str:
        """Run ``airflow dags test`` to its end; return its log."""
        with self.start(name) as process:
            try:
                return process.communicate(timeout=300)[0]
            finally:
                process.kill()

    def states(self, dag: str) -> Mapping[str, tuple[str, int]]:
        """Return the states of the last run's tasks, and the number of tries of each."""
        done = subprocess.run(
            [sys.executable, "-c", STATES, dag],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
        return {task: (state, tries) for task, (state, tries) in found.items()}

    def forwarders(self) -> list[int]:
        """Return the process ids of the forwarders of this site."""
        words = f"saf forward --json .*--config {self.config}"
        done = subprocess.run(["pgrep", "-f", words], capture_output=True, text=True, check=False)
        return [int(pid) for pid in done.stdout.split()]

    def blocked(self) -> bool:
        """Return whether a forwarder waits for a lock of the store."""
        rows = self.sql(
            self.mom,
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
            "AND datname = current_database()",
        )
        return bool(rows[0][0])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Prevent any storing while the block runs."""
        script = (
            "import sys, psycopg\n"
            "with psycopg.connect(sys.argv[1]) as connection:\n"
            "    connection.execute('LOCK TABLE saf.inbox, saf.watermark')\n"
            "    print('locked', flush=True)\n"
            "    sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [PYTHON, "-c", script, self.mom],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            try:
                yield
            finally:
                process.communicate("", timeout=60)

    def asset_events(self) -> list[tuple[str, Any]]:
        """Return the events of assets, in order."""
        done = subprocess.run(
            [sys.executable, "-c", EVENTS],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return [(uri, extra) for uri, extra in json.loads(done.stdout.splitlines()[-1])]


STATES = """
import json, sys
from airflow.models import DagRun, TaskInstance
from airflow.utils.session import create_session
with create_session() as session:
    run = session.query(DagRun).filter_by(dag_id=sys.argv[1]).order_by(DagRun.id.desc()).first()
    tasks = session.query(TaskInstance).filter_by(dag_id=run.dag_id, run_id=run.run_id)
    said = {one.task_id: [str(one.state).rpartition(".")[2], one.try_number] for one in tasks}
    print(json.dumps(said))
"""

EVENTS = """
import json
from airflow.models.asset import AssetEvent
from airflow.utils.session import create_session
with create_session() as session:
    events = session.query(AssetEvent).order_by(AssetEvent.id)
    print(json.dumps([[one.asset.uri, one.extra] for one in events]))
"""


@pytest.fixture(scope="session")
def airflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the SQLite file of an Airflow, migrated once."""
    home = tmp_path_factory.mktemp("airflow")
    env = {**os.environ, "AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "false"}
    subprocess.run([AIRFLOW, "db", "migrate"], env=env, check=True, capture_output=True)
    return home / "airflow.db"


@pytest.fixture
def site(server: Mapping[str, str], airflow_database: Path, tmp_path: Path) -> Site:
    return new_site(server, airflow_database, tmp_path)


def new_site(server: Mapping[str, str], airflow_database: Path, folder: Path) -> Site:
    """Create databases without messages, and an Airflow without DAGs."""
    (folder / "dags").mkdir()
    (folder / "airflow").mkdir()
    (folder / "airflow" / "airflow.db").write_bytes(airflow_database.read_bytes())
    config = folder / "saf.toml"
    created = Site(folder=folder, config=config, shop=server["SHOP_DSN"], mom=server["MOM_DSN"])
    for dsn in (created.shop, created.mom):
        created.sql(dsn, "DROP SCHEMA IF EXISTS saf CASCADE")
        saf("migrate", "--dsn", dsn)
    config.write_text(
        f"[brokers.shop]\ndsn = {json.dumps(created.shop)}\n"
        f"[destinations.mom]\ndsn = {json.dumps(created.mom)}\n"
        '[forwarder]\ndefault_destination = "mom"\n'
    )
    saf("service", "create", "billing", "--config", config)
    return created
