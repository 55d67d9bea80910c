"""The three tiers of the tests: what `make test`, `make check` and `make full` run.

test    the product works: the files of `FIRST_RUN`, on PostgreSQL 18. A first look at a clone.
check   the gate: every promise, each with the same verdict whenever it runs. The default.
full    everything: all variants, all sizes, all versions of PostgreSQL, the marks `full`.

The environment variable SAF_TESTS names the tier. A test may have the mark `check` or `full`: the
first tier that runs it. A test is left to `full` where the gate proves its promise already: one
more variant of a destination or of a server, a second demo. `tests.mutants` holds the gate to it:
each planted bug is caught by a test that the gate runs.
"""

from __future__ import annotations

import os

TEST, CHECK, FULL = "test", "check", "full"

TIER = os.environ.get("SAF_TESTS", "") or CHECK
if TIER not in (TEST, CHECK, FULL):
    raise RuntimeError(f"SAF_TESTS is {TIER!r}: set it to {TEST}, {CHECK} or {FULL}")

LATER = {TEST: (CHECK, FULL), CHECK: (FULL,), FULL: ()}
"""The marks of the tests that a tier leaves out."""

FIRST_RUN: tuple[str, ...] = ()
"""The files and folders, below tests/, that `make test` runs."""


def sized(check: int, full: int) -> int:
    """Return the first size, or the second one in the full tier.

    A promise about many messages or a long time breaks at a tenth of the size already.
    """
    return full if TIER == FULL else check


def in_first_run(path: str) -> bool:
    """Tell whether `make test` runs a file, given by its path below tests/."""
    return any(path == chosen or path.startswith(f"{chosen}/") for chosen in FIRST_RUN)
