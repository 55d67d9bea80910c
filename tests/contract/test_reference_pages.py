"""docs/reference/ says what the code says, and nothing in it is without a word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer.main

import saf
from saf.cli import app as app_of_saf
from saf.config import Settings, load
from saf.database import Dsn
from tests import cli_page, metrics_page, python_page, schema_page, settings_page
from tests.programs import ROOT

WRITTEN = [cli_page, settings_page, python_page, metrics_page]


@pytest.mark.parametrize("one", WRITTEN, ids=lambda one: one.PAGE.name)
def test_the_page_is_what_the_code_says(one: object) -> None:
    module = one.__name__  # type: ignore[attr-defined] # a module
    same = one.PAGE.read_text() == one.page()  # type: ignore[attr-defined] # the same
    assert same, f"run `python -m {module}`, which writes it"


def test_the_page_of_the_schema_is_what_the_catalog_says(app: Dsn) -> None:
    with psycopg.connect(app.conninfo, autocommit=True) as connection:
        same = schema_page.PAGE.read_text() == schema_page.page(connection)
    assert same, "run `python -m tests.schema_page`, which writes it"


def test_each_command_argument_and_option_says_what_it_is() -> None:
    found = list(cli_page.commands())
    assert len(found) > 50
    for command in found:
        assert command.help, command.path
        for parameter in command.parameters:
            assert parameter.info.help, (command.path, parameter.name)


def test_the_page_of_the_commands_has_the_options_that_each_command_takes() -> None:
    whole = typer.main.get_command(app_of_saf)
    for command in cli_page.commands():
        if command.call is None:
            continue
        taken: Any = whole
        for word in command.path[1:]:
            taken = taken.commands[word]
        shown = [one for one in taken.params if not getattr(one, "hidden", False)]
        names = {name for one in shown for name in one.opts if name.startswith("-")} - TYPERS
        said = {word for one in command.parameters for word in one.words.split()}
        assert {word for word in said if word.startswith("-")} == names, command.path


TYPERS = {"--help", "--install-completion", "--show-completion"}
"""The options that typer adds."""

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown_commands(text: str) -> Iterator[str]:
    """What a page shows as a command of saf, in its text or in a block for a shell."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            yield from re.findall(r"(?:^|\$\(|&& |\| )\s*(saf [a-z][^#|;)]*)", line)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`(saf [a-z][^`|]*)`", " ".join(outside.split()))


OF_ARGUMENT = {"saf backfill": "saf backfill run"}
"""Commands that a group runs if an argument follows its name."""


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_every_command_that_a_page_names_exists_with_its_options(file: Path) -> None:
    known = {" ".join(one.path): one for one in cli_page.commands()}
    for shown in shown_commands(file.read_text()):
        words = shown.split()
        path = words[:3] if " ".join(words[:3]) in known else words[:2]
        assert " ".join(path) in known, f"there is no `{shown}`"
        command = known[" ".join(path)]
        if len(words) > len(path):
            command = known[OF_ARGUMENT.get(" ".join(path), " ".join(path))]
        if command.call is None:
            assert len(words) == len(path), f"there is no `{shown}`"
        options = {word for one in command.parameters for word in one.words.split()} | {"--help"}
        for word in words[len(path) :]:
            name = word.partition("=")[0].rstrip(".,…")
            assert not re.match(r"--\w", name) or name in options, f"`{shown}`: no {name}"


def test_each_key_of_the_configuration_says_what_it_is() -> None:
    for table in settings_page.tables():
        assert table.model.__doc__, table.title
        without = set(table.model.model_fields) - set(settings_page.descriptions(table.model))
        assert not without, f"{table.title}: no docstring below {without}"
    outer = {table.name.partition(".")[0] for table in settings_page.tables()}
    assert outer == set(Settings.model_fields)


def test_the_file_with_everything_has_every_key_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(settings_page.missing()) == []
    for name in (
        "SHOP",
        "TENANTS",
        "NATS",
        "REDIS",
        "RABBITMQ",
        "KAFKA",
        "KAFKA_KEY",
        "KAFKA_CLIENT",
        "LAKE",
    ):
        monkeypatch.setenv(f"{name}_PASSWORD", "p@ss/word")
    for name in ("REGIONS", "MOM"):
        monkeypatch.setenv(f"{name}_DSN", "postgresql://saf_forwarder@db/x")
    for name in ("BILLING_SECRET", "PARTNER_SECRET"):
        monkeypatch.setenv(name, "whsec_" + "c2Vj" * 8)
    for name in ("BILLING_TOKEN", "LEDGER_PASSWORD", "ORDERS_SECRET", "PROXY_PASSWORD"):
        monkeypatch.setenv(name, "p@ss/word")
    for name in ("UI_VIEW_TOKEN", "UI_OPERATE_TOKEN"):
        monkeypatch.setenv(name, "p@ss/word" * 3)
    (tmp_path / "saf.toml").write_text(settings_page.EXAMPLE)
    settings = load(tmp_path / "saf.toml")
    assert settings.brokers["shop"].dsn.parts["password"] == "p@ss/word"


def test_each_public_name_is_on_the_page_once_and_says_what_it_is() -> None:
    named = [name for _, names in python_page.groups() for name in names]
    assert sorted(named) == sorted(saf.__all__)
    for name in named:
        value = getattr(saf, name)
        assert value.__doc__, name
        if isinstance(value, type):
            for member, what in python_page.members(value):
                assert what.__doc__, f"{name}.{member}"
