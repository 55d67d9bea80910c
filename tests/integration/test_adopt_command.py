"""Adoptions as an operator types them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import psycopg
import pytest

from saf.capture import adoption
from saf.cli.adopt import _adopt
from saf.config import load
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from saf.operating.doctor import Finding, examine
from tests.adoptions import EVENTS, adopt, bodies, declared, write
from tests.pipeline import connect
from tests.programs import configuration
from tests.programs import saf as run_saf

ADOPT = (
    *("adopt", "--table", "public.outbox_events"),
    *("--map", "topic=to_service,aggregateid=key,body=body,type=message_type"),
)
MARKED = (*ADOPT, "--where", "sent_at IS NULL", "--mark", "sent_at=now()")
AUDITED = "SELECT action, why FROM saf.audit ORDER BY audit_id"


@pytest.fixture
def folder(tmp_path: Path, source: psycopg.Connection[object], app: Dsn, mom: Dsn) -> Path:
    source.execute(EVENTS)
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


def test_an_adoption_is_shown_before_it_is_written_and_asked_about(folder: Path, app: Dsn) -> None:
    with connect(app) as connection:
        write(connection, "secret 1", "secret 2")
    text = said(folder, *MARKED, "--dry-run")
    assert "CREATE OR REPLACE FUNCTION saf." in text
    assert text.count("CREATE OR REPLACE TRIGGER") == 1
    assert "rows: marked: sent_at = now(); old rows: sent once, in the order of id" in text
    assert "nothing is done yet: Write it? Add --yes to confirm" in refused(folder, *MARKED)
    with connect(app) as connection:
        assert adoption.listed(connection) == []
        assert fetch(connection, "SELECT FROM pg_proc WHERE proname LIKE 'capture\\_%%'") == []
        # what was shown is what is written
        done = said(folder, *MARKED, "--yes", "--why", "to saf")
        assert done == text + ("shop: adoption of 'public.outbox_events' added, 2 old rows sent\n")
        assert "secret" not in done
        again = said(folder, *MARKED, "--yes")
        assert again.endswith("shop: adoption of 'public.outbox_events' unchanged\n")
        assert fetch(connection, AUDITED) == [("add adoption public.outbox_events", "to saf")]
        write(connection, 3)
        assert len(bodies(connection)) == 3


def test_adoptions_are_listed_shown_and_removed_as_captures(folder: Path, app: Dsn) -> None:
    said(folder, *MARKED, "--yes", "--from", "shop", "--why", "it's time")
    assert re.search(
        r"public\.outbox_events +topic +aggregateid +\d +mark +active",
        said(folder, "capture", "list"),
    )
    shown = said(folder, "capture", "show", "outbox_events")
    for text in ("to_service +topic", "sent by +shop", "where +sent_at IS NULL", "rows +marked"):
        assert re.search(text, shown)
    (written,) = re.findall(r"written by +saf (.*)", shown)
    with connect(app) as connection:
        connection.execute("ALTER TABLE outbox_events DISABLE TRIGGER saf_capture_insert")
        write(connection, "missed")
    (found,) = json.loads(said(folder, "capture", "show", "outbox_events", "--json"))["captures"]
    assert found["differences"] == [
        "table public.outbox_events: trigger saf_capture_insert is disabled"
    ]
    assert (found["rows"], found["fields"]["key"]) == ("mark", "aggregateid")
    # the command that it shows repairs it
    assert "changed, 1 old row sent" in said(folder, *shlex.split(written), "--yes")
    (found,) = json.loads(said(folder, "capture", "list", "--json"))["captures"]
    assert (found["differences"], found["broker"]) == ([], "shop")
    assert "has no capture" in refused(folder, "backfill", "outbox_events")
    done = said(folder, "capture", "remove", "outbox_events", "--yes", "--why", "back")
    assert done == "shop: capture of 'public.outbox_events' removed\n"
    assert said(folder, "capture", "list").startswith("No captures at shop.")
    with connect(app) as connection:
        assert fetch(connection, AUDITED)[-1] == ("remove capture public.outbox_events", "back")


@pytest.mark.parametrize(
    "more",
    [
        ("--keep",),
        ("--delete",),
        ("--instead", "--new-only"),
        ("--where", "sent_at IS NULL", "--mark", "sent_at=now()", "--mark", "type='it''s'"),
        ("--order", "sent_at", "--from", "a b", "--delete"),
    ],
)
def test_the_command_that_is_shown_writes_the_same_again(
    folder: Path, app: Dsn, more: tuple[str, ...]
) -> None:
    said(folder, *ADOPT, *more, "--yes")
    with connect(app) as connection:
        words = adoption.command(adoption.listed(connection)[0])
    assert "unchanged" in said(folder, *words, "--yes")


def test_a_mistake_is_one_sentence(folder: Path) -> None:
    for more, problem in {
        ("--delete", "--instead"): "--delete and --instead: choose one thing to do with rows",
        ("--layout", "debezum"): "--layout 'debezum' (did you mean 'debezium'?)",
        ("--mark", "sent_at"): "--mark 'sent_at': expected COLUMN=SQL",
        ("--map", "id=message_id"): "its type is int8, expected uuid",
        ("--map", "id=kee"): "did you mean 'key'?",
        ("--hold", "5"): "has no unit",
        ("--where", "sent_att IS NULL"): 'column "sent_att" does not exist',
    }.items():
        assert problem in refused(folder, *ADOPT, *more, "--dry-run")


def test_rows_that_take_too_long_leave_everything_as_it_was(folder: Path, app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO outbox_events (topic, body) "
            "SELECT 'billing', to_jsonb(n) FROM generate_series(1, 5000) AS n"
        )
        text = refused(folder, *ADOPT, "--yes", "--hold", "0.001s")
        assert "could not be sent within 0.001 s, while its writers wait" in text
        assert (bodies(connection), adoption.listed(connection)) == ([], [])
        assert "5,000 old rows sent" in said(folder, *ADOPT, "--yes", "--hold", "1m")


def doctor(folder: Path) -> list[Finding]:
    found = examine(load(folder / "saf.toml"))
    return [one for one in found if one.check == "captures" and one.severity != "ok"]


def test_the_doctor_finds_an_adoption_that_drifted_and_its_cure_is_a_command(
    folder: Path, app: Dsn
) -> None:
    said(folder, *MARKED, "--yes")
    assert doctor(folder) == []
    with connect(app) as connection:
        connection.execute("DROP TRIGGER saf_capture_insert ON outbox_events")
        write(connection, "missed")
        (found,) = doctor(folder)
        assert (found.severity, found.what) == (
            "error",
            "adoption of 'public.outbox_events': table public.outbox_events: trigger "
            "saf_capture_insert is missing, or calls another function",
        )
        said(folder, *shlex.split(found.cure.partition(";")[0])[1:], "--yes")
        assert doctor(folder) == []
        assert bodies(connection) == ['"missed"']
        connection.execute("ALTER TABLE outbox_events RENAME aggregateid TO id2")
        (found,) = doctor(folder)
        assert "column 'aggregateid' of table public.outbox_events was dropped" in found.what
        assert found.cure.startswith("write the adoption again, with columns that exist: saf adopt")


PLAN = """
[brokers.shop.adoptions."public.outbox_events"]
service = "billing"
where = "sent_at IS NULL"
rows = "mark"

[brokers.shop.adoptions."public.outbox_events".fields]
key = "aggregateid"
body = "body"

[brokers.shop.adoptions."public.outbox_events".mark]
sent_at = "now()"
"""


def test_a_plan_has_adoptions_repairs_them_and_is_exported(folder: Path, app: Dsn) -> None:
    with connect(app) as connection:
        write(connection, 1)
        (folder / "plan.toml").write_text(PLAN)
        text = said(folder, "apply", "plan.toml", "--yes")
        assert re.search(r"create +adoption of public\.outbox_events", text)
        assert "nothing to do" in said(folder, "apply", "plan.toml", "--yes")
        connection.execute("ALTER TABLE outbox_events DISABLE TRIGGER saf_capture_insert")
        write(connection, 2)
        text = said(folder, "apply", "plan.toml", "--yes")
        assert "triggers as written, was not as written" in text
        assert "nothing to do" in said(folder, "apply", "plan.toml", "--yes")
        write(connection, 3)
        assert bodies(connection) == ['"1"', '"2"', '"3"']
        exported = said(folder, "export")
        assert PLAN.strip() in exported
        (folder / "plan.toml").write_text("[brokers.shop]\n[brokers.shop.adoptions]\n")
        assert "kept: adoption of public.outbox_events" in said(folder, "apply", "plan.toml")
        said(folder, "apply", "plan.toml", "--prune", "--yes")
        assert adoption.listed(connection) == []


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (PLAN.replace("public.", ""), "write the table with its schema: public.outbox_events"),
        (PLAN.replace('body = "body"\n', ""), "no body: give its column"),
        (PLAN.replace('"mark"', '"marked"'), "rows"),
        (PLAN.replace('"aggregateid"', '"aggregate_id"'), "did you mean 'aggregateid'?"),
    ],
)
def test_a_plan_with_a_wrong_adoption_is_refused(folder: Path, plan: str, problem: str) -> None:
    (folder / "plan.toml").write_text(plan)
    assert problem in refused(folder, "apply", "plan.toml", "--yes")


def test_a_table_that_changes_between_the_review_and_its_answer_is_not_adopted(
    folder: Path, source: psycopg.Connection[object]
) -> None:
    write(source, 1)
    shown = adoption.review(source, declared())

    def review(connection: psycopg.Connection[object]) -> adoption.Review:
        return adoption.review(connection, declared(rows="delete"))

    with pytest.raises(ConfigurationError, match="has changed since its SQL was shown"):
        _adopt(source, review, shown, why="", hold=5, stopping=lambda: False)
    assert (adoption.listed(source), bodies(source)) == ([], [])
    assert folder


def test_a_stop_leaves_the_rest_and_the_next_run_continues(
    source: psycopg.Connection[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute(EVENTS)
    write(source, *range(9))
    monkeypatch.setattr(adoption, "CHUNK_ROWS", 3)

    def review(connection: psycopg.Connection[object]) -> adoption.Review:
        return adoption.review(connection, declared(rows="delete"))

    stops = iter((False, True, True))
    done = _adopt(
        source, review, review(source), why="", hold=5, stopping=lambda: next(stops, True)
    )
    assert (done, adoption.listed(source)) == (3, [])
    assert adopt(source, rows="delete").messages == 6
    assert bodies(source) == [f'"{number}"' for number in range(9)]
