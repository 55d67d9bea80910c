"""Every page's commands are run, or cannot be: they take minutes, or the network."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from tests.pages import unmarked_shells
from tests.programs import ROOT, run, saf

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / "docs").rglob("*.md"),
]
TOO_MUCH = re.compile(r"(make|pip install|git clone|python -m benchmarks\.peers) ")
"""What takes minutes, or the network; other tests have parts of it."""


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_no_command_of_a_page_is_left_out(file: Path) -> None:
    for block in unmarked_shells(file.read_text()):
        for line in block.splitlines():
            assert TOO_MUCH.match(line) or line.startswith(("saf migrate ", "saf --")), line
            if line.startswith("make "):
                assert made(*line.partition("#")[0].split()[1:]) == ""


@cache
def made(*arguments: str) -> str:
    """Return what is wrong with these arguments of make; empty if nothing is."""
    done = run(["make", "-n", *arguments], cwd=ROOT)
    return done.stderr if done.returncode else ""


def quoted(text: str) -> list[str]:
    """The commands within a page's sentences that say where: they are typed as they stand."""
    sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [
        " ".join(command.split())
        for command in re.findall(r"`(saf [^`]*)`", sentences)
        if "--broker " in command and "…" not in command
    ]


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_no_command_in_a_sentence_of_a_page_is_refused(file: Path) -> None:
    for command in quoted(file.read_text()):
        words = shlex.split(command.replace("NUMBER", "1").removesuffix(" [OPTIONS]"))[1:]
        done = saf(*words, env={"SAF_CONFIG": "/nonexistent"})
        assert done.stderr.startswith("saf: cannot read /nonexistent"), (command, done.stderr)


def test_nothing_is_installed_by_a_name_that_no_index_has() -> None:
    """While saf is unreleased, its users install it from a clone; so do those of its files."""
    folders = ("docs", "docker", "jobs", "examples", "airflow", "ops")
    texts = [
        *PAGES,
        *(file for name in folders for file in (ROOT / name).rglob("*") if file.is_file()),
    ]
    named = re.compile(r"pip install\b[^\n#`]*[ '\"]saf[-_]\w+")
    found = {
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in texts
        if file.suffix in (".md", ".py", ".toml", ".yaml", ".service", ".sh", "")
        for match in named.finditer(file.read_text())
    }
    assert found == set()
    assert named.search("pip install 'saf-outbox[ui]'")


def test_every_page_is_in_the_table_of_all_pages() -> None:
    table = (ROOT / "docs" / "index.md").read_text().partition("## All pages")[2]
    pages = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    assert pages - set(re.findall(r"\]\(([\w/-]+\.md)", table)) == {"index.md"}
