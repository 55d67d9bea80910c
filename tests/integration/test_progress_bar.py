"""The progress bar is out of the way of what else is printed, on a real terminal; and the log's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from saf.database import Dsn
from tests.programs import configuration, environment, last_json, saf, send
from tests.terminals import until_the_end

PROGRAM = """
from saf.cli.console import log_to_stderr
from saf.cli.console import echo, plain_console
from saf.cli.forward import ProgressBar
from saf.forwarding.summary import Progress
from saf.telemetry.logger import Log

log_to_stderr()
bar = ProgressBar(plain_console(stderr=True))
show = bar.watching
if show:
    show(Progress(1, 10))
Log("saf.forward").warning("job_failed", error="it says why")
bar.clear()
echo("a cycle has ended")
echo("saf: a problem", err=True)
if show:
    show(Progress(10, 10))
bar.clear()
"""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_what_is_logged_and_printed_is_never_glued_to_the_bar_and_stdout_stays_stdout() -> None:
    terminal, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment(TERM="xterm", COLUMNS="100"),
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    text = until_the_end(terminal)
    out, _ = process.communicate(timeout=60)
    assert out == b"a cycle has ended\n"
    assert "forwarding" in text
    assert "10/10" in text
    # what is before a carriage return has been written over
    lines = [CONTROL.sub("", line).rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
    (logged,) = [line for line in lines if "job_failed" in line]
    (problem,) = [line for line in lines if "saf: a problem" in line]
    assert "forwarding" not in logged
    assert problem == "saf: a problem"


@pytest.mark.full
def test_where_there_is_no_terminal_progress_is_logged_as_often_as_it_was_asked_for(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom}, chunk_rows=1)
    send(app, 1000)
    done = saf("forward", "--json", "--progress-every", "0.1", "--config", config)
    assert last_json(done.stdout)["forwarded"] == 1000
    events = [json.loads(line) for line in done.stderr.splitlines()]
    said = [(one["done"], one["total"]) for one in events if one["event"] == "progress"]
    assert said
    assert said == sorted(said)
    assert all(done <= total == 1000 for done, total in said)
    assert "progress" not in saf("forward", "--json", "--config", config).stderr
