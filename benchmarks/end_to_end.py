"""From end to end: from a sender's commit to the commit of the message's business row.

An application commits in an open loop, which does not wait for the consumer; ``saf forward --loop``
forwards; and a worker inserts a business row for each message. The forwarder is a process of its
own, as in production; sender and worker are threads of this one. With many sources, a few are busy
and share the rate. Where databases are *distant*, a proxy holds up what the forwarder says to them
and hears from them.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

import saf
from benchmarks.receive import BOOKED, book
from benchmarks.stage import Stage, execute, median, percentile
from saf.broker.services import create_service, remove_service
from saf.database import Dsn
from saf.routing.routes import add_route, remove_route
from tests.distant import Distance

RATE, SHARES = 1000, (0.1, 0.5, 0.8)
RATES = {RATE: "", 100: "_at_100", 10_000: "_at_10000"}
REACH = {"p50": "<= 0.015", "p99": "<= 0.05"}
REACH_AT = {"_at_100": REACH, "_at_10000": {"p50": "<= 0.03"}, "": REACH}
REACH_LOCAL = {"p50": "<= 0.003"}
BURST, AT_ONCE, BURSTS = 60_000, 1_000, 3
WARM_UP_SECONDS, OPEN_LOOP_SECONDS = 1, 10
EVERY_SECONDS = 0.01
SOURCES, BUSY = 50, 5
DISTANCE_SECONDS = 0.001
"""To another data center of the same region, there and back."""

WAITS = "SELECT extract(epoch FROM at - sent_at)::float FROM booked ORDER BY sent_at"


def run(stage: Stage) -> None:
    """Notes end_to_end_p50_seconds and so on: at a rate, and at shares of the capacity.

    The capacity is what sender, forwarder and worker do together when none waits for another.
    """
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        create_service(connection, "billing")
        connection.execute(BOOKED.replace("TABLE", "TABLE IF NOT EXISTS"))
    with running(stage):
        _burst(stage)  # what is hot is compiled, and Spark is started
        bursts = [_burst(stage) for _ in range(BURSTS)]
        capacity = median(bursts)
        stage.note("end_to_end_capacity_per_second", bursts, "1/s", ">= 30,000")
        rates = {where: float(rate) for rate, where in RATES.items()}
        rates |= {f"_at_{100 * share:.0f}_percent": capacity * share for share in SHARES}
        for where, rate in rates.items():
            _empty(stage)
            _note(
                stage, "end_to_end", _waits(stage, rate, stage.mom), REACH_AT.get(where, {}), where
            )
    tenants = stage.tenants(SOURCES)
    with running(stage, tenants):
        busy = [*tenants.values()][:BUSY]
        _handled(stage.mom, _send(busy, RATE, RATE))
        _empty(stage)
        _note(stage, f"end_to_end_{SOURCES}_sources", _waits(stage, RATE, stage.mom, busy), REACH)
    with (
        Distance(stage.app, DISTANCE_SECONDS) as distance,
        running(stage, {"app": distance.far(stage.app)}, distance.far(stage.mom)),
    ):
        _handled(stage.mom, _send([stage.app], RATE, RATE))
        _empty(stage)
        _note(stage, "end_to_end_distant", _waits(stage, RATE, stage.mom), {})
    with locally(stage):
        _note(stage, "end_to_end_local", _waits(stage, RATE, stage.app), REACH_LOCAL)


def _note(
    stage: Stage, name: str, waits: list[float], reach: Mapping[str, str], suffix: str = ""
) -> None:
    """Notes how long messages have taken."""
    for which, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
        stage.note(
            f"{name}_{which}_seconds{suffix}", percentile(waits, share), "s", reach.get(which, "")
        )


def _waits(stage: Stage, rate: float, at: Dsn, sources: Sequence[Dsn] | None = None) -> list[float]:
    """How long messages take at a rate, once everything is warm."""
    waits = _handled(at, _send(sources or [stage.app], int(rate * OPEN_LOOP_SECONDS), rate))
    return waits[int(rate * WARM_UP_SECONDS) :]


@contextmanager
def locally(stage: Stage) -> Iterator[None]:
    """No forwarder: a local route, and a worker at the senders' own database."""
    _empty(stage)
    with stage.app.connect(role="bench", autocommit=True) as connection:
        create_service(connection, "billing")
        connection.execute(BOOKED.replace("TABLE", "TABLE IF NOT EXISTS"))
        add_route(connection, "app", service="billing", local=True)
    try:
        with working(stage.app):
            yield
    finally:
        with stage.app.connect(role="bench", autocommit=True) as connection:
            remove_route(connection, "app", service="billing")
            remove_service(connection, "billing", discard=True)
            connection.execute("DROP TABLE booked")


@contextmanager
def working(dsn: Dsn) -> Iterator[None]:
    """A worker, in a thread of this process."""
    worker = saf.Worker(dsn, "billing", max_messages=1000)
    worker.batch_handler()(book)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()


@contextmanager
def running(
    stage: Stage, tenants: Mapping[str, Dsn] | None = None, mom: Dsn | None = None
) -> Iterator[None]:
    """A forwarder in a loop, and a worker, from empty tables on."""
    _empty(stage)
    folder = Path(stage.server.data_dir).parent
    config = stage.settings_file(
        folder / "loop.toml", mom=mom, tenants=tenants, interval_seconds=0.05
    )
    command = [sys.executable, "-m", "saf", "forward", "--config", str(config), "--loop"]
    with working(stage.mom), subprocess.Popen(command, stdout=subprocess.DEVNULL) as forwarder:
        try:
            yield
        finally:
            forwarder.terminate()


def _empty(stage: Stage) -> None:
    execute(stage.app, "TRUNCATE saf.outbox")
    execute(stage.mom, "TRUNCATE saf.inbox, booked")


def _burst(stage: Stage) -> float:
    """Messages a second from the first commit to the last business row."""
    _empty(stage)
    started = time.monotonic()
    _handled(stage.mom, _send([stage.app], BURST, None))
    return BURST / (time.monotonic() - started)


def _send(sources: Sequence[Dsn], messages: int, rate: float | None) -> int:
    """Commit so many messages, at a rate in messages a second or without a pause."""
    outbox, sent = saf.Outbox(), 0
    with ExitStack() as stack:
        connections = cycle([stack.enter_context(one.connect(role="bench")) for one in sources])
        started = time.monotonic()
        while sent < messages:
            due = AT_ONCE if rate is None else int((time.monotonic() - started) * rate) - sent
            rows = [
                saf.Message(service="billing", body=b"x" * 200, key=str(n))
                for n in range(min(due, messages - sent))
            ]
            if rows:
                connection = next(connections)
                outbox.send_many(connection, rows)
                connection.commit()
                sent += len(rows)
            if rate is not None:
                time.sleep(EVERY_SECONDS)
    return sent


def _handled(at: Dsn, sent: int) -> list[float]:
    """Once all are handled: how long each took, in the order in which they were sent."""
    with at.connect(role="bench", autocommit=True) as connection:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            ((count,),) = connection.execute("SELECT count(*) FROM booked").fetchall()
            if count == sent:
                rows = connection.execute(WAITS).fetchall()
                return [float(wait) for (wait,) in rows]
            time.sleep(0.2)
    raise RuntimeError(f"sent {sent} messages, and {count} were handled")
