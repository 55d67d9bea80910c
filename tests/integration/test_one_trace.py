"""One trace, over real processes: from a request of the web to a handler in another service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf_demo.servers import free_port
from tests.pipeline import connect
from tests.programs import BIN, ROOT, configuration, environment, url
from tests.receivers import put
from tests.scraping import served
from tests.traced import site, spans
from tests.waits import until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
REQUEST = {
    "content-type": "application/json",
    "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
    "baggage": "tenant=acme",
}

FAILING = """
import saf
from saf.database import Dsn

worker = saf.Worker(Dsn({dsn!r}), "billing", policy=saf.Policy(max_attempts=1))

@worker.handler()
def handle(message, connection):
    raise ValueError("it is bad")
"""


@contextmanager
def shop(app: Dsn, **env: str) -> Iterator[str]:
    """examples/with_fastapi.py, served; where it is."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "with_fastapi:app", "--port", str(port)]
    with subprocess.Popen(
        command,
        cwd=ROOT / "examples",
        env=environment(SHOP_URL=url(app), **env),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            until(lambda: served(port))
            yield f"http://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGINT)  # after SIGTERM, uvicorn runs nothing at its exit
            server.wait(60)


def order(where: str) -> None:
    body = json.dumps({"number": "A-1", "total": 90}).encode()
    request = urllib.request.Request(f"{where}/orders", body, REQUEST)  # noqa: S310 - it is ours
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - the same
        assert answer.status == 201


def saf(*arguments: object, cwd: Path, env: Mapping[str, str]) -> str:
    """The installed command, begun as a shell begins it; what it says on stderr."""
    done = subprocess.run(
        [str(BIN / "saf"), *map(str, arguments)],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.stderr


@pytest.fixture
def toml(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    with connect(mom) as store:
        create_service(store, "billing")
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


def through(app: Dsn, mom: Dsn, toml: Path, **env: str) -> None:
    """An order from the web to the handler that writes its invoice: four processes."""
    with shop(app, **env) as where:
        order(where)
    saf("forward", "--config", toml, cwd=toml.parent, env=env)
    worker = {**env, "MOM_DSN": mom.conninfo}
    saf("worker", "worker:billing", "--drain", cwd=ROOT / "examples", env=worker)
    with connect(mom) as store:
        assert fetch(store, "SELECT number, total FROM invoice") == [("A-1", 90)]


@pytest.mark.slow
def test_a_request_and_the_handler_in_another_service_are_one_trace(
    app: Dsn, mom: Dsn, toml: Path, tmp_path: Path
) -> None:
    env, file = site(tmp_path)
    through(app, mom, toml, **env)
    with connect(app) as source, connect(mom) as store:
        ((sent,),) = fetch(source, "SELECT headers FROM saf.outbox")
        ((stored,),) = fetch(store, "SELECT headers FROM saf.inbox")
    assert stored == sent
    assert sent["baggage"] == "tenant=acme"
    found = spans(file)
    by_id = {one["context"]["span_id"]: one for one in found}
    (process,) = [one for one in found if one["name"] == "process billing"]
    assert process["context"]["trace_id"] == f"0x{TRACE}"
    above, kinds = process, []
    while (above_it := by_id.get(above["parent_id"])) is not None:
        above = above_it
        kinds.append(above["kind"])
        assert above["context"]["trace_id"] == f"0x{TRACE}"
    assert kinds[-1] == "SpanKind.SERVER"
    assert above["parent_id"] == f"0x{REQUEST['traceparent'].split('-')[2]}"
    assert sent["traceparent"].split("-")[2] == process["parent_id"].removeprefix("0x")
    (chunk,) = [one for one in found if one["name"] == "send mom"]
    assert [one["context"]["trace_id"] for one in chunk["links"]] == [f"0x{TRACE}"]
    assert chunk["context"]["trace_id"] != f"0x{TRACE}"


@pytest.mark.full
@pytest.mark.slow
def test_off_nothing_is_carried_and_nothing_imported(
    app: Dsn, mom: Dsn, toml: Path, tmp_path: Path
) -> None:
    through(app, mom, toml)
    with connect(mom) as store:
        assert fetch(store, "SELECT headers FROM saf.inbox") == [
            ({"content-type": "application/json"},)
        ]
    script = (
        "import sys; from saf.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([one for one in sys.modules if one.startswith('opentelemetry')])"
    )
    with connect(app) as source:
        source.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '')")
    worker = tmp_path / "failing.py"
    worker.write_text(FAILING.format(dsn=mom.conninfo))
    for command in (["forward", "--config", str(toml)], ["worker", "failing:worker", "--drain"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *command],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_the_log_of_a_worker_says_the_trace_of_a_message_that_fails(
    mom: Dsn, toml: Path, tmp_path: Path
) -> None:
    put(mom, "x", headers=json.dumps(REQUEST))
    env, file = site(tmp_path)
    (tmp_path / "failing.py").write_text(FAILING.format(dsn=mom.conninfo))
    said = saf("worker", "failing:worker", "--drain", cwd=toml.parent, env=env)
    (line,) = [json.loads(one) for one in said.splitlines() if "dead_letter" in one]
    assert line["trace_id"] == TRACE
    (process,) = [one for one in spans(file) if one["name"] == "process billing"]
    assert process["status"]["status_code"] == "ERROR"
    assert process["attributes"]["error.type"] == "ValueError"
    assert "it is bad" not in json.dumps(process)
