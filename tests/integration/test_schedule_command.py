"""Schedules as an operator types them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from uuid import UUID

import pytest

import saf
from saf.database import Dsn, fetch
from tests.pipeline import bodies, connect
from tests.programs import configuration
from tests.programs import saf as run_saf

NIGHTLY = (
    *("schedule", "add", "nightly", "--service", "reports", "--cron", "0 2 * * *"),
    *("--zone", "Europe/Berlin", "--body", '{"a":1}'),
)
AUDITED = "SELECT action, cardinality(message_ids), why FROM saf.audit ORDER BY audit_id"
NIGHT = r"\d{4}-\d\d-\d\d 02:00:00\+0[12]:00"


@pytest.fixture
def folder(tmp_path: Path, app: Dsn, mom: Dsn) -> Path:
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    return tmp_path


def said(folder: Path, *arguments: str) -> str:
    done = run_saf(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(folder: Path, *arguments: str) -> str:
    done = run_saf(*arguments, cwd=folder)
    assert done.returncode == 2, done.stdout
    return done.stderr


def test_a_schedule_is_added_changed_listed_and_removed(folder: Path, app: Dsn) -> None:
    text = said(folder, *NIGHTLY, "--why", "reports")
    assert re.fullmatch(f"shop: schedule 'nightly' added, next run {NIGHT}\n", text)
    assert " unchanged, " in said(folder, *NIGHTLY)
    more = ("--key", "k", "--type", "Nightly", "--header", "a=b", "--missed", "all")
    assert " changed, " in said(folder, *NIGHTLY, *more, "--from", "clock")
    listed = said(folder, "schedule", "list")
    assert re.search(rf"nightly +reports +0 2 \* \* \* Europe/Berlin +{NIGHT} +all +0 +act", listed)
    assert said(folder, "schedule", "remove", "nightly") == "shop: schedule 'nightly' removed\n"
    assert said(folder, "schedule", "list") == (
        "No schedules at shop. Stores are asked only with --broker: mom.\n"
    )
    with connect(app) as connection:
        assert fetch(connection, AUDITED) == [
            ("add schedule nightly", 0, "reports"),
            ("change schedule nightly", 0, ""),
            ("remove schedule nightly", 0, ""),
        ]


def test_its_message_is_as_given_and_its_extra_run_is_audited(folder: Path, app: Dsn) -> None:
    said(folder, *NIGHTLY, "--header", "a=b", "--key", "k")
    text = said(folder, "schedule", "run", "nightly", "--why", "now")
    (message_id,) = re.findall(r"has sent message (\S+)", text)
    with connect(app) as connection:
        found = fetch(connection, "SELECT message_id, key, headers, body FROM saf.outbox")
        headers = {"content-type": "application/json", "a": "b"}
        assert found == [(UUID(message_id), "k", headers, b'{"a":1}')]
        assert fetch(connection, AUDITED)[1:] == [("run schedule nightly", 1, "now")]
    shown = said(folder, "schedule", "show", "nightly")
    assert re.search(rf"extra +\S+ \S+ +{message_id}", shown)


def test_show_has_the_next_five_runs_and_the_last_ones_but_no_body(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    said(folder, *NIGHTLY)
    shown = said(folder, "schedule", "show", "nightly")
    assert len(re.findall(NIGHT, shown)) == 5
    assert "7 bytes, application/json" in shown
    assert '"a"' not in shown
    assert "No runs yet." in shown
    with connect(app) as connection:
        connection.execute("UPDATE saf.schedule SET next_run = next_run - '3 days'::interval")
    said(folder, "forward")
    assert bodies(mom) == ['{"a":1}']
    (found,) = json.loads(said(folder, "schedule", "show", "nightly", "--json"))["schedules"]
    assert len(found["next_runs"]) == 5
    (run,) = found["runs"]
    assert run["due"] == found["last_run"]
    assert run["skipped"] == found["skipped"] in (1, 2)
    assert UUID(run["message_id"])


def test_pause_and_resume(folder: Path) -> None:
    said(folder, "schedule", "add", "often", "--service", "s", "--every", "15m", "--body", "go")
    assert said(folder, "schedule", "pause", "often") == "shop: schedule 'often' paused\n"
    assert re.search(r"every 15m .* paused", said(folder, "schedule", "list"))
    assert "paused" in said(folder, "schedule", "show", "often")
    text = said(folder, "schedule", "resume", "often")
    assert re.fullmatch(
        r"shop: schedule 'often' resumed, next run \S+ \d\d:(00|15|30|45):00\S+\n", text
    )
    assert re.search(r"every 15m .* active", said(folder, "schedule", "list"))
    (found,) = json.loads(said(folder, "schedule", "list", "--json"))["schedules"]
    assert (found["broker"], found["every"], found["zone"]) == ("shop", 900.0, "UTC")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--cron", "0 25 * * *"), "cron '0 25 * * *': the hour, '25', is not valid: 0 to 23"),
        (("--cron", "0 2 * *"), "expected five fields"),
        (("--every", "100ms"), "expected a time such as 30s, 15m"),
        (("--every", "0s"), "from 1 s"),
        (("--every", "1h", "--zone", "Europe/Belin"), "did you mean 'Europe/Berlin'?"),
        (("--every", "1h", "--header", "a"), "--header 'a': expected NAME=VALUE"),
        (("--every", "1h", "--header", "scheduled-for=x"), "'scheduled-for' is set by each run"),
        ((), "give one of both"),
        (("--every", "1h", "--missed", "some"), "'some' is not one of"),
    ],
    ids=str,
)
def test_a_mistake_is_named(folder: Path, arguments: tuple[str, ...], problem: str) -> None:
    text = refused(folder, "schedule", "add", "x", "--service", "s", "--body", "", *arguments)
    assert problem in " ".join(text.split())
    assert said(folder, "schedule", "list").startswith("No schedules at shop.")


@pytest.mark.parametrize("command", ["show", "pause", "resume", "run", "remove"])
def test_an_unknown_schedule_is_named_with_a_near_match(folder: Path, command: str) -> None:
    said(folder, *NIGHTLY)
    text = refused(folder, "schedule", command, "nigthly")
    assert "no schedule 'nigthly' (did you mean 'nightly'?), only 'nightly'" in text


def test_a_schedule_of_an_application_is_changed_there(folder: Path, app: Dsn) -> None:
    schedules = saf.Schedules("shop")
    schedules.every("nightly", "1d", service="reports", body="")
    with app.connect(role="test") as connection:
        schedules.deploy(connection)
    assert "is declared by 'shop': change it there" in refused(folder, *NIGHTLY)
    assert re.search(r"active +shop", said(folder, "schedule", "list"))


PLAN = """
[brokers.shop.schedules.nightly]
service = "reports"
cron = "0  2 * * *"
zone = "Europe/Berlin"
key = "k"
body = '{"a":1}'

[brokers.shop.schedules.nightly.headers]
a = "b"

[brokers.shop.schedules.often]
service = "search"
every = "60m"
anchor = 2026-01-01T00:00:07Z
missed = "all"

[brokers.shop.schedules.binary]
service = "search"
every = "1d"
body_base64 = "/w=="
"""


def test_a_plan_has_schedules_shows_how_they_differ_and_is_exported(folder: Path, app: Dsn) -> None:
    plan = folder / "plan.toml"
    plan.write_text(PLAN)
    text = said(folder, "apply", "plan.toml", "--yes")
    assert re.search(r"create +schedule often +.*every 1h", text)
    nothing = "nothing to do: the brokers match the plan\n"
    assert said(folder, "apply", "plan.toml", "--yes") == nothing
    said(folder, "schedule", "pause", "often")
    exported = said(folder, "export", "--broker", "shop")
    (folder / "now.toml").write_text(exported)
    assert said(folder, "apply", "now.toml", "--prune", "--yes") == nothing
    with connect(app) as connection:
        found = fetch(connection, "SELECT name, headers, body FROM saf.schedule ORDER BY name")
    assert found == [
        ("binary", {"content-type": "application/octet-stream"}, b"\xff"),
        ("nightly", {"content-type": "application/json", "a": "b"}, b'{"a":1}'),
        ("often", {"content-type": "text/plain; charset=utf-8"}, b""),
    ]
    changed = (
        PLAN.replace("0  2 *", "0 3 *")
        .replace('"a":1', '"secret":2')
        .split("[brokers.shop.schedules.often]")
    )
    plan.write_text(changed[0])
    text = said(folder, "apply", "plan.toml", "--yes")
    assert "cron 0 3 * * *, was 0 2 * * *" in text
    assert "another body" in text
    assert "secret" not in text
    assert "not in the plan, and kept: schedule binary, schedule often" in text
    text = said(folder, "apply", "plan.toml", "--prune", "--yes")
    assert re.search(r"remove +schedule often", text)


def test_a_plan_leaves_the_schedules_of_code_alone(folder: Path, app: Dsn) -> None:
    schedules = saf.Schedules("shop")
    schedules.every("often", "1d", service="search", body="")
    with app.connect(role="test") as connection:
        schedules.deploy(connection)
    (folder / "plan.toml").write_text("[brokers.shop]\nschedules = {}\n")
    text = said(folder, "apply", "plan.toml", "--prune", "--yes")
    assert text == "nothing to do: the brokers match the plan\n"
    (folder / "plan.toml").write_text(PLAN)
    assert "is declared by 'shop'" in refused(folder, "apply", "plan.toml", "--yes")


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("0  2 * * *", "0 25 * * *", "schedules.nightly: cron '0 25 * * *': the hour, '25'"),
        ("Europe/Berlin", "Europe/Belin", "did you mean 'Europe/Berlin'"),
        ("60m", "1x", "schedules.often: every '1x'"),
        ("/w==", "/w", "schedules.binary"),
        ("missed", "misses", "unknown setting brokers.shop.schedules.often.misses"),
    ],
)
def test_a_mistake_in_a_plan_is_named(folder: Path, before: str, after: str, problem: str) -> None:
    (folder / "plan.toml").write_text(PLAN.replace(before, after))
    assert problem in " ".join(refused(folder, "apply", "plan.toml", "--yes").split())


def test_the_doctor_finds_what_nobody_runs_and_what_is_refused(folder: Path, app: Dsn) -> None:
    said(folder, *NIGHTLY)
    said(folder, *NIGHTLY[:2], "bad", *NIGHTLY[3:])

    def found() -> dict[str, str]:
        done = run_saf("doctor", "--json", cwd=folder)
        findings = json.loads(done.stdout)["findings"]
        return {
            one["what"]: one["cure"]
            for one in findings
            if one["check"] == "schedules" and one["severity"] == "error"
        }

    assert found() == {}
    with connect(app) as connection:
        connection.execute(
            "UPDATE saf.schedule SET next_run = now() - interval '11 minutes' WHERE name <> 'bad'"
        )
        connection.execute("UPDATE saf.schedule SET refused = 'it may not' WHERE name = 'bad'")
    problems = found()
    overdue, refused = problems
    assert overdue.startswith("nobody runs schedules: 1 schedule, such as 'nightly', overdue")
    assert "saf forward" in problems[overdue]
    assert refused == "schedule 'bad' sends nothing: it may not"
    assert problems[refused] == "fix the cause, then saf schedule resume bad --broker shop"
    said(folder, "forward")
    said(folder, "schedule", "pause", "bad")
    assert [*found()] == [refused]
