"""Quiet: whether anything may be new at a source, by one statement that reads no table.

Searching for work takes several queries, about each shard. At a source where a search has found
nothing, the driver first asks whether there can be anything new (`ASK`):

- *Has any transaction of the server ended* that has written something? If not, nothing is new.
- *Has an id been drawn?* A row's id is drawn after its transaction has its own id. So while the
  outbox's sequence stands still, no transaction that began later has written to the outbox.
- *Has a transaction ended* that was in progress at the search? It may have drawn its ids before.
- *Is there a lane?* An operator may have created one.

So other databases of a server, however busy, cause few searches: one at most for each transaction
that was in progress when the sequence stopped. The driver still searches now and then
(`SURE_SECONDS`), because an operator may have set back cursors.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

from saf.database import fetch
from saf.setaside import backoff

SURE_SECONDS = 5.0
"""Seconds for which a driver relies on a sequence that stands still."""

# The snapshot is older than the sequence's value. So it counts only if the previous `ASK` returned
# the same value.
# it was asked for before.
ASK = "SELECT last_value + is_called::int, pg_current_snapshot()::text FROM saf.outbox_id_seq"


class Quiet:
    """A driver's knowledge from its last search at a source that found nothing."""

    def __init__(self) -> None:
        self._next_id: int | None = None
        self._asked: tuple[str, frozenset[str] | None] | None = None
        """The snapshot before the search that follows, and the new `_known` if it finds nothing."""
        self._at = ""
        """The snapshot before a search that found nothing. Snapshots without a search do not count,
        because a cursor may have been set back before."""
        self._known: frozenset[str] | None = None
        """Transactions that were in progress at a search that found nothing, and still are. None:
        the sequence has not stood still."""
        self._until = 0.0

    def lasts(self, connection: psycopg.Connection[Any], subscription_id: int) -> bool:
        """Whether there is still nothing new. Only reads.

        If not, search; then call `nothing` if nothing was found and no lane exists, else `forget`.
        """
        ((next_id, snapshot),) = fetch(connection, ASK)
        if snapshot == self._at:
            return True
        running = frozenset(filter(None, snapshot.split(":")[2].split(",")))
        stood_still, self._next_id = next_id == self._next_id, next_id
        known = self._known if stood_still else None
        left = running if known is None else known & running
        if (
            known is not None
            and left == known
            and time.monotonic() < self._until
            and not backoff.any_lane(connection, subscription_id)
        ):
            return True
        self._asked = (snapshot, left if stood_still else None)
        return False

    def nothing(self) -> None:
        """Note that the search after `lasts` has found nothing, and that no lane waits."""
        if self._asked is not None:
            self._at, self._known = self._asked
            self._asked = None
            self._until = time.monotonic() + SURE_SECONDS

    def forget(self) -> None:
        """Forget all until the next search: something was found, or other shards are owned."""
        self._at, self._known, self._asked = "", None, None
