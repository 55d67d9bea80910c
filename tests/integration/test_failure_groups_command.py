"""``saf dead groups`` and ``saf parked groups``, and decisions about a group, as operators type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saf.broker.services import create_service, create_subscription
from saf.database import Dsn, fetch
from tests.pipeline import Cycle, connect, forwarding_rules
from tests.programs import configuration, saf

NOWHERE = Dsn("host=/nonexistent dbname=other")
LETTERS = """
INSERT INTO saf.dead_letter (subscription_id, destination, shard, id, reason, error, to_service,
                             key, body)
SELECT subscription_id, 'mom', 0, n, 'rejected',
       CASE WHEN n < 4 THEN 'no price in order ' || n ELSE 'no address' END, 'billing',
       'k-' || n, ''
FROM saf.subscription, generate_series(1, 4) AS n WHERE log = 'outbox' AND name = 'forwarder'
"""

OF_READER = """
INSERT INTO saf.dead_letter (subscription_id, shard, id, reason, error, to_service, key, body)
SELECT subscription_id, 0, 1, 'failed', 'no price', 'billing', 'm-1', ''
FROM saf.subscription WHERE name = 'reader'
"""


@pytest.fixture
def config(tmp_path: Path, app: Dsn, mom: Dsn) -> Path:
    """Four dead letters, three of them for one cause, and two messages that wait."""
    with connect(app) as connection:
        connection.execute(LETTERS)
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('ship', 'other')")
        connection.execute(
            "INSERT INTO saf.outbox (to_service, body) VALUES ('ship', 'y'), ('ship', 'z')"
        )
        with Cycle(app, forwarding_rules(mom=mom, other=NOWHERE)) as cycle:
            cycle.run()
        # a command may take longer to start than the first wait
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now() + interval '1 h'")
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


def answer(*arguments: str, config: Path) -> dict[str, Any]:
    done = saf(*arguments, "--config", config, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_group_of_dead_letters_is_listed_and_discarded(config: Path, app: Dsn) -> None:
    found = answer("dead", "groups", "--limit", "1", config=config)
    (group,) = found["groups"]
    assert (group["broker"], group["messages"], group["reason"]) == ("shop", 3, "rejected")
    assert (group["fingerprint"], group["error"]) == ("no price in order …", "no price in order 3")
    assert (group["key"], group["service"]) == ("k-3", "billing")
    assert found["more"] == {"shop": 1, "mom": 0}
    said = saf("dead", "groups", "--limit", "1", "--config", config).stdout
    assert f"shop {group['group']} 3 rejected forwarder mom billing" in " ".join(said.split())
    assert "shop: 1 smaller group more" in said

    of_group = ("--group", group["group"])
    assert answer("dead", "list", "--count", *of_group, config=config)["dead_letters"] == {
        "shop": 3,
        "mom": 0,
    }
    listed = answer("dead", "discard", *of_group, "--dry-run", config=config)["dead_letters"]
    assert [one["key"] for one in listed] == ["k-1", "k-2", "k-3"]
    refused = saf("dead", "discard", *of_group, "--config", config)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "(k-1, k-2, k-3) would be lost: add --yes" in refused.stderr
    done = saf("dead", "discard", *of_group, "--why", "no orders", "--yes", "--config", config)
    assert done.stdout == "shop: 3 dead letters discarded (k-1, k-2, k-3)\n"
    with connect(app) as connection:
        assert fetch(connection, "SELECT key FROM saf.dead_letter") == [("k-4",)]


def test_a_group_of_parked_messages_is_listed_and_retried(config: Path) -> None:
    (group,) = answer("parked", "groups", config=config)["groups"]
    assert (group["messages"], group["reason"], group["destination"]) == (2, "main", "other")
    assert group["waits_for"] == "destination"
    said = saf("parked", "groups", "--config", config).stdout
    assert f"shop {group['group']} 2 destination 'other' forwarder" in " ".join(said.split())
    of_group = ("--group", group["group"])
    assert len(answer("parked", "messages", *of_group, config=config)["parked"]) == 2
    assert answer("parked", "retry-now", *of_group, config=config)["lanes"] == {
        "shop": 1,
        "mom": 0,
    }
    (lane,) = answer("parked", "list", *of_group, config=config)["parked"]
    assert lane["due"]
    other = ("--group", "0123456789ab")
    done = saf("parked", "retry-now", *other, "--config", config)
    refusal = "saf: no group 0123456789ab at mom, shop; see `saf parked groups`\n"
    assert (done.returncode, done.stderr) == (2, refusal)
    assert answer("parked", "list", *other, config=config)["parked"] == []


def test_groups_are_those_of_sources_and_stores(config: Path, mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, "billing")
        create_subscription(connection, "reader", service="billing")
        connection.execute(OF_READER)
    groups = answer("dead", "groups", config=config)["groups"]
    assert [(one["broker"], one["messages"]) for one in groups] == [
        ("mom", 1),
        ("shop", 3),
        ("shop", 1),
    ]
    done = saf("dead", "retry", "--group", groups[0]["group"], "--config", config)
    assert done.stdout == "mom: 1 dead letter set to be retried by the worker of reader (m-1)\n"
    only = answer("dead", "groups", "--broker", "shop", config=config)["groups"]
    assert {one["broker"] for one in only} == {"shop"}


@pytest.mark.parametrize(
    "command", ["dead list", "dead discard", "parked list", "parked messages", "parked retry-now"]
)
def test_a_value_that_is_no_id_of_a_group_is_named(config: Path, command: str) -> None:
    done = saf(*command.split(), "--group", "no price", "--config", config)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "'no price' is not a failure group: `saf dead groups`" in done.stderr
