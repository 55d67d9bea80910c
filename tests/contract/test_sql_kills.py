"""Two receivers in psql are killed at random: each message is handled once, in order of its key."""

from __future__ import annotations

import os
import random
import subprocess
from collections import defaultdict
from functools import partial

from saf.broker import services
from saf.database import Dsn, fetch
from tests.pipeline import connect
from tests.waits import until

KEYS, EACH = "abcdef", 40
KILLS = 12

# Each turn is a transaction; some are rolled back. The sleep is the work during which
# the receiver is killed
TURN = """
BEGIN;
INSERT INTO handled (key, number)
SELECT key, convert_from(body, 'UTF8')::int FROM saf.receive('billing', 3, 1000);
SELECT pg_sleep(random() * 0.01) \\g /dev/null
{end};
"""
LEFT = f"SELECT {len(KEYS) * EACH} - count(*) FROM handled"


def receiver(dsn: Dsn, seed: int) -> subprocess.Popen[str]:
    """Start psql with many turns, in a process that may be killed."""
    chance = random.Random(seed)
    turns = (TURN.format(end=chance.choices(("COMMIT", "ROLLBACK"), (9, 1))[0]) for _ in range(300))
    process = subprocess.Popen(
        ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn.conninfo, "-f", "-"],
        env={"PATH": os.environ["PATH"], "PGAPPNAME": "killed"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write("".join(turns))
    process.stdin.close()
    return process


def left(dsn: Dsn) -> int:
    with connect(dsn) as connection:
        ((count,),) = fetch(connection, LEFT)
    return int(count)


def has_moved(dsn: Dsn, before: int, receivers: list[subprocess.Popen[str]]) -> bool:
    """Whether something was handled since, or a receiver has ended."""
    return left(dsn) < before or any(one.poll() is not None for one in receivers)


def test_psql_receivers_killed_at_random_handle_each_message_once_and_in_order(app: Dsn) -> None:
    with connect(app) as connection:
        services.create_service(connection, "billing")
        connection.execute(
            "CREATE TABLE handled (at bigint GENERATED ALWAYS AS IDENTITY, key text, number int)"
        )
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) "
            f"SELECT 'billing', key, n::text::bytea FROM generate_series(1, {EACH}) AS g (n), "
            f"unnest('{{{','.join(KEYS)}}}'::text[]) AS key ORDER BY g.n"
        )
    seeds = iter(range(1000))
    chance = random.Random(7)
    receivers = [receiver(app, next(seeds)) for _ in range(2)]
    killed = 0
    try:
        while left(app):
            until(partial(has_moved, app, left(app), receivers))
            hit = chance.randrange(2)
            if killed < KILLS and receivers[hit].poll() is None:
                kill(app, receivers[hit], of_server=chance.random() < 0.5)
                killed += 1
            receivers = [
                one if one.poll() is None else receiver(app, next(seeds)) for one in receivers
            ]
            with connect(app) as connection:
                connection.execute(
                    "UPDATE saf.backoff SET next_attempt_at = now() WHERE next_attempt_at > now()"
                )
    finally:
        for one in receivers:
            one.kill()
            one.wait()
    assert killed >= KILLS // 2
    numbers = defaultdict(list)
    with connect(app) as connection:
        for key, number in fetch(connection, "SELECT key, number FROM handled ORDER BY at"):
            numbers[key].append(number)
        assert fetch(connection, "SELECT FROM saf.dead_letter") == []
    assert numbers == {key: list(range(1, EACH + 1)) for key in KEYS}


def kill(dsn: Dsn, process: subprocess.Popen[str], *, of_server: bool) -> None:
    """Kill psql, or the server's processes of both receivers."""
    if not of_server:
        process.kill()
        process.wait()
        return
    with connect(dsn) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'killed'"
        )
