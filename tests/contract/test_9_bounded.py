"""Guarantee 9: memory does not grow with the backlog, on driver or executor."""

from __future__ import annotations

import json
import resource
import subprocess
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from saf.database import Dsn
from tests.pipeline import Cycle, connect, forwarding_rules
from tests.processes import start, wait
from tests.programs import BIN, environment

FILL = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT 'billing', 'order ' || n %% 100, convert_to(repeat(md5(n::text), %s), 'UTF8')
FROM generate_series(1, %s) AS n
"""
GROWTH_MIB = 48


def fill(app: Dsn, messages: int, kib: int) -> None:
    with connect(app) as connection:
        # stored as it is: what counts is the memory of those who read it
        connection.execute("ALTER TABLE saf.outbox ALTER COLUMN body SET STORAGE EXTERNAL")
        connection.execute(FILL, [32 * kib, messages])


def forward_and_tell(app: Dsn, mom: Dsn, tell: Connection) -> None:
    rules = forwarding_rules("exactly_once", 1000, mom=mom)
    with Cycle(app, rules) as cycle:
        cycle.run()
    tell.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def peak_mib(app: Dsn, mom: Dsn) -> float:
    """Peak memory of a process that reads and delivers everything."""
    told, tell = Pipe(duplex=False)
    assert wait(start(forward_and_tell, app, mom, tell)) == 0
    return float(told.recv())


@pytest.mark.slow
def test_a_task_needs_no_more_memory_for_forty_times_the_backlog(app: Dsn, mom: Dsn) -> None:
    fill(app, 2_000, kib=2)
    small = peak_mib(app, mom)
    fill(app, 80_000, kib=2)
    assert peak_mib(app, mom) - small < GROWTH_MIB, "the backlog was 160 MiB"


@pytest.mark.full
@pytest.mark.slow
def test_a_backlog_larger_than_the_memory_of_spark_is_forwarded(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    messages = 110_000
    fill(app, messages, kib=5)
    config = tmp_path / "saf.toml"
    config.write_text(
        f"[brokers.app]\ndsn = {json.dumps(app.conninfo)}\n"
        f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
        '[forwarder]\ndefault_destination = "mom"\nmaster = "local[2]"\n'
        '[forwarder.spark]\n"spark.driver.memory" = "512m"\n'
    )
    done = subprocess.run(
        [BIN / "saf", "forward", "--config", config, "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["forwarded"] == messages
