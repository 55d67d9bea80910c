"""What goes again to a destination that was set back and cannot be read back.

Nobody knows what it has lost. So somebody has to say since when, and all that was sent to it since
then goes again; what it still has, it gets twice. Messages whose way now leads elsewhere, or that
a router has found a way for, may be lost there too: they are counted.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from saf.database import Dsn
from saf.destinations.reading import Entry
from saf.log.side import in_order
from saf.repair.reconcile.comparing import SENT
from saf.repair.reconcile.copies import RoutesOf
from saf.repair.reconcile.sides import read_both
from saf.repair.reconcile.unread import unread_of


def everything_sent(
    name: str, source: Dsn, destinations: Collection[str], routes: RoutesOf, since: datetime
) -> list[tuple[int, int]]:
    """Return the messages that these destinations may have got since then, as (shard, id).

    Args:
        name: the source's name, for people.
        source: where the source is.
        destinations: their names.
        routes: returns where messages go now, given a connection to the source.
        since: with this created_at or a later one.

    Raises:
        Unavailable: the source does not answer.
        UsageError: a role may not read.
    """
    with read_both(name, source, {}, since=since, until=None, retention_seconds=0) as both:
        may_be_there = unread_of(both.source.connection, destinations, routes)
        shards = list(range(both.what.shards))
        sent = both.source.stream(in_order(SENT, shards, state="state"), both.params)
        return [
            (one.shard, one.id)
            for one in map(Entry._make, sent)
            if one.state == "complete" and may_be_there.may_have(one)
        ]
