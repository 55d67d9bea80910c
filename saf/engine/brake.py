"""The brake: stops sending to a destination that rejects one message after the other.

A destination that rejects everything is more likely to be at fault than every message. Each
rejection makes a dead letter, so without a brake the whole backlog would become dead letters. After
``most`` rejections in a row, with nothing stored in between, the destination's messages wait until
an operator tries it again: `saf parked retry-now`.

Rejections in a row are counted per source and destination. The source keeps the count
(saf.rejecting), so the count continues in the next run; tasks that run side by side count
separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from saf.engine.work import Work
from saf.errors import Braked, Rejected

KNOWN = (
    "SELECT destination, messages FROM saf.rejecting WHERE subscription_id = %(subscription_id)s"
)
COUNT = """
INSERT INTO saf.rejecting (subscription_id, destination, messages)
VALUES (%(subscription_id)s, %(destination)s, %(messages)s)
ON CONFLICT (subscription_id, destination) DO UPDATE SET messages = excluded.messages
"""
FORGET = """
DELETE FROM saf.rejecting
WHERE subscription_id = %(subscription_id)s AND destination = %(destination)s
"""


@dataclass
class Brake:
    """Rejections in a row, for each destination of one task."""

    work: Work
    most: int
    _reasons: dict[str, str] = field(default_factory=dict)
    """The last reason of each destination that has rejected a message."""
    _written: dict[str, int] = field(init=False)
    _row: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._row = dict(self.work.rejecting)
        self._written = dict(self.work.rejecting)

    def stored(self, destination: str) -> None:
        """Note that a destination has stored a message."""
        self._row.pop(destination, None)

    def rejected(self, destination: str, error: Rejected) -> None:
        """Note that a destination has rejected a message."""
        self._row[destination] = self._row.get(destination, 0) + 1
        self._reasons[destination] = error.reason

    def engaged(self, destination: str) -> Braked | None:
        """Return the error that stops sending to a destination; None if it is not braked."""
        messages = self._row.get(destination, 0)
        if messages < self.most or destination not in self._reasons:
            return None
        return Braked(destination, messages, self._reasons[destination])

    def counts(self) -> Mapping[str, int]:
        """Return the rejections in a row by destination, for the next cycle.

        The count starts again when an operator has lifted the brake.
        """
        return {name: row for name, row in self._row.items() if self.engaged(name) is None}

    def write(self, source: psycopg.Connection[Any]) -> None:
        """Write the changed counts, in the transaction that sets the messages aside."""
        counts = self.counts()
        for name in {*counts, *self._written}:
            if counts.get(name, 0) != self._written.get(name, 0):
                params = {
                    "subscription_id": self.work.batch.subscription_id,
                    "destination": name,
                    "messages": counts.get(name, 0),
                }
                source.execute(COUNT if params["messages"] else FORGET, params)

    def written(self) -> None:
        """Note that the written counts are committed."""
        self._written = dict(self.counts())
