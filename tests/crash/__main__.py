"""``make crash ROUNDS=20 SEED=7``: rounds of faults, a line for each, and what they came to.

``make crash SEED=7 SHRINK=12`` reduces the plan of a round with a finding, and prints a test.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import signal
import sys
import time
from collections.abc import Mapping

from tests.crash import bugs, evidence, lake, queues, shrink, sources, spark_sites, webhooks
from tests.crash.outcome import Outcome
from tests.crash.plan import (
    CLOCKS,
    FAULTS,
    MORE,
    MOVES,
    OF_MORE,
    SET_BACKS,
    SPARK_FAULTS,
    VISITED,
    Plan,
)
from tests.crash.rounds import Round
from tests.crash.site import Site

SITES: Mapping[str, type[Site]] = {
    "mom": Site,
    **queues.QUEUES,
    "delta": lake.DeltaSite,
    "iceberg": lake.IcebergSite,
    "http": webhooks.WebhookSite,
    "transforms": spark_sites.TransformSite,
    "stream": spark_sites.StreamSite,
    **{f"from {kind}": site for kind, site in sources.SOURCES.items()},
}


def main() -> int:
    """Run; exit 1 on any finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--first", "--round", type=int, default=0, help="the first one's number")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--seconds", type=float, help="start no round after so long")
    parser.add_argument("--to", choices=[to for to in SITES if " " not in to], default="mom")
    parser.add_argument("--from", dest="origin", choices=sources.SOURCES, help="from its topics")
    kinds = sorted(
        {*FAULTS, *SPARK_FAULTS, *MORE, *OF_MORE, *SET_BACKS, *SET_BACKS.values()}
        | {*queues.FAULTS, *queues.SET_BACKS, *queues.SET_BACKS.values(), *lake.FAULTS}
        | {*lake.SET_BACKS, *lake.SET_BACKS.values()}
        | {*sources.FAULTS, *webhooks.FAULTS, VISITED, *CLOCKS, *MOVES}
        | {*spark_sites.FAULTS_OF_TRANSFORMS, *spark_sites.FAULTS_OF_STREAMS}
    )
    parser.add_argument("--only", nargs="*", choices=kinds, help="these faults")
    parser.add_argument("--bug", default="", help="one of tests/crash/bugs.py, planted")
    parser.add_argument("--shrink", action="store_true", help="reduce the plan of the first one")
    given = parser.parse_args()
    if given.bug and not hasattr(bugs, given.bug):
        parser.error(f"no bug {given.bug!r} in tests/crash/bugs.py")
    to = f"from {given.origin}" if given.origin else given.to
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its servers do not stay behind
    print(f"seed {given.seed}", flush=True)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with contextlib.suppress(KeyboardInterrupt), SITES[to]() as site:
        number = given.first
        if given.shrink:
            plan = site.plan(given.seed, number, tuple(given.only or ()))
            return reduce(site, plan, to, given.bug)
        while number < given.first + given.rounds or given.seconds:
            if given.seconds and time.monotonic() - began > given.seconds:
                break
            what = site.plan(given.seed, number, tuple(given.only or ()))
            round_ = Round(site, what, bug=given.bug)
            outcome = round_.run()
            outcomes.append(outcome)
            show(outcome)
            if not outcome.good:
                kept = evidence.FOLDER / f"{to}-{given.seed}-{number}".replace(" ", "-")
                evidence.keep(round_.brokers, round_.told(), kept)
                print(f"  what is there: {kept}", flush=True)
            number += 1
    return summary(outcomes)


def reduce(site: Site, plan: Plan, to: str, bug: str) -> int:
    """Print the smallest plan with a finding as a test; 1 if there was a finding."""
    for _ in range(shrink.TRIES):
        outcome = Round(site, plan, bug=bug).run()
        show(outcome)
        if not outcome.good:
            smallest = shrink.shrink(plan, shrink.shows_again(site, outcome.findings, bug))
            print(shrink.as_test(smallest, outcome.findings, to))
            return 1
    print(f"no finding in {shrink.TRIES} rounds")
    return 0


def show(outcome: Outcome) -> None:
    """A round in a line; the whole plan where it found something."""
    kinds = " ".join(fault.kind for fault in outcome.plan.faults)
    engine = " on Spark" if outcome.plan.spark else ""
    away = outcome.taken_away
    taken = "" if away is None else f", {away} taken away by set-backs"
    print(
        f"round {outcome.plan.round}{engine}: {outcome.verdict.sent} sent, recovered in "
        f"{outcome.recovery_seconds:.2f} s{taken}, "
        f"{'ok' if outcome.good else 'FINDINGS'} ({kinds})",
        flush=True,
    )
    if not outcome.good:
        print(f"  {outcome.plan}\n  left {outcome.left}, died {outcome.died}")
        print(*(f"  {line}" for line in outcome.in_the_way), sep="\n")
        for name, messages in outcome.verdict.findings.items():
            print(f"  {name}: {len(messages)}: {messages[:10]}", flush=True)


def summary(outcomes: list[Outcome]) -> int:
    """What all rounds came to; 1 if any found something."""
    total: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        total.update({n: len(v) for n, v in vars(outcome.verdict).items() if isinstance(v, list)})
    times = sorted(outcome.recovery_seconds for outcome in outcomes)
    if not outcomes:
        return 1
    bad = [outcome.plan.round for outcome in outcomes if not outcome.good]
    back = [outcome.taken_away for outcome in outcomes if outcome.taken_away is not None]
    print(
        f"{len(outcomes)} rounds, N {sum(o.verdict.sent for o in outcomes)}, "
        + ", ".join(f"{name} {count}" for name, count in sorted(total.items()))
        + f"; recovery p50 {times[len(times) // 2]:.2f} s"
        + f", p99 {times[int(len(times) * 0.99)]:.2f} s"
        + (f"; set back in {len(back)} rounds, in {back.count(0)} without effect" if back else "")
        + (f"; rounds with findings: {bad}" if bad else "")
    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
