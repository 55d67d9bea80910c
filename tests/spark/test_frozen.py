"""A part of Spark that is stopped, and not dead: its shards go to others, and it ends."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from saf.database import Dsn
from tests import on_spark
from tests.pipeline import bodies, connect
from tests.programs import BIN, configuration, environment, last_json, received, saf, send
from tests.tiers import sized
from tests.waits import until

pytestmark = pytest.mark.full

MESSAGES = 10_000
LEASE_SECONDS = 3.0
SLOWER = """
CREATE FUNCTION slower() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN PERFORM pg_sleep(0.1); RETURN NULL; END $$;
CREATE TRIGGER slower AFTER INSERT ON saf.inbox FOR EACH STATEMENT EXECUTE FUNCTION slower()
"""
"""Each chunk takes a tenth of a second."""


def workers(forwarder: psutil.Process) -> list[psutil.Process]:
    """What Spark's daemon has forked for the tasks."""
    return [
        one
        for one in forwarder.children(recursive=True)
        if "pyspark.daemon" in command(one) and "pyspark.daemon" in command(one.parent())
    ]


def command(process: psutil.Process | None) -> list[str]:
    """Return a process's command; none if it has ended meanwhile."""
    try:
        return [] if process is None else process.cmdline()
    except psutil.NoSuchProcess:  # also of a zombie
        return []


def jvm(forwarder: psutil.Process) -> list[psutil.Process]:
    return [one for one in forwarder.children(recursive=True) if one.name() == "java"]


@contextmanager
def forwarding(config: Path, output: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A forwarder in a process group of its own, which says all it says in a file."""
    with (
        output.open("w") as file,  # no pipe: what is stopped would hold it open
        subprocess.Popen(
            [BIN / "saf", "forward", "--config", config, "--json", *options],
            env=environment(PYTHONFAULTHANDLER="1"),
            stdout=file,
            stderr=file,
            start_new_session=True,
        ) as process,
    ):
        yield process


def code_at_the_end(program: subprocess.Popen[bytes], output: Path) -> int:
    """Its exit code; if it does not end, the error says where each of its threads is."""
    try:
        return program.wait(60)
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGABRT)
        program.wait(20)
        raise AssertionError(output.read_text()) from None


@pytest.mark.parametrize("part", [jvm, workers][: sized(1, 2)])
def test_what_is_stopped_loses_its_shards_to_the_next_run(
    app: Dsn,
    mom: Dsn,
    tmp_path: Path,
    part: Callable[[psutil.Process], list[psutil.Process]],
) -> None:
    sent = send(app, MESSAGES)
    with connect(mom) as connection:  # so that much is left when the part is stopped
        connection.execute(SLOWER)
    options = {"chunk_rows": 100, "lease_seconds": LEASE_SECONDS, "master": "local[2]"}
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}, **options)
    output = tmp_path / "output"
    with forwarding(config, output) as forwarder:
        while not bodies(mom):
            assert forwarder.poll() is None
            time.sleep(0.01)
        frozen = part(psutil.Process(forwarder.pid))
        assert frozen
        for one in frozen:
            one.send_signal(signal.SIGSTOP)
        assert len(bodies(mom)) < MESSAGES
        began = time.monotonic()
        try:
            # workers whose JVM is stopped go on, to the end of what they have in hand
            next_run = saf("forward", "--config", config, "--json")
            while last_json(next_run.stdout)["idle"]:
                assert time.monotonic() - began < 90
                next_run = saf("forward", "--config", config, "--json")
            assert code_at_the_end(forwarder, output) == 75
        finally:
            for one in frozen:
                if one.is_running():
                    one.send_signal(signal.SIGCONT)
            forwarder.kill()
    said = output.read_text()
    assert ("no task was heard of" if part is jvm else "was not heard of for 3 s") in said
    assert "Traceback" not in said
    with connect(mom) as connection:
        connection.execute("DROP TRIGGER slower ON saf.inbox")
    on_spark.forward(config)
    arrived = received(mom)
    assert sorted(body for _, body in arrived) == sorted(sent)
    for key in {key for key, _ in arrived}:
        numbers = [int(body.split()[-1]) for at, body in arrived if at == key]
        assert numbers == sorted(numbers)


@pytest.mark.full
def test_a_loop_whose_spark_hangs_between_two_cycles_ends(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    options = {"lease_seconds": LEASE_SECONDS, "master": "local[2]", "use_spark": "always"}
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}, **options)
    output = tmp_path / "output"
    send(app, 10)
    with forwarding(config, output, "--loop") as forwarder:
        until(lambda: output.read_text().strip())
        frozen = jvm(psutil.Process(forwarder.pid))
        for one in frozen:
            one.suspend()
        send(app, 10)
        try:
            assert code_at_the_end(forwarder, output) == 75
        finally:
            forwarder.kill()
        _, alive = psutil.wait_procs(frozen, timeout=60)
        assert alive == []
    said = output.read_text()
    assert "Spark is unavailable: it has not answered for 6 s" in said
    assert "Traceback" not in said
    assert len(bodies(mom)) == 10
    on_spark.forward(config)
    assert len(bodies(mom)) == 20


def test_a_run_says_what_hangs_and_forwards_everything_else(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], tmp_path: Path
) -> None:
    stuck, other = new_broker("stuck"), new_broker("other")
    for source in (app, stuck):
        send(source, 10)
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('late', 'other')")
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('late', '')")
    sources, stores = {"app": app, "stuck": stuck}, {"mom": mom, "other": other}
    config = configuration(tmp_path / "saf.toml", sources, stores, master="local[2]")
    config.write_text(config.read_text() + "[bounds]\nlock_seconds = 0.5\n")
    with connect(stuck) as one, connect(other) as two, one.transaction(), two.transaction():
        one.execute("LOCK TABLE saf.cursor IN ACCESS EXCLUSIVE MODE")
        two.execute("LOCK TABLE saf.inbox IN ACCESS EXCLUSIVE MODE")
        done = saf("forward", "--config", config)
    assert done.returncode == 75
    assert len(bodies(mom)) == 10
    assert "broker 'stuck' does not answer" in done.stderr
    assert "destination 'other' does not answer" in done.stderr
    assert done.stderr.count("`saf doctor` shows who holds the lock") == 2
