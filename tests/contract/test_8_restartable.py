"""Guarantee 8: kill -9 anything, anywhere; run it again; nothing else to do."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from saf.database import Dsn
from tests import on_spark
from tests.pipeline import bodies, connect
from tests.processes import KEYS, application, forwarder, run, start, wait
from tests.tiers import sized

IN_APPLICATION = ("business_dml", "outbox_insert", "application_commit")
IN_FORWARDER = ("mom_insert", "mom_commit", "mark_forwarded", "mark_commit")

COPIES = {"exactly_once": {1}, "at_least_once": {1, 2}, "at_most_once": {0, 1}}


@pytest.fixture
def accounts(app: Dsn) -> Dsn:
    with connect(app) as connection:
        connection.execute("CREATE TABLE account (id text PRIMARY KEY, version int NOT NULL)")
        connection.execute("INSERT INTO account SELECT generate_series(0, %s)::text, 0", [KEYS - 1])
    return app


def check(app: Dsn, mom: Dsn, copies: set[int]) -> None:
    """Each committed count arrived as often as allowed, and each account's in order."""
    with connect(app) as connection:
        accounts = connection.execute("SELECT id, version FROM account").fetchall()
    committed = {f"{account} {n}" for account, version in accounts for n in range(1, version + 1)}
    arrived = bodies(mom)
    assert set(arrived) <= committed, "what was rolled back was sent"
    assert {arrived.count(body) for body in committed} <= copies
    if copies != {1}:
        return
    for account, version in accounts:
        counts = [int(body.split()[1]) for body in arrived if body.split()[0] == account]
        assert counts == list(range(1, version + 1))


@pytest.mark.parametrize("seed", range(sized(1, 3)))
@pytest.mark.parametrize("point", IN_APPLICATION)
def test_an_application_killed_at_a_step_leaves_a_message_for_each_commit_and_no_other(
    accounts: Dsn, mom: Dsn, point: str, seed: int
) -> None:
    nth = random.Random(seed).randint(1, 15)
    code = run(application, accounts, seed, failpoint=f"{point}:{nth}")
    assert code == -signal.SIGKILL
    with connect(accounts) as connection:
        messages = connection.execute("SELECT count(*) FROM saf.outbox").fetchone()
        counts = connection.execute("SELECT sum(version) FROM account").fetchone()
    assert messages == counts
    assert run(forwarder, accounts, mom, "exactly_once") == 0
    check(accounts, mom, {1})


@pytest.mark.parametrize("quality", COPIES)
@pytest.mark.parametrize("point", IN_FORWARDER)
def test_a_forwarder_killed_at_a_step_and_run_again_keeps_the_quality(
    accounts: Dsn, mom: Dsn, point: str, quality: str
) -> None:
    assert run(application, accounts, 1) == 0
    for nth in (1, 2):
        killed = run(forwarder, accounts, mom, quality, failpoint=f"{point}:{nth}")
        assert killed == -signal.SIGKILL
    assert run(forwarder, accounts, mom, quality) == 0
    # two kills: a chunk may be sent up to three times at least once
    check(accounts, mom, COPIES[quality] | ({3} if quality == "at_least_once" else set()))


@pytest.mark.parametrize("seed", range(sized(2, 4)))
def test_two_forwarders_killed_at_random_steps_while_an_application_writes(
    accounts: Dsn, mom: Dsn, seed: int
) -> None:
    chance = random.Random(seed)

    def point(among: tuple[str, ...], most: int) -> str:
        return f"{chance.choice(among)}:{chance.randint(1, most)}"

    for round_ in range(3):
        processes = [
            start(application, accounts, 10 * seed + round_, failpoint=point(IN_APPLICATION, 30)),
            start(forwarder, accounts, mom, "exactly_once", failpoint=point(IN_FORWARDER, 4)),
            start(forwarder, accounts, mom, "exactly_once", failpoint=point(IN_FORWARDER, 4)),
        ]
        assert {wait(process) for process in processes} <= {0, -signal.SIGKILL}
    assert run(forwarder, accounts, mom, "exactly_once") == 0
    check(accounts, mom, {1})


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.parametrize("point", IN_FORWARDER[sized(1, 0) : sized(2, 4)])
def test_the_spark_job_killed_at_a_step_and_run_again_delivers_exactly_once(
    accounts: Dsn, mom: Dsn, point: str, tmp_path: Path
) -> None:
    assert run(application, accounts, 2) == 0
    config = tmp_path / "saf.toml"
    config.write_text(
        f'[brokers.app]\ndsn = "{accounts.conninfo}"\n[destinations.mom]\n'
        f'dsn = "{mom.conninfo}"\n[forwarder]\ndefault_destination = "mom"\nchunk_rows = 4\n'
        'master = "local[2,2]"\nattempts = 1\n'
    )
    options = ["--spark", "always", "--json"]
    command = [sys.executable, "-m", "saf", "forward", "--config", str(config), *options]
    killed = subprocess.run(
        command,
        env={**os.environ, "SAF_FAILPOINT": f"{point}:2"},
        start_new_session=True,
        capture_output=True,
        check=False,
    )
    # Spark has tried again what it was killed in, or the run has failed
    assert b"unexpectedly" in killed.stderr, "nobody was killed"
    on_spark.forward(config)
    check(accounts, mom, {1})
