"""docs/scale.md: its configurations and commands work as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from saf.database import Dsn
from tests.pipeline import connect
from tests.programs import ROOT, activated, received, run, send

pytestmark = pytest.mark.full

PAGE = (ROOT / "docs" / "scale.md").read_text()
SHELL = "".join(re.findall(r"<!-- test: shell -->\n```sh\n(.*?)```", PAGE, re.DOTALL))
TOMLS = re.findall(r"<!-- test: toml -->\n```toml\n(.*?)```", PAGE, re.DOTALL)


def test_both_ways_to_list_a_fleet_are_shown() -> None:
    assert [("databases =" in text, "query =" in text) for text in TOMLS] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("toml", TOMLS, ids=["pattern", "query"])
def test_its_commands_forward_a_fleet(
    toml: str,
    new_broker: Callable[[str], Dsn],
    app: Dsn,
    mom: Dsn,
    tmp_path: Path,
) -> None:
    tenant = new_broker("tenant_acme")
    send(tenant, 5)
    with connect(app) as connection:
        connection.execute("CREATE TABLE tenant (name text, dsn text, live boolean)")
        connection.execute("INSERT INTO tenant VALUES (%s, %s, true)", [
            tenant.database, tenant.conninfo,
        ])  # fmt: skip
    (tmp_path / "saf.toml").write_text(toml.replace("tenant_*", "saf_test_*_tenant_acme"))
    done = run(
        ["bash", "-euxc", SHELL.replace("tenant_acme", tenant.database)],
        env={
            "PATH": activated(),
            "TENANTS_DSN": app.conninfo,
            "CONTROL_DSN": app.conninfo,
            "MOM_DSN": mom.conninfo,
        },
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert len(received(mom)) == 5
