"""What nothing costs: idle receivers, an idle forwarder, and a poll that finds nothing.

Shares of one core, of the processor's time of their own process and of the server together, once
they have been idle for so long that their pauses are the longest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import saf
from benchmarks.receive import BOOKED, book
from benchmarks.stage import Stage, cpu_seconds, execute
from saf.broker.services import create_service
from saf.receiving.link import connected
from saf.receiving.receive import Receiver

RECEIVERS = 64
POLLS, ROUNDS = 300, 5
SETTLE_SECONDS, SECONDS = 5.0, 10.0


def polls(stage: Stage) -> None:
    """Notes what a poll that finds nothing takes, and what of it is the server's work.

    Either nobody writes anything, or others have written something elsewhere since the last poll.
    """
    with connected(stage.mom) as link, stage.app.connect(role="bench", autocommit=True) as other:
        receiver = Receiver(link, "billing", saf.Policy(), 100)
        backend = link.raw.info.backend_pid
        with receiver.delivery(0.2) as delivery:
            assert not delivery
        for where, writes in (("", False), ("_others_write", True)):
            taken, work = [], []
            for _ in range(ROUNDS):
                before, seconds = cpu_seconds(backend, children=False), 0.0
                for _ in range(POLLS):
                    if writes:
                        other.execute("SELECT pg_current_xact_id()")
                    began = time.perf_counter()
                    receiver._still_quiet()
                    seconds += time.perf_counter() - began
                taken.append(seconds / POLLS * 1000)
                work.append((cpu_seconds(backend, children=False) - before) / POLLS * 1000)
            stage.note(f"empty_poll_ms{where}", taken, "ms")
            stage.note(f"empty_poll_server_ms{where}", work, "ms", "<= 0.3")


def share(stage: Stage, used: Callable[[], float]) -> float:
    """The share of a core that a process and the server use, without what the server uses alone."""
    time.sleep(SETTLE_SECONDS)
    before, began = used() + cpu_seconds(stage.process, children=True), time.monotonic()
    time.sleep(SECONDS)
    after = used() + cpu_seconds(stage.process, children=True)
    return (after - before) / (time.monotonic() - began)


def receivers(stage: Stage) -> float:
    """The share of the threads of one worker."""
    worker = saf.Worker(stage.mom, "billing", threads=RECEIVERS)
    worker.batch_handler()(book)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        return share(stage, lambda: sum(os.times()[:2]))
    finally:
        worker.stop()
        thread.join()


def forwarder(stage: Stage) -> float:
    """The share of ``saf forward --loop`` with its default of a poll a second."""
    config = stage.settings_file(stage.server.data_dir.parent / "idle.toml")
    command = [sys.executable, "-m", "saf", "forward", "--config", str(config), "--loop"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            return share(stage, lambda: cpu_seconds(process.pid, children=False))
        finally:
            process.terminate()


def run(stage: Stage) -> None:
    """Notes idle_receivers_core_share and so on."""
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        create_service(connection, "billing")
        connection.execute(BOOKED.replace("TABLE", "TABLE IF NOT EXISTS"))
    stage.fill(0)
    stage.rewind()
    execute(stage.mom, "VACUUM ANALYZE")
    polls(stage)
    alone = share(stage, lambda: 0.0)
    stage.note(f"idle_{RECEIVERS}_receivers_core_share", receivers(stage) - alone, "", "< 0.02")
    stage.note("idle_forwarder_core_share", forwarder(stage) - alone, "", "< 0.01")
