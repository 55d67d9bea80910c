"""What a little cycle costs where its databases are far away: round trips, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saf.config import load
from saf.database import Dsn, connections
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from tests.distant import Distance
from tests.pipeline import bodies, connect, send

MOST = 5
"""To ask whether there is news, to open and read, to store, and to close takes one each; and
once more to look."""

MOST_OF_A_TASK = 26


def test_a_little_cycle_takes_few_round_trips(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    assert min(_taken(app, mom, tmp_path)) <= MOST


def test_a_cycle_with_a_task_takes_few_round_trips(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcess, "is_here", lambda *_: False)
    assert min(_taken(app, mom, tmp_path)) <= MOST_OF_A_TASK


def _taken(app: Dsn, mom: Dsn, tmp_path: Path) -> list[int]:
    """Return the round trips of some cycles with one message each, once everything is connected."""
    taken = []
    with Distance(app) as distance, connect(app) as connection:
        far, store = distance.far(app), distance.far(mom)
        file = tmp_path / "saf.toml"
        file.write_text(
            f"[brokers.app]\ndsn = {json.dumps(far.conninfo)}\n"
            f"[destinations.mom]\ndsn = {json.dumps(store.conninfo)}\n"
            '[forwarder]\ndefault_destination = "mom"\n'
        )
        looping = Forwarder(load(file), InProcess())
        looping.roster.once = False
        for number in range(12):
            send(connection, str(number), "A-1")
            before = distance.round_trips
            looping.cycle()
            taken.append(distance.round_trips - before)
        looping._leave()
        for dsn in (far, store):
            connections.forget(dsn)
    assert bodies(mom) == [str(number) for number in range(12)]
    return taken[6:]
