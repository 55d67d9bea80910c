"""What a little cycle costs where its databases are far away: round trips, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

from saf.config import load
from saf.database import Dsn, connections
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from tests.distant import Distance
from tests.pipeline import bodies, connect, send

MOST = 16
"""To look and to open takes 8; to read, to store and to close takes one each; and 5 are to look
whether messages follow soon."""


def test_a_little_cycle_takes_few_round_trips(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
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
    assert min(taken[6:]) <= MOST
