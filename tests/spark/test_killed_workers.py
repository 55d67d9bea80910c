"""A Python worker of Spark's that is killed in mid-task costs another attempt, and no message."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from saf.database import Dsn
from tests.forwarders import configuration, fill, start
from tests.pipeline import bodies, connect
from tests.spark_workers import workers

WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'saf deliver'
  AND wait_event_type = 'Lock'
"""
RETRYING = "local[2]"
NOT_RETRYING = "local[2,1]"


@contextmanager
def held_up(mom: Dsn) -> Iterator[None]:
    """No message can be stored, so that a task stays in the middle."""
    with mom.connect(role="test") as connection:
        connection.execute("LOCK TABLE saf.inbox IN EXCLUSIVE MODE")
        yield


def kill_in_mid_task(process: subprocess.Popen[str], mom: Dsn) -> None:
    until = time.monotonic() + 90
    with connect(mom) as connection:
        while connection.execute(WAITING).fetchone() == (0,):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until, "no task came so far"
            time.sleep(0.05)
    victims = workers(process.pid)
    assert victims
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("master", [RETRYING, NOT_RETRYING])
def test_a_run_forwards_everything_all_the_same(
    app: Dsn, mom: Dsn, tmp_path: Path, master: str
) -> None:
    fill(app, 1000)
    config = configuration(tmp_path, app, mom)
    process = start(config, "--master", master)
    try:
        with held_up(mom):
            kill_in_mid_task(process, mom)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["problems"] == []
    assert sorted(map(int, bodies(mom))) == list(range(1, 1001))


@pytest.mark.full
def test_a_loop_notes_the_problem_and_goes_on(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    fill(app, 1000)
    config = configuration(tmp_path, app, mom, interval_seconds=0.2)
    process = start(config, "--loop", "--master", NOT_RETRYING)
    assert process.stdout is not None
    try:
        with held_up(mom):
            kill_in_mid_task(process, mom)
        first = json.loads(process.stdout.readline())
        (problem,) = first["problems"]
        assert (problem["broker"], problem["kind"]) == ("app", "JobFailed")
        assert "the Spark job failed: " in problem["error"]
        assert "Nothing is lost" in problem["error"]
        assert first["exit_code"] == 75
        then = json.loads(process.stdout.readline())
        assert (then["forwarded"] + then["dropped"], then["problems"]) == (1000, [])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        _, err = process.communicate()
    assert "\tat " not in err, "no stack of the JVM"
    assert "Traceback" not in err
    assert sorted(map(int, bodies(mom))) == list(range(1, 1001))


@pytest.mark.full
def test_a_master_that_spark_does_not_know_is_one_sentence(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    fill(app, 1)
    process = start(configuration(tmp_path, app, mom), "--master", "nonsense")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in err + out) == (2, False)
    (said,) = [line for line in err.splitlines() if line.startswith("saf: ")]
    assert "forwarder.master = 'nonsense'" in said
