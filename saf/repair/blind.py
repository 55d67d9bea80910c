"""Messages to send again to a destination that was set back and cannot be read back.

Nobody knows what the destination has lost. So an operator has to name a time, and all messages sent
there since then are sent again; those that the destination still has arrive twice. Messages that
are set aside for it have not been sent. A topic's message may be set aside for one destination
only; the others get their copies again.

Some messages may be lost there too, and are only counted: messages whose routes now lead elsewhere,
or that a router has redirected, and copies of a topic's messages that an operator has discarded,
because the audit does not name the destination.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import merge
from itertools import groupby
from operator import itemgetter

from saf.database import Dsn
from saf.destinations.reading import Entry
from saf.log.side import in_order
from saf.repair.reconcile.comparing import DISCARDED, SENT, SET_ASIDE
from saf.repair.reconcile.copies import RoutesOf, copied_to
from saf.repair.reconcile.sides import read_both
from saf.repair.reconcile.unread import Unread, unread_of
from saf.repair.replay import Copy
from saf.routing.matching import Routes

NOW = "SELECT clock_timestamp()"


@dataclass(frozen=True, kw_only=True)
class Blind:
    """Messages that some destinations may have got since a time."""

    destinations: Collection[str]
    messages: list[tuple[int, int]] = field(default_factory=list)
    """As (shard, id)."""
    copies: list[Copy] = field(default_factory=list)
    """Copies of topics' messages that are set aside for other destinations."""
    uncertain: Counter[str] = field(default_factory=Counter)
    """Copies of discarded messages that each destination may have got."""
    purged: datetime | None = None
    """Messages sent before this time may have been purged, and are not sent again."""

    def add(self, entries: Sequence[Entry], routes: Routes, may_be_there: Unread) -> None:
        """Add a message, given all rows with its id."""
        discarded = any(entry.state == "discarded" for entry in entries)
        for entry in entries:
            if entry.state not in ("complete", "aside") or not may_be_there.may_have(entry):
                continue
            held = {
                other.where
                for other in entries
                if other.state == "set_aside" and (other.shard, other.id) == (entry.shard, entry.id)
            }
            if entry.state == "complete":
                self.messages.append((entry.shard, entry.id))
            elif "" not in held:
                self._add_aside(entry, held, routes, discarded=discarded)

    def _add_aside(
        self, entry: Entry, held: Collection[str], routes: Routes, *, discarded: bool
    ) -> None:
        """Add a message that is set aside for some destinations, or was discarded."""
        if any(router.service == entry.service for router in routes.routers):
            if not {*self.destinations} <= {*held}:
                self.messages.append((entry.shard, entry.id))
            return
        ways = copied_to(routes, entry.service, entry.broker)
        lacking = tuple(way for way in ways if way in self.destinations and way not in held)
        if len(ways) < 2 or not lacking:  # noqa: PLR2004 - a single destination lacks it
            return
        if discarded:
            self.uncertain.update(lacking)
            return
        address = (entry.service, entry.broker, entry.key)
        self.copies.append(
            Copy(shard=entry.shard, id=entry.id, destinations=lacking, address=address)
        )


def everything_sent(
    name: str,
    source: Dsn,
    destinations: Collection[str],
    routes: RoutesOf,
    *,
    since: datetime,
    retention_seconds: float,
) -> Blind:
    """Return the messages that these destinations may have got since a time.

    Args:
        name: the source's name, for errors.
        source: the source's dsn.
        destinations: their names.
        routes: returns the current routes, given a connection to the source.
        since: the earliest created_at.
        retention_seconds: every purge has kept messages at least this long.

    Raises:
        Unavailable: the source does not answer.
        UsageError: a role may not read.
    """
    with read_both(
        name, source, {}, since=since, until=None, retention_seconds=retention_seconds
    ) as both:
        here, shards = both.source, list(range(both.what.shards))
        ((now,),) = here.fetch(NOW, {})
        kept = now - timedelta(seconds=retention_seconds)
        found = Blind(
            destinations=destinations,
            purged=kept if since < kept and here.may_be_purged() else None,
        )
        unread = unread_of(here.connection, destinations, routes)
        current = routes(here.connection)
        sent = here.stream(in_order(SENT, shards, state="state"), both.params)
        aside = (here.stream(query, both.params) for query in (SET_ASIDE, DISCARDED))
        for _, rows in groupby(merge(sent, *aside, key=itemgetter(0)), key=itemgetter(0)):
            found.add([Entry._make(row) for row in rows], current, unread)
    return found
