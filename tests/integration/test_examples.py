"""The applications in examples/ do what they say, each as a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from saf.broker.services import create_service
from saf.database import Dsn, fetch
from tests.pipeline import connect, forward
from tests.programs import BIN, ROOT, run, url

EXAMPLES = ROOT / "examples"
MOST_LINES = 80

ORDER = [("A-1", 90)]
MESSAGE = [("billing", "A-1", "OrderPlaced", b'{"order":"A-1","total":90}')]

POST = """
import asyncio, httpx
from with_fastapi import app, life

async def main():
    async with life(app), httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://shop"
    ) as client:
        order = {"number": "A-1", "total": 90}
        print((await client.post("/orders", json=order)).status_code)
        print((await client.post("/orders", json=order)).status_code)

asyncio.run(main())
"""


def example(*arguments: str, **env: str) -> str:
    """What Python says in the folder of the examples."""
    done = run([sys.executable, *arguments], cwd=EXAMPLES, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def drained(worker: str, **env: str) -> None:
    done = run([BIN / "saf", "worker", worker, "--drain"], cwd=EXAMPLES, env=env)
    assert done.returncode == 0, done.stderr


def ordered(app: Dsn) -> tuple[list[Any], list[Any]]:
    """The orders, and what was sent."""
    with connect(app) as connection:
        sent = "SELECT to_service, key, message_type, body FROM saf.outbox"
        return fetch(connection, "SELECT number, total FROM orders"), fetch(connection, sent)


def test_each_is_one_short_file_that_says_how_to_run_it_and_is_in_the_index() -> None:
    index = (EXAMPLES / "README.md").read_text()
    files = sorted(EXAMPLES.glob("*.py"))
    assert files
    for file in files:
        text = file.read_text()
        assert len(text.splitlines()) <= MOST_LINES, file.name
        assert f"({file.name})" in index
        assert file.stem in text.split('"""')[1], "how to run it"


def test_psycopg_sends_with_an_order(app: Dsn) -> None:
    example("with_psycopg.py", "A-1", "90", SHOP_DSN=app.conninfo)
    assert ordered(app) == (ORDER, MESSAGE)


def test_sqlalchemy_sends_with_an_order(app: Dsn) -> None:
    example("with_sqlalchemy.py", "A-1", "90", SHOP_URL=url(app))
    assert ordered(app) == (ORDER, MESSAGE)


def test_fastapi_sends_with_an_order_and_not_without(app: Dsn) -> None:
    assert example("-c", POST, SHOP_URL=url(app)).split() == ["201", "409"]
    assert ordered(app) == (ORDER, MESSAGE)


def test_django_sends_with_an_order(app: Dsn) -> None:
    place = {"SHOP_DB": app.database, "SHOP_HOST": app.parts["host"], "SHOP_USER": "postgres"}
    place["SHOP_PORT"] = str(app.parts["port"])
    example("with_django.py", "migrate_orders", **place)
    example("with_django.py", "place", "A-1", "90", **place)
    assert ordered(app) == (ORDER, MESSAGE)


def test_a_worker_writes_the_invoice_of_an_order(app: Dsn, mom: Dsn) -> None:
    with connect(mom) as store:
        create_service(store, "billing")
        example("with_psycopg.py", "A-1", "90", SHOP_DSN=app.conninfo)
        forward(app, mom=mom)
        drained("worker:billing", STORE_DSN=mom.conninfo)
        assert fetch(store, "SELECT number, total FROM invoice") == ORDER


@pytest.mark.parametrize(("amount", "delivered"), [(2, [("A-1", 2)]), (200, None)])
def test_a_dialog_is_asked_answered_and_ended_at_both_ends(
    app: Dsn, new_broker: Callable[[str], Dsn], amount: int, delivered: list[Any] | None
) -> None:
    there = new_broker("warehouse")
    env = {"SHOP_DSN": app.conninfo, "WAREHOUSE_DSN": there.conninfo}
    with connect(app) as shop, connect(there) as warehouse:
        create_service(shop, "shop")
        create_service(warehouse, "warehouse")
        example("dialog.py", "A-1", str(amount), **env)
        forward(app, warehouse=there)
        drained("dialog:warehouse", **env)
        forward(there, shop=app)
        drained("dialog:shop", **env)
        forward(app, warehouse=there)
        drained("dialog:warehouse", **env)
        if delivered is not None:
            assert fetch(shop, "SELECT article, amount FROM delivery") == delivered
        for end in (shop, warehouse):
            assert fetch(end, "SELECT state FROM saf.conversation") == [("closed",)]
