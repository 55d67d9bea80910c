"""Captures and backfills as an operator types them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import psycopg
import pytest

from saf.broker.grants import Kind, grant
from saf.capture import backfill
from saf.capture.stored import Declaration, listed, named, review
from saf.cli.capture import _write
from saf.config import load
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from saf.operating.doctor import Finding, Limits, examine
from tests.captures import capture, ops
from tests.pipeline import connect
from tests.programs import configuration
from tests.programs import saf as run_saf
from tests.roles import as_user

ADD = (
    *("capture", "add", "orders", "--service", "billing", "--key", "number"),
    *("--columns", "number, total", "--when", "new.status = 'paid'"),
)
AUDITED = "SELECT action, why FROM saf.audit ORDER BY audit_id"


@pytest.fixture
def folder(tmp_path: Path, source: psycopg.Connection[object], app: Dsn, mom: Dsn) -> Path:
    source.execute("CREATE TABLE orders (number bigint PRIMARY KEY, status text, total numeric)")
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    return tmp_path


def said(folder: Path, *arguments: str) -> str:
    done = run_saf(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(folder: Path, *arguments: str, code: int = 2) -> str:
    done = run_saf(*arguments, cwd=folder)
    assert done.returncode == code, done.stdout
    return done.stderr


def test_a_capture_is_shown_before_it_is_written_and_asked_about(folder: Path, app: Dsn) -> None:
    text = said(folder, *ADD, "--dry-run")
    assert "CREATE OR REPLACE FUNCTION saf." in text
    assert "new.status = 'paid'" in text
    assert text.count("CREATE OR REPLACE TRIGGER") == 4
    assert "nothing is done yet: Write it? Add --yes to confirm" in refused(folder, *ADD)
    with connect(app) as connection:
        assert listed(connection) == []
        assert fetch(connection, "SELECT FROM pg_proc WHERE proname LIKE 'capture\\_%%'") == []
        # what was shown is what is written
        done = said(folder, *ADD, "--yes", "--why", "for billing")
        assert done == text + "shop: capture of 'public.orders' added\n"
        again = said(folder, *ADD, "--yes")
        assert again.endswith("shop: capture of 'public.orders' unchanged\n")
        assert fetch(connection, AUDITED) == [("add capture public.orders", "for billing")]
        connection.execute("INSERT INTO orders VALUES (1, 'paid', 2), (2, 'open', 3)")
        assert ops(connection) == [("1", "insert")]


def test_what_was_shown_can_be_run_by_hand(folder: Path, app: Dsn) -> None:
    text = said(folder, *ADD, "--dry-run")
    with connect(app) as connection:
        connection.execute(text)
        connection.execute("INSERT INTO orders VALUES (1, 'paid', 2)")
        assert ops(connection) == [("1", "insert")]


def test_captures_are_listed_shown_and_removed(folder: Path, app: Dsn) -> None:
    said(folder, *ADD, "--yes", "--from", "shop")
    assert re.search(r"public\.orders +billing +number +2 +active", said(folder, "capture", "list"))
    shown = said(folder, "capture", "show", "orders")
    for text in ("number, total", "new.status = 'paid'", "orders.insert, orders.update", "shop"):
        assert text in shown
    (written,) = re.findall(r"written by +saf (.*)", shown)
    with connect(app) as connection:
        connection.execute("ALTER TABLE orders DISABLE TRIGGER saf_capture_update")
    (found,) = json.loads(said(folder, "capture", "show", "orders", "--json"))["captures"]
    assert found["differences"] == ["table public.orders: trigger saf_capture_update is disabled"]
    assert "saf_capture_update is disabled" in said(folder, "capture", "list")
    # the command that it shows repairs it

    assert "changed" in said(folder, *shlex.split(written), "--yes")
    (found,) = json.loads(said(folder, "capture", "list", "--json"))["captures"]
    assert (found["differences"], found["broker"], found["when"]) == (
        *([], "shop"), "new.status = 'paid'",
    )  # fmt: skip
    assert "Later changes are not sent. Add --yes" in refused(folder, "capture", "remove", "orders")
    done = said(folder, "capture", "remove", "orders", "--yes", "--why", "moved")
    assert done == "shop: capture of 'public.orders' removed\n"
    assert said(folder, "capture", "list").startswith("No captures at shop.")
    assert "table 'orders' has no capture" in refused(folder, "capture", "show", "orders")
    with connect(app) as connection:
        assert fetch(connection, AUDITED)[-1] == ("remove capture public.orders", "moved")


def test_a_mistake_is_one_sentence(folder: Path) -> None:
    bad = ("capture", "add", "orders", "--service", "s", "--dry-run")
    assert "did you mean 'number'?" in refused(folder, *bad, "--key", "nummer")
    assert "--columns ',': expected names with commas" in refused(folder, *bad, "--columns", ",")
    assert "column new.x does not exist" in refused(folder, *bad, "--when", "new.x > 1")
    assert "has no capture" in refused(folder, "backfill", "orders")
    assert "--rate 'x' is not a rate" in refused(folder, "backfill", "orders", "--rate", "x")


def test_a_backfill_runs_by_the_name_of_its_table_and_is_listed(folder: Path, app: Dsn) -> None:
    said(folder, "capture", "add", "orders", "--service", "billing", "--yes")
    with connect(app) as connection, connection.transaction():
        connection.execute("SET LOCAL session_replication_role = replica")
        connection.execute("INSERT INTO orders SELECT n, 'old', n FROM generate_series(1, 30) AS n")
    text = said(folder, "backfill", "orders", "--where", "number > 10", "--why", "new reader")
    assert text == "shop: 20 messages of 'public.orders', done; 20 messages in all\n"
    text = said(folder, "backfill", "run", "public.orders", "--chunk", "7")
    assert text == "shop: 30 messages of 'public.orders', done; 30 messages in all\n"
    assert re.search(
        r"orders +\d+ +done +20 +30 +\S+ \S+ +number > 10", said(folder, "backfill", "list")
    )
    first, second = json.loads(said(folder, "backfill", "list", "--json"))["backfills"]
    assert (first["condition"], second["chunk_rows"], second["state"]) == ("number > 10", 7, "done")
    with connect(app) as connection:
        assert fetch(connection, AUDITED)[1:] == [
            ("backfill public.orders", "new reader"), ("backfill public.orders", ""),
        ]  # fmt: skip


def test_an_operator_pauses_resumes_and_cancels_but_only_the_owner_runs(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        capture(connection)
        connection.execute("CREATE ROLE clerk_2 LOGIN")
        grant(connection, "clerk_2", [Kind.OPERATOR])
        backfill.run(connection, named(connection, "orders"), backfill.Wanted(), lambda: True)
        try:
            configuration(folder / "saf.toml", {"shop": as_user(app, "clerk_2")}, {"mom": mom})
            assert said(folder, "backfill", "pause", "orders") == (
                "shop: backfill of 'public.orders' paused\n"
            )
            assert "paused" in said(folder, "backfill", "list")
            assert "was paused by 'clerk_2'" in refused(folder, "backfill", "orders")
            assert "may continue: `saf backfill public.orders`" in said(
                folder, "backfill", "resume", "orders"
            )
            assert refused(folder, "backfill", "orders")
            said(folder, "backfill", "cancel", "orders", "--why", "enough")
            assert "has no open backfill" in refused(folder, "backfill", "cancel", "orders")
            assert [action for action, _ in fetch(connection, AUDITED)] == [
                f"{verb} backfill public.orders" for verb in ("pause", "resume", "cancel")
            ]
        finally:
            connection.execute("DROP OWNED BY clerk_2; DROP ROLE clerk_2")


def doctor(folder: Path, check: str, limits: Limits = Limits()) -> list[Finding]:  # noqa: B008
    found = examine(load(folder / "saf.toml"), limits=limits)
    return [one for one in found if one.check == check and one.severity != "ok"]


def test_the_doctor_finds_a_capture_that_drifted_and_its_cure_is_a_command(
    folder: Path, app: Dsn
) -> None:
    said(folder, *ADD, "--yes")
    assert doctor(folder, "captures") == []
    with connect(app) as connection:
        connection.execute("DROP TRIGGER saf_capture_insert ON orders")
    (found,) = doctor(folder, "captures")
    assert (found.severity, found.what) == (
        "error",
        "capture of 'public.orders': table public.orders: trigger saf_capture_insert is missing, "
        "or calls another function",
    )
    cure = found.cure.partition(";")[0]

    said(folder, *shlex.split(cure)[1:], "--yes")
    assert doctor(folder, "captures") == []
    with connect(app) as connection:
        connection.execute("ALTER TABLE orders RENAME total TO sum")
    (found,) = doctor(folder, "captures")
    assert "column 'total' of table public.orders was dropped or renamed" in found.what
    assert found.cure.startswith("write the capture again, with columns that exist: saf capture")


def test_the_doctor_finds_a_backfill_that_nobody_continues(folder: Path, app: Dsn) -> None:
    with connect(app) as connection:
        capture(connection)
        backfill.run(connection, named(connection, "orders"), backfill.Wanted(), lambda: True)
        assert doctor(folder, "backfills") == []
        (found,) = doctor(folder, "backfills", Limits(stuck_seconds=0.0))
        assert "the backfill of 'public.orders' has sent nothing for" in found.what
        assert "saf backfill public.orders --broker shop" in found.cure
        backfill.pause(connection, backfill.backfills(connection)[0])
        assert doctor(folder, "backfills", Limits(stuck_seconds=0.0)) == []


PLAN = """
[brokers.shop.captures."public.orders"]
service = "billing"
key = "number"
columns = ["number", "total"]
when = "new.status = 'paid'"
"""


def test_a_plan_has_captures_repairs_them_and_is_exported(folder: Path, app: Dsn) -> None:
    (folder / "plan.toml").write_text(PLAN)
    text = said(folder, "apply", "plan.toml", "--yes")
    assert re.search(r"create +capture of public\.orders +.*when new\.status = 'paid'", text)
    assert "nothing to do" in said(folder, "apply", "plan.toml", "--yes")
    with connect(app) as connection:
        connection.execute("ALTER TABLE orders DISABLE TRIGGER saf_capture_update")
        text = said(folder, "apply", "plan.toml", "--yes")
        assert "triggers as written, was not as written" in text
        assert "nothing to do" in said(folder, "apply", "plan.toml", "--yes")
        connection.execute("INSERT INTO orders VALUES (1, 'paid', 2)")
        assert ops(connection) == [("1", "insert")]
    exported = said(folder, "export")
    assert PLAN.strip().splitlines()[-1] in exported
    assert "triggers" not in exported
    (folder / "plan.toml").write_text("[brokers.shop]\n[brokers.shop.captures]\n")
    assert "kept: capture of public.orders" in said(folder, "apply", "plan.toml")
    said(folder, "apply", "plan.toml", "--prune", "--yes")
    with connect(app) as connection:
        assert listed(connection) == []


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (PLAN.replace("public.", ""), "write the table with its schema: public.orders"),
        (PLAN.replace('["number", "total"]', "[]"), "at least 1 item"),
        (PLAN.replace('"number"\n', '"numbre"\n', 1), "did you mean 'number'?"),
        (PLAN.replace('"new.status', '"status'), "ambiguous"),
    ],
)
def test_a_plan_with_a_wrong_capture_is_refused(folder: Path, plan: str, problem: str) -> None:
    (folder / "plan.toml").write_text(plan)
    assert problem in refused(folder, "apply", "plan.toml", "--yes")


def test_a_table_that_changes_between_the_review_and_its_answer_is_not_captured(
    folder: Path, source: psycopg.Connection[object]
) -> None:
    declared = Declaration(table="orders", service="billing")
    shown = review(source, declared)
    source.execute("ALTER TABLE orders ADD secret text")
    with pytest.raises(ConfigurationError, match="has changed since its SQL was shown"):
        _write(source, declared, shown, "")
    assert listed(source) == []
    assert folder
