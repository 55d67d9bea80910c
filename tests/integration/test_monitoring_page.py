"""docs/monitoring.md: its figures, statements, events and alerts are there."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest
import yaml

from saf.database import Dsn
from tests.pages import blocks, page, prepared, shell
from tests.pipeline import connect, forward
from tests.programs import BIN, ROOT, run, send

SOURCE = "\n".join(file.read_text() for file in sorted((ROOT / "saf").rglob("*.py")))


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Where saf.toml is."""
    return prepared(tmp_path, app, mom)


def test_the_figures_to_watch_are_there_and_right(folder: Path, app: Dsn, mom: Dsn) -> None:
    send(app, 3)
    forward(app, mom=mom)
    send(app, 2)
    script = "".join(blocks(page("monitoring.md"), "shell"))
    shell(script, folder, app, mom)
    sources = (folder / "saf-status.prom").read_text()
    assert 'saf_pending{broker="shop"} 2\n' in sources
    assert re.search(r'saf_oldest_pending_seconds\{broker="shop"\} \d', sources)
    stores = (folder / "saf-inbox.prom").read_text()
    assert 'saf_unread{broker="mom",subscription="billing"} 3\n' in stores


def test_the_alerts_are_on_figures_that_the_page_writes() -> None:
    groups = yaml.safe_load((ROOT / "examples" / "production" / "alerts.yaml").read_text())[
        "groups"
    ]
    rules = [rule for group in groups for rule in group["rules"]]
    written = set(
        re.findall(r"print\(\"(saf_\w+)%s", "".join(blocks(page("monitoring.md"), "shell")))
    )
    assert len(rules) == len({rule["alert"] for rule in rules})
    watched = {name for rule in rules for name in re.findall(r"\bsaf_\w+", rule["expr"])}
    assert watched <= written
    assert all({"summary", "do"} <= rule["annotations"].keys() for rule in rules)


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
