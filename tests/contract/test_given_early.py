"""A destination that holds no messages gets them early: that is said, and not hidden."""

from __future__ import annotations

import json
from pathlib import Path

from saf.database import Dsn
from saf.destinations.jsonl import Jsonl
from tests.pipeline import connect, forward
from tests.programs import last_json, saf


def send(app: Dsn) -> None:
    """One message for now, one that was for an hour ago, and two for later."""
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, body, deliver_at) VALUES ('billing', '', NULL), "
            "('billing', '', now() - interval '1 h'), ('billing', '', now() + interval '1 h'), "
            "('billing', '', now() + interval '1 day')"
        )


def test_a_run_counts_what_went_before_its_time_to_a_destination_that_holds_none(
    app: Dsn, tmp_path: Path
) -> None:
    send(app)
    (tmp_path / "files").mkdir()
    receipts = forward(app, lake=Jsonl(folder=tmp_path / "files"))
    assert sum(one.early for one in receipts) == 2
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, body, deliver_at) VALUES ('billing', '', now())"
        )
    receipts = forward(app, lake=Jsonl(folder=tmp_path / "files"))
    assert [(one.messages, one.early) for one in receipts if one.messages] == [(1, 0)]


def test_an_inbox_holds_its_messages(app: Dsn, mom: Dsn) -> None:
    send(app)
    assert sum(one.early for one in forward(app, mom=mom)) == 0


def test_a_route_and_a_run_say_that_a_destination_holds_no_message(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    config = tmp_path / "saf.toml"
    config.write_text(
        f'[brokers.app]\ndsn = "{app.conninfo}"\n[destinations.mom]\ndsn = "{mom.conninfo}"\n'
        f'[destinations.lake]\nkind = "jsonl"\nfolder = "{tmp_path / "files"}"\n'
    )
    holds = saf("route", "add", "mom", "--service", "stock", "--config", config)
    assert (holds.returncode, holds.stderr) == (0, "")
    added = saf("route", "add", "lake", "--service", "billing", "--config", config)
    assert added.returncode == 0
    assert "'lake' of kind 'jsonl' holds no message until its deliver_at" in added.stderr
    plan = tmp_path / "plan.toml"
    plan.write_text('[[brokers.app.routes]]\nservice = "orders"\ndestination = "lake"\n')
    for options in (["--dry-run"], ["--yes"]):
        applied = saf("apply", plan, *options, "--config", config)
        assert applied.returncode == 0
        assert "'lake' of kind 'jsonl' holds no message until its deliver_at" in applied.stderr
    assert saf("apply", plan, "--yes", "--config", config).stderr == ""
    send(app)
    found = json.loads(saf("doctor", "--json", "--config", config).stdout)["findings"]
    (one,) = [one for one in found if one["check"] == "given_early"]
    assert (one["where"], one["severity"]) == ("broker 'app'", "warning")
    assert "2 messages for service 'billing', of the newest, have a deliver_at" in one["what"]
    assert "destination 'lake' of kind 'jsonl' holds no message" in one["what"]
    run = saf("forward", "--config", config)
    assert "2 messages for destination 'lake' went before deliver_at" in run.stderr
    send(app)
    assert last_json(saf("forward", "--json", "--config", config).stdout)["early"] == {"lake": 2}
