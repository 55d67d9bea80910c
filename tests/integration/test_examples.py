"""The applications in examples/ do what they say, each as a process of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from saf.broker.embedded import EmbeddedServer
from saf.broker.services import create_service
from saf.config import load
from saf.database import Dsn, fetch
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf_demo.servers import free_port
from tests.pipeline import connect, forward
from tests.programs import BIN, ROOT, environment, run, url
from tests.tiers import sized
from tests.waits import until

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


FLASK = """
from with_flask import app

client = app.test_client()
order = {"number": "A-1", "total": 90}
print(client.post("/orders", json=order).status_code)
print(client.post("/orders", json=order).status_code)
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


def test_flask_sends_with_an_order_and_not_without(app: Dsn) -> None:
    assert example("-c", FLASK, SHOP_DSN=app.conninfo).split() == ["201", "409"]
    assert ordered(app) == (ORDER, MESSAGE)


def test_asyncio_sends_with_each_of_several_orders(app: Dsn) -> None:
    example("with_asyncio.py", "A-1=90", "A-2=70", SHOP_DSN=app.conninfo)
    orders, messages = ordered(app)
    assert sorted(orders) == [*ORDER, ("A-2", 70)]
    billed = ("billing", "A-2", "OrderPlaced", b'{"order":"A-2","total":70}')
    assert sorted(messages) == [*MESSAGE, billed]


def test_a_mail_is_sent_unless_somebody_reads_first(app: Dsn) -> None:
    env = {"SHOP_DSN": app.conninfo}
    example("unless_read.py", "write", "42", "hello", **env)
    example("unless_read.py", "write", "43", "hi", **env)
    assert example("unless_read.py", "read", "42", **env) == "hello (no mail is sent)\n"
    assert "read before" in example("unless_read.py", "read", "42", **env)
    with connect(app) as connection:
        connection.execute("UPDATE saf.held SET due = now()")
        connection.execute("SELECT saf.move_held(10)")
        assert fetch(connection, "SELECT body FROM saf.outbox") == [(b'{"note":"43"}',)]
    assert example("unless_read.py", "read", "43", **env) == "hi (the mail was sent before)\n"


def test_a_request_that_is_repeated_makes_one_payment(app: Dsn) -> None:
    said = [
        example("idempotent_requests.py", key, "90", SHOP_DSN=app.conninfo)
        for key in ("7f3c", "7f3c", "other")
    ]
    assert [one.rpartition(" ")[2].strip() for one in said] == ["new", "repeated", "new"]
    assert said[0].partition(":")[0] == said[1].partition(":")[0]
    with connect(app) as connection:
        paid = fetch(connection, "SELECT id FROM payment ORDER BY 1")
        assert paid == fetch(connection, "SELECT message_id FROM saf.outbox ORDER BY 1")
        assert len(paid) == 2


def test_a_worker_writes_the_invoice_of_an_order(app: Dsn, mom: Dsn) -> None:
    with connect(mom) as store:
        create_service(store, "billing")
        example("with_psycopg.py", "A-1", "90", SHOP_DSN=app.conninfo)
        forward(app, mom=mom)
        drained("worker:billing", MOM_DSN=mom.conninfo)
        assert fetch(store, "SELECT number, total FROM invoice") == ORDER


def test_an_event_becomes_an_invoice(app: Dsn, mom: Dsn) -> None:
    env = {"SHOP_DSN": app.conninfo, "MOM_DSN": mom.conninfo}
    with connect(mom) as store:
        create_service(store, "billing")
        example("typed.py", "A-1", "90", **env)
        with connect(app) as shop:
            old = b'{"number":"A-0","total":"70"}'
            send = "INSERT INTO saf.outbox (to_service, message_type, body) VALUES (%s, %s, %s)"
            shop.execute(send, ["billing", "OrderPlaced", old])
        forward(app, mom=mom)
        drained("typed:billing", **env)
        found = "SELECT number, total::int, currency FROM invoice ORDER BY 1"
        assert fetch(store, found) == [("A-0", 70, "CHF"), ("A-1", 90, "EUR")]


SAGA_STEPS = ("receive_read", "receive_handled", "receive_settled", "receive_committed")


@pytest.mark.parametrize("point", SAGA_STEPS[: sized(1, 4)])
def test_orders_of_a_saga_that_is_killed_get_stock_and_payment_or_neither(
    app: Dsn, point: str
) -> None:
    env = {"SHOP_DSN": app.conninfo}
    example("saga_services.py", **env)
    for order in (("A-1", "book", "2"), ("A-2", "map", "1"), ("A-3", "book", "2")):
        example("saga.py", *order, **env)
    workers = ("saga:orders", "saga_services:stock", "saga_services:payment")
    for worker in workers:
        drained("saga:orders", **env)
        command: list[str | Path] = [BIN / "saf", "worker", worker, "--drain"]
        run(command, cwd=EXAMPLES, env={**env, "SAF_FAILPOINT": point})
    with connect(app) as shop:
        for _ in range(9):
            if fetch(shop, "SELECT count(*) FROM outcome") == [(3,)]:
                break
            for worker in workers:
                drained(worker, **env)
        found = fetch(shop, "SELECT number, result FROM outcome ORDER BY 1")
        assert sorted(result for _, result in found) == ["done", "no payment", "no stock"]
        assert found[1] == ("A-2", "no stock")
        for worker in workers:
            drained(worker, **env)
        assert fetch(shop, "SELECT in_stock FROM article") == [(8,)]
        assert fetch(shop, "SELECT balance, total FROM account, payment") == [(40, 60)]
        assert fetch(shop, "SELECT DISTINCT state FROM saf.conversation") == [("closed",)]


@contextmanager
def served(
    folder: Path, application: str, *options: str, **env: str
) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """An application that uvicorn serves, as its users start it; its address, and its log."""
    port, log = free_port(), folder / "log"
    command: list[str | Path] = [
        BIN / "uvicorn",
        f"{application}:app",
        "--port",
        str(port),
        *options,
    ]
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**env, PYTHONPATH=f"{folder}:{ROOT}"),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            until(lambda: "Application startup complete" in log.read_text())
            yield process, f"http://127.0.0.1:{port}", log
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def curl(address: str) -> dict[str, Any]:
    """What curl prints of an address, as JSON; empty unless it is a success."""
    done = run(["curl", "--silent", "--fail", address])
    return dict(json.loads(done.stdout or "{}"))


def ended(process: subprocess.Popen[str], log: Path) -> None:
    """It ends in order after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    # uvicorn ends by the signal that it was sent, after its work; its supervisor, with 0
    assert process.wait(20) in (0, -signal.SIGTERM)
    text = log.read_text()
    assert "Application shutdown complete" in text.rpartition("Shutting down")[2]
    assert "Traceback" not in text
    assert "ERROR" not in text


@pytest.mark.parametrize("framework", ["fastapi", "litestar"])
def test_a_web_application_receives_beside_its_requests_and_ends_in_order(
    app: Dsn, mom: Dsn, tmp_path: Path, framework: str
) -> None:
    name = f"worker_in_{framework}"
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    with connect(mom) as store:
        create_service(store, "billing")
    with served(tmp_path, name, MOM_DSN=mom.conninfo) as (process, address, log):
        assert curl(f"{address}/health") == {"worker": "runs"}
        assert curl(f"{address}/invoices/A-1") == {}
        example("with_psycopg.py", "A-1", "90", SHOP_DSN=app.conninfo)
        forward(app, mom=mom)
        until(lambda: curl(f"{address}/invoices/A-1") == {"number": "A-1", "total": 90})
        ended(process, log)
    with connect(mom) as store:
        receivers = (
            "SELECT FROM pg_stat_activity WHERE starts_with(application_name, 'saf receive')"
        )
        assert fetch(store, f"{receivers} AND datname = current_database()") == []


@pytest.mark.parametrize("framework", ["fastapi", "litestar"])
def test_a_web_application_that_is_reloaded_ends_its_worker_and_begins_another(
    app: Dsn, mom: Dsn, tmp_path: Path, framework: str
) -> None:
    name = f"worker_in_{framework}"
    file = Path(shutil.copy(EXAMPLES / f"{name}.py", tmp_path))
    with connect(mom) as store:
        create_service(store, "billing")
    with served(tmp_path, name, "--reload", MOM_DSN=mom.conninfo) as (process, address, log):
        file.write_text(file.read_text().replace('"total": row[0]', '"amount": row[0]'))
        until(lambda: log.read_text().count("Application startup complete") == 2)
        assert log.read_text().count("Application shutdown complete") == 1
        example("with_psycopg.py", "A-1", "90", SHOP_DSN=app.conninfo)
        forward(app, mom=mom)
        until(lambda: curl(f"{address}/invoices/A-1") == {"number": "A-1", "amount": 90})
        ended(process, log)


@pytest.mark.parametrize("framework", ["fastapi", "litestar"])
def test_a_web_application_does_not_start_if_its_worker_cannot_receive(
    mom: Dsn, tmp_path: Path, framework: str
) -> None:
    name = f"worker_in_{framework}"
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    command: list[str | Path] = [BIN / "uvicorn", f"{name}:app", "--port", str(free_port())]
    env = {"MOM_DSN": mom.conninfo, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run(command, cwd=tmp_path, env=env, tracebacks=True)
    assert done.returncode not in (0, None)
    assert "no subscription 'billing'" in done.stderr


@pytest.mark.full
def test_each_tenant_gets_an_invoice_from_one_service(
    server: EmbeddedServer, mom: Dsn, tmp_path: Path
) -> None:
    mine = secrets.token_hex(3)  # the server is shared
    tenants = [f"{mine}_{name}" for name in ("acme", "ajax")]
    file = tmp_path / "tenants.toml"
    file.write_text((EXAMPLES / "tenants.toml").read_text().replace("tenant_*", f"tenant_{mine}_*"))
    env = {"SERVER_DSN": server.dsn("postgres").conninfo, "MOM_DSN": mom.conninfo}
    try:
        done = run([BIN / "saf", "service", "create", "billing", "--config", file], env=env)
        assert done.returncode == 0, done.stderr
        for tenant in tenants:
            example("tenants.py", "add", tenant, **env)
            example("tenants.py", "place", tenant, "A-1", "90", **env)
        forwarded(file, env)
        drained("tenants:billing", **env)
        with connect(mom) as store:
            found = fetch(store, "SELECT tenant, number, total FROM invoice ORDER BY 1")
        assert found == [(tenant, "A-1", 90) for tenant in tenants]
    finally:
        for tenant in tenants:
            with connect(server.dsn("postgres")) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS tenant_{tenant} WITH (FORCE)")


def forwarded(file: Path, env: Mapping[str, str]) -> None:
    """A run of the forwarder by a saf.toml, without Spark."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        settings = load(file)
    summary = Forwarder(settings, InProcess()).drain()
    assert summary.exit_code == 0, summary.problems


def test_the_two_sides_of_a_dialog_have_the_saf_toml_that_they_need(
    app: Dsn, new_broker: Callable[[str], Dsn]
) -> None:
    there = new_broker("warehouse")
    env = {"SHOP_DSN": app.conninfo, "WAREHOUSE_DSN": there.conninfo}
    files = {side: EXAMPLES / f"dialog_{side}.toml" for side in ("shop", "warehouse")}
    for side, file in files.items():
        create: list[str | Path] = [
            BIN / "saf",
            "service",
            "create",
            side,
            "--broker",
            side,
            "--config",
            file,
        ]
        assert run(create, env=env).returncode == 0
    example("dialog.py", "A-1", "2", **env)
    for turn in ("shop", "warehouse", "shop"):
        forwarded(files[turn], env)
        drained(f"dialog:{'warehouse' if turn == 'shop' else 'shop'}", **env)
    with connect(app) as shop, connect(there) as warehouse:
        assert fetch(shop, "SELECT article, amount FROM delivery") == [("A-1", 2)]
        for end in (shop, warehouse):
            assert fetch(end, "SELECT state FROM saf.conversation") == [("closed",)]


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
