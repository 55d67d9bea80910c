"""docs/schedules.md: its commands and its code, as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from saf.database import Dsn, fetch
from saf.operating.plans.file import read
from tests.pages import blocks, page, prepared, shell, unmarked_shells
from tests.pipeline import bodies, connect
from tests.programs import run

pytestmark = pytest.mark.full

PAGE = page("schedules.md")


def code(kind: str) -> str:
    (text,) = blocks(PAGE, kind)
    return text


def test_the_commands_work_and_what_is_due_is_delivered(tmp_path: Path, app: Dsn, mom: Dsn) -> None:
    folder = prepared(tmp_path, app, mom)
    said = shell(code("add"), folder, app, mom)
    assert len(re.findall(r"\d{4}-\d\d-\d\d 02:00:00\+0[12]:00", said)) == 1 + 1 + 5
    shell(code("decide"), folder, app, mom)
    with connect(app) as connection:
        connection.execute("UPDATE saf.schedule SET next_run = next_run - '1 day'::interval")
    shell("saf forward", folder, app, mom)
    assert bodies(mom) == ['{"full": true}'] * 2
    with connect(mom) as connection:
        headers = [found for (found,) in fetch(connection, "SELECT headers FROM saf.inbox")]
    assert sorted("scheduled-for" in one for one in headers) == [False, True]
    assert "run schedule nightly" in shell("saf dead audit", folder, app, mom)


def test_declared_schedules_are_deployed(app: Dsn) -> None:
    for expected in (
        "('monday', 'prices') () () ()\n",
        "() () ('monday', 'prices') ()\n",
    ):
        done = run([sys.executable, "-c", code("declared")], env={"DSN": app.conninfo})
        assert (done.stdout, done.stderr) == (expected, "")


def test_the_plan_is_one(tmp_path: Path) -> None:
    (plan,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "plan.toml").write_text(plan)
    assert [*read(tmp_path / "plan.toml").brokers["shop"].entries()["schedules"]] == [("nightly",)]


def test_no_command_of_the_page_is_left_out() -> None:
    assert unmarked_shells(PAGE) == []
