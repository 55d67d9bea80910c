"""Fairness: how a subscription's messages are shared out among groups and classes.

A message belongs to a *group*, such as a tenant, and to a *class*, such as an urgent message type.
Each group gets its share of each delivery, whatever the backlog of the others, and the share of a
class grows with its weight. `saf.receiving.fair` hands messages out by these rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from saf.errors import UsageError
from saf.message import MAX_NAME, fits

Column = Literal["message_type", "from_service"]
"""A column whose values are groups or classes."""

COLUMNS = get_args(Column)

HEAVIEST, LIGHTEST = 1000.0, 0.001
"""Bounds of a weight: a class with the lightest weight must stay alive."""
MOST_CLASSES = 100
"""Maximum number of classes with weights."""

FORMS = "key, key:SEPARATOR, header:NAME, message_type or from_service"


@dataclass(frozen=True, kw_only=True)
class Fairness:
    """How to share out messages. It is false if it neither makes groups nor weighs classes.

    Raises:
        UsageError: a value is out of range.
    """

    fair_by: str | None = None
    """What makes a message's group; see `FORMS`. None: all messages are of one group."""
    priority_by: Column | None = None
    """The column whose values are classes. None: all messages are of one class."""
    priority: Mapping[str, float] = field(default_factory=dict)
    """Weight of each class; classes without one have weight 1."""

    def __post_init__(self) -> None:
        if self.fair_by is not None:
            _check_group(self.fair_by)
        if (self.priority_by is not None) != bool(self.priority):
            raise UsageError(
                "priority: give weights, such as {'Alarm': 10}, and the column that they belong "
                f"to: {' or '.join(COLUMNS)}"
            )
        if self.priority_by is not None and self.priority_by not in COLUMNS:
            raise UsageError(
                f"priority_by: {self.priority_by!r} is not one of {', '.join(COLUMNS)}"
            )
        if len(self.priority) > MOST_CLASSES:
            raise UsageError(f"priority: more than {MOST_CLASSES} weights")
        for name, weight in self.priority.items():
            _check_weight(name, weight)

    def __bool__(self) -> bool:
        return self.fair_by is not None or self.priority_by is not None

    def __str__(self) -> str:
        parts = [f"by {self.fair_by}"] if self.fair_by is not None else []
        if self.priority_by is not None:
            weights = ", ".join(f"{name}={weight:g}" for name, weight in self.priority.items())
            parts.append(f"{weights} by {self.priority_by}")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON; empty if they make nothing fair."""
        weights = {"priority_by": self.priority_by, "priority": dict(self.priority)}
        return ({"fair_by": self.fair_by} if self.fair_by is not None else {}) | (
            weights if self.priority else {}
        )


def _check_group(fair_by: str) -> None:
    kind, colon, value = fair_by.partition(":")
    known = fair_by in ("key", *COLUMNS) or (kind in ("key", "header") and colon and value)
    if not known or not fits(value, MAX_NAME) or not value.isprintable():
        raise UsageError(
            f"fair_by: {fair_by!r} is not one of {FORMS}; for example key:/ for the key up to its "
            "first /, or header:tenant"
        )


def _check_weight(name: str, weight: float) -> None:
    if not name or not fits(name, MAX_NAME) or not name.isprintable():
        raise UsageError(
            f"priority: {name!r}: a name has 1 to {MAX_NAME} bytes of printable characters"
        )
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or not LIGHTEST <= weight <= HEAVIEST:
        raise UsageError(
            f"priority: {name!r} has weight {weight!r}; a weight is a number from {LIGHTEST:g} to "
            f"{HEAVIEST:g}"
        )
