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
import re
from pathlib import Path

TEST, CHECK, FULL = "test", "check", "full"

TIER = os.environ.get("SAF_TESTS", "") or CHECK
if TIER not in (TEST, CHECK, FULL):
    raise RuntimeError(f"SAF_TESTS is {TIER!r}: set it to {TEST}, {CHECK} or {FULL}")

WHOLE_FILE = re.compile(r"^pytestmark = .*\bpytest\.mark\.full\b", re.MULTILINE)
"""Matches a file that has the mark `full` as a whole."""

LATER = {TEST: (CHECK, FULL), CHECK: (FULL,), FULL: ()}
"""The marks of the tests that a tier leaves out."""

FIRST_RUN: tuple[str, ...] = (
    "unit",
    # the ten guarantees
    "contract/test_1_atomic.py",
    "contract/test_2_no_loss.py",
    "contract/test_3_order.py",
    "contract/test_4_quality_of_service.py",
    "contract/test_5_fenced.py",
    "contract/test_6_durable.py",
    "contract/test_7_isolated.py",
    "contract/test_8_restartable.py",
    "contract/test_9_bounded.py",
    "contract/test_10_honest.py",
    # what was set back, and its repair
    "contract/test_set_back.py",
    "contract/test_rebase.py",
    "contract/test_reconciling.py",
    "contract/test_replay.py",
    # setting aside
    "contract/test_set_aside_once.py",
    "contract/test_set_aside_crash.py",
    "contract/test_dead_letters.py",
    "contract/test_decide_parked.py",
    "contract/test_lanes_in_order.py",
    # owners and the ring
    "contract/test_owners.py",
    "contract/test_one_alone.py",
    "contract/test_ring.py",
    "contract/test_purging.py",
    # receiving
    "contract/test_receive.py",
    "contract/test_worker.py",
    "contract/test_savepoints.py",
    "contract/test_stopping.py",
    "contract/test_delayed.py",
    # dialogs
    "contract/test_dialogs.py",
    "contract/test_dialog_groups.py",
    # dispatching
    "contract/test_dispatch.py",
    "contract/test_dispatch_owners.py",
    "contract/test_dispatch_running.py",
    "contract/test_hostile_endpoints.py",
    # the kinds of destination that need no server of their own
    "contract/test_destination_conformance.py",
    "contract/test_jsonl.py",
    # streams and sinks of Spark, without a JVM
    "contract/test_streams.py",
    "contract/test_sinks.py",
    # sending, the README's own commands
    "integration/test_outbox.py",
    "integration/test_sending.py",
    "integration/test_readme.py",
    # a thin slice of Spark
    "spark/test_forward.py",
    "spark/test_streams_on_spark.py",
    "spark/test_sinks_on_spark.py",
)
"""The files and folders, below tests/, that `make test` runs."""


def sized(check: int, full: int) -> int:
    """Return the first size, or the second one in the full tier.

    A promise about many messages or a long time breaks at a tenth of the size already.
    """
    return full if TIER == FULL else check


def is_later(file: Path) -> bool:
    """Tell whether this tier runs nothing of a file of tests."""
    if TIER == TEST and not in_first_run(file.relative_to(Path(__file__).parent).as_posix()):
        return True
    return TIER != FULL and is_full(file)


def is_full(file: Path) -> bool:
    """Tell whether a file of tests has the mark `full` as a whole."""
    return WHOLE_FILE.search(file.read_text()) is not None


def in_first_run(path: str) -> bool:
    """Tell whether `make test` runs a file, given by its path below tests/."""
    return any(path == chosen or path.startswith(f"{chosen}/") for chosen in FIRST_RUN)
