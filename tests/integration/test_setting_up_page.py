"""docs/setting-up.md: its plan and its commands, as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg import sql

from saf.database import Dsn
from tests.pipeline import connect
from tests.programs import ROOT, activated, configuration, run

pytestmark = pytest.mark.full

PAGE = (ROOT / "docs" / "setting-up.md").read_text()
ROLES = ("billing_app", "shop_app")


def block(name: str) -> str:
    (text,) = re.findall(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


def shell(text: str, folder: Path, **env: str) -> str:
    done = run(
        ["bash", "-euc", text],
        env={"PATH": activated(), **env},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def _roles(app: Dsn, mom: Dsn) -> Iterator[None]:
    with connect(app) as connection:
        for name in ROLES:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
    yield
    for dsn in (mom, app):
        with connect(dsn) as connection:
            for name in ROLES:
                connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
    with connect(app) as connection:
        for name in ROLES:
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def test_init_does_what_the_page_says(new_database: Callable[[str], Dsn], tmp_path: Path) -> None:
    text = block("init")
    for name in ("shop", "mom"):
        text = re.sub(
            rf"postgresql://saf_owner@db\d/{name}", f"'{new_database(name).conninfo}'", text
        )
    assert "received it at mom" in shell(text, tmp_path)


@pytest.mark.usefixtures("_roles")
def test_the_plan_is_applied_exported_and_applied_again(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    (tmp_path / "plan.toml").write_text(block("plan"))
    said = shell(block("apply"), tmp_path)
    assert said.count("nothing to do: the brokers match the plan") == 2


def test_a_file_of_secrets_that_a_shell_and_systemd_read_alike() -> None:
    (line,) = re.findall(r"`(SHOP_DSN='.*?')`", PAGE)
    done = run(["sh", "-c", f'{line}; printf %s "$SHOP_DSN"'])
    assert done.stdout == "postgresql://saf_forwarder:p$ss@db1/shop"
