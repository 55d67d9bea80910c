"""Copies of a topic's messages: which of them a destination that was set back has lost.

Where a topic's message went is not recorded, and another destination may still have its copy. So of
each destination that has less than it had acknowledged (`saf.destinations.marks`) it is worked out
what it would have. It has lost its copy of a message if it has none, the routes lead there now, the
message is complete and not set aside for that destination, its shard is one of those with a lower
mark, and it was created after the destination had begun to get the topic. That is the earliest of

- always, if the first routes that batches were ever opened with lead there;
- when the first of those that are kept began to;
- when the route and the topic were made, of rows of saf.route;
- when the oldest message of the topic was created that the destination still has.

So a new subscriber is not flooded with an old topic, and a transaction may have been open for long
when the destination was backed up. What it does not see: a message that was created before all of
these, and was committed, or forwarded, after.

A person's discard does not say for which destination it was. One from before the mark counts for
all; what was discarded later is sent again to those that have lost it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.destinations.marks import NOTHING, Mark, Place, compare
from saf.destinations.reading import Entry, Reading
from saf.log.side import Side
from saf.repair.set_back import remembered
from saf.routing.matching import Routes
from saf.routing.routes import versions

RoutesOf = Callable[[psycopg.Connection[Any]], Routes]
"""What says where a source's messages go now."""

MADE = """
SELECT t.name, min(greatest(t.created_at, r.created_at))
FROM saf.topic t JOIN saf.route r ON coalesce(r.service, t.name) = t.name
WHERE r.destination = %(destination)s GROUP BY t.name
"""

ALWAYS = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Lacking:
    """What a destination that was set back has lost."""

    shards: Mapping[int, datetime | None]
    """When the batch was opened that its mark is of; None: of some lane it has nothing at all."""
    begun: Mapping[str, datetime]
    """By topic, from when on it got the messages."""

    def lacks(self, sent: Entry, topic: str, given_up: datetime | None) -> bool:
        """Whether a message of a topic was there, if it is not any more."""
        begun = self.begun.get(topic)
        if sent.shard not in self.shards or begun is None or sent.created_at < begun:
            return False
        opened_at = self.shards[sent.shard]
        return not (given_up and opened_at and given_up < opened_at)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The destinations of a source that were set back, and where its messages go."""

    routes: Routes
    destinations: Mapping[str, Lacking]
    topics: frozenset[str]

    def lost(self, entries: Sequence[Entry]) -> tuple[Entry, tuple[str, ...]]:
        """Which destinations have lost a message, given every row that has its id.

        And a row that has the address under which it went there.
        """
        sent = next((e for e in entries if e.state in ("complete", "aside")), None)
        there = [e for e in entries if e.state in ("stored", "set_aside")]
        address = next((e for e in (*there, sent) if e and e.service in self.topics), None)
        if sent is None or address is None:
            return entries[0], ()
        others = {e.where for e in there}
        given_up = max((e.created_at for e in entries if e.state == "discarded"), default=None)
        return address, tuple(
            name
            for name in copied_to(self.routes, address.service, address.broker)
            if name in self.destinations
            and not others & {name, ""}
            and self.destinations[name].lacks(sent, address.service, given_up)
        )


def set_back_copies(
    here: Side,
    there: Iterable[Reading],
    source: UUID,
    topics: Collection[str],
    routes: RoutesOf,
) -> Copies | None:
    """What is asked of a source and its destinations, whose snapshots are taken in this order.

    None if no destination was set back, or nothing is a topic.
    """
    found: dict[str, Lacking] = {}
    for side in there if topics else ():
        known = side.known(source)
        before = remembered(here.connection, known.destination)
        if behind := compare(known.marks, before.marks, before.in_hand).behind:
            found[side.name] = Lacking(
                shards=_reached(known.marks, behind), begun=_begun(here, side, source, topics)
            )
    if not found:
        return None
    return Copies(routes=routes(here.connection), destinations=found, topics=frozenset(topics))


def copied_to(routes: Routes, service: str, broker: UUID | None = None) -> tuple[str, ...]:
    """The destinations that each get a message; none of routes that share, which get some each."""
    match = routes.match(service, str(broker) if broker else None)
    return match.destinations if match and not match.shared else ()


def _reached(marks: Mapping[Place, Mark], behind: Iterable[Place]) -> dict[int, datetime | None]:
    """By shard, when the oldest batch was opened that the marks of its lanes are of."""
    found: dict[int, datetime | None] = {}
    for lane, shard in behind:
        opened_at = marks.get((lane, shard), NOTHING).opened_at
        before = found.get(shard, opened_at)
        found[shard] = before and opened_at and min(before, opened_at)
    return found


def _begun(here: Side, side: Reading, source: UUID, topics: Collection[str]) -> dict[str, datetime]:
    """By topic, from when on a destination got its messages."""
    begun = [
        (topic, ALWAYS if one.is_first else one.created_at)
        for one in versions(here.connection)
        for topic in topics
        if side.name in copied_to(one.routes, topic)
    ]
    begun += here.fetch(MADE, {"destination": side.name})
    begun += side.begun(source, topics)
    earliest: dict[str, datetime] = {}
    for topic, moment in begun:
        earliest[topic] = min(moment, earliest.get(topic, moment))
    return earliest
