"""A command whose standard streams are closed, or full, does its work and says what it can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from saf.database import Dsn
from tests.pipeline import bodies, connect, send
from tests.programs import configuration, environment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "ends_with"),
    [
        ("2>&-", (0, "")),
        (">&-", (0, "")),
        ("<&- >&- 2>&-", (0, "")),
        ("> /dev/full", (1, "the output cannot be written: No space left on device")),
    ],
)
def test_a_run_forwards_whatever_its_standard_streams_are(
    app: Dsn, mom: Dsn, tmp_path: Path, redirection: str, ends_with: tuple[int, str]
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    with connect(app) as connection:
        send(connection, "one")
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m saf forward --config {config} {redirection}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    code, said = ends_with
    assert bodies(mom) == ["one"]
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert said in done.stderr
    assert "Exception ignored" not in done.stderr
