"""The soak itself: what it finds, and that a piece of it goes well, is stopped, and goes on."""

from __future__ import annotations

import doctest
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.programs import ROOT, environment
from tests.soak import __main__ as command
from tests.soak import charts, flatness, ledger
from tests.soak.flatness import LIMITS, Sample, judge
from tests.soak.ledger import Balance
from tests.soak.record import Record
from tests.soak.sampler import family
from tests.waits import until

HOUR = 360
"""Samples, ten seconds apart."""


def samples(figure: str, values: Sequence[float], piece: int = 1) -> list[Sample]:
    return [
        Sample(piece=piece, seconds=10.0 * n, figures={figure: value})
        for n, value in enumerate(values)
    ]


def word(some: Sequence[Sample]) -> str:
    [verdict] = judge(some)
    return verdict.word


@pytest.mark.parametrize("module", [command, flatness, ledger])
def test_the_examples_are_true(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("figure", "level", "an_hour", "noise"),
    [
        ("memory/forward", 180.0, 12.0, 6.0),
        ("handles/worker", 30.0, 4.0, 2.0),
        ("connections/saf worker", 8.0, 2.0, 1.0),
        ("table/app.outbox", 90.0, 25.0, 40.0),
        ("dead/mom", 5_000.0, 6_000.0, 4_000.0),
        ("wal/all", 900.0, 120.0, 100.0),
        ("p99/billing", 60.0, 80.0, 50.0),
    ],
)
def test_a_planted_leak_is_found_and_the_same_noise_without_it_is_flat(
    figure: str, level: float, an_hour: float, noise: float
) -> None:
    chance = random.Random(figure)
    shaken = [level + chance.uniform(-noise, noise) for _ in range(4 * HOUR)]
    assert word(samples(figure, shaken)) == "flat"
    leaks = [value + an_hour * n / HOUR for n, value in enumerate(shaken)]
    assert word(samples(figure, leaks)) == "GROWS"


def test_a_log_that_is_purged_rises_and_falls_and_is_flat() -> None:
    assert word(samples("table/app.outbox", [40 + n % 30 for n in range(HOUR)])) == "flat"
    higher_each_time = [40 + n % 30 + 20 * (n // 60) for n in range(HOUR)]
    assert word(samples("table/app.outbox", higher_each_time)) == "GROWS"


def test_a_process_that_begins_anew_is_compared_with_itself_and_a_table_with_what_it_was() -> None:
    grows = [100 + 40 * n / HOUR for n in range(HOUR)]
    again = [*samples("memory/ui", grows), *samples("memory/ui", grows, piece=2)]
    assert word(again) == "GROWS"
    steps = [
        one
        for piece in range(1, 7)
        for one in samples("table/mom.inbox", [50.0 + 20 * piece] * (HOUR // 6), piece=piece)
    ]
    assert word(steps) == "GROWS"


def test_the_first_minutes_of_a_piece_are_not_looked_at_and_a_few_say_nothing() -> None:
    fills = [n if n < 30 else 30.0 for n in range(HOUR)]
    assert word(samples("memory/ui", fills)) == "flat"
    assert word(samples("memory/ui", range(0, 60 * 100, 100))) == "too short to say"


def test_memory_of_a_program_that_leaks_is_seen() -> None:
    leak = "kept = []\nwhile True: kept.append(bytearray(b'x' * 2**20)); input()"
    with subprocess.Popen(
        [sys.executable, "-c", leak], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as program:
        assert program.stdin is not None

        def memory() -> float:
            return float(sum(one.memory_full_info().pss for one in family(program.pid))) / 2**20

        before = memory()
        program.stdin.write(b"\n" * 30)
        program.stdin.flush()
        until(lambda: memory() > before + 25)
        program.kill()


def test_a_message_that_is_lost_or_doubled_and_an_answer_that_is_missing_are_found() -> None:
    whole = Balance(
        sent={("a", "k"): 3, ("talk", "t"): 2},
        heard={("a", "k"): 3, ("talk", "t"): 2, ("back", "t"): 2},
        answered="talk",
        answers="back",
    )
    assert (list(whole.findings()), whole.left) == ([], 0)
    for at, heard in ((("a", "k"), 2), (("a", "k"), 4), (("back", "t"), 1), (("talk", "t"), 0)):
        broken = Balance(
            sent=whole.sent, heard={**whole.heard, at: heard}, answered="talk", answers="back"
        )
        assert len(list(broken.findings())) == 1, at


# A piece, with everything on


def soak(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.soak", "--folder", str(folder), "--rate", "200"]
    command += ["--sample-seconds", "1", "--purge-seconds", "3", "--rotation-seconds", "2", *more]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_piece_is_stopped_by_a_signal_and_its_hours_are_added_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with soak(tmp_path / "soak", "--hours", "1") as process:
        assert process.stdout is not None
        shown = [next(process.stdout) for _ in range(3)]
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=120)[0]
    assert process.returncode == 0, rest
    assert all("piece 1: " in line for line in shown)
    record = Record(tmp_path / "soak")
    [first] = record.pieces()
    assert first.findings == []
    assert first.messages > 500
    assert 2 < first.seconds < 100
    kinds = {name.partition("/")[0] for one in record.samples() for name in one.figures}
    assert kinds >= LIMITS.keys()
    services = {name for one in record.samples() for name in one.figures if name[:4] == "p50/"}
    assert len(services) == 6, services
    charts.draw(record.samples(), tmp_path / "soak")
    assert (tmp_path / "soak.png").stat().st_size > 10_000

    with soak(tmp_path / "soak", "--seconds", "2", "--hours", "1") as process:
        said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert [one.number for one in record.pieces()] == [1, 2]
    assert record.pieces()[1].messages > first.messages
    assert record.hours * 3600 == pytest.approx(sum(one.seconds for one in record.pieces()))
    assert "0 findings" in said
    samples_file = tmp_path / "soak" / "samples.jsonl"
    assert all(json.loads(line) for line in samples_file.read_text().splitlines())
