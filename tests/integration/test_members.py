"""`saf members` and `saf broker list`: who has which shards, and who a broker is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saf import receive
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.database.dsn import Dsn as AnyDsn
from saf.log.shards import Member
from tests.pipeline import connect, new_member, send
from tests.programs import configuration, last_json, saf


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    with connect(mom) as connection:
        create_service(connection, "billing")
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


def asked(config: Path, *options: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    done = saf("members", "--json", *options, "--config", config)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["subscriptions"]
    return {(row["broker"], row["log"], row["subscription"]): row for row in rows}


def test_members_of_every_subscription_are_shown_with_their_shards_and_its_lag(
    app: Dsn, mom: Dsn, config: Path
) -> None:
    with connect(app) as source, connect(mom) as store:
        first, second = new_member(source, name="one:1"), new_member(source, name="two:2")
        first.balance(source)
        second.balance(source)
        first.balance(source)
        second.balance(source)
        send(source, "x", key="k")
        store.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('billing', '')")
        ((number,),) = fetch(
            store, "SELECT subscription_id FROM saf.subscription WHERE name = 'billing'"
        )
        third = Member(subscription_id=number, lease_seconds=30, name="three:3")
        third.join(store)
        third.balance(store)
        found = asked(config)
        forwarder = found["shop", "outbox", "forwarder"]
        assert [one["name"] for one in forwarder["members"]] == ["one:1", "two:2"]
        assert {one["shards"] for one in forwarder["members"]} == {"0-31", "32-63"}
        assert (forwarder["left"], forwarder["exact"], forwarder["unowned_shards"]) == (1, True, "")
        assert forwarder["lag_seconds"] > 0
        billing = found["mom", "inbox", "billing"]
        assert [one["shards"] for one in billing["members"]] == ["0-63"]
        assert billing["left"] == 1
        assert found["mom", "outbox", "forwarder"]["unowned_shards"] == "0-63"

        (only,) = asked(config, "--subscription", "billing", "--shards").values()
        if "shards" in only:
            assert sum(shard["left"] for shard in only["shards"]) == 1
            assert {shard["owner"] for shard in only["shards"]} == {"three:3"}
        said = saf("members", "--config", config).stdout
        assert "one:1: 32 (0-31), lease" in said
        assert "no running process owns shards 0-63" in said


def test_a_subscription_that_is_not_there_is_named_with_those_that_are(config: Path) -> None:
    done = saf("members", "--subscription", "biling", "--config", config)
    assert done.returncode == 2
    assert "--subscription biling does not exist, only billing, forwarder" in done.stderr


def test_a_broker_that_is_down_does_not_hide_the_others(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    nowhere = AnyDsn("host=/nonexistent dbname=x")
    config = configuration(tmp_path / "saf.toml", {"shop": app, "gone": nowhere}, {"mom": mom})
    for command in (["members"], ["broker", "list"]):
        done = saf(*command, "--json", "--config", config)
        assert done.returncode == 75
        answer = json.loads(done.stdout)
        (rows,) = (value for name, value in answer.items() if name != "errors")
        assert {row["broker"] for row in rows} == {"shop", "mom"}
        assert [one["broker"] for one in answer["errors"]] == ["gone"]


def test_broker_list_gives_the_broker_id_that_routes_by_broker_name(mom: Dsn, config: Path) -> None:
    with connect(mom) as store:
        ((broker_id,),) = fetch(store, "SELECT broker_id::text FROM saf.broker")
    done = saf("broker", "list", "--json", "--config", config)
    brokers = {one["broker"]: one for one in json.loads(done.stdout)["brokers"]}
    assert brokers["mom"]["broker_id"] == broker_id
    assert brokers["mom"]["used_as"] == ["destination"]
    assert brokers["shop"]["used_as"] == ["source"]
    assert (brokers["shop"]["destinations"], brokers["mom"]["destinations"]) == ([], ["mom"])
    assert (brokers["shop"]["shards"], brokers["shop"]["incarnation"]) == (64, 1)
    assert broker_id in saf("broker", "list", "--broker", "mom", "--config", config).stdout
    added = saf("route", "add", "mom", "--to-broker", broker_id, "--config", config)
    assert added.returncode == 0, added.stderr


def test_a_broker_that_is_a_source_and_a_store_is_listed_once(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"shop": app, "mom": mom}, {"store": app})
    config.write_text(config.read_text() + f"[destinations.mom]\ndsn = '{mom.conninfo}'\n")
    assert saf("dead", "list", "--config", config).stdout == "No dead letters at shop, mom.\n"
    assert saf("dead", "list", "--broker", "store", "--config", config).stdout == (
        "No dead letters at store.\n"
    )
    listed = saf("broker", "list", "--config", config).stdout.splitlines()
    shop, other = (
        next(line for line in listed if line.startswith(name)) for name in ("shop", "mom")
    )
    assert len(listed) == 3
    assert "  source and destination store  " in shop
    assert "  source and destination  " in other
    done = saf("broker", "list", "--json", "--config", config)
    rows = {row["broker"]: row for row in json.loads(done.stdout)["brokers"]}
    assert (rows["shop"]["used_as"], rows["shop"]["destinations"]) == (
        ["source", "destination"],
        ["store"],
    )
    refused = saf("broker", "new-id", "--broker", "store", "--config", config)
    assert "no other broker of saf.toml has the broker_id of 'shop'" in refused.stderr


def test_a_receiver_that_is_connected_is_listed_though_it_owns_no_shard(
    mom: Dsn, config: Path
) -> None:
    def shown() -> str:
        return saf("members", "--subscription", name, "--config", config).stdout

    name, idle = "Rechnungsprüfung", "no members, and no receiver is connected"
    with connect(mom) as connection:
        create_service(connection, name)
    assert idle in shown()
    with receive(mom, name):
        assert "receivers, which own no shards: pid " in shown()
        rows = last_json(saf("inbox", "status", "--json", "--config", config).stdout)
        receivers = {row["subscription"]: row["receivers"] for row in rows["subscriptions"]}
        assert receivers == {name: 1, "billing": 0}
    assert idle in shown()
