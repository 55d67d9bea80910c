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
from tests.cli_page import commands


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
    first = "Commands:" if words else "Set up:"
    said = help_.output.partition(first)[2].splitlines()
    assert len(said) > 1
    assert [line for line in said if line.endswith("...") or len(line) > 80] == []


def test_the_commands_are_in_panels_by_what_a_reader_is_about_to_do() -> None:
    help_ = CliRunner().invoke(app, ["--help"], terminal_width=80).output
    lines = help_.splitlines()
    panels = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert panels[1:] == ["Set up:", "Run:", "Look:", "Decide:", "Repair:"]
    shown = {line.split()[0] for line in lines[lines.index("Set up:") :] if line.startswith("  ")}
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert commands <= shown, "every command has a panel"
    decide = help_.partition("Decide:")[2].partition("Repair:")[0]
    assert [line.split()[0] for line in decide.splitlines() if line.strip()] == [
        *("held", "parked", "dead"),
    ]


def test_each_help_text_begins_with_its_verb_or_its_noun() -> None:
    """Not with "The", "It" or "Let": the first word tells two commands apart."""
    texts = {" ".join(command.path): command.help for command in commands()}
    texts |= {
        f"{' '.join(command.path)} {one.words}": one.info.help
        for command in commands()
        for one in command.parameters
    }
    assert len(texts) > 300
    assert {
        where: text
        for where, text in texts.items()
        if not text or text.split()[0] in {"The", "A", "An", "It", "Its", "Let", "Make", "Instead:"}
    } == {}


def test_all_groups_of_commands_are_looked_at() -> None:
    assert {(), ("route",), ("dead",)} < set(GROUPS)


def test_without_its_package_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saf.cli.DEMO", "saf_demo_that_is_not_there")
    with pytest.raises(UsageError, match="saf_demo_that_is_not_there, which is not installed"):
        cli._demo()()
