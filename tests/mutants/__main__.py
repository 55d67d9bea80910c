"""``make mutants``: each bug of the list is planted, and a line says whether tests noticed it.

Verdicts are kept (`tests.mutants.kept`), so the same command goes on where it was interrupted, or
where its time was over. The score is that of each folder of saf.

Exit 1 if one survived, 2 if the list does not fit to the tree any more.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from tests import memory
from tests.mutants.generated import HARMLESS, SURVIVED, Generated, listed
from tests.mutants.kept import FILE, JUDGED, Kept
from tests.mutants.listed import PARTS
from tests.mutants.mutant import Mutant
from tests.mutants.planting import Fate, Field, Verdict, field
from tests.mutants.recording import Recordings, in_groups

T = TypeVar("T")
R = TypeVar("R")

SHOWN_LINES = 15
"""Of what the tests said, where a verdict needs looking into."""


def main() -> int:
    """Run; see above for what is returned."""
    given = _given()
    memory.use()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the copy does not stay behind
    until = time.monotonic() + (given.seconds if given.seconds is not None else float("inf"))
    if given.generated or given.survived:
        chosen = _generated(given, until)
    else:
        chosen = [
            one
            for part, mutants in PARTS.items()
            for one in mutants
            if given.words in f"{part}/{one.file} {one.name}"
        ]
    if given.sample is not None or given.shuffle:
        print(f"seed {given.seed}", flush=True)
        count = len(chosen) if given.sample is None else min(given.sample, len(chosen))
        chosen = random.Random(given.seed).sample(chosen, count)
    kept = Kept(given.results)
    known = [] if given.again else [kept.verdict(one) for one in chosen]
    verdicts = [one for one in known if one is not None]
    there = {id(one.mutant) for one in verdicts}
    ahead = [one for one in chosen if id(one) not in there]
    if verdicts:
        print(f"{len(verdicts)} are known from {given.results}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for number, verdict in enumerate(planted(ahead, until, given.jobs), 1):
            kept.add(verdict)
            verdicts.append(verdict)
            print(f"{number}/{len(ahead)} ", end="")
            show(verdict)
    return summary(verdicts, len(chosen))


def _generated(given: argparse.Namespace, until: float) -> list[Mutant]:
    """Draw bugs that a machine plants; before that, record what was not recorded yet."""
    recordings = Recordings()
    groups = in_groups(recordings.missing(given.tests.split()))

    def record(ground: Field, group: list[str]) -> tuple[str, float | None]:
        began = time.monotonic()
        if began > until:
            return group[0], None
        recordings.record(ground, group)
        return group[0], time.monotonic() - began

    if groups:
        print(f"which lines each test executes is recorded, in {len(groups)} parts", flush=True)
    for number, (first, took) in enumerate(in_fields(record, groups, given.jobs), start=1):
        if took is None:
            print(f"{len(groups) - number + 1} parts are left: the same command goes on")
            return []
        print(f"{number}/{len(groups)} {took:5.0f} s  {first} …", flush=True)
    print(f"seed {given.seed}", flush=True)
    generated = Generated(recordings, listed(HARMLESS))
    if given.survived:
        drawn = list(generated.those(listed(SURVIVED)))
    else:
        drawn = list(generated.draw(given.generated, given.seed, given.words))
    print(
        f"{len(drawn)} are drawn; {generated.not_executed} more are executed by no test", flush=True
    )
    return drawn


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, help="only so many, chosen at random")
    parser.add_argument("--generated", type=int, help="so many that a machine plants instead")
    parser.add_argument("--survived", action="store_true", help="those of survived.toml instead")
    parser.add_argument("--tests", default="", help="of tests whose paths have one of these words")
    parser.add_argument("--shuffle", action="store_true", help="in random order")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("-k", dest="words", default="", help="only those whose name or file has it")
    parser.add_argument("--seconds", type=float, help="begin with none after so long")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time, each in a copy")
    parser.add_argument("--results", type=Path, default=FILE, help="where verdicts are kept")
    parser.add_argument("--again", action="store_true", help="also those whose verdict is known")
    return parser.parse_args()


def planted(mutants: Sequence[Mutant], until: float, jobs: int = 1) -> Iterator[Verdict]:
    """Plant one after the other, or so many at a time, until the time is over."""

    def plant(ground: Field, one: Mutant) -> Verdict | None:
        return ground.plant(one) if time.monotonic() <= until else None

    yield from filter(None, in_fields(plant, mutants, jobs))


def in_fields(work: Callable[[Field, T], R], items: Sequence[T], jobs: int) -> Iterator[R]:
    """Do work with each item, in as many copies as there are jobs; yield results as they come."""
    if not items:
        return
    free: SimpleQueue[Field] = SimpleQueue()

    def do(one: T) -> R:
        ground = free.get()
        try:
            return work(ground, one)
        finally:
            free.put(ground)

    with contextlib.ExitStack() as stack:
        for _ in range(jobs):
            free.put(stack.enter_context(field()))
        pool = ThreadPoolExecutor(jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        for done in as_completed([pool.submit(do, item) for item in items]):
            yield done.result()


def show(verdict: Verdict) -> None:
    """A verdict in a line, and why it is bad if it is."""
    one = verdict.mutant
    print(f"{verdict.fate:8} {verdict.seconds:5.1f} s  {one.name} ({one.file})", flush=True)
    if verdict.fate in (Fate.SURVIVED, Fate.BROKEN):
        print(f"    {one.before!r} -> {one.after!r}")
        for line in verdict.said.strip().splitlines()[-SHOWN_LINES:]:
            print(f"    {line}", flush=True)


def summary(verdicts: Sequence[Verdict], chosen: int) -> int:
    """Print the score of each folder and of all, and who survived; return what `main` does."""
    counts: dict[str, collections.Counter[Fate]] = collections.defaultdict(collections.Counter)
    for verdict in verdicts:
        counts[folder(verdict.mutant.file)][verdict.fate] += 1
        counts["all"][verdict.fate] += 1
    print(f"{'folder':18} {'planted':>7} {'caught':>7} {'survived':>8} {'score':>8}")
    for where, fates in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        judged = sum(fates[fate] for fate in JUDGED)
        score = f"{100 * fates[Fate.CAUGHT] / judged:.1f} %" if judged else "-"
        others = ", ".join(
            f"{fate} {fates[fate]}" for fate in Fate if fates[fate] and fate not in JUDGED
        )
        line = f"{where:18} {judged:7} {fates[Fate.CAUGHT]:7} {fates[Fate.SURVIVED]:8} {score:>8}"
        print(f"{line}  {others}".rstrip())
    for verdict in verdicts:
        if verdict.fate is Fate.SURVIVED:
            print(f"survived: {verdict.mutant.name} ({verdict.mutant.file})")
            if verdict.mutant.by_machine:
                print(f"    {verdict.mutant.before!r} -> {verdict.mutant.after!r}")
    if len(verdicts) < chosen:
        print(f"{chosen - len(verdicts)} of {chosen} are left: the same command goes on")
    if counts["all"][Fate.BROKEN]:
        return 2
    return int(bool(counts["all"][Fate.SURVIVED]))


def folder(file: str) -> str:
    """The folder of saf that a file is in, or who it belongs to otherwise.

    >>> folder("saf/log/cursor.py"), folder("saf/message.py"), folder("migrations/baseline/log.sql")
    ('saf/log', 'saf', 'migrations')
    >>> folder("saf/destinations/kafka/server.py")
    'saf/destinations'
    """
    first, *rest = file.split("/")
    return "/".join([first, *rest[:-1][:1]]) if first == "saf" else first


if __name__ == "__main__":
    sys.exit(main())
