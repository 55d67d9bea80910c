"""``make mutants``: each bug of the list is planted, and a line says whether tests noticed it.

Exit 1 if one survived, 2 if the list does not fit to the tree any more.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import signal
import sys

from tests.mutants.listed import PARTS
from tests.mutants.planting import Fate, Verdict, field

SHOWN_LINES = 15
"""Of what the tests said, where a verdict needs looking into."""


def main() -> int:
    """Run; see above for what is returned."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, help="only so many, chosen at random")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("-k", dest="words", default="", help="only those whose name or file has it")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the copy does not stay behind
    chosen = [
        (part, one)
        for part, mutants in PARTS.items()
        for one in mutants
        if given.words in f"{part}/{one.file} {one.name}"
    ]
    if given.sample is not None:
        print(f"seed {given.seed}", flush=True)
        chosen = random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))
    verdicts: list[tuple[str, Verdict]] = []
    with contextlib.suppress(KeyboardInterrupt), field() as planted:
        for number, (part, one) in enumerate(chosen, 1):
            verdict = planted.plant(one)
            verdicts.append((part, verdict))
            print(f"{number}/{len(chosen)} ", end="")
            show(part, verdict)
    return summary(verdicts)


def show(part: str, verdict: Verdict) -> None:
    """A verdict in a line, and why it is bad if it is."""
    one = verdict.mutant
    print(f"{verdict.fate:8} {verdict.seconds:5.1f} s  {part}: {one.name} ({one.file})", flush=True)
    if verdict.fate in (Fate.SURVIVED, Fate.BROKEN):
        print(f"    {one.before!r} -> {one.after!r}")
        for line in verdict.said.strip().splitlines()[-SHOWN_LINES:]:
            print(f"    {line}", flush=True)


def summary(verdicts: list[tuple[str, Verdict]]) -> int:
    """The score of each part and of all; what `main` returns."""
    counts: dict[str, collections.Counter[Fate]] = collections.defaultdict(collections.Counter)
    for part, verdict in verdicts:
        counts[part][verdict.fate] += 1
        counts["all"][verdict.fate] += 1
    for part, fates in sorted(counts.items(), key=lambda item: item[0] == "all"):
        judged = fates[Fate.CAUGHT] + fates[Fate.SURVIVED]
        score = f"{100 * fates[Fate.CAUGHT] / judged:.1f} %" if judged else "-"
        rest = ", ".join(f"{fate} {fates[fate]}" for fate in Fate if fates[fate])
        print(f"{part:14} {score:>8}  {rest}")
    if counts["all"][Fate.BROKEN]:
        return 2
    return int(bool(counts["all"][Fate.SURVIVED]))


if __name__ == "__main__":
    sys.exit(main())
