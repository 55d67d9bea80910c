"""Bulk: what a person decides about many dead letters or parked messages, done some at a time.

A decision about a million messages in one transaction would hold its locks for minutes, and could
not be stopped. So each `CHUNK` is a transaction of its own, with its own line in the audit: what is
done is done, and what is not is still set aside. The oldest go first. Of what is set aside after
the decision nothing is touched, so a message that fails again at once is not taken twice.
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
"""How many messages are decided about in one transaction."""


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
        """Decide about the oldest of the chosen ones; return their message ids."""


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
    """Decide about all that are chosen and are set aside now; give the ids of each chunk.

    Before each chunk, ``stop`` is asked whether to leave the rest as it is. The connection is in
    autocommit.
    """
    chosen = chosen.until_now(connection)
    while not stop() and (done := decision(connection, chosen, why, person, chunk)):
        yield done
