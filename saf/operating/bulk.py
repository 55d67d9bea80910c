"""Bulk: what a person decides about many dead letters, done some at a time.

A decision about a million messages in one transaction would hold its locks for minutes, and could
not be stopped. So each `CHUNK` is a transaction of its own, with its own line in the audit: what is
done is done, and what is not is still a dead letter. The oldest go first. Of what dies after the
decision nothing is touched, so a message that fails again at once is not taken twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol
from uuid import UUID

import psycopg

from saf.setaside import dead
from saf.setaside.dead import Filter

CHUNK = 1000
"""How many messages are decided about in one transaction."""


class Decision(Protocol):
    """A function of `saf.operating.decide`."""

    def __call__(
        self,
        connection: psycopg.Connection[Any],
        chosen: Filter,
        why: str,
        person: str | None = None,
        limit: int | None = None,
    ) -> list[UUID]:
        """Decide about the oldest of the chosen ones; return their message ids."""


def in_chunks(
    connection: psycopg.Connection[Any],
    decision: Decision,
    chosen: Filter,
    why: str,
    *,
    person: str | None = None,
    chunk: int = CHUNK,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[UUID]]:
    """Decide about all that are chosen and are dead letters now; give the ids of each chunk.

    Before each chunk, ``stop`` is asked whether to leave the rest as it is. The connection is in
    autocommit.
    """
    if chosen.through is None:
        chosen = replace(chosen, through=dead.last(connection))
    while not stop():
        done = decision(connection, chosen, why, person, chunk)
        if done:
            yield done
        if len(done) < chunk:
            return
