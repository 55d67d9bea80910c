"""Replay: send messages again that a destination has lost, e.g. one restored from a backup.

The messages are parked again, in the order in which they were sent, in a separate lane (see
`saf.setaside.lane`). That lane goes before everything else for its destination, so newer messages
follow behind, and the lane's watermark ensures that each message is stored once.

`saf.operating.repair.reconcile` finds the messages to send again, and for topics their
destinations. Messages that were purged from the outbox in the meantime cannot be sent again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from saf.columns import COLUMNS
from saf.database import fetch
from saf.errors import UsageError
from saf.routing.matching import Match, Routes
from saf.routing.route_choices import Asker, choose
from saf.setaside.audit import ONE_AT_A_TIME, audit
from saf.setaside.lane import Kind
from saf.setaside.parking import ADDRESS

CHUNK = 10_000
"""Messages that are read, and written into the audit, at a time."""

FIND = """
SELECT o.shard, o.id, o.message_id, o.to_service, o.to_broker, o.key
FROM unnest(%(shards)s::smallint[], %(ids)s::bigint[]) AS lost (shard, id)
JOIN saf.outbox o USING (shard, id) ORDER BY o.id
"""
PARK = f"""
INSERT INTO saf.parked
    (subscription_id, destination, kind, shard, id, batch, position, {", ".join(COLUMNS)})
SELECT s.subscription_id, %(destination)s, '{Kind.REPLAY}', o.shard, o.id, %(number)s,
       row_number() OVER (ORDER BY o.id),
       {", ".join(f"{'lost' if c in ADDRESS else 'o'}.{c}" for c in COLUMNS)}
FROM unnest(%(shards)s::smallint[], %(ids)s::bigint[], %(to_services)s::text[],
            %(to_brokers)s::uuid[], %(keys)s::text[]) AS lost (shard, id, {", ".join(ADDRESS)})
JOIN saf.outbox o USING (shard, id)
JOIN saf.subscription s ON s.log = 'outbox' AND s.name = 'forwarder'
"""
DUE = f"""
INSERT INTO saf.backoff (subscription_id, destination, kind, error)
SELECT subscription_id, %(destination)s, '{Kind.REPLAY}', 'replayed by ' || session_user
FROM saf.subscription WHERE log = 'outbox' AND name = 'forwarder'
ON CONFLICT (subscription_id, destination, kind, subject, broker)
DO UPDATE SET next_attempt_at = now()
"""


Address = tuple[str, UUID | None, str | None]
"""A service, a broker and a key."""

_Chosen = tuple[int, int, UUID, str, UUID | None, str | None]
"""A message's shard, id and message_id, and the address that it is sent to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A topic's message that some of its destinations have lost, and others may have."""

    shard: int
    id: int
    destinations: tuple[str, ...]
    address: Address
    """The topic's address, under which the message was sent there, even if a router had found
    it."""


def replay(
    connection: psycopg.Connection[Any],
    lost: Sequence[tuple[int, int]],
    routes: Routes,
    why: str,
    *,
    copies: Sequence[Copy] = (),
    only: Collection[str] | None = None,
    dry_run: bool = False,
) -> dict[str, list[UUID]]:
    """Give messages, as (shard, id), to the forwarder again; return their ids by destination.

    They go where the routes lead now; a topic's message goes to all of its destinations. Messages
    without a route are left out. For messages of a router the forwarder finds the destination;
    until then they have none, which is the empty name. ``copies`` go to the destinations that they
    name. With ``only``, no other destinations get anything. ``why`` is written to the audit. With
    ``dry_run``, nothing is written.
    """
    known = {(copy.shard, copy.id): copy for copy in copies}
    places = sorted([*lost, *known])
    sent: dict[str, list[UUID]] = defaultdict(list)
    with connection.transaction(force_rollback=dry_run):
        connection.execute(ONE_AT_A_TIME)
        # each shard's messages in their order, which is that of the numbers in the audit
        for begin in range(0, len(places), CHUNK):
            found = _found(connection, places[begin : begin + CHUNK], routes, known)
            for destination, messages in found.items():
                if only is not None and destination not in only:
                    continue
                message_ids = [message[2] for message in messages]
                sent[destination] += message_ids
                if not dry_run:
                    number = audit(connection, "replay", message_ids, why)
                    _park(connection, destination, number, messages)
    return dict(sent)


def _found(
    connection: psycopg.Connection[Any],
    places: Sequence[tuple[int, int]],
    routes: Routes,
    known: Mapping[tuple[int, int], Copy],
) -> dict[str, list[_Chosen]]:
    """Return where messages go, by destination, in the order in which they were sent."""
    routers = {router.service for router in routes.routers}
    place = {"shards": [shard for shard, _ in places], "ids": [number for _, number in places]}
    rows = fetch(connection, FIND, place)
    _refuse_more_than(places, [(shard, number) for shard, number, *_ in rows])
    matches = [
        None
        if (shard, number) in known or service in routers
        else routes.match(service, str(broker) if broker else None)
        for shard, number, _, service, broker, _ in rows
    ]
    chosen = choose(
        connection,
        {
            _asker(*address): match.destinations
            for (_, _, _, *address), match in zip(rows, matches, strict=True)
            if match is not None and match.shared and address[2] is not None
        },
    )
    found: dict[str, list[_Chosen]] = defaultdict(list)
    for (shard, number, message_id, *address), match in zip(rows, matches, strict=True):
        copy = known.get((shard, number)) or Copy(
            shard=shard,
            id=number,
            destinations=("",)
            if address[0] in routers
            else _destinations(match, chosen.get(_asker(*address)), number),
            address=tuple(address),
        )
        for destination in copy.destinations:
            found[destination].append((shard, number, message_id, *copy.address))
    return found


def _park(
    connection: psycopg.Connection[Any],
    destination: str,
    number: int,
    messages: Sequence[_Chosen],
) -> None:
    shards, ids, _, *addresses = map(list, zip(*messages, strict=True))
    params = {
        "destination": destination,
        "number": number,
        "shards": shards,
        "ids": ids,
        **{f"{name}s": column for name, column in zip(ADDRESS, addresses, strict=True)},
    }
    connection.execute(DUE, params)
    parked = connection.execute(PARK, params).rowcount
    if parked > len(messages):
        raise _more(parked, len(messages))


def _refuse_more_than(
    announced: Sequence[tuple[int, int]], found: Sequence[tuple[int, int]]
) -> None:
    """Raise if more rows would be sent than are lost: a place may have several rows."""
    if len(found) > len({*announced}):
        raise _more(len(found), len({*announced}))


def _more(found: int, announced: int) -> UsageError:
    return UsageError(
        f"{found} messages stand where {announced} are lost: saf.outbox has some twice, or has "
        "given an id twice. Nothing is sent again; run `saf rebase` first, then `saf replay`"
    )


def _asker(service: str, broker: UUID | None, key: Any) -> Asker:
    return Asker(service, str(broker) if broker else None, key)


def _destinations(match: Match | None, chosen: str | None, number: int) -> tuple[str, ...]:
    if match is None or not match.shared:
        return match.destinations if match else ()
    return (chosen or match.destinations[number % len(match.routes)],)
