"""Bulk: an operator's decision about many dead letters or parked messages, done in chunks.

A decision about a million messages in one transaction would hold its locks for minutes, and could
not be stopped. So each `CHUNK` is a separate transaction, with its own line in the audit: decided
messages are done, and the others are still set aside. The oldest go first. Messages set aside after
the decision are not touched, so a message that fails again immediately is not taken twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar
from uuid import UUID

import psycopg

from saf.setaside.dead import Filter
from saf.setaside.parked_messages import ParkedFilter

Chosen = TypeVar("Chosen", Filter, ParkedFilter)
Decided_contra = TypeVar("Decided_contra", Filter, ParkedFilter, contravariant=True)

CHUNK = 1000
"""Number of messages decided about in one transaction."""


class Decision(Protocol[Decided_contra]):
    """A function of `saf.operating.decide` or `saf.operating.decide_parked`."""

    def __call__(
        self,
        connection: psycopg.Connection[Any],
        chosen: Decided_contra,
        why: str,
        person: str | None = None,
        limit: int | None = None,
    ) -> list[UUID]:
        """Decide about the oldest of the chosen messages; return their message ids."""


def in_chunks(
    connection: psycopg.Connection[Any],
    decision: Decision[Chosen],
    chosen: Chosen,
    why: str,
    *,
    person: str | None = None,
    chunk: int = CHUNK,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[UUID]]:
    """Decide about all chosen messages that are set aside now; yield the ids of each chunk.

    Before each chunk, ``stop`` is called: if it returns true, the rest stays as it is. The
    connection is in autocommit.
    """
    chosen = chosen.until_now(connection)
    while not stop() and (done := decision(connection, chosen, why, person, chunk)):
        yield done
