"""docs/coming-from.md: both ways are written, and nothing is handled twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from saf.database import Dsn, fetch
from tests.pages import blocks, page, prepared, shell, unmarked_shells
from tests.pipeline import bodies, connect, forward
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
        shop.execute("CREATE TABLE old_outbox (id text PRIMARY KEY, topic text, payload jsonb)")
        store.execute(INVOICE)
        store.execute("CREATE TABLE handled (order_number text PRIMARY KEY)")
        (both,), (handler,), (trial,) = (
            blocks(text, kind) for kind in ("both", "handler", "trial")
        )
        env = {"SHOP_DSN": app.conninfo, "MOM_DSN": mom.conninfo}
        done = run([sys.executable, "-c", both], env=env)
        assert done.returncode == 0, done.stderr
        assert fetch(shop, "SELECT id FROM old_outbox") == [("A-1",)]
        # a program that nobody can change writes to the old table alone
        assert "old_outbox" in shell(trial, folder, app, mom)
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


SENT = """
SELECT to_service, key, message_type, convert_from(body, 'UTF8'), headers ->> 'content-type'
FROM saf.outbox ORDER BY id
"""
ROW = "INSERT INTO outbox_events (topic, aggregateid, body) VALUES ('billing', 'A-1', '2')"
EVENT = """
INSERT INTO outbox VALUES (gen_random_uuid(), 'billing', 'A-1', 'OrderPlaced', '{"total": 90}')
"""


def test_an_outbox_table_is_adopted_and_given_back(folder: Path, app: Dsn, mom: Dsn) -> None:
    text = page("coming-from.md")
    (table,), (own,), (back,) = (blocks(text, kind) for kind in ("own-table", "own", "back"))
    with connect(app) as shop:
        shop.execute(table.encode())
        said = shell(own, folder, app, mom)
        assert "added, 1 old row sent" in said
        shop.execute(ROW)
        assert fetch(shop, SENT) == [
            ("billing", "A-1", "OrderPlaced", '{"order": "A-1", "total": 90}', "application/json"),
            ("billing", "A-1", None, "2", "application/json"),
        ]
        said = shell(back, folder, app, mom)
        assert "removed" in said
        assert len(bodies(mom)) == 2
        shop.execute(ROW)
        assert fetch(shop, "SELECT count(*) FROM outbox_events WHERE sent_at IS NULL") == [(1,)]
        assert fetch(shop, "SELECT count(*) FROM saf.outbox") == [(2,)]


def test_debeziums_table_is_adopted(folder: Path, app: Dsn, mom: Dsn) -> None:
    text = page("coming-from.md")
    (table,), (commands,) = (blocks(text, kind) for kind in ("debezium-table", "debezium"))
    with connect(app) as shop:
        shop.execute(table.encode())
        shop.execute(EVENT)
        shell(commands, folder, app, mom)
        shop.execute(EVENT)
        expected = ("billing", "A-1", "OrderPlaced", '{"total": 90}', "application/json")
        assert fetch(shop, SENT) == [expected]
        assert fetch(shop, "SELECT count(*) FROM outbox") == [(1,)]


def test_moduliths_table_is_adopted(folder: Path, app: Dsn, mom: Dsn) -> None:
    text = page("coming-from.md")
    (table,), (commands,) = (blocks(text, kind) for kind in ("modulith-table", "modulith"))
    with connect(app) as shop:
        shop.execute(table.encode())
        shell(commands, folder, app, mom)
        body = '{"order":"A-1","total":90}'
        assert fetch(shop, SENT) == [
            ("billing", "A-1", "shop.OrderPlaced", body, "application/json")
        ]
        assert fetch(shop, "SELECT status FROM event_publication") == [("COMPLETED",)]


def test_masstransits_table_is_adopted(folder: Path, app: Dsn, mom: Dsn) -> None:
    text = page("coming-from.md")
    (table,), (commands,) = (blocks(text, kind) for kind in ("masstransit-table", "masstransit"))
    with connect(app) as shop:
        shop.execute(table.encode())
        shell(commands, folder, app, mom)
        ((service, key, kind, body, content_type),) = fetch(shop, SENT)
        assert (service, kind, content_type) == (
            *("billing", "urn:message:Shop:OrderPlaced", "application/vnd.masstransit+json"),
        )
        assert (len(key), body) == (36, '{"message": {"order": "A-1", "total": 90}}')
        assert fetch(shop, 'SELECT FROM "OutboxMessage"') == []


def test_no_command_of_the_page_is_left_out() -> None:
    assert unmarked_shells(page("coming-from.md")) == []
