"""The soak itself: what it finds, and that a piece of it goes well, is stopped, and goes on."""

from __future__ import annotations

import doctest
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.programs import ROOT, environment
from tests.soak import __main__ as command
from tests.soak import charts, flatness, hindrance, ledger
from tests.soak.flatness import LIMITS, Sample, judge
from tests.soak.ledger import Balance
from tests.soak.piece import Piece
from tests.soak.programs import Programs, family
from tests.soak.record import Record
from tests.tiers import sized
from tests.waits import until

HEARING = ("billing", "events", "hooks", "shop", "totals", "warehouse")
PIECES = sized(1, 3)
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


@pytest.mark.parametrize("module", [command, flatness, hindrance, ledger])
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


def test_all_programs_but_one_stand_still_with_what_is_below_them_and_go_on(
    tmp_path: Path,
) -> None:
    def states(name: str) -> list[bool]:
        some = family(programs.running[name].pid)
        return [one.status() == psutil.STATUS_STOPPED for one in some]

    def names(name: str) -> set[str]:
        return {process.name() for process in family(programs.running[name].pid)}

    programs = Programs(tmp_path, {})
    for name in ("application", "forward"):
        programs.start(name, ["sh", "-c", "sleep 100; true"])
    try:
        # a child that is stopped before its exec keeps its parent waiting, and not stopped
        until(lambda: all(names(name) == {"sh", "sleep"} for name in programs.running))
        programs.stand_still(True, but="application")
        until(lambda: states("forward") == [True, True])
        assert states("application") == [False, False]
        programs.stand_still(False, but="application")
        until(lambda: states("forward") == [False, False])
    finally:
        programs.stop()


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


@pytest.mark.full
@pytest.mark.slow
def test_a_piece_with_everything_on_goes_well_and_is_stopped_by_a_signal(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with soak(tmp_path / "soak", "--hours", "1") as process:
        assert process.stdout is not None
        shown = next(line for line in process.stdout if all(f"{one} " in line for one in HEARING))
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=120)[0]
    assert process.returncode == 0, rest
    assert "piece 1: " in shown
    record = Record(tmp_path / "soak")
    [first] = record.pieces()
    assert first.findings == []
    assert first.messages > 100
    assert 1 < first.seconds < 200
    kinds = {name.partition("/")[0] for one in record.samples() for name in one.figures}
    assert kinds >= LIMITS.keys()
    charts.draw(record.samples(), tmp_path / "soak")
    assert (tmp_path / "soak.png").stat().st_size > 10_000
    for number in range(2, PIECES + 1):  # the same command goes on
        more = ("--seconds", "30", "--hinder-seconds", "3", "--hours", "1")
        with soak(tmp_path / "soak", *more) as process:
            said = process.communicate(timeout=200)[0]
        *_, before, last = record.pieces()
        assert (last.number, last.messages > before.messages) == (number, True)
        assert last.recovered, said
        # whether latencies of so short a piece come down again is chance
        assert not [one for one in last.findings if "recovered" not in one], said


def test_hours_are_added_up_and_a_piece_that_was_killed_is_not_counted(tmp_path: Path) -> None:
    record = Record(tmp_path)
    assert (record.begin(), record.hours) == (1, 0)
    for number, seconds in ((1, 1800), (2, 900)):
        record.note(Sample(piece=number, seconds=1, figures={"memory/ui": 1.0}))
        record.ended(Piece(number=number, began=0, seconds=seconds))
    record.note(Sample(piece=3, seconds=1, figures={"memory/ui": 1.0}))
    with (tmp_path / "samples.jsonl").open("a") as lines:
        lines.write('{"piece": 3, "sec')
    again = Record(tmp_path)
    assert (again.begin(), again.hours) == (4, 0.75)
    again.note(Sample(piece=4, seconds=1, figures={"memory/ui": 1.0}))
    again.ended(Piece(number=4, began=0, seconds=900))
    assert ([one.piece for one in again.samples()], again.hours) == ([1, 2, 4], 1.0)
