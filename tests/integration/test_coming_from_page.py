"""docs/coming-from.md: both ways are written, and nothing is handled twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from saf.database import Dsn, fetch
from tests.pages import blocks, page, prepared
from tests.pipeline import connect, forward
from tests.programs import BIN, run

pytestmark = pytest.mark.full

ORDERS = "CREATE TABLE orders (number text PRIMARY KEY, total int)"
INVOICE = "CREATE TABLE invoice (number text PRIMARY KEY, total int)"


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Where saf.toml is."""
    return prepared(tmp_path, app, mom)


def test_both_ways_are_written_and_what_both_have_is_handled_once(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    text = page("coming-from.md")
    with connect(app) as shop, connect(mom) as store:
        shop.execute(ORDERS)
        shop.execute("CREATE TABLE old_outbox (id text, topic text, payload jsonb)")
        store.execute(INVOICE)
        store.execute("CREATE TABLE handled (order_number text PRIMARY KEY)")
        (both,), (handler,), (trigger,) = (
            blocks(text, kind) for kind in ("both", "handler", "trigger")
        )
        env = {"SHOP_DSN": app.conninfo, "MOM_DSN": mom.conninfo}
        done = run([sys.executable, "-c", both], env=env)
        assert done.returncode == 0, done.stderr
        assert fetch(shop, "SELECT id FROM old_outbox") == [("A-1",)]
        # a program that nobody can change writes to the old table alone
        shop.execute(trigger.encode())
        shop.execute(
            "INSERT INTO old_outbox VALUES ('A-2', 'billing', '{\"order\": \"A-2\", \"total\": 7}')"
        )
        # the old consumer was first with one of them
        store.execute("INSERT INTO handled VALUES ('A-1')")
        store.execute("INSERT INTO invoice VALUES ('A-1', 90)")
        forward(app, mom=mom)
        (folder / "consumers.py").write_text(handler)
        done = run([BIN / "saf", "worker", "consumers:worker", "--drain"], env=env, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert fetch(store, "SELECT number, total FROM invoice ORDER BY 1") == [
            ("A-1", 90),
            ("A-2", 7),
        ]
