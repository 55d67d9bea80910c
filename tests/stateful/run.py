"""Running a machine: for the gate, bounded and always the same; or for long, by a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

Make = Callable[[], RuleBasedStateMachine]


def run(
    make: Make, *, examples: int, steps: int, number: int | None = None, shrink: bool = True
) -> None:
    """Run examples of a machine; raises what it found, shrunk, with the steps that lead there.

    Without a seed's ``number``, the same ones each time.
    """
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]

    def factory() -> Any:
        return make()

    if number is not None:
        factory = seed(number)(factory)
    run_state_machine_as_test(
        factory,  # type: ignore[arg-type] # it takes any callable, and says so
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=number is None,
            phases=phases,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
