"""A destination whose client raises for each message: the run says so, ends, and buries nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from saf.database import Dsn
from tests.destinations import count
from tests.programs import ROOT, environment, last_json, saf, send
from tests.waits import until

KIND = """
import os
import time
from typing import Literal
from uuid import UUID

from saf.destinations.settings import DestinationSettings


class Paper(DestinationSettings):
    kind: Literal["paper"] = "paper"

    def open(self, name, *, keep=False):
        return Printer()

    def identity(self, name):
        return UUID(int=1)


class Printer:
    def identity(self):
        return UUID(int=1)

    def connect(self):
        pass

    def store(self, chunk, *, exactly_once):
        with open(os.environ["ATTEMPTS"], "a") as attempts:
            attempts.write(f"{chunk.rows.num_rows}\\n")
        time.sleep(0.1)
        raise TypeError("expected bytes, got Buffer")

    def close(self):
        pass
"""


@pytest.fixture
def package(tmp_path: Path, app: Dsn) -> Path:
    (tmp_path / "paper_outbox.py").write_text(KIND)
    info = tmp_path / "paper_outbox-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper-outbox\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[saf.destinations]\npaper = paper_outbox:Paper\n")
    (tmp_path / "saf.toml").write_text(
        f'[brokers.app]\ndsn = "{app.conninfo}"\n[destinations.paper]\nkind = "paper"\n'
        '[forwarder]\ndefault_destination = "paper"\nchunk_rows = 10\n'
    )
    return tmp_path


def variables(package: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{package}:{ROOT}", "ATTEMPTS": str(package / "attempts")}


def test_a_run_ends_says_why_and_makes_no_dead_letters(app: Dsn, package: Path) -> None:
    send(app, 200)
    done = saf("forward", "--json", env=variables(package), cwd=package)
    run = last_json(done.stdout)
    assert done.returncode == run["exit_code"] == 75
    assert "its client raised TypeError: expected bytes, got Buffer" in run["problems"][0]["error"]
    assert run["dead"] == count(app, "dead_letter") == 0
    assert len((package / "attempts").read_text().split()) <= 3, "not once a message"


@pytest.mark.slow
def test_sigterm_ends_a_loop_whose_client_raises(app: Dsn, package: Path) -> None:
    send(app, 200)
    process = subprocess.Popen(
        [sys.executable, "-m", "saf", "forward", "--loop", "--json"],
        cwd=package,
        env=environment(**variables(package)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until((package / "attempts").is_file)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - began < 15
    assert "Traceback" not in out + err
    assert count(app, "dead_letter") == 0
