"""What `--help` says of each command fits in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from saf import cli
from saf.cli import app
from saf.errors import UsageError


def groups(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All commands that have commands, by the words that name them."""
    if commands := getattr(command, "commands", {}):
        yield words
        for name, one in commands.items():
            yield from groups(one, (*words, name))


GROUPS = [*groups(typer.main.get_command(app))]


@pytest.mark.parametrize("words", GROUPS, ids=" ".join)
def test_no_commands_line_is_cut_at_80_columns(words: tuple[str, ...]) -> None:
    help_ = CliRunner().invoke(app, [*words, "--help"], terminal_width=80)
    said = help_.output.partition("Commands:")[2].splitlines()
    assert len(said) > 1
    assert [line for line in said if line.endswith("...") or len(line) > 80] == []


def test_all_groups_of_commands_are_looked_at() -> None:
    assert {(), ("route",), ("dead",)} < set(GROUPS)


def test_without_its_package_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saf.cli.DEMO", "saf_demo_that_is_not_there")
    with pytest.raises(UsageError, match="saf_demo_that_is_not_there, which is not installed"):
        cli._demo()()
