"""docs/first-hour.md leads from a clone to an order that was sent, received, failed and done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from saf_demo.servers import free_port
from tests.needed import needed
from tests.pages import blocks, clone, page
from tests.programs import run

pytestmark = pytest.mark.full

PAGE = page("first-hour.md")


@pytest.mark.slow
def test_every_command_of_the_first_hour_works_in_an_empty_environment(short_path: Path) -> None:
    needed("curl", "curl")
    script = "".join(blocks(PAGE, "shell")).replace("8000", str(free_port()))
    here = clone(short_path / "saf", Path(sys.prefix))
    done = run(
        ["bash", "-euo", "pipefail", "-c", f"trap 'kill $(jobs -p) 2>&- || true' EXIT\n{script}"],
        env={"HOME": str(short_path), "VIRTUAL_ENV_DISABLE_PROMPT": "1"},
        cwd=here,
        timeout=280,
        tracebacks=True,  # the worker logs that of the handler that fails
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert said.count("pending") >= 2
    assert "already exists" in said  # the order that was posted twice
    assert "(mom: 2)" in said
    assert "pays_us" in said  # why A-2 was put back
    tried = "1 lane to be tried by the next run (A-2)\n"
    assert tried in said
    after = said.rpartition(tried)[2]
    assert [line for line in after.splitlines() if "A-" in line] == [
        " A-1    |    90",
        " A-2    |    -5",
    ]
