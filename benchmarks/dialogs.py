"""Dialogs: what sending costs over a plain send, receiving many and few, and large bodies.

    python -m benchmarks.dialogs [send] [receive] [fragments] [sizes]

Not a part of `make bench`. A large body is noise, sent from a file by one process, forwarded by
`saf forward` and read as a file by another one; what memory each needs is noted. "sizes" is what
the default of ``fragment_bytes`` was chosen by: the same without Spark, at several sizes.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import saf
from benchmarks.memory import peak_mib
from benchmarks.stage import RESULTS, Stage, execute, median
from saf.broker.services import create_service
from saf.database import Dsn
from saf.dialogs.dialog import FRAGMENT_BYTES
from saf.receiving.link import connected
from saf.receiving.receive import Receiver
from saf.testing.cycle import Cycle, forwarding_rules

SHOP, WAREHOUSE = "shop", "warehouse"
SENDS, RECEIVED = 1500, 10_000
LARGE = 2**30
SWEPT, ROUNDS = 2**27, 3
SIZES = {"40_kib": 40 * 2**10, **{f"{n}_kib": n * 2**10 for n in (256, 1024, 4096, 16384)}}

FILL = """
INSERT INTO saf.inbox (to_service, from_service, key, conversation_id, from_initiator, sequence,
                       headers, body)
SELECT 'warehouse', 'shop', id::text, id, true, sequence, '{"saf-dialog": {}}', 'order'::bytea
FROM (SELECT md5((i / %(each)s)::text)::uuid AS id, i %% %(each)s + 1 AS sequence
      FROM generate_series(0, %(messages)s - 1) AS i) AS said ORDER BY sequence
"""
EMPTY = "TRUNCATE saf.outbox, saf.inbox, saf.fragment, saf.conversation CASCADE"


class Noise(io.RawIOBase):
    """A file of so many bytes that cannot be compressed."""

    def __init__(self, length: int) -> None:
        self.left = length
        self.noise = os.urandom(2**24)

    def read(self, size: int = -1, /) -> bytes:
        piece = self.noise[: min(size, self.left)]
        self.left -= len(piece)
        return piece


def begin(dsn: Dsn) -> saf.Dialog:
    with dsn.connect(role="bench") as connection:
        return saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)


def send(stage: Stage) -> None:
    """Notes dialog_send_added_p50_ms: transactions of one message, by turns."""
    dialog, outbox = begin(stage.app), saf.Outbox()
    body = b"x" * 200
    took: dict[str, list[float]] = {"plain": [], "dialog": []}
    with stage.app.connect(role="bench") as connection:
        says: dict[str, Callable[[], object]] = {
            "plain": lambda: outbox.send(connection, WAREHOUSE, body, key="a key"),
            "dialog": lambda: dialog.send(connection, body),
        }
        for _ in range(SENDS):
            for name, say in says.items():
                started = time.perf_counter()
                say()
                connection.commit()
                took[name].append(time.perf_counter() - started)
    plain, spoken = median(took["plain"]), median(took["dialog"])
    stage.note("dialog_send_p50_ms", spoken * 1000, "ms")
    stage.note("dialog_send_added_p50_ms", (spoken - plain) * 1000, "ms")


def receive(stage: Stage) -> None:
    """Notes dialog_receive_per_second_…: one receiver, a thousand messages a delivery, no-op."""
    for name, each in (("1_dialog", RECEIVED), ("10000_dialogs", 1)):
        with stage.mom.connect(role="bench", autocommit=True) as connection:
            connection.execute(EMPTY)
            connection.execute(FILL, {"messages": RECEIVED, "each": each})
            connection.execute("VACUUM ANALYZE saf.inbox")
        received = 0
        with connected(stage.mom) as link:
            receiver = Receiver(link, WAREHOUSE, saf.Policy(), 1000)
            started = time.monotonic()
            while received < RECEIVED:
                with receiver.delivery() as delivery:
                    received += sum(message.dialog is not None for message in delivery)
        rate = received / (time.monotonic() - started)
        stage.note(f"dialog_receive_per_second_{name}", rate, "1/s")


def send_large(dsn: Dsn, length: int, fragment_bytes: int) -> tuple[float, float]:
    """A program: how many seconds it took, and how many MiB its memory grew by."""
    dialog, file = begin(dsn), Noise(length)
    before = _peak_mib()
    with dsn.connect(role="bench") as connection:
        started = time.monotonic()
        dialog.send(connection, file, fragment_bytes=fragment_bytes)
        connection.commit()
    return time.monotonic() - started, _peak_mib() - before


def receive_large(dsn: Dsn, length: int) -> tuple[float, float]:
    """The same at the other end."""
    before = _peak_mib()
    read, started = 0, time.monotonic()
    with saf.receive(dsn, WAREHOUSE) as delivery:
        (message,) = delivery
        body = message.open()
        while piece := body.read(2**20):
            read += len(piece)
    if read != length:
        raise RuntimeError(f"{read} bytes of {length}")
    return time.monotonic() - started, _peak_mib() - before


def fragments(stage: Stage) -> None:
    """Notes fragments_…_mb_per_second of a large body, and the memory that each program needs."""
    _prepare(stage)
    config = stage.settings_file(Path(stage.server.data_dir).parent / "dialogs.toml")
    sent, sending = _alone(send_large, stage.app, LARGE, FRAGMENT_BYTES)
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "saf", "forward", "--config", str(config), "--json"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        forwarding = peak_mib(process)
    forwarded = time.monotonic() - started
    received, receiving = _alone(receive_large, stage.mom, LARGE)
    for name, seconds in {
        "send": sent,
        "forward": forwarded,
        "receive": received,
        "end_to_end": sent + forwarded + received,
    }.items():
        stage.note(f"fragments_{name}_mb_per_second", LARGE / 1e6 / seconds, "MB/s")
    stage.note("fragments_send_growth_mib", sending, "MiB")
    stage.note("fragments_forward_peak_mib", forwarding, "MiB")
    stage.note("fragments_receive_growth_mib", receiving, "MiB")


def sizes(stage: Stage) -> None:
    """Notes fragment_…_mb_per_second by size, the best of interleaved rounds of each step.

    Forwarded without Spark, in chunks as by default.
    """
    best: dict[tuple[str, str], float] = {}
    for _ in range(ROUNDS):
        for name, fragment_bytes in SIZES.items():
            _prepare(stage)
            seconds = {
                "send": _alone(send_large, stage.app, SWEPT, fragment_bytes)[0],
                "forward": _alone(forward_large, stage.app, stage.mom)[0],
                "receive": _alone(receive_large, stage.mom, SWEPT)[0],
            }
            for step, took in seconds.items():
                best[name, step] = min(best.get((name, step), took), took)
    for name in SIZES:
        steps = {step: took for (size, step), took in best.items() if size == name}
        for step, took in steps.items():
            stage.note(f"fragment_{name}_{step}_mb_per_second", SWEPT / 1e6 / took, "MB/s")
        total = sum(steps.values())
        stage.note(f"fragment_{name}_mb_per_second", SWEPT / 1e6 / total, "MB/s")


def forward_large(app: Dsn, mom: Dsn) -> tuple[float, float]:
    """A program: a forwarder without Spark."""
    before = _peak_mib()
    rules = replace(forwarding_rules("exactly_once", 50_000, mom=mom), chunk_bytes=2**25)
    started = time.monotonic()
    with Cycle(app, rules) as cycle:
        while cycle.run():
            pass
    return time.monotonic() - started, _peak_mib() - before


def _prepare(stage: Stage) -> None:
    execute(stage.app, EMPTY, "CHECKPOINT")
    execute(stage.mom, EMPTY, "CHECKPOINT")


def _alone(program: Callable[..., tuple[float, float]], *arguments: object) -> tuple[float, float]:
    """Run it in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(program, arguments)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


PARTS = {"send": send, "receive": receive, "fragments": fragments, "sizes": sizes}


def main(chosen: list[str]) -> None:
    """Run the chosen parts, or all."""
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        Path(folder).chmod(0o755)
        stage = Stage(Path(folder))
        try:
            for dsn, service in ((stage.app, SHOP), (stage.mom, WAREHOUSE)):
                with dsn.connect(role="bench", autocommit=True) as connection:
                    create_service(connection, service)
            for part in chosen or PARTS:
                PARTS[part](stage)
        finally:
            stage.server.stop()
    stage.report(RESULTS.with_name("dialogs.jsonl"))


if __name__ == "__main__":
    main(sys.argv[1:])
