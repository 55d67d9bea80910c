"""Copies of a topic's messages that a destination that was set back has lost.

Where a topic's message went is not recorded, and another destination may still have its copy. So
this module works out, for each destination that has less than it had acknowledged
(`saf.destinations.marks`), which messages it should have. It has lost its copy of a message if all
of this is true:

- it does not have the message;
- the routes lead there now;
- the message is complete, and not set aside for that destination;
- the message's shard is one of those with a lower mark;
- the message was created after the destination had begun to get the topic.

It had begun to get the topic at the earliest of these times:

- always, if the first routes that batches were ever opened with lead there;
- when the first of the frozen routes that are kept began to lead there;
- when the route and the topic were created, if they are rows of saf.route and saf.topic;
- when the oldest message of the topic was created that the destination still has.

So a new subscriber is not flooded with an old topic, and a transaction may have been open for long
when the destination was backed up.

For some copies, nobody can know whether the destination had them. They are *uncertain*: counted,
and not sent again automatically.

- The message was created before all of these times, and may have been committed after them.
- The routes no longer lead to the destination, and nobody knows which messages went there last.

An operator's discard does not name the destination. A discard from before the mark counts for all
destinations; messages that were discarded later are sent again to destinations that have lost them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.destinations import Entry, Reading
from saf.destinations.marks import compare, reached
from saf.log.side import Side
from saf.operating.repair.set_back import remembered
from saf.routing.matching import Routes
from saf.routing.routes import versions

RoutesOf = Callable[[psycopg.Connection[Any]], Routes]
"""Returns the current routes of a source, given a connection to it."""

MADE = """
SELECT t.name, min(greatest(t.created_at, r.created_at))
FROM saf.topic t JOIN saf.route r ON coalesce(r.service, t.name) = t.name
WHERE r.destination = %(destination)s GROUP BY t.name
"""

ALWAYS = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Lacking:
    """Copies that a destination that was set back has lost."""

    shards: Mapping[int, datetime | None]
    """For each shard with a lower mark, when the batch of that mark was opened. None: the
    destination has nothing at all of some lane.
    """
    begun: Mapping[str, datetime]
    """For each topic, when the destination began to get its messages."""

    def may_lack(self, sent: Entry, given_up: datetime | None) -> bool:
        """Whether the destination has lost messages of this shard, and this may be one of them."""
        opened_at = self.shards.get(sent.shard)
        return sent.shard in self.shards and not (given_up and opened_at and given_up < opened_at)

    def had(self, sent: Entry, topic: str) -> bool:
        """Whether the destination had begun to get the topic when a message was created."""
        begun = self.begun.get(topic)
        return begun is not None and sent.created_at >= begun


@dataclass(frozen=True, kw_only=True)
class Gone:
    """Destinations that were set back and lack their copy of a message."""

    address: Entry
    """A row with the address under which the message was sent there."""
    at: tuple[str, ...] = ()
    """Destinations that had the copy."""
    uncertain: tuple[str, ...] = ()
    """Destinations that may have had the copy."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """A source's destinations that were set back, and its routes."""

    routes: Routes
    earlier: Sequence[tuple[Routes, datetime | None]]
    """The frozen routes that are kept, each with the time when others replaced them, if any."""
    destinations: Mapping[str, Lacking]
    topics: frozenset[str]

    def lost(self, entries: Sequence[Entry]) -> Gone:
        """Return which destinations have lost a message, given every row with its id."""
        sent = next((e for e in entries if e.state in ("complete", "aside")), None)
        copies = [e for e in entries if e.state in ("stored", "set_aside")]
        address = next((e for e in (*copies, sent) if e and e.service in self.topics), None)
        if sent is None or address is None:
            return Gone(address=entries[0])
        others = {e.where for e in copies}
        given_up = max((e.created_at for e in entries if e.state == "discarded"), default=None)
        missing = {
            name: lacking
            for name, lacking in self.destinations.items()
            if not others & {name, ""} and lacking.may_lack(sent, given_up)
        }
        now = copied_to(self.routes, address.service, address.broker)
        lost = tuple(n for n in now if n in missing and missing[n].had(sent, address.service))
        uncertain = tuple(
            name
            for name in missing
            if name not in lost and (name in now or self._may_have_had(name, address, sent))
        )
        return Gone(address=address, at=lost, uncertain=uncertain)

    def _may_have_had(self, name: str, address: Entry, sent: Entry) -> bool:
        """Whether routes led a message to a destination when its batch may have been opened."""
        return any(
            name in copied_to(routes, address.service, address.broker)
            for routes, until in self.earlier
            if until is None or sent.created_at < until
        )


def set_back_copies(
    here: Side,
    there: Iterable[Reading],
    source: UUID,
    topics: Collection[str],
    routes: RoutesOf,
) -> Copies | None:
    """Ask a source and its destinations which were set back, and where messages go.

    Snapshots are taken in this order. None if no destination was set back, or no service is a
    topic.
    """
    found: dict[str, Lacking] = {}
    for side in there if topics else ():
        known = side.known(source)
        before = remembered(here.connection, known.destination)
        if behind := compare(known.marks, before.marks, before.in_hand).behind:
            found[side.name] = Lacking(
                shards=reached(known.marks, behind), begun=_begun(here, side, source, topics)
            )
    if not found:
        return None
    frozen = versions(here.connection)
    replaced = [version.created_at for version in frozen[1:]]
    return Copies(
        routes=routes(here.connection),
        earlier=[
            (version.routes, until)
            for version, until in zip(frozen, [*replaced, None], strict=bool(frozen))
        ],
        destinations=found,
        topics=frozenset(topics),
    )


def copied_to(routes: Routes, service: str, broker: UUID | None = None) -> tuple[str, ...]:
    """Return the destinations that each get a copy of a message.

    Destinations of routes that share do not count, because each gets only some of the messages.
    """
    match = routes.match(service, str(broker) if broker else None)
    return match.destinations if match and not match.shared else ()


def _begun(here: Side, side: Reading, source: UUID, topics: Collection[str]) -> dict[str, datetime]:
    """Return, for each topic, when a destination began to get its messages."""
    begun = [
        (topic, ALWAYS if version.is_first else version.created_at)
        for version in versions(here.connection)
        for topic in topics
        if side.name in copied_to(version.routes, topic)
    ]
    begun += here.fetch(MADE, {"destination": side.name})
    begun += side.begun(source, topics)
    earliest: dict[str, datetime] = {}
    for topic, moment in begun:
        earliest[topic] = min(moment, earliest.get(topic, moment))
    return earliest
