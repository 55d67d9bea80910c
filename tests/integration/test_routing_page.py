"""The examples of docs/routing.md do what the page says; and what ``saf route`` answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saf.config import load
from saf.database import Dsn
from saf.doctor import Finding, examine
from saf.errors import ConfigurationError
from saf.routes import configuration
from tests.pipeline import connect
from tests.programs import BIN, ROOT, run, saf
from tests.programs import configuration as configure

PAGE = (ROOT / "docs" / "routing.md").read_text()
DONE, USAGE, TRY_AGAIN = 0, 2, 75


def blocks(kind: str) -> list[str]:
    return re.findall(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(app: Dsn, mom: Dsn, new_broker: Any, tmp_path: Path) -> Path:
    """With a saf.toml of one source, shop, and the destinations mom and erp."""
    configure(tmp_path / "saf.toml", {"shop": app}, {"mom": mom, "erp": new_broker("erp")})
    return tmp_path


def declare(folder: Path, text: str) -> None:
    file = folder / "saf.toml"
    file.write_text(file.read_text() + text)


def explained(folder: Path, *arguments: str) -> dict[str, Any]:
    done = saf("route", "explain", *arguments, "--json", cwd=folder)
    (one,) = json.loads(done.stdout)["explanations"]
    return dict(one)


def verdicts(one: dict[str, Any]) -> dict[tuple[str | None, str], str]:
    return {(route["service"], route["destination"]): route["why"] for route in one["routes"]}


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == USAGE
    return done.stderr


def test_the_commands_work_in_their_order(folder: Path) -> None:
    done = run(
        ["bash", "-euxc", "".join(blocks("shell"))],
        env={"PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin"},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert "shop: service 'billing' to 'erp' added, from the next batch on" in done.stdout


def test_the_same_works_from_python(folder: Path, app: Dsn) -> None:
    (code,) = blocks("python")
    done = run([sys.executable, "-c", code], env={"SHOP_DSN": app.conninfo}, cwd=folder)
    assert (done.returncode, done.stdout) == (0, "('erp',)\n"), done.stderr


def test_the_file_declares_routes_that_are_listed_with_their_origin(folder: Path) -> None:
    declare(folder, "".join(blocks("toml")))
    saf("route", "disable", "erp", "--service", "billing", cwd=folder)
    rows = json.loads(saf("route", "list", "--json", cwd=folder).stdout)["routes"]
    assert [(r["service"], r["destination"], r["origin"], r["state"]) for r in rows] == [
        ("billing", "erp", "saf.route", "disabled"),
        (None, "mom", "saf.toml", "in force"),
        (None, "mom", "default", "not needed"),
    ]
    assert rows[1]["comment"] == "until everything has a route of its own"
    assert saf("route", "list", cwd=folder).stdout.splitlines()[1] == (
        "shop: any service to 'mom', until 2031-01-01 00:00:00+0000; in force (saf.toml): "
        "until everything has a route of its own"
    )
    topics = json.loads(saf("topic", "list", "--json", cwd=folder).stdout)["topics"]
    assert topics == [{"broker": "shop", "topic": "prices", "destinations": ["mom"]}]


def test_explain_says_of_each_route_whether_it_counts_and_why(folder: Path, app: Dsn) -> None:
    there = "00000000-0000-0000-0000-000000000007"
    for arguments in (
        ["mom"],
        ["erp", "--service", "billing"],
        ["mom", "--service", "billing"],
        ["mom", "--service", "other"],
        ["erp", "--to-broker", there],
        ["erp", "--service", "old", "--expires", "2001-01-01"],
    ):
        assert saf("route", "add", *arguments, cwd=folder).returncode == DONE
    saf("route", "disable", "mom", "--service", "other", cwd=folder)
    one = explained(folder, "billing", "--key", "A-1")
    assert one["destinations"] == ["erp", "mom"]
    assert "has not chosen" in verdicts(one)["billing", "erp"]
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route_choice (service, key, destination) "
            "VALUES ('billing', 'A-1', 'mom')"
        )
    one = explained(folder, "billing", "--key", "A-1")
    assert one["destinations"] == ["mom"]
    why = verdicts(one)
    assert why["billing", "mom"] == "shares, and key 'A-1' has chosen it"
    assert why["billing", "erp"] == "shares, and key 'A-1' has chosen 'mom'"
    assert why["old", "erp"].startswith("expired at 2001-01-01")
    assert why["other", "mom"] == "disabled"
    assert why[None, "erp"] == f"for another broker, {there}"
    assert why[None, "mom"] == "less specific than service 'billing' to 'erp'"
    said = saf("route", "explain", "billing", "--key", "A-1", cwd=folder).stdout
    assert said.startswith("shop: a message for 'billing' with key 'A-1' goes to 'mom'\n")
    assert explained(folder, "elsewhere")["destinations"] == ["mom"]


def test_explain_of_a_topic_names_every_destination(folder: Path) -> None:
    saf("topic", "add", "prices", cwd=folder)
    saf("route", "add", "mom", "--service", "prices", cwd=folder)
    saf("route", "add", "erp", cwd=folder)
    saf("route", "add", "mom", cwd=folder)
    one = explained(folder, "prices")
    assert one["destinations"] == ["mom", "erp"]
    assert verdicts(one)["prices", "mom"] == "a topic goes to every destination"


def test_a_message_that_would_wait_for_a_route_is_code_75(folder: Path) -> None:
    text = (folder / "saf.toml").read_text()
    (folder / "saf.toml").write_text(re.sub("default_destination.*\n", "", text))
    done = saf("route", "explain", "billing", cwd=folder)
    assert done.returncode == TRY_AGAIN
    assert "nowhere: it would be parked" in done.stdout


def test_what_is_wrong_is_named_with_what_was_meant(folder: Path) -> None:
    assert "did you mean 'erp'?" in refused(saf("route", "add", "epr", cwd=folder))
    saf("route", "add", "erp", "--service", "billing", cwd=folder)
    said = refused(saf("route", "remove", "erp", "--service", "biling", cwd=folder))
    assert "no route service 'biling' to 'erp', only service 'billing' to 'erp'" in said
    assert "only none" in refused(saf("topic", "remove", "prices", cwd=folder))
    assert "1 to" in refused(saf("route", "add", "erp", "--service", "", cwd=folder))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[routes]]\ndestination = "epr"\n', "did you mean 'erp'?"),
        ('[[routes]]\ndestnation = "erp"\n', "did you mean 'destination'?"),
        ('[[routes]]\ndestination = "erp"\nexpires_at = 2031-01-01T00:00:00\n', "timezone"),
        ('[[routes]]\ndestination = "erp"\n[[routes]]\ndestination = "erp"\n', "routes.0"),
        ('[topics.prices]\ncoment = "x"\n', "did you mean 'comment'?"),
    ],
)
def test_a_route_of_the_file_that_cannot_be_is_refused(folder: Path, text: str, said: str) -> None:
    declare(folder, text)
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        load(folder / "saf.toml")


def test_the_doctor_finds_routes_that_lead_nowhere(folder: Path, app: Dsn) -> None:
    text = (folder / "saf.toml").read_text()
    (folder / "saf.toml").write_text(re.sub("default_destination.*\n", "", text))

    def found() -> list[Finding]:
        checks = examine(load(folder / "saf.toml"))
        return [one for one in checks if one.check == "routes" and one.where == "broker 'shop'"]

    assert [one.severity for one in found()] == ["ok"]
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES ('billing', 'epr'), ('x', 'epr')"
        )
        connection.execute("UPDATE saf.route SET enabled = false WHERE service = 'x'")
        connection.execute("INSERT INTO saf.topic (name) VALUES ('prices')")
        assert len(configuration(connection).routes) == 2
    wrong = found()
    assert [one.severity for one in wrong] == ["error", "warning"]
    assert "service 'billing' to 'epr'" in wrong[0].what
    assert "did you mean 'erp'?" in wrong[0].cure
    assert "topic 'prices'" in wrong[1].what
