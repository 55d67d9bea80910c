"""What hangs, and goes on later: a server that is frozen, a machine that vanishes, a lock.

Each takes longer than everybody's lease.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from saf.broker.embedded import EmbeddedServer
from tests.crash.forwarders import LEASE_SECONDS
from tests.crash.plan import Fault

if TYPE_CHECKING:
    from tests.crash.rounds import Round

LOCKED = (
    ("saf.cursor", "app"),
    ("saf.outbox", "app"),
    ("saf.member", "app"),
    ("saf.parked", "app"),
    ("saf.inbox", "stores"),
    ("saf.watermark", "stores"),
    ("saf.cursor", "stores"),
)
"""What a person may lock, and where."""


def freeze_source(round_: Round, fault: Fault) -> None:
    """All processes of the server are stopped."""
    _freeze(round_.site.source, LEASE_SECONDS + fault.lasts)


def freeze_mom(round_: Round, fault: Fault) -> None:
    """All processes of the server are stopped."""
    _freeze(round_.site.mom, LEASE_SECONDS + fault.lasts)


def vanish_mom(round_: Round, fault: Fault) -> None:
    """The MOM store's machine is off the network, and later on it again."""
    if round_.site.away:
        round_.site.away.vanish()
        time.sleep(LEASE_SECONDS + fault.lasts)
        round_.site.away.vanish(False)


def hold_lock(round_: Round, fault: Fault) -> None:
    """A person locks a table, and thinks."""
    _hold(round_, fault, "LOCK TABLE {} IN ACCESS EXCLUSIVE MODE")


def hold_rows(round_: Round, fault: Fault) -> None:
    """A person locks all rows of a table, and thinks."""
    _hold(round_, fault, "SELECT FROM {} FOR UPDATE")


def _freeze(server: EmbeddedServer, seconds: float) -> None:
    first = int((server.data_dir / "postmaster.pid").read_text().split()[0])
    os.kill(first, signal.SIGSTOP)  # it starts no more of them
    children = f"/proc/{first}/task/{first}/children"
    stopped = [*map(int, Path(children).read_text().split()), first]
    for signals in (signal.SIGSTOP, signal.SIGCONT):
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signals)
        time.sleep(seconds if signals is signal.SIGSTOP else 0.0)


def _hold(round_: Round, fault: Fault, statement: str) -> None:
    stores = round_.stores or {"app": round_.app}
    table, dsns = LOCKED[fault.target % len(LOCKED)]
    dsn = round_.app if dsns == "app" else stores[sorted(stores)[fault.target % len(stores)]]
    with dsn.connect(role="crash") as person, contextlib.suppress(psycopg.OperationalError):
        person.execute("SET lock_timeout = '3s'")
        person.execute(statement.format(table).encode())
        time.sleep(LEASE_SECONDS + fault.lasts)
        person.rollback()
