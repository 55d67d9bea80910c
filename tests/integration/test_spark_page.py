"""docs/spark.md: its recipes run, and its tables say what there is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from saf.broker.services import create_service
from saf.config import load
from saf.database import Dsn
from saf.spark import java
from saf.spark.table.options import NAMES
from saf.spark.table.outgoing import TYPES
from saf.spark.table.query import TEXT, schema_of
from tests import short_lived
from tests.archives import in_log, may_go
from tests.pages import blocks, page, prepared, shell
from tests.pipeline import bodies, connect, run
from tests.programs import INSTALLED
from tests.programs import run as run_program

pytestmark = pytest.mark.full

SEND = """
INSERT INTO saf.outbox (to_service, key, body, created_at)
SELECT CASE WHEN n % 3 = 0 THEN 'shipping' ELSE 'billing' END, 'k',
       convert_to('{"order": ' || n % 5 || '}', 'UTF8'), now() - n * interval '1 day'
FROM generate_series(0, 9) AS n
"""


def test_the_recipe_counts_what_was_sent_and_what_is_under_way(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    prepared(tmp_path, app, mom)
    with connect(mom) as store:
        create_service(store, "shipping")
    with connect(app) as source:
        source.execute(SEND)
        run(app, mom=mom)
        source.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', 'new')")
    said = recipe("analytics", tmp_path)
    rows = re.findall(r"^\| *(\w+)\| *(\d+)\| *(\d+)\|$", said, re.MULTILINE)
    assert rows == [("billing", "6", "4"), ("shipping", "3", "3")], said
    assert "1 under way" in said


def test_a_run_of_the_stream_brings_what_is_there_into_the_lake_and_commits_it(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    prepared(tmp_path, app, mom)
    with connect(app) as source:
        source.execute(SEND)
    assert recipe("streaming", tmp_path).splitlines()[-2:] == ["billing 6", "shipping 4"]
    said = shell("".join(blocks(page("spark.md"), "shell")), tmp_path, app, mom)
    assert re.search(r"lake\W+outbox\W+0\W", said), said
    assert "shop: stream lake of the outbox dropped" in said


@pytest.mark.full
def test_the_scoring_job_sends_once_however_often_it_is_run(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    prepared(tmp_path, app, mom)
    with connect(app) as source:
        source.execute(SEND)
        for _ in range(2):
            recipe("scoring", tmp_path)
            found = source.execute(
                "SELECT key, convert_from(body, 'UTF8'), headers FROM saf.outbox "
                "WHERE body LIKE '{\"orders%' ORDER BY id"
            ).fetchall()
            assert found == [("k", '{"orders":10}', {"content-type": "application/json"})]


def test_the_transform_with_a_join_passes_its_test_and_changes_what_is_forwarded(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    prepared(tmp_path, app, mom)
    with (tmp_path / "saf.toml").open("a") as file:
        file.write("".join(blocks(page("transforms.md"), "toml")))
    (tmp_path / "customers.py").write_text("".join(blocks(page("spark.md"), "transform module")))
    recipe("transform check", tmp_path)
    with connect(app) as source:
        source.execute(
            "INSERT INTO saf.outbox (to_service, key, body) "
            """VALUES ('billing', 'k', '{"customer": "c2", "card": "4999"}')"""
        )
    script = "PYTHONPATH=\n" + "".join(blocks(page("spark.md"), "transform shell"))
    script += "".join(blocks(page("transforms.md"), "try"))
    said = shell(script, tmp_path, app, mom)
    assert (
        '"body": "{\\"customer\\":\\"c2\\",\\"name\\":\\"Grace\\",\\"card\\":\\"4111…\\"}"' in said
    )
    assert bodies(mom) == ['{"customer":"c2","name":"Grace","card":"4999…"}']


def test_the_settings_of_a_transform_that_is_not_deterministic_are_settings(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    prepared(tmp_path, app, mom)
    with (tmp_path / "saf.toml").open("a") as file:
        file.write("".join(blocks(page("transforms.md"), "kept toml")))
    settings = load(tmp_path / "saf.toml")
    assert [one.deterministic for one in settings.transforms] == [False]


@pytest.mark.full
def test_what_was_purged_into_the_lake_is_counted_with_what_is_in_the_log(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    prepared(tmp_path, app, mom)
    with connect(mom) as store:
        create_service(store, "shipping")
    with connect(app) as source:
        source.execute(SEND.replace("now() -", "now() - interval '30 days' -"))
    may_go(app, mom)
    (script,) = blocks(page("spark.md"), "archive shell")
    said = shell(script.replace("/srv/", f"{tmp_path}/"), tmp_path, app, mom)
    assert in_log(app) == [], said
    with connect(app) as source:
        source.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', 'new')")
    rows = re.findall(r"^\| *(\w+)\| *(\d+)\|$", recipe("archive", tmp_path), re.MULTILINE)
    assert rows == [("billing", "7"), ("shipping", "4")]


def recipe(name: str, folder: Path) -> str:
    """What a recipe of the page prints."""
    script = "".join(blocks(page("spark.md"), name)).replace("/srv/", f"{folder}/")
    done = run_program(
        [sys.executable, "-c", script.replace("local[*]", "local[2]")],
        env={
            **short_lived.defaults(folder / "spark"),
            **java.find().environment(),
            "PATH": INSTALLED,
        },
        cwd=folder,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_each_option_and_each_column() -> None:
    said = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*?\|", page("spark.md"), re.M))))
    assert {*NAMES, TEXT, *TYPES, *schema_of("inbox").fieldNames()} == said
