"""``airflow standalone``: a real scheduler, triggerer, DAG processor and API server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from conftest import AIRFLOW, SAF, Site, new_site, saf, until

SECONDS = 300.0
"""Longest time for any step of a scheduler."""

COMPONENTS = ("metadatabase", "scheduler", "triggerer", "dag_processor")

WATCHED = """
from airflow.sdk import DAG, Asset, AssetWatcher
from saf_airflow import *

trigger = SafPendingTrigger(
    command={saf!r}, config={config!r}, poll_seconds=1, again_seconds=5
)
asset = Asset("saf_pending", watchers=[AssetWatcher(name="saf", trigger=trigger)])

with DAG("watched", schedule=[asset], max_active_runs=1):
    SafForwardOperator(task_id="forward", saf=Saf(command={saf!r}, config={config!r}))
"""

SENSOR = """
SafForwardedSensor(
    task_id="wait", saf=SAF, poke_interval=1, timeout=600, deferrable=True
) >> PythonOperator(task_id="next", python_callable=print, op_args=["NEXT"])
"""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A running Airflow, queried by the API that its pages use."""

    site: Site
    port: int

    def ask(self, path: str, method: str = "GET", body: Mapping[str, Any] | None = None) -> Any:
        """Call the API.

        Raises:
            OSError: the API does not answer, or refuses.
        """
        token = self._json("/auth/token")["access_token"]
        return self._json(f"/api/v2/{path}", method, body, Authorization=f"Bearer {token}")

    def healthy(self) -> bool:
        """Return whether all components are healthy."""
        try:
            report = self._json("/api/v2/monitor/health")
        except (URLError, ConnectionError):
            return False
        return all(report[name]["status"] == "healthy" for name in COMPONENTS)

    def knows(self, dag: str) -> bool:
        """Return whether the file of a DAG has been read."""
        return any(one["dag_id"] == dag for one in self.ask("dags")["dags"])

    def go(self, dag: str) -> None:
        """Unpause a DAG."""
        until(lambda: self.knows(dag), SECONDS)
        self.ask(f"dags/{dag}", "PATCH", {"is_paused": False})

    def run(self, dag: str) -> str:
        """Start a run; return its id."""
        self.go(dag)
        run: str = self.ask(f"dags/{dag}/dagRuns", "POST", {"logical_date": None})["dag_run_id"]
        return run

    def state(self, dag: str, run: str, task: str) -> str | None:
        """Return the state of a task."""
        state: str | None = self.ask(f"dags/{dag}/dagRuns/{run}/taskInstances/{task}")["state"]
        return state

    def _json(
        self, path: str, method: str = "GET", body: Mapping[str, Any] | None = None, **headers: str
    ) -> Any:
        request = Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
            method=method,
        )
        with urlopen(request, timeout=60) as answer:  # noqa: S310 - local
            return json.load(answer)


def free_ports(count: int) -> list[int]:
    """Return unused ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def airflow(
    server: Mapping[str, str],
    airflow_database: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    """Run an Airflow; afterwards, none of its processes is left."""
    site = new_site(server, airflow_database, tmp_path_factory.mktemp("scheduled"))
    site.dag("sensor", SENSOR)
    site.dag("killed", "SafForwardOperator(task_id='forward', saf=SAF)")
    (site.folder / "dags" / "watched.py").write_text(
        WATCHED.format(saf=str(SAF), config=str(site.config))
    )
    port, workers, triggers = free_ports(3)
    environment = {
        **site.environment,
        "PATH": f"{AIRFLOW.parent}:{os.environ['PATH']}",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "true",
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(triggers),
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(workers),
    }
    log = site.folder / "standalone.log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [AIRFLOW, "standalone"],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        running = Running(site=site, port=port)
        try:
            until(running.healthy, SECONDS)
            yield running
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 0
            until(lambda: not group(process.pid), SECONDS)
        except BaseException:
            print(log.read_text()[-20_000:])
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def group(number: int) -> list[str]:
    """Return the processes of a group."""
    done = subprocess.run(["pgrep", "-g", str(number)], capture_output=True, text=True, check=False)
    return done.stdout.split()


def test_what_is_pending_starts_a_dag_and_a_sensor_goes_on_where_the_triggerer_has_waited(
    airflow: Running,
) -> None:
    site = airflow.site
    airflow.go("watched")
    with site.locked():
        site.send(2)
        waiting = airflow.run("sensor")
        until(lambda: airflow.state("sensor", waiting, "wait") == "deferred", SECONDS)
        until(site.blocked, SECONDS)
        assert airflow.state("sensor", waiting, "next") is None
    until(lambda: airflow.state("sensor", waiting, "next") == "success", SECONDS)
    assert site.stored() == 2
    until(lambda: ("saf://mom/billing", {"messages": 2}) in events(airflow), SECONDS)
    (run, *_) = airflow.ask("dags/watched/dagRuns?order_by=start_date")["dag_runs"]
    assert run["run_type"] == "asset_triggered"
    airflow.ask("dags/watched", "PATCH", {"is_paused": True})
    until(lambda: not site.forwarders(), SECONDS)


def events(airflow: Running) -> list[tuple[str, Any]]:
    found = airflow.ask("assets/events")["asset_events"]
    return [(event["uri"], event["extra"]) for event in found]


def test_a_task_that_a_person_marks_as_failed_ends_the_command(airflow: Running) -> None:
    site = airflow.site
    before = site.stored()
    with site.locked():
        site.send(5)
        run = airflow.run("killed")
        until(site.blocked, SECONDS)
        assert site.forwarders()
        airflow.ask(
            f"dags/killed/dagRuns/{run}/taskInstances/forward", "PATCH", {"new_state": "failed"}
        )
        until(lambda: not site.forwarders(), SECONDS)
        assert airflow.state("killed", run, "forward") == "failed"
    saf("forward", "--config", site.config)
    assert site.stored() == before + 5
