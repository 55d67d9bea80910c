"""Masters that forwarding cannot use, or cannot reach, are named at once and in one sentence."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark
import pytest

from saf.database import Dsn
from saf.errors import Unavailable
from saf.spark import java, master
from tests.programs import ROOT, configuration, run, saf, send

pytestmark = pytest.mark.full

USAGE, TRY_AGAIN = 2, 75
CONNECT = "sc://127.0.0.1:1/;x-canary=canary-31"


@pytest.fixture
def folder(tmp_path: Path, app: Dsn, mom: Dsn) -> Path:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}, master="local[1]")
    return tmp_path


@contextmanager
def silent() -> Iterator[int]:
    """The port of somebody who accepts no connection, and refuses none."""
    with ExitStack() as stack:
        place = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0)).getsockname()
        try:
            while True:  # until the queue is full
                stack.enter_context(socket.create_connection(place, timeout=0.2))
        except TimeoutError:
            yield int(place[1])


def sentence(stderr: str) -> str:
    (line,) = stderr.splitlines()
    assert line.startswith("saf: ")
    assert "canary" not in line
    return line


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        ([], {"SPARK_REMOTE": CONNECT}),
        (["--master", CONNECT], {}),
        (["--remote", CONNECT], {}),
        ([], {"SAF_FORWARDER__MASTER": CONNECT}),
        ([], {"SAF_FORWARDER__SPARK": f'{{"spark.remote": "{CONNECT}"}}'}),
    ],
)
def test_all_that_asks_for_a_server_of_spark_connect_gets_it(
    folder: Path, app: Dsn, arguments: list[str], env: dict[str, str]
) -> None:
    send(app, 1)
    done = saf("forward", *arguments, cwd=folder, env=env)
    assert done.returncode == TRY_AGAIN, done.stderr
    assert "the server of Spark Connect sc://127.0.0.1:1 is unavailable" in sentence(done.stderr)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"SPARK_API_MODE": "connect"}, "SPARK_API_MODE"),
        ({"SAF_FORWARDER__SPARK": '{"spark.api.mode": "connect"}'}, "spark.api.mode"),
    ],
)
def test_spark_connect_without_an_address_is_refused_even_if_there_is_nothing_to_do(
    folder: Path, env: dict[str, str], named: str
) -> None:
    done = saf("forward", cwd=folder, env=env)
    assert done.returncode == USAGE, done.stderr
    said = sentence(done.stderr)
    assert named in said
    assert "use --remote sc://host:15002" in said


def test_spark_submit_with_remote_is_understood(folder: Path, app: Dsn) -> None:
    send(app, 1)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    env = {**java.find().environment(), "PYSPARK_PYTHON": sys.executable}
    done = run([submit, "--remote", CONNECT, ROOT / "jobs" / "forward.py"], env=env, cwd=folder)
    assert done.returncode != 0
    assert (
        "the server of Spark Connect sc://127.0.0.1:1 is unavailable" in done.stdout + done.stderr
    )


def test_a_master_that_nobody_answers_at_is_named_soon_and_in_one_line(
    folder: Path, app: Dsn
) -> None:
    send(app, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    started = time.monotonic()
    done = saf("forward", "--master", f"spark://{place}", cwd=folder)
    assert time.monotonic() - started < 20
    assert done.returncode == TRY_AGAIN
    said = sentence(done.stderr)
    assert f"Spark's master spark://{place} is unavailable" in said
    assert "Connection refused" in said


def test_a_master_that_does_not_answer_is_not_waited_for_longer_than_one_that_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(master, "PATIENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        master.reach(f"spark://127.0.0.1:1,127.0.0.1:{port}")  # one of two is enough
    with silent() as port:
        for places in (f"127.0.0.1:{port}", f"127.0.0.1:1,127.0.0.1:{port}"):
            with pytest.raises(Unavailable, match="Spark's master"):
                master.reach(f"spark://{places}")
    master.reach("local[*]")
    master.reach("yarn")
