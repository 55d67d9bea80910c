"""Each process shows that it lives: at its start, while it is idle, and while one waits for it."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from saf.broker.services import create_service
from saf.cli import alive
from saf.database import Dsn
from saf.routing import routers
from saf.routing.matching import PYTHON
from tests.pipeline import connect
from tests.programs import ROOT, configuration, environment, saf, send
from tests.receivers import put
from tests.silence import mute
from tests.terminals import ROWS, until_the_end

SECRET = "verysecret"

SHORT = """
import sys
from saf.cli import alive, main
from saf.receiving import loop
alive.IDLE_SECONDS, alive.TICK_SECONDS = (1.0, 2.0, 3600.0), 0.1
alive.SHOW_SECONDS = 0.3
alive.LOG_SECONDS = 0.5
loop.WAIT_SECONDS = 0.2
main(sys.argv[1:])
"""
"""The command saf, whose minutes are seconds."""

CONSUMERS = """
import os
import saf

worker = saf.Worker(os.environ["INBOX"], "billing")

@worker.handler("OrderPlaced")
def placed(message, connection): ...

@worker.handler
def other(message, connection): ...

class Totals(saf.Processor):
    @saf.handles("OrderPaid")
    def paid(self, message, connection): ...

processors = saf.Processors(os.environ["INBOX"], "billing", Totals)
"""
ENDPOINT = """
[endpoints.billing]
url = "http://127.0.0.1:1/orders?token=verysecret"
"""

COMMANDS = {
    "worker": ("worker", "consumers:worker"),
    "processors": ("worker", "consumers:processors"),
    "router": ("router", "serve", "departures", "--broker", "mom"),
    "forward": ("forward", "--loop", "--interval", "0.1", "--json"),
    "dispatch": ("dispatch", "--loop"),
    "ui": ("ui", "--port", "0"),
    "metrics": ("metrics", "--listen", "127.0.0.1:0"),
}
SAYS = {
    "worker": (
        r"saf worker consumers:worker: process \d+ receives for billing at database \S+ at \S+, "
        "handles OrderPlaced, all other types"
    ),
    "processors": r"saf worker consumers:processors: process \d+ receives .*, handles OrderPaid",
    "router": r"saf router serve departures: process \d+ receives for departures at database \S+"
    ".*, handles all types",
    "forward": r"saf forward --loop: process \d+ forwards from shop to mom",
    "dispatch": r"saf dispatch --loop: process \d+ sends to billing \(http://127\.0\.0\.1:1/orders",
    "ui": r"saf ui: process \d+ shows shop",
    "metrics": r"saf metrics: process \d+ serves metrics at 127\.0\.0\.1:0",
}
ENDS = "; log level info; Ctrl-C or SIGTERM stops it"
LACKS = {
    **dict.fromkeys(("worker", "processors", "router", "forward"), "no message"),
    "dispatch": "nothing sent (see `saf endpoint list`)",
    "ui": "no request",
    "metrics": "no scrape",
}


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """A folder with a saf.toml, and a module of consumers."""
    with connect(mom) as store:
        create_service(store, "billing")
        create_service(store, "departures")
    file = configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    file.write_text(file.read_text() + ENDPOINT)
    (tmp_path / "consumers.py").write_text(CONSUMERS)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", SHORT, *arguments]


@contextmanager
def started(
    folder: Path, mom: Dsn, arguments: Sequence[str], **streams: int
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment(INBOX=mom.conninfo, PYTHONPATH=str(ROOT)),
        text=True,
        **streams,  # type: ignore[call-overload]
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def events(lines: Sequence[str], name: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [one for one in found if one["event"] == name]


def router_that_forwards(mom: Dsn) -> None:
    with connect(mom) as store:
        routers.add_router(
            store, "departures", PYTHON, "tests.classifiers:by_origin", mode="forward"
        )


def read(process: subprocess.Popen[str], enough: Callable[[list[str]], bool]) -> list[str]:
    """The lines of a process's standard error until there are enough; it is then told to stop."""
    assert process.stderr is not None
    lines: list[str] = []
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        for line in process.stderr:
            lines.append(line)
            if enough(lines):
                break
        process.send_signal(signal.SIGTERM)
        lines += process.stderr.readlines()
    finally:
        watchdog.cancel()
    return lines


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_log_has_a_line_at_the_start_and_lines_while_it_is_idle(
    folder: Path, mom: Dsn, kind: str
) -> None:
    if kind == "router":
        router_that_forwards(mom)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(folder, mom, COMMANDS[kind], **streams) as process:
        lines = read(process, lambda found: len(events(found, "idle")) == 2)
        assert process.stdout is not None
        out = process.stdout.read()
        assert process.wait(30) == 0, lines
    (start,) = events(lines, "started")
    assert re.fullmatch(SAYS[kind] + ".*" + re.escape(ENDS), str(start["detail"]))
    assert f"process {process.pid} " in str(start["detail"])
    first, second = events(lines, "idle")
    assert re.search(rf": idle, {re.escape(LACKS[kind])} for \d+ s$", str(first["detail"]))
    assert 1 <= int(str(first["seconds"])) <= int(str(second["seconds"])) >= 2
    assert "log level" not in out
    assert ": idle" not in out
    assert SECRET not in "".join(lines) + out


def test_a_message_begins_the_idle_time_again(folder: Path, mom: Dsn) -> None:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    sent: list[float] = []

    def enough(lines: list[str]) -> bool:
        idle = len(events(lines, "idle"))
        if idle and not sent:
            sent.append(time.monotonic())
            put(mom, "1", message_type="OrderPlaced")
        elif idle == 2:
            sent.append(time.monotonic())
        return idle == 2

    with started(folder, mom, COMMANDS["worker"], **streams) as process:
        lines = read(process, enough)
    _, second = (int(str(one["seconds"])) for one in events(lines, "idle"))
    began, ended = sent
    assert second < ended - began + 0.6, "it counts from the message on"


def test_a_loop_whose_source_does_not_answer_is_not_idle(folder: Path, mom: Dsn) -> None:
    file = folder / "saf.toml"
    silent = 'dsn = "host=127.0.0.1 port=1 dbname=nothing"'
    file.write_text(re.sub('dsn = ".*"', silent, file.read_text(), count=1))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(folder, mom, COMMANDS["forward"], **streams) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["problems"]
        time.sleep(3)  # three times as long as until a line of an idle loop
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    lines = err.splitlines()
    assert events(lines, "started")
    assert events(lines, "idle") == []


def test_several_processes_each_have_their_line(folder: Path, mom: Dsn) -> None:
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    arguments = [*COMMANDS["worker"], "--processes", "2"]
    with started(folder, mom, arguments, **streams) as process:
        lines = read(process, lambda found: len(events(found, "started")) == 3)
    details = [str(one["detail"]) for one in events(lines, "started")]
    assert re.search(r"process \d+ keeps 2 processes running", details[0])
    assert len({re.findall(r"process \d+", one)[0] for one in details}) == 3


# On a terminal


def terminal(columns: int = 80) -> tuple[int, int]:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    return ours, theirs


CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_a_terminal_has_sentences_within_its_80_columns(folder: Path, mom: Dsn) -> None:
    ours, theirs = terminal()
    streams = {"stdout": subprocess.PIPE, "stderr": theirs}
    with started(folder, mom, COMMANDS["worker"], **streams) as process:
        os.close(theirs)
        shown = ""
        while shown.count("idle") < 2:
            shown += os.read(ours, 65536).decode()
        process.send_signal(signal.SIGTERM)
        shown += until_the_end(ours)
        out, _ = process.communicate(timeout=60)
    assert out == "handled 0 messages\n"
    lines = shown.splitlines()
    assert all(len(line) <= 80 for line in lines)
    text = re.sub(r"\s+", " ", shown).strip()
    starts, *idle = re.split(r" (?=saf worker)", text)
    assert re.fullmatch(SAYS["worker"] + re.escape(ENDS), starts)
    for line in idle:
        assert re.fullmatch(r"saf worker consumers:worker: idle, no message for \d+ s", line)


def on_a_terminal(folder: Path, mom: Dsn, *arguments: str) -> tuple[str, str]:
    """What a command writes to a terminal, in all its moments; and its standard output."""
    ours, theirs = terminal()
    streams = {"stdout": subprocess.PIPE, "stderr": theirs}
    with started(folder, mom, arguments, **streams) as process:
        os.close(theirs)
        shown = until_the_end(ours)
        out, _ = process.communicate(timeout=30)
    return CONTROL.sub("", shown), out


@pytest.fixture
def slow(folder: Path) -> Iterator[Path]:
    """The folder, with a second source that takes two seconds not to answer."""
    file = folder / "saf.toml"
    with mute() as silent:
        text = f'[brokers.silent]\ndsn = "{silent.conninfo} connect_timeout=2"\n'
        file.write_text(text + file.read_text())
        yield folder


@pytest.mark.parametrize("arguments", [("status", "--json"), ("reconcile", "--json")])
def test_a_command_that_takes_long_shows_which_brokers_it_waits_for(
    slow: Path, mom: Dsn, arguments: Sequence[str]
) -> None:
    shown, out = on_a_terminal(slow, mom, *arguments)
    assert re.search(r"[01] of 2 brokers; waiting for silent", shown)
    assert [one["broker"] for one in json.loads(out)["errors"]] == ["silent"]


def test_a_log_shows_it_too_and_less_often(slow: Path) -> None:
    done = subprocess.run(
        command("status", "--json"),
        cwd=slow,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found = [str(one["detail"]) for one in events(done.stderr.splitlines(), "progress")]
    assert "1 of 2 brokers; waiting for silent" in found
    assert len(done.stdout.splitlines()) == 1


def test_a_quick_command_shows_nothing_more(folder: Path, mom: Dsn) -> None:
    assert alive.SHOW_SECONDS == 2
    shown, _ = on_a_terminal(folder, mom, "router", "list", "--broker", "shop")
    assert shown == ""


def test_a_run_shows_how_many_sources_it_has_visited(slow: Path, app: Dsn, mom: Dsn) -> None:
    send(app, 3)
    shown, out = on_a_terminal(slow, mom, "forward", "--json")
    assert "visiting sources" in shown
    assert "1/2" in shown
    assert json.loads(out)["forwarded"] == 3


def test_a_run_logs_how_many_sources_it_has_visited(slow: Path, app: Dsn) -> None:
    send(app, 3)
    done = saf("forward", "--json", "--progress-every", "0.1", cwd=slow)
    found = [(one["sources"], one["total"]) for one in events(done.stderr.splitlines(), "visiting")]
    assert found[-1] == (2, 2)


def test_a_drain_shows_how_many_messages_it_has_handled(folder: Path, mom: Dsn) -> None:
    (folder / "slow.py").write_text(
        CONSUMERS + "\nimport time\nworker = saf.Worker(os.environ['INBOX'], 'billing')\n"
        "worker.handler(lambda message, connection: time.sleep(1))\n"
    )
    put(mom, "1", "2", key="k")
    shown, out = on_a_terminal(folder, mom, "worker", "slow:worker", "--drain")
    assert "saf worker slow:worker: handled 0 messages so far" in shown
    assert out == "handled 2 messages\n"


def test_a_migration_shows_what_it_is_at(new_database: Callable[[str], Dsn], folder: Path) -> None:
    empty = new_database("empty")
    shown, out = on_a_terminal(folder, empty, "migrate", "--dsn", empty.conninfo)
    assert f"migrating {empty.database}" in shown
    assert out.startswith(f"{empty.database}: saf schema ")


def test_the_garbage_collector_leaves_out_what_a_process_has_loaded_at_its_start() -> None:
    gc.unfreeze()
    try:
        alive.Alive("saf worker", "reads")
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
