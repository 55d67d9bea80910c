"""Metrics: figures that are true, and bounded whatever anybody sends."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

METRICS, PROMETHEUS = "saf/telemetry/metrics.py", "saf/telemetry/prometheus.py"
UNIT, DOCTESTS = "unit/test_declared_metrics.py", "unit/test_doctests.py"
PAGE = f"{UNIT}::test_a_page_has_help_labels_and_cumulative_steps"

MUTANTS: list[Mutant] = [
    mutant(
        "a metric has as many series as labels that come",
        METRICS,
        "if names not in values and len(values) >= MOST_SERIES:",
        "if names not in values and len(values) < 0:",
        f"{UNIT}::test_a_process_has_a_bounded_number_of_series",
    ),
    mutant(
        "a count replaces the one before",
        METRICS,
        "values[names] = before + amount",
        "values[names] = amount",
        f"{UNIT}::test_threads_may_count_at_the_same_time",
    ),
    mutant(
        "what is reported is kept though nobody wants it",
        METRICS,
        "_store: Store | None = None\n",
        "_store: Store | None = Store()\n",
        f"{UNIT}::test_nobody_keeps_what_is_reported_until_somebody_wants_it",
    ),
    mutant(
        "a value at a bound is above it",
        METRICS,
        "self.counts[bisect_left(self.bounds, value)] += 1",
        "self.counts[__import__('bisect').bisect(self.bounds, value)] += 1",
        DOCTESTS,
    ),
    mutant(
        "steps of a histogram do not add up",
        PROMETHEUS,
        "counts = accumulate(sample.value.counts)",
        "counts = iter(sample.value.counts)",
        PAGE,
    ),
]
