"""What `make install` and `make demo` show while pip works: packaging/install.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.programs import ROOT, environment
from tests.terminals import until_the_end

PROGRAM = """
import sys
sys.path.insert(0, {packaging!r})
import install
install.SHOW_SECONDS = install.LINE_SECONDS = 0.05
sys.exit(install.main(sys.argv[1:]))
"""
LINES = (
    "Collecting pyarrow>=24 (from saf-outbox==0.1.0)",
    "  Downloading pyarrow-24.0.0-cp312-cp312-manylinux_2_28_x86_64.whl (47.6 MB)",
    "  Building wheel for pyspark (pyproject.toml): started",
    "Installing collected packages: pytz, pyspark, pyarrow",
)
PIP = """
import time
for line in {lines!r}:
    print(line)
    time.sleep(0.3)
{end}
"""
"""A package that stands in for pip, and prints some of its lines."""


def command(folder: Path, end: str = "") -> list[str]:
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(PIP.format(lines=LINES, end=end))
    return [sys.executable, "-c", PROGRAM.format(packaging=str(ROOT / "packaging")), ".[demo]"]


def run(folder: Path, end: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, end),
        env=environment(PYTHONPATH=str(folder)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_log_shows_each_step_with_the_seconds_and_the_end(tmp_path: Path) -> None:
    done = run(tmp_path)
    lines = done.stdout.splitlines()
    steps = list(dict.fromkeys(line.partition(" s  ")[2] for line in lines[:-1]))
    assert steps[0] in ("starting pip", "finding pyarrow")
    assert steps[-4:] == [
        "finding pyarrow",
        "getting pyarrow-24.0.0-cp312-cp312-manylinux_2_28_x86_64.whl (47.6 MB)",
        "building pyspark",
        "installing 0 of 3 packages",
    ]
    assert lines[-1].strip().startswith("installed in ")
    assert max(map(len, lines)) < 80
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failure_ends_with_pips_own_lines_and_code(tmp_path: Path) -> None:
    done = run(tmp_path, "raise SystemExit('ERROR: No matching distribution found')")
    assert done.returncode == 1
    assert [line.strip() for line in LINES] == [
        line.strip() for line in done.stderr.splitlines()[:-1]
    ]
    assert done.stderr.endswith("ERROR: No matching distribution found\n")
    assert "installed in" not in done.stdout


def test_a_terminal_shows_one_line_that_changes(tmp_path: Path) -> None:
    terminal, theirs = os.openpty()
    with subprocess.Popen(
        command(tmp_path), env=environment(PYTHONPATH=str(tmp_path), COLUMNS="60"), stdout=theirs
    ) as process:
        os.close(theirs)
        shown = until_the_end(terminal)
        assert process.wait(30) == 0
    *changing, last, end = shown.replace("\r\n", "\n").split("\n")
    assert changing == []
    assert "building pyspark" in last
    assert last.rpartition("\r")[2].strip().startswith("installed in ")
    assert max(len(part) for part in last.split("\r")) < 60
    assert end == ""


def planned(venv: Path, *arguments: str) -> str:
    """The commands that make would run, with this environment."""
    command = ["make", "--dry-run", "demo", f"VENV={venv}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_installs_what_it_needs_and_not_what_developers_need(tmp_path: Path) -> None:
    for arguments in ((), ("DEMO=--limit 1000",), ("DEMO=--reset",)):
        commands = planned(tmp_path / "none", *arguments)
        assert "--editable '.[demo]'" in commands
        assert "[dev]" not in commands
    assert "--editable '.[dev]'" in planned(tmp_path / "none", "DEMO=--to redis")


def test_the_demo_installs_nothing_where_it_or_the_developers_environment_is(
    tmp_path: Path,
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    for stamp in (".demo", ".installed"):
        (tmp_path / stamp).touch()
        assert "packaging" not in planned(tmp_path)
    (tmp_path / ".installed").unlink()
    assert "--editable '.[dev]'" in planned(tmp_path, "DEMO=--to nats")
