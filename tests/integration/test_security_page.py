"""docs/security.md says what each role can do, and its commands work."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

import saf
from saf.broker.grants import Kind, grant
from saf.database import Dsn
from saf.routing.routers import add_router
from saf.routing_service import RoutingService
from tests.pages import blocks, page, prepared, shell
from tests.pipeline import connect, forward
from tests.programs import BIN, run

pytestmark = pytest.mark.full


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Where saf.toml is."""
    return prepared(tmp_path, app, mom)


def test_the_commands_of_the_security_page_work_as_they_stand(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    script = "".join(blocks(page("security.md"), "shell"))
    # roles are the server's, which other tests share
    mine = {name: f"{name}_{app.database}" for name in ("shop_app", "saf_forward")}
    for name, own in mine.items():
        script = re.sub(rf"\b{name}\b", own, script)
    said = shell(script, folder, app, mom)
    assert "GRANT INSERT" in said  # by --dry-run


def test_the_page_of_security_has_every_kind_of_role() -> None:
    for kind in Kind:
        assert f"| `{kind}` |" in page("security.md")


def test_what_the_shop_signs_billing_takes_and_nothing_else(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    keys = next(one for one in blocks(page("security.md"), "shell") if "openssl" in one)
    shell(keys, prepared(tmp_path, app, mom), app, mom)
    for name, of in (("shop.toml", "sending.md"), ("billing.toml", "receiving.md")):
        (settings,) = blocks(page(of), "signed-settings")
        (tmp_path / name).write_text(settings)
    (sends,) = blocks(page("sending.md"), "signed")
    done = run([sys.executable, "-c", sends], env={"DSN": app.conninfo}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with connect(app) as connection, connection.transaction():
        saf.Outbox(from_service="shop").send(connection, "billing", {"order": "A-2"})
    forward(app, mom=mom)
    (receives,) = blocks(page("receiving.md"), "signed")
    (tmp_path / "consumers.py").write_text(receives)
    done = run(
        [BIN / "saf", "worker", "consumers:worker", "--drain"],
        env={"INBOX": mom.conninfo},
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == [
        "shop-2026 shop A-1",
        "handled 1 message, made 1 dead letter",
    ]
    assert done.returncode == 1
    assert "message_refused" in done.stderr
    listed = shell("saf dead list --broker mom --reason unsigned --json", tmp_path, app, mom)
    (letter,) = json.loads(listed)["dead_letters"]
    assert (letter["reason"], letter["error"]) == ("unsigned", "it is not signed")
    private = (tmp_path / "shop-2026.pem").read_text().splitlines()[1]
    assert private not in done.stdout + done.stderr + listed


SEND = "INSERT INTO saf.outbox (to_service, from_service, body) VALUES ('billing', 'anybody', '')"
DELIVER = (
    "INSERT INTO saf.inbox (message_id, to_service, body, created_at) VALUES ({}, 'b', '', now())"
)
WORST = (
    ("writer", SEND, True),
    ("writer", "SELECT FROM saf.outbox", False),
    (
        "writer",
        "INSERT INTO saf.outbox (to_service, body, created_at) VALUES ('b', '', now())",
        False,
    ),
    ("writer", "INSERT INTO saf.outbox (to_service, body, txid) VALUES ('b', '', '99')", False),
    ("forwarder", "SELECT body FROM saf.outbox", True),
    ("forwarder", DELIVER.format("gen_random_uuid()"), True),
    ("forwarder", SEND, False),
    ("forwarder", "SELECT body FROM saf.dead_letter", False),
    ("forwarder", "TRUNCATE saf.outbox_0", False),
    ("receiver", "SELECT body FROM saf.inbox", True),
    ("receiver", "UPDATE saf.cursor SET done = pg_current_snapshot()", True),
    ("receiver", "SELECT FROM saf.outbox", False),
    ("receiver", SEND, False),
    ("purger", "TRUNCATE saf.outbox_3", True),
    ("purger", SEND, False),
    ("operator", "SELECT body FROM saf.dead_letter", True),
    (
        "operator",
        "INSERT INTO saf.router (service, kind, expression) VALUES ('r', 'python', 'o:p')",
        True,
    ),
    ("operator", DELIVER.format("gen_random_uuid()"), True),
    ("operator", "UPDATE saf.cursor SET done = pg_current_snapshot()", False),
    ("operator", "UPDATE saf.watermark SET position = 0", False),
)


def test_each_kind_of_role_can_at_worst_what_the_security_page_says(app: Dsn) -> None:
    role = f"worst_{app.database}"
    with connect(app) as owner:
        owner.execute(f"CREATE ROLE {role}")
        try:
            for kind in dict.fromkeys(kind for kind, _, _ in WORST):
                grant(owner, role, [Kind(kind)])
                for may in (one for one in WORST if one[0] == kind):
                    with owner.transaction(force_rollback=True):
                        owner.execute(f"SET LOCAL ROLE {role}")
                        refused = None
                        try:
                            owner.execute(may[1].encode())
                        except psycopg.errors.InsufficientPrivilege as error:
                            refused = error
                        assert (refused is None) is may[2], may
        finally:
            owner.execute(f"DROP OWNED BY {role}")
            owner.execute(f"DROP ROLE {role}")


ROUTED = """
import os

import psycopg

import saf

with psycopg.connect(os.environ["DSN"]) as connection:
    for signer in (saf.config.load_signer(), None):
        outbox = saf.Outbox(from_service="shop", signer=signer)
        outbox.send(connection, "departures", "billing")
"""


def test_billing_verifies_the_shop_behind_a_routing_service(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], tmp_path: Path
) -> None:
    hub = new_broker("hub")
    keys = next(one for one in blocks(page("security.md"), "shell") if "openssl" in one)
    shell(keys, prepared(tmp_path, app, mom), app, mom)
    for name, of in (("shop.toml", "sending.md"), ("billing.toml", "receiving.md")):
        (settings,) = blocks(page(of), "signed-settings")
        if name == "billing.toml":
            settings = '[signing]\nredirected_from = ["departures"]\n\n' + settings
        (tmp_path / name).write_text(settings)
    sends = ROUTED.replace("import saf\n", "import saf\nimport saf.config\n")
    env = {"DSN": app.conninfo, "SAF_CONFIG": "shop.toml"}
    done = run([sys.executable, "-c", sends], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with connect(hub) as connection:
        saf.create_service(connection, "departures")
        add_router(
            connection, "departures", "python", "tests.classifiers:by_body_once", mode="forward"
        )
        saf.add_route(connection, "mom", service="billing")
    with connect(app) as connection:
        saf.add_route(connection, "hub", service="departures")
    forward(app, hub=hub)
    RoutingService(hub, "departures").drain()
    forward(hub, mom=mom)
    (receives,) = blocks(page("security.md"), "origin")
    (tmp_path / "consumers.py").write_text(receives)
    done = run(
        [BIN / "saf", "worker", "consumers:worker", "--drain"],
        env={"INBOX": mom.conninfo, "SAF_CONFIG": "billing.toml"},
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == [
        "shop-2026 shop None",
        "handled 1 message, made 1 dead letter",
    ]
