"""``make stateful SECONDS=600 SEED=7``: the machines in turn, a line for each round."""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import time
from contextlib import suppress

from tests.stateful.machines import MACHINES
from tests.stateful.run import Make, run
from tests.stateful.site import own_site

EXAMPLES, STEPS = 15, 30
"""Of one round."""


def main() -> int:
    """Run; exit 1 on any finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.stateful", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no round after so long")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", nargs="*", choices=sorted(MACHINES), help="these machines")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its server does not stay behind
    until = time.monotonic() + given.seconds
    names = given.only or list(MACHINES)
    made: dict[str, Make] = {}
    found = rounds = 0
    with suppress(KeyboardInterrupt), own_site() as site:
        for seed in itertools.count(given.seed):
            for name in names:
                if time.monotonic() > until and rounds:
                    break
                if name not in made:
                    made[name] = MACHINES[name](site)
                found += not show(name, made[name], seed)
                rounds += 1
            if time.monotonic() > until:
                break
    print(f"{rounds} rounds of {EXAMPLES} examples, {found} with findings")
    return bool(found)


def show(name: str, make: Make, seed: int) -> bool:
    """One round, in a line; the shortest steps that lead there where it has found something."""
    began = time.monotonic()
    problem = ""
    try:
        run(make, examples=EXAMPLES, steps=STEPS, number=seed)
    except Exception as error:
        # whatever a machine meets is a finding, and Hypothesis's notes say how it came to it
        notes = "\n".join(getattr(error, "__notes__", []))
        problem = f"\n  {type(error).__name__}: {error}\n{notes}"
    words = f"FINDING{problem}" if problem else "ok"
    print(f"{name}, seed {seed}: {time.monotonic() - began:.0f} s, {words}", flush=True)
    return not problem


if __name__ == "__main__":
    sys.exit(main())
