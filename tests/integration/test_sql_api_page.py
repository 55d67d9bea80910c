"""docs/sql-api.md and the examples that it names: each block is run by psql, as a reader would."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg import sql

from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.routing.routes import add_route
from tests.dialogs import SHOP, WAREHOUSE, forward, prepare
from tests.pages import blocks, page, shell
from tests.pipeline import connect
from tests.programs import ROOT, activated, run
from tests.talks import answered, answers, before, house_of

PAGE = page("sql-api.md")
EXAMPLES = ROOT / "examples"
STORE = "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'A', '{}')"
CONSTRAINTS = """
SELECT DISTINCT (regexp_matches(prosrc, '''([a-z]+_[a-z]+)'',? (?:format|checked)', 'g'))[1]
FROM pg_proc WHERE pronamespace = 'saf'::regnamespace AND prosrc ~ 'refuse_dialog'
"""


def psql(script: str, dsn: Dsn) -> str:
    """Return what psql says of a script; each statement has to succeed."""
    done = attempted(script, dsn)
    assert done.returncode == 0, done.stderr
    return done.stdout


def attempted(script: str, dsn: Dsn) -> subprocess.CompletedProcess[str]:
    """Run psql with a script, up to its first error."""
    command = 'psql -X -q -A -t -v ON_ERROR_STOP=1 -d "$DSN" -f - <<< "$SCRIPT"'
    env = {"PATH": os.environ["PATH"], "DSN": dsn.conninfo, "SCRIPT": script}
    return run(["bash", "-c", command], env=env)


@pytest.fixture
def billing(app: Dsn) -> Dsn:
    with connect(app) as connection:
        create_service(connection, "billing")
        for _ in range(3):
            connection.execute(STORE.encode())
    return app


def drained(dsn: Dsn, script: str) -> str:
    """Return what psql says once a receiver has found something."""
    for _ in range(10):
        if said := psql(script, dsn).strip():
            return said
    raise AssertionError("nothing was received")


def test_the_blocks_receive_messages(billing: Dsn) -> None:
    shown, statement = blocks(PAGE, "receive")
    assert drained(billing, shown).count("|A|{}|1") == 3
    with connect(billing) as connection:
        connection.execute(STORE.encode())
    psql(statement, billing)
    assert psql("SELECT body FROM paid", billing) == "{}\n"


def test_the_blocks_set_a_message_aside(billing: Dsn) -> None:
    (fail,) = blocks(PAGE, "fail")
    assert psql(fail, billing).strip() == "waits"
    waits = "SELECT error, next_attempt_at > now() + interval '20 s' FROM saf.backoff"
    assert psql(waits, billing) == "the bank does not answer|t\n"
    psql("UPDATE saf.backoff SET next_attempt_at = now()", billing)
    (reject,) = blocks(PAGE, "reject")
    psql(reject, billing)
    assert psql("SELECT reason, error FROM saf.dead_letter", billing) == "failed|no such order\n"


def test_the_block_begins_and_ends_a_dialog(app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)
    (dialog,) = blocks(PAGE, "dialog")
    psql(dialog, app)
    forward(app, mom)
    received = "SELECT message_type FROM saf.receive('warehouse')"
    assert [drained(mom, received) for _ in range(2)] == ["order", "saf/end-dialog"]


def test_the_block_receives_one_dialog(app: Dsn) -> None:
    house_of(app)
    dialog = answered(app)
    before(app, dialog, "plain")
    answers(app, dialog, "mine")
    (chosen,) = blocks(PAGE, "chosen")
    assert psql(f"\\set dialog {dialog.handle}\n{chosen}", app) == "|mine\n"


def test_the_roles_may_do_what_the_page_says_and_nothing_else(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    prepare(app, mom)
    roles = [f"{name}_{app.database}" for name in ("shop_app", "warehouse_app")]
    with connect(app) as connection:
        for role in roles:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
    try:
        (grants,) = blocks(PAGE, "shell")
        for name, role in zip(("shop_app", "warehouse_app"), roles, strict=True):
            grants = grants.replace(name, role)
        shell(grants, tmp_path, app, mom)
        send = "SELECT message_id FROM saf.send('warehouse', 'a'::text)"
        begin = "SELECT saf.say(saf.begin_dialog('warehouse', 'shop'), 'a'::text)"
        receive = "SELECT count(*) FROM saf.receive('warehouse')"
        assert allowed(app, roles[0], (send, begin, receive)) == [True, False, False]
        assert allowed(mom, roles[1], (send, begin, receive)) == [True, True, True]
        shell(f'saf grant --role receiver {roles[1]} --dsn "$MOM_DSN"', tmp_path, app, mom)
        assert allowed(mom, roles[1], (send, begin, receive)) == [False, False, True]
        shell(f'saf grant --role dialog {roles[1]} --dsn "$MOM_DSN"', tmp_path, app, mom)
        assert allowed(mom, roles[1], (send, begin, receive)) == [False, True, False]
    finally:
        for role in roles:
            for dsn in (app, mom):
                psql(f'DROP OWNED BY "{role}"', dsn)
            psql(f'DROP ROLE "{role}"', app)


def allowed(dsn: Dsn, role: str, statements: tuple[str, ...]) -> list[bool]:
    found = []
    for statement in statements:
        done = attempted(f'SET ROLE "{role}";\n{statement};', dsn)
        assert done.returncode == 0 or "permission denied for function" in done.stderr, done.stderr
        found.append(done.returncode == 0)
    return found


def test_the_page_names_each_constraint_of_the_functions(app: Dsn) -> None:
    with connect(app) as connection:
        named = {name for (name,) in fetch(connection, CONSTRAINTS)}
    assert {"dialog_known", "dialog_over", "contract_known"} <= named
    for name in (*named, "argument_valid", "may_receive"):
        assert f"`{name}`" in PAGE


@pytest.fixture
def sides(app: Dsn, new_broker: Callable[[str], Dsn]) -> dict[str, Dsn]:
    there = new_broker("warehouse")
    for dsn, service in ((app, SHOP), (there, WAREHOUSE)):
        with connect(dsn) as connection:
            create_service(connection, service)
    return {"SHOP_DSN": app, "WAREHOUSE_DSN": there}


def test_the_listing_of_a_dialog_runs_in_psql(sides: dict[str, Dsn]) -> None:
    env = {name: dsn.conninfo for name, dsn in sides.items()}
    app = sides["SHOP_DSN"]
    done = run(
        ["psql", "-X", "-q", "-A", "-t", "-d", app.conninfo, "-f", "dialog.sql"],
        env={"PATH": activated(), **env},
        cwd=EXAMPLES,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "A-1|2" in said
    assert 'delivery|{"amount": 2, "article": "A-1"}|t' in said
    assert 'saf/error|{"code": 17, "text": "we do not have that many"}|f' in said
    assert said[said.index("== Both sides are closed") + 1 :] == ["warehouse|closed"] * 2
    with connect(sides["SHOP_DSN"]) as connection:
        assert fetch(connection, "SELECT state FROM saf.conversation") == [("closed",)] * 2


def test_two_services_of_one_database_talk_in_psql_alone(app: Dsn) -> None:
    with connect(app) as connection:
        for service in ("isbn-client", "isbn-lookup"):
            create_service(connection, service)
            add_route(connection, "shop", service=service, local=True)
    done = run(
        ["psql", "-X", "-q", "-A", "-t", "-d", app.conninfo, "-f", "isbn.sql"],
        env={"PATH": os.environ["PATH"]},
        cwd=EXAMPLES,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "isbn|978-1-55860-190-1" in said
    assert "saf/end-dialog" in said
    assert said[-2:] == ["isbn-client|closed", "isbn-lookup|closed"]
    with connect(app) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.outbox") == [(0,)]


@pytest.mark.full
def test_the_service_in_go_answers_its_dialogs(sides: dict[str, Dsn], tmp_path: Path) -> None:
    app, there = sides.values()
    folder = shutil.copytree(EXAMPLES / "with_go", tmp_path / "with_go")
    psql(
        "SELECT saf.begin_dialog('shop', 'warehouse') AS dialog \\gset\n"
        "SELECT saf.say(:'dialog', '{\"Item\": \"A-1\"}'::jsonb, message_type => 'order');\n"
        "SELECT saf.say(:'dialog', 'nonsense'::text, message_type => 'order');\n"
        "SELECT saf.send('warehouse', '{}'::jsonb);",
        app,
    )
    forward(app, there)
    home = os.environ["HOME"]
    done = run(
        ["go", "run", "."],
        env={"PATH": os.environ["PATH"], "HOME": home, "DSN": there.conninfo},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == 'order {"Item": "A-1"}'
    with connect(there) as connection:
        assert (
            fetch(connection, "SELECT error FROM saf.dead_letter")
            == [("not an order in a dialog",)] * 2
        )
    forward(there, app)
    answers = "SELECT convert_from(body, 'UTF8') FROM saf.receive('shop')"
    assert drained(app, answers) == '{"delivered": "A-1"}'
