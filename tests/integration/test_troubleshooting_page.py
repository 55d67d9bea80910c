"""docs/troubleshooting.md quotes what saf says, and its commands work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from saf.database import Dsn
from tests.pages import blocks, page, prepared, shell
from tests.pipeline import connect, forward, send
from tests.programs import ROOT

pytestmark = pytest.mark.full


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Where saf.toml is."""
    return prepared(tmp_path, app, mom)


def test_the_commands_of_the_troubleshooting_page_work_as_they_stand(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    script = "".join(blocks(page("troubleshooting.md"), "shell"))
    with connect(app) as source:
        send(source, "a message that somebody misses", key="A-1")
    forward(app, mom=mom)
    said = shell(script, folder, app, mom)
    assert re.search(r"A-1 +\| billing +\| forwarded", said)
    assert re.search(r"A-1 .*\d+", said.rpartition("forwarded")[2]), "it is stored, and unread"


SOURCE = "\n".join(file.read_text() for file in sorted((ROOT / "saf").rglob("*.py")))
SAID = re.sub(r'"\s*\n?\s*f?"', "", SOURCE)
"""The source with texts that are written in parts put together."""

POSTGRESQLS = (
    "permission denied",
    "canceling statement due to lock timeout",
    "query would be affected by row-level security",
    "it does not have a replica identity",
)
"""Errors of PostgreSQL itself."""


def test_every_text_that_the_page_quotes_is_one_that_saf_says() -> None:
    rows = [
        line.split("|")[1] for line in page("troubleshooting.md").splitlines() if line[:1] == "|"
    ]
    quoted = [one for row in rows for one in re.findall(r'"([^"]+)"', row)]
    assert quoted
    for text in quoted:
        for part in re.split(r"\s*…\s*|\d+|: |'\w+'", text):
            said = part.strip(" .,;:`")
            if len(said) > 5 and not said.startswith(POSTGRESQLS):
                assert said in SAID, f"{text!r}: saf does not say {said!r}"
