"""docs/monitoring.md: its figures, statements, events and alerts are there."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from saf.database import Dsn
from saf.telemetry.metrics import METRICS
from tests.pages import blocks, page, prepared, shell
from tests.pipeline import connect, forward
from tests.programs import BIN, ROOT, run, send
from tests.scraping import value

pytestmark = pytest.mark.full

SOURCE = "\n".join(file.read_text() for file in sorted((ROOT / "saf").rglob("*.py")))


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Where saf.toml is."""
    return prepared(tmp_path, app, mom)


def test_the_figures_to_watch_are_there_and_right(folder: Path, app: Dsn, mom: Dsn) -> None:
    send(app, 3)
    forward(app, mom=mom)
    send(app, 2)
    script = "".join(blocks(page("monitoring.md"), "figures"))
    shell(script, folder, app, mom)
    figures = (folder / "saf.prom").read_text()
    there = {"broker": "shop", "destination": "mom", "service": "billing"}
    assert value(figures, "saf_pending_messages", **there) == 2
    assert (value(figures, "saf_oldest_pending_seconds", **there) or 0) > 0
    assert value(figures, "saf_unread_messages", broker="mom", subscription="billing") == 3
    shell("".join(blocks(page("monitoring.md"), "shell")), folder, app, mom)


def test_the_metrics_that_the_page_names_are_declared() -> None:
    names = {one.name for one in METRICS}
    assert {*re.findall(r"`(saf_[a-z_]+)`", page("monitoring.md"))} <= names


def test_the_commands_of_the_metrics_page_show_and_write_them(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    send(app, 2)
    said = shell("".join(blocks(page("metrics.md"), "shell")), folder, app, mom)
    assert value(said.split("forwarded ")[0], "saf_up", broker="shop") == 1
    ran = (folder / "saf-forward.prom").read_text()
    to = {"broker": "shop", "destination": "mom"}
    assert value(ran, "saf_forwarded_messages_total", **to) == 2


@pytest.mark.slow
def test_a_run_says_of_itself_what_the_page_says(folder: Path, app: Dsn, mom: Dsn) -> None:
    send(app, 2)
    (script,) = blocks(page("monitoring.md"), "run")
    figures, problems = shell(script, folder, app, mom).splitlines()
    assert figures.startswith("2 0 0 0 ")
    assert problems == "0 [] 0"


def test_the_statements_to_watch_by_work_for_an_operator(app: Dsn) -> None:
    send(app, 2)
    (text,) = blocks(page("monitoring.md"), "sql")
    role = f"watcher_{app.database}"
    with connect(app) as owner:
        owner.execute(f"CREATE ROLE {role} LOGIN")
        try:
            run([BIN / "saf", "grant", "--role", "operator", role], env={"SAF_DSN": app.conninfo})
            with psycopg.connect(app.conninfo, user=role, autocommit=True) as connection:
                for statement in filter(None, text.split(";\n")):
                    connection.execute(statement.encode()).fetchall()
        finally:
            owner.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_every_event_that_the_page_names_is_one_that_is_logged() -> None:
    section = page("monitoring.md").split("| event | means |")[1].split("\n## ")[0]
    for event in re.findall(r"`([a-z_]+)`", section.split("\n\n")[0]):
        assert f'"{event}"' in SOURCE, event
