"""`saf outbox list` and `show`: each message in its state, a page at a time, at a bounded cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from saf import create_service
from saf.database import Dsn, fetch
from saf.operating.outbox import Sent, State, Wanted, messages, place_at
from tests.pipeline import connect, forward, send
from tests.programs import configuration, saf
from tests.programs import send as send_many

ASIDE = (
    "INSERT INTO saf.dead_letter (subscription_id, destination, shard, id, message_id, "
    "to_service, key, body, reason, error) SELECT 1, 'mom', shard, id, message_id, to_service, "
    "key, body, 'rejected', 'it is blue' FROM saf.outbox WHERE body = 'dead'"
)


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """An outbox with a message in each state."""
    with connect(mom) as connection:
        create_service(connection, "billing", refuse_others=True)
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) VALUES ('unknown', 'k', 'parked')"
        )
        send(connection, "dead", key="k")
        send(connection, "forwarded", key="k")
        forward(app, mom=mom)
        connection.execute(ASIDE)
        send(connection, "pending", key="k")
        send(connection, "another")
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


def listed(config: Path, *options: str) -> list[dict[str, Any]]:
    done = saf("outbox", "list", "--json", *options, "--config", config)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["messages"]
    return rows


def test_each_message_is_listed_in_its_state_in_the_order_of_transactions(config: Path) -> None:
    rows = listed(config)
    states = ["parked", "dead", "forwarded", "pending", "pending"]
    assert [row["state"] for row in rows] == states
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    assert (rows[0]["destination"], "has no service" in rows[0]["error"]) == ("mom", True)
    assert rows[1]["error"] == "rejected: it is blue"
    for state in set(states):
        assert {row["state"] for row in listed(config, "--state", state)} == {state}
    assert len(listed(config, "--state", "pending")) == 2
    assert [row["state"] for row in listed(config, "--key", "k")] == states[:4]
    assert [row["state"] for row in listed(config, "--service", "unknown")] == ["parked"]
    assert listed(config, "--until", "2020-01-01T00:00:00Z") == []
    assert len(listed(config, "--since", "2020-01-01T00:00:00Z")) == 5


@pytest.mark.parametrize("state", [None, "pending", "forwarded", "parked", "dead"])
def test_pages_follow_each_other_without_a_gap_or_a_repeat(
    app: Dsn, mom: Dsn, config: Path, state: str | None
) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) SELECT 'unknown', n::text, '' "
            "FROM generate_series(1, 8) AS n"
        )
        forward(app, mom=mom)
    send_many(app, 25)
    options = [] if state is None else ["--state", state]
    whole = [row["message_id"] for row in listed(config, *options)]
    pages: list[str] = []
    after: str | None = None
    for _ in range(40):
        more = [] if after is None else ["--after", after]
        shop = ("--broker", "shop", "--config", config)
        done = saf("outbox", "list", "--json", "--limit", "3", *options, *more, *shop)
        answer = json.loads(done.stdout)
        pages += [row["message_id"] for row in answer["messages"]]
        after = answer["next"]["shop"]
        if after is None:
            break
    assert pages == whole
    assert len(set(whole)) == len(whole) > 0


@pytest.mark.parametrize("state", [None, "pending", "forwarded"])
@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_look_whose_time_is_over_says_how_far_it_came_and_the_next_one_goes_on_there(
    app: Dsn, config: Path, state: State | None, seconds: float
) -> None:
    assert config
    send_many(app, 25)
    with connect(app) as connection:
        for number in range(30):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) "
                "SELECT 'billing', %s, '' FROM generate_series(1, 4)",
                [f"k{number % 3}"],
            )
        for wanted in (Wanted(state=state), Wanted(state=state, key="k1"),
                       Wanted(state=state, service="nobody")):  # fmt: skip
            whole = messages(connection, wanted, limit=1000)
            found: list[Sent] = []
            after, cut = None, 0
            for _ in range(200):
                page = messages(connection, wanted, after=after, limit=7, look_seconds=seconds)
                assert len(page.shown) <= 7
                found += page.shown
                cut += page.before is not None
                after = place_at(page.next, state)
                if after is None:
                    break
            assert found == [*whole.shown]
            assert (cut > 0) is (seconds == 0)


def test_the_end_of_another_listing_is_refused(config: Path) -> None:
    for state, end in (("pending", "7"), ("dead", "7.7"), ("dead", "x")):
        done = saf("outbox", "list", "--state", state, "--after", end, "--config", config)
        assert done.returncode == 2
        assert "with the same --state" in done.stderr
    done = saf("outbox", "list", "--state", "lost", "--config", config)
    assert "the states are pending, forwarded, parked, dead" in done.stderr


def test_what_takes_too_long_says_how_to_ask_for_less(app: Dsn, config: Path) -> None:
    with connect(app) as connection:
        connection.execute("BEGIN; LOCK TABLE saf.outbox IN ACCESS EXCLUSIVE MODE")
        done = saf("outbox", "list", "--timeout", "0.2", "--config", config)
    assert done.returncode == 2
    assert "took longer than 0.2 s" in done.stderr
    assert "--key" in done.stderr


def test_a_page_of_a_long_log_reads_little(app: Dsn, mom: Dsn, config: Path) -> None:
    with connect(app) as connection:
        connection.execute(
            "DO $$ BEGIN FOR i IN 1 .. 300 LOOP INSERT INTO saf.outbox (to_service, key, body) "
            "SELECT 'billing', n::text, '' FROM generate_series(1, 100) AS n; COMMIT; END LOOP; "
            "END $$"
        )
        forward(app, mom=mom, chunk_rows=10_000)
        send(connection, "last")
        read = (
            "SELECT sum(idx_tup_fetch + seq_tup_read)::bigint FROM pg_stat_user_tables "
            "WHERE relname ~ '^outbox_[0-9]$'"
        )
        connection.execute("SELECT pg_stat_force_next_flush()")
        ((before,),) = fetch(connection, read)
        assert [row["bytes"] for row in listed(config, "--state", "pending")][-1] == 4
        assert len(listed(config, "--limit", "10")) == 10
        connection.execute("SELECT pg_stat_clear_snapshot()")
        ((after,),) = fetch(connection, read)
    assert after - before < 5_000


def test_one_message_is_shown_by_its_id_or_message_id_with_why_it_waits(config: Path) -> None:
    rows = {row["state"]: row for row in listed(config)}
    for state, row in rows.items():
        for which in (str(row["id"]), row["message_id"]):
            done = saf("outbox", "show", which, "--json", "--broker", "shop", "--config", config)
            (shown,) = json.loads(done.stdout)["messages"]
            assert (shown["state"], shown["message_id"]) == (state, row["message_id"])
    done = saf("outbox", "show", rows["dead"]["message_id"], "--key", "k", "--config", config)
    assert "it is blue" in done.stdout
    shop = ("--broker", "shop", "--config", config)
    done = saf("outbox", "show", str(rows["parked"]["id"]), "--body", *shop)
    assert done.stdout == "parked"
    done = saf("outbox", "show", str(uuid4()), "--config", config)
    assert done.returncode == 2
    assert "no message" in done.stderr
    assert "neither an id" in saf("outbox", "show", "seven", "--config", config).stderr
