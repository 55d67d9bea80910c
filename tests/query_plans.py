"""Plans of statements, as PostgreSQL explains them in JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def steps(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A step of a plan and all steps below it."""
    yield plan
    for one in plan.get("Plans", ()):
        yield from steps(one)
