"""The examples of docs/conversations.md do what the page says; ``saf dialog``, ``saf contract``."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import saf
from saf.broker.services import create_service
from saf.cli.dialog import _read
from saf.database import Dsn, fetch
from saf.dialogs.statements import TRANSITIONS, Code
from saf.errors import ConfigurationError
from tests.dialogs import SHOP, WAREHOUSE, forward, receive, said, say, states
from tests.dialogs import begin as begin_dialog
from tests.pipeline import connect
from tests.programs import BIN, ROOT, activated, configuration, environment, run
from tests.programs import saf as run_saf
from tests.waits import until

PAGE = (ROOT / "docs" / "conversations.md").read_text()
USAGE = 2


def blocks(kind: str) -> list[str]:
    return re.findall(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """With a saf.toml, the contract, and the services."""
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    (tmp_path / "ordering.toml").write_text("".join(blocks("toml")))
    for dsn, service in ((app, SHOP), (mom, WAREHOUSE)):
        with connect(dsn) as connection:
            create_service(connection, service)
    with connect(app) as connection:
        connection.execute("CREATE TABLE orders (number int, dialog uuid)")
    return tmp_path


def shell(folder: Path, kind: str, **env: str) -> str:
    done = run(
        ["bash", "-euxc", "".join(blocks(kind))],
        env={"PATH": activated(), **env},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def begin(app: Dsn) -> saf.Dialog:
    (code,) = blocks("shop")
    done = run([sys.executable, "-c", code], env={"SHOP_DSN": app.conninfo})
    assert done.returncode == 0, done.stderr
    with connect(app) as connection:
        ((handle,),) = fetch(connection, "SELECT dialog FROM orders")
        return saf.open_dialog(connection, handle)


@pytest.mark.full
def test_the_shop_and_the_warehouse_do_what_the_page_says(folder: Path, app: Dsn, mom: Dsn) -> None:
    assert "mom: 2 created, 0 existed\n" in shell(folder, "shell")
    begin(app)
    forward(app, mom)
    (code,) = blocks("warehouse")
    (folder / "consumers.py").write_text(code)
    done = run(
        [BIN / "saf", "worker", "consumers:worker", "--drain"],
        env={"WAREHOUSE_DSN": mom.conninfo},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert states(mom) == ["disconnected_outbound"]
    forward(app, mom)
    assert said(receive(app, SHOP)) == ['{"delivered":2}', "saf/end-dialog"]


def test_two_services_of_one_database_talk_without_a_forwarder(folder: Path, app: Dsn) -> None:
    toml = folder / "saf.toml"
    toml.write_text(toml.read_text() + f'\n[destinations.shop]\ndsn = "{app.conninfo}"\n')
    out = shell(folder, "local")
    assert out.count("in force, local") == 2
    dialog = begin_dialog(app, "1", from_service="isbn-client", to_service="isbn-lookup")
    assert said(receive(app, "isbn-lookup")) == ["1"]
    say(app, dialog, "2")
    assert said(receive(app, "isbn-lookup")) == ["2"]
    worker = saf.Worker(app, "isbn-lookup")

    @worker.handler("lookup")
    def lookup(message: saf.Received, connection: Any) -> None:
        assert message.dialog is not None
        message.dialog.send(connection, "a title of " + message.text(), message_type="title")

    (code,) = blocks("wait")
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(SHOP_DSN=app.conninfo),
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        until(lambda: worker.drain() == 1)
        out, _ = program.communicate()
    assert out == "a title of 978-3-16-148410-0\n"


def test_a_saga_does_what_the_page_says(folder: Path, app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("CREATE TABLE refused (number text, why text)")
        for service in ("orders", "stock", "payment"):
            create_service(connection, service)
            saf.add_route(connection, "shop", service=service, local=True)
    (code,) = blocks("saga")
    (folder / "saga.py").write_text(code)

    def work() -> str:
        return shell(folder, "saga-shell", SHOP_DSN=app.conninfo)

    def reserve(connection: Any, message: saf.Received) -> None:
        assert message.dialog is not None
        assert message.message_type == "Reserve"
        message.dialog.send(connection, {}, message_type="Reserved")

    def pay(connection: Any, message: saf.Received) -> None:
        assert message.dialog is not None
        if message.json() == {"order": "A-1"}:
            message.dialog.send(connection, {}, message_type="Paid")
        else:
            message.dialog.end_with_error(connection, 2, "no money")

    for key in ("A-1", "A-2"):
        with app.connect(role="test") as connection:
            order = {"article": "book"}
            saf.Outbox().send(connection, "orders", order, key=key, message_type="PlaceOrder")
    assert work().count("started_outbound") == 2
    with connect(app) as connection:
        (own, *_) = saf.conversations(connection, service="orders", states=["started_outbound"])
    shown = run_saf("dialog", "show", str(own.handle), cwd=folder).stdout
    assert '"state": {"article": "book", "reserved": false}' in shown
    assert len(receive(app, "stock", reserve)) == 2
    work()
    assert len(receive(app, "payment", pay)) == 2
    assert "started_outbound" not in work()
    assert said(receive(app, "payment")) == ["saf/end-dialog"]
    assert sorted(said(receive(app, "stock"))) == ["saf/end-dialog", "saf/error"]
    with connect(app) as connection:
        assert fetch(connection, "SELECT number, why FROM refused") == [("A-2", "no money")]


def test_a_large_file_arrives_as_it_was(folder: Path, app: Dsn, mom: Dsn) -> None:
    drawing = random.Random(7).randbytes(3_500_000)
    (folder / "drawing.tiff").write_bytes(drawing)
    (code,) = blocks("large")
    dsns = {"SHOP_DSN": app.conninfo, "WAREHOUSE_DSN": mom.conninfo}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment(**dsns), cwd=folder
    ) as program:
        while program.poll() is None:
            forward(app, mom)
            time.sleep(0.1)
    assert program.returncode == 0
    assert (folder / "received.tiff").read_bytes() == drawing


@pytest.mark.full
def test_the_operators_commands_work_in_their_order(folder: Path, app: Dsn, mom: Dsn) -> None:
    shell(folder, "shell")
    dialog = begin(app)
    forward(app, mom)
    receive(mom, WAREHOUSE)
    out = shell(folder, "operator", HANDLE=str(dialog.handle))
    first = json.loads(out.splitlines()[0])["conversations"]
    assert [(one["broker"], one["state"], one["contract"]) for one in first] == [
        ("mom", "conversing", "ordering"),
        ("shop", "conversing", "ordering"),
    ]
    assert f"shop: conversation {dialog.handle} ended" in out
    assert f"shop: conversation {dialog.handle} closed" in out
    forward(app, mom)
    (error,) = receive(mom, WAREHOUSE)
    assert error.json() == {"code": 1, "text": "the shop is closed"}


@pytest.mark.full
def test_the_ends_compare_and_those_that_have_failed_are_shown(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    shell(folder, "shell")
    dialog = begin(app)
    forward(app, mom)
    receive(mom, WAREHOUSE)
    with connect(mom) as connection:
        # as a backup from before the dialog would have it
        connection.execute("DELETE FROM saf.conversation")
    out = shell(folder, "compare")
    assert "shop: 1 end will compare" in out
    assert "mom: 0 ends will compare" in out
    for _ in range(2):
        forward(app, mom)
        receive(mom, WAREHOUSE)
        receive(app, SHOP)
    shown = json.loads(run_saf("dialog", "list", "--json", cwd=folder).stdout)["conversations"]
    assert [(one["broker"], one["state"], one["error_code"]) for one in shown] == [
        ("mom", "error", Code.SET_BACK),
        ("shop", "error", Code.SET_BACK),
    ]
    assert "messages 1 to 1 were sent" in shown[0]["error_text"]
    assert str(dialog.handle) == shown[1]["handle"]
    found = json.loads(run_saf("doctor", "--json", cwd=folder).stdout)["findings"]
    dialogs = [one for one in found if one["check"] == "dialogs_set_back"]
    assert [one["severity"] for one in dialogs] == ["warning", "warning"]
    assert "saf dialog list --state error" in dialogs[0]["cure"]


def test_a_handle_that_nobody_knows_is_wrong_usage(folder: Path) -> None:
    for command in ("show", "end", "cleanup"):
        nobody = "6f1e0000-0000-4000-8000-000000000000"
        yes = ["--yes"] if command == "cleanup" else []
        done = run_saf("dialog", command, nobody, *yes, cwd=folder)
        assert done.returncode == USAGE
        assert f"no conversation {nobody}" in done.stderr


@pytest.mark.parametrize(
    ("text", "said_"),
    [
        ("[[contract]]", "unknown contract, only message_types, contracts"),
        ("[[contracts]]\nname = 'a'", "contracts.0: no types"),
        ("[[message_types]]\nname = 'a'\nvalid = 1", "message_types.0: unknown valid"),
        ("[[", "not TOML"),
    ],
)
def test_a_file_of_contracts_that_cannot_be_is_refused_with_the_entry(
    tmp_path: Path, text: str, said_: str
) -> None:
    (tmp_path / "contracts.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=said_):
        _read(tmp_path / "contracts.toml")


def test_the_page_draws_the_table_of_transitions() -> None:
    drawn = set(re.findall(r"^    (\w+) --> (\w+):", PAGE, re.MULTILINE))
    table = {
        (str(state), str(to))
        for state, events in TRANSITIONS.items()
        for event, to in events.items()
        if event != "end_with_error" and state != to
    }
    assert {(a, b) for a, b in drawn if a != b} == table
