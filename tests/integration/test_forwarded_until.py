"""`saf outbox forwarded`: whether everything that was sent before a time has been forwarded."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.operating.outbox import SentPage, Wanted, forwarded, messages
from tests.pipeline import connect, forward, send
from tests.programs import configuration, saf


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    with connect(mom) as connection:
        create_service(connection, "billing", refuse_others=True)
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


def now(app: Dsn) -> str:
    with connect(app) as connection:
        ((moment,),) = fetch(connection, "SELECT clock_timestamp()")
    return str(moment.isoformat())


def asked(config: Path, until: str, *options: str) -> tuple[int, dict[str, Any]]:
    done = saf("outbox", "forwarded", "--until", until, "--json", "--config", config, *options)
    said: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, said


def test_it_is_when_nothing_older_is_pending_whatever_came_later(
    app: Dsn, mom: Dsn, config: Path
) -> None:
    before = now(app)
    with connect(app) as connection:
        send(connection, "x")
        after = now(app)
        assert asked(config, before)[0] == 0
        code, said = asked(config, after)
        assert (code, said["brokers"][0]["forwarded"], said["brokers"][0]["waits"]) == (
            1,
            False,
            True,
        )
        assert said["brokers"][0]["left"]["pending"]["service"] == "billing"
        assert asked(config, after, "--service", "other")[0] == 0
        forward(app, mom=mom)
        send(connection, "later")
    assert asked(config, after) == (
        0,
        {
            "brokers": [{"broker": "shop", "forwarded": True, "waits": False, "left": {}}],
            "errors": [],
        },
    )
    done = saf("outbox", "forwarded", "--until", after, "--config", config)
    assert "is forwarded" in done.stdout


def test_what_is_parked_waits_and_what_is_dead_does_not(app: Dsn, mom: Dsn, config: Path) -> None:
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('unknown', '')")
        forward(app, mom=mom)
        until = now(app)
        code, said = asked(config, until)
        assert (code, [*said["brokers"][0]["left"]]) == (1, ["parked"])
        assert said["brokers"][0]["waits"]
        connection.execute(
            "INSERT INTO saf.dead_letter (subscription_id, shard, id, to_service, body, reason, "
            "error) SELECT subscription_id, shard, id, to_service, body, 'rejected', 'no' "
            "FROM saf.parked"
        )
        connection.execute("DELETE FROM saf.parked")
    code, said = asked(config, now(app))
    assert (code, [*said["brokers"][0]["left"]]) == (1, ["dead"])
    assert not said["brokers"][0]["waits"]
    assert "unknown" in saf("outbox", "forwarded", "--until", now(app), "--config", config).stdout
    assert asked(config, now(app), "--since", now(app))[0] == 0


def test_a_source_that_is_down_is_not_forwarded(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    gone = Dsn("host=/nonexistent dbname=gone")
    config = configuration(tmp_path / "saf.toml", {"shop": app, "gone": gone}, {"mom": mom})
    code, said = asked(config, now(app))
    assert (code, said["errors"][0]["broker"]) == (75, "gone")
    with connect(app) as connection:
        send(connection, "x")
    assert asked(config, now(app))[0] == 75


def test_an_answer_that_takes_too_long_is_asked_for_again_later(app: Dsn, config: Path) -> None:
    """So a schedule waits, and nobody is called: nothing is wrong that a person could mend."""
    until = now(app)
    with connect(app) as connection, connection.transaction():
        connection.execute("LOCK TABLE saf.dead_letter")
        code, said = asked(config, until, "--timeout", "0.2")
    assert (code, said["brokers"]) == (75, [])
    assert "longer than 0.2 s to look for dead messages" in said["errors"][0]["error"]
    assert "--timeout" in said["errors"][0]["error"]


def test_a_dead_letter_that_is_retried_meanwhile_is_not_overlooked(
    app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(connection: Any, wanted: Wanted, **options: Any) -> SentPage:
        page = messages(connection, wanted, **options)
        if wanted.state == "parked":
            with connect(app) as other:
                other.execute("DELETE FROM saf.dead_letter")
        return page

    monkeypatch.setattr("saf.operating.outbox.messages", reading)
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.dead_letter (subscription_id, shard, id, to_service, body, reason, "
            "error) SELECT subscription_id, 1, 1, 'x', '', 'rejected', 'no' "
            "FROM saf.subscription WHERE name = 'forwarder'"
        )
        found = forwarded(connection, Wanted(until=datetime.now(UTC).replace(year=2100)))
    assert [*found.left] == ["dead"]
