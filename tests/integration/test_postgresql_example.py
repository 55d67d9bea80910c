"""examples/postgresql.py, started as docs/first-hour.md and its own docstring do."""

from __future__ import annotations

import ast
import shlex
import sys
from pathlib import Path

import pytest

from tests.pages import blocks, page
from tests.programs import ROOT, run

EXAMPLE = ROOT / "examples" / "postgresql.py"
OF_PAGE = next(
    block for block in blocks(page("first-hour.md"), "shell") if "postgresql.py" in block
)
OF_DOCSTRING = (ast.get_docstring(ast.parse(EXAMPLE.read_text())) or "").split("\n\n")[1]

ASK = 'psql "$SHOP_DSN" --no-align --tuples-only --command "SELECT \'answer\'"\n'
STOP = "kill $! && wait\n"


@pytest.mark.slow
@pytest.mark.parametrize("start", [OF_PAGE, OF_DOCSTRING], ids=["page", "docstring"])
def test_a_second_start_is_ready_when_it_says_so(short_path: Path, start: str) -> None:
    python = f"{shlex.quote(sys.executable)} {shlex.quote(str(EXAMPLE))}"
    for command in ("python examples/postgresql.py", "python postgresql.py"):
        start = start.replace(command, python)
    trap = "trap 'kill $(jobs -p) 2>&- || true' EXIT\n"
    script = trap + 2 * f"{start}\n{ASK}{STOP}"
    done = run(["bash", "-eu", "-c", script], cwd=short_path, env={"HOME": str(short_path)})
    assert (done.returncode, done.stdout) == (0, "answer\nanswer\n"), done.stderr
