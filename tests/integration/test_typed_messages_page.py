"""The blocks of docs/typed-messages.md do what the page says."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from saf.broker.embedded import programs
from saf.config import load
from saf.database import Dsn, fetch
from saf.destinations.kafka import Kafka
from tests.pages import blocks, page, prepared, shell
from tests.pipeline import connect, forward
from tests.programs import BIN, INSTALLED, run

PAGE = page("typed-messages.md")
WITH_PSQL = f"{INSTALLED}:{programs(18)}"


def block(name: str) -> str:
    (code,) = blocks(PAGE, name)
    return code


@pytest.fixture
def folder(tmp_path: Path, app: Dsn, mom: Dsn) -> Path:
    """The page's files, of the first version."""
    prepared(tmp_path, app, mom)
    for name in ("events.py", "send.py", "billing.py", "plan.toml"):
        (tmp_path / name).write_text(block(name))
    shell(block("table"), tmp_path, app, mom, path=WITH_PSQL)
    return tmp_path


def in_folder(folder: Path, app: Dsn, mom: Dsn, *command: str, code: int = 0) -> str:
    env = {"SHOP_DSN": app.conninfo, "MOM_DSN": mom.conninfo}
    done = run(command, cwd=folder, env=env)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_an_order_is_sent_received_and_received_in_its_next_version(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    in_folder(folder, app, mom, sys.executable, "send.py")
    with connect(app) as shop:
        assert fetch(shop, "SELECT message_type, key, body FROM saf.outbox") == [
            ("OrderPlaced", "A-1", b'{"number":"A-1","total":"19.90"}')
        ]
    forward(app, mom=mom)
    # the first version is still on its way when the receiver has the next one
    (folder / "events.py").write_text(block("next/events.py"))
    text = (folder / "billing.py").read_text()
    text = text.replace("(%s, %s)", "(%s, %s, %s)")
    text = text.replace("order.total]", "order.total, order.currency]")
    (folder / "billing.py").write_text(text)
    in_folder(folder, app, mom, str(BIN / "saf"), "worker", "billing:worker", "--drain")
    with connect(mom) as store:
        assert fetch(store, "SELECT * FROM invoice") == [("A-1", Decimal("19.90"), "CHF")]


def test_the_first_version_is_handled(folder: Path, app: Dsn, mom: Dsn) -> None:
    said = shell(block("run"), folder, app, mom, path=WITH_PSQL)
    assert "(mom: 1)" in said
    assert " A-1    | 19.90" in said


def test_a_dataclass_is_not_validated_when_it_is_sent(folder: Path, app: Dsn, mom: Dsn) -> None:
    sent = block("send.py").replace('Decimal("19.90")', '"abc"')
    (folder / "send.py").write_text(sent)
    in_folder(folder, app, mom, sys.executable, "send.py")
    forward(app, mom=mom)
    done = run(
        [BIN / "saf", "worker", "billing:worker", "--drain"],
        cwd=folder,
        env={"MOM_DSN": mom.conninfo},
        tracebacks=True,  # the worker logs that of the body
    )
    assert "made 1 dead letter" in done.stdout


def test_the_commands_store_and_publish_the_schemas(folder: Path, app: Dsn, mom: Dsn) -> None:
    for script in blocks(PAGE, "shell"):
        shell(script, folder, app, mom)
    with connect(mom) as store:
        ((name, version, schema),) = fetch(
            store, "SELECT name, version, schema FROM saf.message_type"
        )
    assert (name, version, schema["required"]) == ("OrderPlaced", 1, ["number", "total"])
    received = json.loads((folder / "billing.asyncapi.json").read_text())
    assert received["operations"]["receive-billing"]["action"] == "receive"
    sent = json.loads((folder / "shop.asyncapi.json").read_text())
    assert (sent["info"]["title"], list(sent["operations"])) == ("The shop", ["send-billing"])


def test_a_version_that_cannot_read_the_stored_one_is_refused_as_shown(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    apply = (str(BIN / "saf"), "apply", "plan.toml")
    in_folder(folder, app, mom, *apply, "--yes")
    events = block("next/events.py")
    without_upcaster = events.partition("\n\n@saf.upcaster")[0]
    (folder / "events.py").write_text(without_upcaster)
    assert block("refusal") in in_folder(folder, app, mom, *apply, "--yes", code=2)
    shown = in_folder(folder, app, mom, *apply, "--dry-run")
    assert "mom: OrderPlaced version 2 cannot read version 1: currency is required now" in shown
    (folder / "events.py").write_text(events)
    shown = in_folder(folder, app, mom, *apply, "--dry-run")
    assert "upcasts 1" in shown
    assert "cannot read" not in shown
    (folder / "events.py").write_text(without_upcaster)
    with connect(mom) as store:
        versions = "SELECT version FROM saf.message_type ORDER BY 1"
        assert fetch(store, versions) == [(1,)]
        in_folder(folder, app, mom, *apply, "--yes", "--allow-breaking")
        assert fetch(store, versions) == [(1,), (2,)]


def test_the_destination_is_one_that_saf_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "hunter2-canary")
    source = '[brokers.shop]\ndsn = "postgresql://nowhere/shop"\n\n'
    (tmp_path / "saf.toml").write_text(source + block("kafka.toml"))
    events = load(tmp_path / "saf.toml").destinations["events"]
    assert isinstance(events, Kafka)
    assert events.encodes
