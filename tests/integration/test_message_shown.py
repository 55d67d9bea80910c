"""`saf message`: one message from its sender to its handlers; and `saf dead redirect`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from saf import receive
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from tests.destinations import NOWHERE, route
from tests.pipeline import Cycle, connect, forwarding_rules, let_time_pass, run, send
from tests.programs import configuration, saf


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    with connect(mom) as connection:
        create_service(connection, "billing")
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


def sent(app: Dsn, body: str, key: str | None) -> str:
    with connect(app) as source:
        send(source, body, key=key)
        ((message_id,),) = fetch(source, "SELECT message_id::text FROM saf.outbox")
    return str(message_id)


def asked(config: Path, message_id: str, *options: str) -> dict[str, dict[str, Any]]:
    done = saf("message", message_id, "--json", *options, "--config", config)
    assert done.returncode == 0, done.stderr
    return {row["broker"]: row for row in json.loads(done.stdout)["message"]}


@pytest.mark.parametrize("key", ["k", None])
def test_a_message_is_followed_from_its_outbox_to_its_subscription(
    app: Dsn, mom: Dsn, config: Path, key: str | None
) -> None:
    message_id = sent(app, "x", key)
    before = asked(config, message_id)
    assert [(name, one["sent"]["state"]) for name, one in before.items()] == [("shop", "pending")]
    run(app, mom=mom)
    options = ("--key", key) if key else ()
    after = asked(config, message_id, *options)
    assert after["shop"]["sent"]["state"] == "forwarded"
    assert after["mom"]["stored"]["service"] == "billing"
    (reading,) = [one for one in after["mom"]["subscriptions"] if one["subscription"] == "billing"]
    assert reading["complete"] is False
    about = after["shop"]["sent"]["created_at"]
    assert asked(config, message_id, "--sent", about) == after
    shown = saf("message", message_id, "--config", config)
    assert "unread" in shown.stdout
    assert "sent, forwarded" in shown.stdout


def test_a_message_that_nobody_knows_is_said_to_be_unknown(config: Path) -> None:
    done = saf("message", "00000000-0000-0000-0000-000000000007", "--config", config)
    assert done.returncode == 2
    assert "no broker has message 00000000" in done.stderr


def test_a_dead_letter_and_what_was_decided_about_it_are_told(
    app: Dsn, mom: Dsn, config: Path
) -> None:
    with connect(mom) as store:
        store.execute("ALTER TABLE saf.inbox ADD CONSTRAINT no CHECK (key <> 'k')")
    message_id = sent(app, "x", "k")
    run(app, mom=mom)
    (aside,) = asked(config, message_id)["shop"]["set_aside"]
    assert (aside["state"], aside["reason"], aside["destination"]) == ("dead", "rejected", "mom")
    counted = saf("dead", "list", "--count", "--json", "--config", config)
    assert json.loads(counted.stdout)["dead_letters"] == {"mom": 0, "shop": 1}
    refused = saf("dead", "redirect", "--all", "--to", "mum", "--config", config)
    assert "did you mean 'mom'" in refused.stderr
    done = saf("dead", "redirect", "--all", "--to", "mom", "--why", "mended", "--config", config)
    assert done.stdout == "shop: 1 dead letter redirected to mom (k)\n"
    there = asked(config, message_id)["shop"]
    assert [one["state"] for one in there["set_aside"]] == ["parked"]
    assert [(one["action"], one["why"]) for one in there["decided"]] == [
        ("redirect to mom", "mended")
    ]
    shown = saf("message", message_id, "--config", config).stdout.splitlines()
    times = [line.split()[1:3] for line in shown[1:]]
    assert times == sorted(times), "the first event is first"
    words = "decision to redirect the dead letter or parked message to mom"
    assert words in "\n".join(shown)
    details = saf("outbox", "show", message_id, "--config", config).stdout
    assert f"{words}, by postgres: mended" in details


def test_attempts_at_what_is_parked_are_told_where_it_is_sent_and_where_it_is_received(
    app: Dsn, mom: Dsn, config: Path
) -> None:
    message_id = sent(app, "x", "k")
    with connect(app) as source:
        route(source, "billing", "mom")
    with Cycle(app, forwarding_rules(mom=NOWHERE, other=mom)) as cycle:
        cycle.run()
    (aside,) = asked(config, message_id)["shop"]["set_aside"]
    assert (aside["state"], aside["attempts"]) == ("parked", 1)
    assert "destination 'mom' is unavailable" in aside["error"]
    assert aside["next_attempt_at"] > aside["since"]
    assert "destination 'mom', 1 attempt" in saf("message", message_id, "--config", config).stdout
    let_time_pass(app)
    run(app, mom=mom)
    for _ in range(3):
        with suppress(ZeroDivisionError), receive(mom, "billing") as delivery:
            for _message in delivery:
                raise ZeroDivisionError("no amount")
    (aside,) = asked(config, message_id)["mom"]["set_aside"]
    assert (aside["state"], aside["lane"], aside["subscription"]) == (
        "parked",
        "next attempt of billing for key 'k'",
        "billing",
    )
    assert aside["attempts"] >= 1
    assert "ZeroDivisionError: no amount" in aside["error"]


def test_attempts_in_vain_at_an_endpoint_are_told_one_by_one(
    app: Dsn, mom: Dsn, config: Path
) -> None:
    message_id = sent(app, "x", "k")
    run(app, mom=mom)
    with connect(mom) as store:
        for status, error in ((503, "<b>busy</b>"), (None, "it timed out")):
            store.execute(
                "INSERT INTO saf.attempt"
                " (subscription_id, message_id, key, status, seconds, outcome, error)"
                " SELECT subscription_id, %s, 'k', %s, 1.5, 'again', %s"
                " FROM saf.subscription WHERE name = 'billing'",
                [message_id, status, error],
            )
    attempts = asked(config, message_id)["mom"]["attempts"]
    assert [(one["status"], one["error"]) for one in attempts] == [
        (503, "<b>busy</b>"),
        (None, "it timed out"),
    ]
    shown = " ".join(saf("message", message_id, "--config", config).stdout.split())
    assert "attempt of 1.5 s: answer 503 billing" in shown
    assert "attempt of 1.5 s: no answer billing" in shown
