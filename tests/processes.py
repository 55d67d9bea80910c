"""Processes for tests that kill them: an application and a forwarder.

They are forked from a server that has imported everything, so that one costs milliseconds. Each
has a process group of its own, and dies at its fail point by SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from saf import Outbox
from saf.database import Dsn
from saf.failpoints import arm, fail_point
from tests.pipeline import Cycle, drain, forwarding_rules

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.processes",
        "saf.cli",
        "saf.forwarding.forwarder",
        "saf.broker.migrate",
        "tests.crash.forwarders",
        "tests.crash.writers",
        "tests.crash.site",
        "tests.crash.talks",
        "tests.crash.bugs",
        "tests.crash.hubs",
        "jsonschema",
        "tests.frozen",
    ]
)

KEYS = 5
TRANSACTIONS = 20


def application(dsn: Dsn, seed: int) -> None:
    """Count up accounts under their row lock; each count is also a message, keyed by account.

    Needs ``account (id text PRIMARY KEY, version int)`` with ids "0" to "4".
    """
    chance = random.Random(seed)
    outbox = Outbox()
    with dsn.connect(role="application") as connection:
        for _ in range(TRANSACTIONS):
            account = str(chance.randrange(KEYS))
            row = connection.execute(
                "UPDATE account SET version = version + 1 WHERE id = %s RETURNING version",
                [account],
            ).fetchone()
            fail_point("business_dml")
            assert row is not None
            outbox.send(connection, "billing", f"{account} {row[0]}", key=account)
            fail_point("outbox_insert")
            if chance.random() < 0.1:
                connection.rollback()
            else:
                connection.commit()
            fail_point("application_commit")


def forwarder(app: Dsn, mom: Dsn, quality: str) -> None:
    """Forward until nothing is left, in chunks of a few messages."""
    rules = forwarding_rules(quality, chunk_rows=4, mom=mom)
    with Cycle(app, rules) as cycle:
        drain(cycle)


def start(program: Callable[..., None], *arguments: object, failpoint: str = "") -> BaseProcess:
    process = CONTEXT.Process(target=_run, args=(failpoint, program, *arguments))
    process.start()
    return process


def run(program: Callable[..., None], *arguments: object, failpoint: str = "") -> int:
    """Run to the end; return the exit code, -9 if it was killed."""
    return wait(start(program, *arguments, failpoint=failpoint))


def wait(process: BaseProcess) -> int:
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(failpoint: str, program: Callable[..., None], *arguments: object) -> None:
    os.setsid()
    arm(failpoint)
    program(*arguments)
