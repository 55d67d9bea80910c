"""Each end that docs/where-messages-end.md names is reached, and shown by the page's commands."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import saf as library
from saf.broker.services import create_service, create_subscription, remove_subscription
from saf.database import Dsn
from saf.dialogs.conversations import clean_up
from saf.failpoints import arm
from saf.operating import decide
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.setaside import dead
from saf.setaside.dropped import Reason
from saf.setaside.selection import DeadLetters
from tests import expiring
from tests.crash.evaluated import run_transforming, transforming_rules
from tests.destinations import NOWHERE, send_to
from tests.dialogs import SHOP, WAREHOUSE, begin, prepare, put, receive
from tests.dying import Crash, crash
from tests.pipeline import Cycle, connect, drain, forwarding_rules
from tests.programs import ROOT, activated, configuration, run, saf
from tests.signing import hmac_key, signer

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("disarmed")]

LATER = """
INSERT INTO saf.outbox (to_service, body, deliver_at)
VALUES ('billing', 'later', now() + interval '9 h')
"""
PAGE = (ROOT / "docs" / "where-messages-end.md").read_text()


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    return tmp_path


def table(heading: str) -> list[str]:
    """The first column of a section's table."""
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def forward(app: Dsn, mom: Dsn) -> None:
    rules = replace(forwarding_rules("exactly_once", 100, mom=mom, down=NOWHERE), max_bytes=1024)
    with Cycle(app, rules) as cycle:
        cycle.default = None
        drain(cycle)


def leave_out(app: Dsn, mom: Dsn) -> None:
    """A message of which its transform makes nothing."""
    with connect(app) as connection:
        add_route(connection, "mom", service="events")
        send_to(connection, "events", "events-0 7 t -")
    rules = transforming_rules(forwarding_rules(mom=mom), ["events"])
    with Cycle(app, rules) as cycle:
        for number, item in enumerate(cycle.open()):
            run_transforming(number, item, rules)


def send_all(app: Dsn, mom: Dsn) -> None:
    """A message for each end that is reached at the source."""
    add = expiring.send
    with connect(mom) as store, connect(app) as connection:
        for service in ("billing", "once"):
            create_service(store, service)
        store.execute("ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (body <> 'x')")
        for service in ("billing", "unknown", WAREHOUSE):
            add_route(connection, "mom", service=service)
        add_route(connection, "mom", service="once", quality="at_most_once")
        add_route(connection, "down", service="far")
        add_router(connection, "router", "arrow", "tests.classifiers:by_body")
        with connection.transaction():
            add(connection, "once", "once")
        arm("mom_insert", crash)
        with pytest.raises(Crash):
            forward(app, mom)
        past = datetime.now(UTC) - timedelta(seconds=1)
        with connection.transaction():
            add(connection, "billing", "bad")
            connection.execute(LATER)
            add(connection, "billing", "not now", key="k")
            add(connection, "billing", "x")
            add(connection, "billing", "too late", expires_at=past)
            add(connection, "billing", "L" * 2000)
            add(connection, "router", "nobody")
            for service in ("unknown", "far", "no route"):
                add(connection, service, "waits")
            add(connection, "billing", "a stranger's", to_broker=uuid4())
    forward(app, mom)


def refuse_all(app: Dsn, mom: Dsn) -> None:
    """A message for each reason of a receiver that requires signatures."""
    with connect(mom) as store:
        create_service(store, "careful")
    signers = {"nobody": None, "bank": signer(key_id="bank"), "shop": signer(key_id="shop")}
    with app.connect(role="test") as connection:
        add_route(connection, "mom", service="careful")
        for name, one in signers.items():
            library.Outbox(signer=one).send(connection, "careful", name)
    forward(app, mom)
    with connect(mom) as store:
        store.execute("UPDATE saf.inbox SET body = 'shop!' WHERE body = 'shop'")
    with library.receive(mom, "careful", require_signed=True, keys={"shop": hmac_key()}) as none:
        assert not none


def receive_all(app: Dsn, mom: Dsn) -> None:
    """A message for each end that is reached by a receiver."""
    with library.receive(mom, "billing") as delivery:
        for message in delivery:
            if message.text() == "bad":
                delivery.reject(message, "no")
            if message.text() == "not now":
                delivery.park(message, "not now")
    refuse_all(app, mom)
    talk = begin(app, "1")
    begin(app, "late", lifetime=0.01)
    failed = begin(app, "never heard")
    ended = begin(app, "1")
    with app.connect(role="test") as connection:
        failed.end_with_error(connection, 1, "no")
        talk.start_timer(connection, 0)
        talk.stop_timer(connection)
    time.sleep(0.02)  # the lifetime
    forward(app, mom)

    def end(connection: Any, message: library.Received) -> None:
        if message.conversation_id == ended.conversation_id:
            assert message.dialog is not None
            message.dialog.end(connection)

    receive(mom, WAREHOUSE, end)
    put(mom, talk, 1, "again")
    put(mom, talk, 3, "ahead")
    put(mom, ended, 2, "after the end")
    large = begin(app, "1")
    forward(app, mom)
    put(mom, large, 2, "half", headers='{"saf-fragment": 1}')
    put(mom, replace(talk, conversation_id=uuid4(), is_initiator=False), 1, "stray")
    (message,) = [one for one in receive(mom, WAREHOUSE) if one.sequence == 1]
    assert message.dialog is not None
    with connect(mom) as connection:
        clean_up(connection, message.dialog.handle)
    receive(app, SHOP)


def test_every_end_is_reached_and_the_pages_commands_show_it(
    app: Dsn, mom: Dsn, folder: Path
) -> None:
    prepare(app, mom)
    send_all(app, mom)
    receive_all(app, mom)
    with connect(mom) as connection:
        create_subscription(connection, "more", service="billing")
        remove_subscription(connection, "more", discard=True)
        connection.execute("INSERT INTO saf.service (name) VALUES ('unheard')")
    with connect(app) as connection:
        assert len(decide.discard(connection, DeadLetters(reason="rejected"), "nobody asks")) == 1

    def answer(*command: str, of: str) -> list[dict[str, Any]]:
        done = saf(*command, "--json", cwd=folder)
        found = json.loads(done.stdout)[of]
        assert isinstance(found, list)
        return found

    waiting = answer("parked", "list", "--broker", "shop", of="parked")
    lanes = {(one["destination"], one["kind"]) for one in waiting}
    assert lanes == {("down", "main"), ("", "route"), ("mom", "service")}
    assert any(one["to_broker"] for one in waiting)
    waiting = answer("parked", "list", "--broker", "mom", of="parked")
    assert {one["kind"] for one in waiting} == {"key", "later", "ahead"}

    letters = answer("dead", "list", of="dead_letters")
    assert {one["broker"] for one in letters} == {"shop", "mom"}
    # a source makes the last one; see tests/contract/test_sources.py
    reached = {one["reason"] for one in letters} | {"rejected", "undecodable"}
    assert reached == set(dead.REASONS) == {one.strip("`") for one in table("Dead letters")}
    audit = answer("dead", "audit", "--broker", "shop", of="audit")
    assert [(one["action"], one["messages"], one["why"]) for one in audit] == [
        ("discard", 1, "nobody asks")
    ]
    (given_up,) = answer("dead", "audit", "--broker", "mom", of="audit")
    assert given_up["why"].startswith("subscription 'more' is removed, and has 3 messages")

    commands = re.findall(r"<!-- test: shell -->\n```sh\n(.*?)```", PAGE, re.DOTALL)
    script = "".join(commands).replace("saf doctor ", "saf doctor || true ")
    done = run(
        ["bash", "-euc", script],
        env={"PATH": activated()},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    for said in (
        "mom 1 warehouse repeat 2",
        "shop 1 shop outdated 2",
        "discard 1 nobody asks",
        "service 'unheard' has no subscription",
    ):
        assert said in " ".join(done.stdout.split())
    inline = set(re.findall(r"`(saf [a-z]+(?: [a-z-]+)?)`", PAGE))
    tried = (
        "".join(commands)
        + "saf dead retry saf dead discard saf dialog cleanup saf purge saf status"
    )
    assert [one for one in sorted(inline) if one not in tried] == []

    leave_out(app, mom)  # now, because saf reconcile takes it for lost
    gone = answer("inbox", "status", "--broker", "mom", of="dropped")
    (status,) = answer("status", of="brokers")
    reasons = {one["reason"] for one in [*gone, *status["dropped"]]}
    assert reasons == set(Reason) == {one.strip("`") for one in table("Dropped")}
    assert all(one["messages"] == 1 for one in gone)
