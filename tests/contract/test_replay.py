"""A destination restored from an older backup gets what it lost, once and in order."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from saf.broker.embedded import EmbeddedServer, programs
from saf.database import Dsn, fetch
from saf.operating.repair.replay import CHUNK, replay
from saf.operating.repair.send_again import TAKE_TURN, send_again
from saf.routing.matching import Route, Routes
from tests.pipeline import bodies, connect, run, send, stores
from tests.programs import BIN, configuration, environment, saf
from tests.waits import until, waiters

ROUTES = Routes(routes=(Route(destination="mom"),))


@pytest.mark.parametrize("chunk", [3, CHUNK])
def test_what_a_restored_store_lost_arrives_before_what_was_sent_since(
    app: Dsn, mom: Dsn, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("saf.operating.repair.replay.CHUNK", chunk)
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key=str(number % 2))
        run(app, chunk_rows=3, mom=mom)
        restored = server.create_database(f"restored_{mom.database}")
        dump = subprocess.run(
            [programs(18) / "pg_dump", mom.conninfo], capture_output=True, check=True
        )
        subprocess.run(
            [programs(18) / "psql", "-qX", restored.conninfo],
            input=dump.stdout, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for number in range(10, 20):
            send(connection, str(number), key=str(number % 2))
        run(app, chunk_rows=3, mom=mom)
        for number in range(20, 30):
            send(connection, str(number), key=str(number % 2))
        lost = fetch(connection, "SELECT shard, id FROM saf.outbox ORDER BY id OFFSET 10 LIMIT 10")
        dry = replay(connection, lost, ROUTES, "", dry_run=True)
        assert len(dry["mom"]) == 10
        assert fetch(connection, "SELECT FROM saf.parked") == []
    sent = send_again(
        "app", app, stores(mom=restored), lambda _: ROUTES, retention_seconds=3600, why="disk died"
    )
    assert sent is not None
    assert sent.by_destination == dry
    run(app, chunk_rows=3, mom=restored)
    assert sorted(map(int, bodies(restored))) == list(range(30))
    for parity in range(2):
        mine = [int(body) for body in bodies(restored) if int(body) % 2 == parity]
        assert mine == sorted(mine)


def test_a_replay_without_a_route_or_of_purged_messages_sends_the_rest(app: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "one")
        lost = fetch(connection, "SELECT shard, id FROM saf.outbox")
        assert replay(connection, [*lost, (1, 999)], Routes(), "") == {}
        assert list(replay(connection, [*lost, (1, 999)], ROUTES, "")) == ["mom"]


@pytest.mark.slow
def test_the_command_sends_again_what_reconcile_says_is_lost_and_nothing_else(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key="k")
    run(app, chunk_rows=3, mom=mom)
    with connect(mom) as store:
        gone = store.execute(
            "DELETE FROM saf.inbox WHERE id IN (SELECT id FROM saf.inbox ORDER BY id DESC LIMIT 3) "
            "RETURNING message_id::text"
        ).fetchall()
    lost = sorted(message_id for (message_id,) in gone)

    done = saf("replay", "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    would = json.loads(done.stdout)
    assert sorted(would["message_ids"]["app"]["mom"]) == lost
    assert (would["set_back"], would["blind"]) == ({"app": []}, {"app": []})
    assert bodies(mom) == [str(number) for number in range(7)]
    said = saf("replay", "--why", "the disk died", cwd=tmp_path).stdout
    assert said == "app: 3 for mom to be sent again by the next run\n"
    assert saf("replay", cwd=tmp_path).stdout == "app: nothing lost\n"
    run(app, chunk_rows=3, mom=mom)
    assert bodies(mom) == [str(number) for number in range(10)]
    assert saf("reconcile", cwd=tmp_path).returncode == 0


def test_a_dry_run_of_a_replay_changes_nothing(app: Dsn) -> None:
    shared = Routes(routes=(Route(destination="a"), Route(destination="b")))
    with connect(app) as connection:
        send(connection, "x", key="k")
        lost = fetch(connection, "SELECT shard, id FROM saf.outbox")
        (chosen,) = replay(connection, lost, shared, "", dry_run=True)
        assert chosen in ("a", "b")
        for table in ("parked", "backoff", "audit", "route_choice", "route_share"):
            assert fetch(connection, f"SELECT FROM saf.{table}") == []


def test_ctrl_c_ends_a_replay_that_waits_for_another_one(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    with connect(app) as other:
        other.execute(TAKE_TURN)
        process = subprocess.Popen(
            [BIN / "saf", "replay"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        until(lambda: waiters(other))
        process.send_signal(signal.SIGINT)
        # sooner than the wait for a lock ends by itself
        assert process.communicate(timeout=5) == (b"", b"")
        assert process.returncode == 130
        until(lambda: not waiters(other))
