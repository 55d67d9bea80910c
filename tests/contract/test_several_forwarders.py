"""Several forwarders share the shards: they move as the numbers say, and no message notices.

`saf forward` starts no Spark while there is nothing to do, so the first tests run the real program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from saf.broker.migrate import migrate
from saf.database import Dsn
from tests import processes
from tests.crash.forwarders import forwarder
from tests.pipeline import connect
from tests.programs import BIN, configuration, environment, received, send
from tests.waits import until

LEASE_SECONDS = 6.0
SHARDS = 100
OWNERS = """
SELECT c.shard, m.name, c.epoch FROM saf.cursor c
JOIN saf.subscription s USING (subscription_id)
LEFT JOIN saf.member m ON m.member_id = c.owner
WHERE s.log = 'outbox' AND s.name = 'forwarder' ORDER BY c.shard
"""

Owners = dict[int, tuple[str | None, int]]
"""By shard, its owner's name and its epoch."""


def owners(app: Dsn) -> Owners:
    with connect(app) as connection:
        return {shard: (name, epoch) for shard, name, epoch in connection.execute(OWNERS)}


def shares(app: Dsn) -> list[int]:
    held = Counter(name for name, _ in owners(app).values())
    return sorted(held.values()) if None not in held else []


def moved(before: Owners, after: Owners) -> list[int]:
    """The shards that have another owner, each of which came by it in one step."""
    changed = [shard for shard in before if before[shard][0] != after[shard][0]]
    for shard in before:
        assert after[shard][1] - before[shard][1] == (shard in changed)
    return changed


@contextmanager
def programs(config: Path, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many `saf forward --loop`, of which some may be killed."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.extend(start(config) for _ in range(count))
        yield running
    finally:
        for one in running:
            one.send_signal(signal.SIGCONT)
            one.kill()
        for one in running:
            one.wait()


def start(config: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [BIN / "saf", "forward", "--config", config, "--loop", "--interval", "0.1"],
        env=environment(),
    )


@pytest.fixture
def broker(new_database: Callable[[str], Dsn]) -> Dsn:
    dsn = new_database("shards")
    migrate(dsn, shards=SHARDS)
    return dsn


@pytest.mark.full
@pytest.mark.slow
def test_a_sixth_takes_sixteen_of_a_hundred_shards_and_only_those_come_back_when_it_is_killed(
    broker: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(
        tmp_path / "saf.toml", {"app": broker}, {"mom": mom}, lease_seconds=LEASE_SECONDS
    )
    with programs(config, 5) as running:
        until(lambda: shares(broker) == [20] * 5)
        five = owners(broker)

        running.append(start(config))
        until(lambda: shares(broker) == [16, 16, 17, 17, 17, 17])
        six = owners(broker)
        changed = moved(five, six)
        assert len(changed) == 16
        assert {(six[shard][0] or "").split(":")[1] for shard in changed} == {str(running[5].pid)}
        given = Counter(five[shard][0] for shard in changed)
        assert sorted(given.values()) == [3, 3, 3, 3, 4]

        running[5].kill()
        seconds = until(lambda: shares(broker) == [20] * 5)
        assert seconds < LEASE_SECONDS, "a killed one's session tells at once"
        assert moved(six, owners(broker)) == changed

        running[0].send_signal(signal.SIGSTOP)
        seconds = until(lambda: shares(broker) == [25] * 4)
        assert seconds < 2 * LEASE_SECONDS, "one that hangs keeps its shards for its lease"
        four = owners(broker)
        running[0].send_signal(signal.SIGCONT)
        until(lambda: shares(broker) == [20] * 5)
        assert len(moved(four, owners(broker))) == 20, "it comes back as a new member"


@pytest.mark.slow
def test_nothing_is_lost_and_order_is_kept_while_forwarders_come_hang_and_die(
    broker: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    with connect(broker) as connection:
        connection.execute("INSERT INTO saf.route (destination) VALUES ('mom')")
    refusals = tmp_path / "refusals"
    arguments = (forwarder, broker, {"mom": mom}, 20, False, refusals)
    working = [processes.start(*arguments) for _ in range(5)]
    sent: list[str] = []
    try:
        for number in range(12):
            sent += send(broker, 100, f"round-{number}")
            if number == 2:
                until(lambda: shares(broker) == [20] * 5)
                working.append(processes.start(*arguments))
            if number == 5:
                until(lambda: shares(broker) == [16, 16, 17, 17, 17, 17])
                working[0].kill()
                os.kill(working[1].pid or 0, signal.SIGSTOP)
            if number == 8:
                until(lambda: shares(broker) == [25] * 4)
                os.kill(working[1].pid or 0, signal.SIGCONT)
            time.sleep(0.1)
        until(lambda: len(received(mom)) >= len(sent))
        until(lambda: shares(broker) == [20] * 5)
    finally:
        for one in working:
            one.kill()
        for one in working:
            one.join()
    assert not refusals.exists()
    arrived = received(mom)
    assert sorted(body for _, body in arrived) == sorted(sent)
    by_key: dict[str, list[str]] = {}
    for key, body in arrived:
        by_key.setdefault(key, []).append(body)
    position = {body: number for number, body in enumerate(sent)}
    for bodies in by_key.values():
        assert bodies == sorted(bodies, key=position.__getitem__)
