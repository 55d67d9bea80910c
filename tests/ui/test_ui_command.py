"""``saf ui`` and ``saf demo --ui`` as processes: they start, say where, and end when told."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from saf.broker.embedded import EmbeddedServer
from saf.database import Dsn
from tests import programs
from tests.dashboard import OPERATE, Visitor, settings
from tests.programs import BIN, environment
from tests.silence import mute
from tests.ui.dead_letters import letters, many, second_chunk_held
from tests.waits import until

NOWHERE = Dsn("host=/nonexistent dbname=nowhere")
ENDS_SECONDS = 60
"""Much longer than it takes: an open page would hold it up for longer still."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A saf.toml whose brokers are down: a dashboard starts all the same."""
    file = tmp_path / "saf.toml"
    settings(file, {"shop": NOWHERE}, {"mom": NOWHERE})
    return file


@contextmanager
def started(*arguments: str | Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process, and the address that it names."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [BIN / "saf", *arguments], stdout=out, stderr=out, env=environment()
        )
    try:
        address = re.compile(r"the dashboard is at (http://\S+/)")
        until(lambda: address.search(log.read_text()) or process.poll() is not None)
        found = address.search(log.read_text())
        assert found is not None, log.read_text()
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def logged_in(url: str, token: str = OPERATE) -> Visitor:
    visitor = Visitor(base_url=url, timeout=60)

    def login() -> bool:
        with suppress(httpx.TransportError):
            return visitor.post("/login", data={"token": token, "name": "ann"}).status_code == 303
        return False

    until(login)
    return visitor


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_although_pages_are_open(
    config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with started("ui", "--port", "0", "--config", config, log=log) as (process, url):
        open_page, came_to_its_end = threading.Event(), threading.Event()

        def look() -> None:
            with closing(logged_in(url)) as visitor, visitor.stream("GET", "/live") as stream:
                for _ in stream.iter_lines():
                    open_page.set()
            came_to_its_end.set()

        page = threading.Thread(target=look)
        page.start()
        until(open_page.is_set)
        process.send_signal(number)
        assert process.wait(ENDS_SECONDS) == 0
        page.join()
        # as a whole, so the browser does not take it for a failure
        assert came_to_its_end.is_set()
    lines = log.read_text().splitlines()
    said = [line for line in lines if not line.startswith("{")]
    assert len(said) == 2, "it has said where it is, and that nobody may change"
    logged = [json.loads(line)["event"] for line in lines if line.startswith("{")]
    assert [event for event in logged if event != "not_answered"] == ["started", "login"]


@pytest.mark.full
def test_a_signal_ends_it_although_a_broker_hangs(tmp_path: Path) -> None:
    file = tmp_path / "saf.toml"
    with mute() as gone:
        hangs = Dsn(f"{gone.conninfo} connect_timeout=600")
        settings(file, {"shop": hangs}, {"mom": hangs})
        log = tmp_path / "log"
        with started("ui", "--port", "0", "--config", file, log=log) as (process, url):
            with closing(logged_in(url)) as visitor:
                assert "has not answered" in visitor.get("/dead").text
            process.send_signal(signal.SIGTERM)
            assert process.wait(ENDS_SECONDS) == 0


def test_a_signal_ends_it_although_a_chunk_of_a_job_hangs(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    many(app)
    file, log = tmp_path / "saf.toml", tmp_path / "log"
    # for longer than the test waits: what hangs does not end by itself
    settings(file, {"shop": app}, {"mom": mom}, f"[bounds]\nlock_seconds = {2 * ENDS_SECONDS}")
    arguments = ("ui", "--write", "--port", "0", "--config", file)
    with started(*arguments, log=log) as (process, url), closing(logged_in(url)) as visitor:
        form = visitor.counted("discard", {"matching": "yes"})
        with second_chunk_held(app):
            job = visitor.form("/dead", "/dead/decide", form).url.path
            until(lambda: "1,000 messages of 2,500" in visitor.get(job).text)
            process.send_signal(signal.SIGTERM)
            assert process.wait(ENDS_SECONDS) == 0
    assert letters(app) == 1500, "the chunk that hung was rolled back"


def test_a_port_that_is_taken_is_said_in_one_sentence(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = programs.saf("ui", "--port", str(port), "--config", config)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert f"127.0.0.1:{port}: Address already in use; name another --port" in said


def test_a_wrong_setting_is_named_and_nothing_is_served(config: Path) -> None:
    config.write_text(config.read_text() + 'redact_paths = ["$.["]\n')
    done = programs.saf("ui", "--port", "0", "--config", config)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert "$.[" in said
    config.write_text(config.read_text().replace(OPERATE, "short"))
    done = programs.saf("ui", "--port", "0", "--config", config)
    assert done.returncode == 2
    assert "ui.operate_token: a token has at least 16 characters" in done.stderr
    assert "short" not in done.stderr


@pytest.mark.full
@pytest.mark.slow
def test_a_demo_shows_what_flows_and_stays_until_it_is_told_to_end(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="saf-demo-"))  # not tmp_path: too long for a socket
    log = tmp_path / "log"
    try:
        more = ("--ui", "--ui-port", "0", "--data", folder, "--limit", "500")
        with started("demo", *more, log=log) as (process, url):
            until(lambda: "log in with the token" in log.read_text())
            token = re.search(r"log in with the token (\S+)", log.read_text())
            assert token is not None
            with closing(logged_in(url, token[1])) as visitor:
                until(lambda: "stays until Ctrl-C" in log.read_text(), 240)
                assert ">forwarded<" in visitor.get("/outbox").text
            process.send_signal(signal.SIGINT)
            assert process.wait(ENDS_SECONDS) == 0
        assert "Traceback" not in log.read_text()
    finally:
        with EmbeddedServer(folder / "postgres"):
            pass
        shutil.rmtree(folder)
