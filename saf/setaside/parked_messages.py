"""Parked messages one by one: which there are, and which of them a person may decide about now.

Lanes are what most people ask for (`saf.setaside.waiting`); this is for whoever has to do with
single messages. `saf.operating.decide_parked` has what a person does with them.

Not every parked message is a person's to decide about (`FREE`). These stay parked:

- what a forwarder's open batch has set aside beyond its position: only while it is here is it known
  that the batch must not send it as well. This passes within a chunk;
- what is in doubt: the next run makes a dead letter of it;
- messages of conversations at their receivers, whose ends know of them; and those that wait there
  for their time, or for an earlier message;
- what waits for a receiver that is a member, such as a dispatcher: it may have it in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Self
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.database import fetch
from saf.log.shards import ALL_SHARDS, LAST
from saf.setaside.dead import SHOWN
from saf.setaside.lane import BROKER, SAME_LANE, Kind, Lane

# The newest version of each cursor, as in saf.log.shards
TAKEN = f"""
taken AS MATERIALIZED (
    SELECT c.subscription_id, c.shard, s.log, c.position, c.opened_at
    FROM saf.subscription s CROSS JOIN {ALL_SHARDS} AS h (shard)
    CROSS JOIN LATERAL (
        SELECT * FROM saf.cursor
        WHERE (subscription_id, shard, batch) <= (s.subscription_id, h.shard, {LAST})
        ORDER BY subscription_id DESC, shard DESC, batch DESC LIMIT 1) AS c
    WHERE c.subscription_id = s.subscription_id AND c.shard = h.shard
      AND CASE WHEN s.log = 'outbox' THEN c.open IS NOT NULL ELSE c.owner IS NOT NULL END)
"""
FREE = f"""
CASE WHEN s.log = 'outbox'
     THEN p.kind <> '{Kind.DOUBT}'
          AND (%(to)s::text IS NULL OR p.conversation_id IS NULL AND p.destination <> %(to)s)
     ELSE p.kind = '{Kind.KEY}' AND p.conversation_id IS NULL AND %(to)s::text IS NULL END
AND NOT EXISTS (
    SELECT FROM taken t
    WHERE (t.subscription_id, t.shard) = (p.subscription_id, p.shard)
      AND (t.log = 'inbox' OR p.id > t.position AND p.parked_at >= t.opened_at))
"""
"""SQL: whether a person may decide about the message p of the subscription s; ``to`` is where it is
to be redirected, or NULL."""

CHOSEN = """
FROM saf.parked p JOIN saf.subscription s USING (subscription_id)
WHERE (%(parked_ids)s::bigint[] IS NULL OR p.parked_id = ANY (%(parked_ids)s))
  AND (%(subscription)s::text IS NULL OR s.name = %(subscription)s)
  AND (%(destination)s::text IS NULL OR p.destination = %(destination)s)
  AND (%(lane)s::text IS NULL OR p.kind = %(lane)s)
  AND (%(subject)s::text IS NULL OR p.subject = %(subject)s)
  AND (%(service)s::text IS NULL OR p.to_service = %(service)s)
  AND (%(key)s::text IS NULL OR p.key = %(key)s)
  AND (%(before)s::timestamptz IS NULL OR p.parked_at < %(before)s)
  AND (%(after)s::bigint IS NULL OR p.parked_id > %(after)s)
  AND (%(through)s::bigint IS NULL OR p.parked_id <= %(through)s)
"""

LIST = f"""
WITH {TAKEN}
SELECT p.parked_id, s.name AS subscription, p.destination, p.kind, p.subject,
       {BROKER.replace("broker,", "p.broker,")}, p.parked_at, p.message_id,
       left(p.to_service, {SHOWN}) AS service, left(p.key, {SHOWN}) AS key,
       left(p.message_type, {SHOWN}) AS message_type, octet_length(p.body) AS bytes,
       p.created_at, {FREE} AS free,
       (SELECT b.error FROM saf.backoff b WHERE {SAME_LANE}) AS error
{CHOSEN} ORDER BY p.parked_id LIMIT %(limit)s
"""

COUNT = f"""
WITH {TAKEN}
SELECT count(*) FILTER (WHERE free), max(parked_id) FILTER (WHERE free), count(*)
FROM (SELECT p.parked_id, {FREE} AS free {CHOSEN} ORDER BY p.parked_id LIMIT %(most)s) AS found
"""

LAST_PARKED = "SELECT coalesce(max(parked_id), 0) FROM saf.parked"


@dataclass(frozen=True, kw_only=True)
class ParkedFilter:
    """Which parked messages to choose; None means any."""

    parked_ids: Sequence[int] | None = None
    subscription: str | None = None
    destination: str | None = None
    lane: str | None = None
    """The kind of their lanes; see `saf.setaside.lane.Kind`."""
    subject: str | None = None
    service: str | None = None
    key: str | None = None
    before: datetime | None = None
    after: int | None = None
    """Only those with greater numbers."""
    through: int | None = None
    """Only those up to this number: none that was parked later."""

    def until_now(self, connection: psycopg.Connection[Any]) -> Self:
        """The same, without what is parked from now on."""
        return self if self.through is not None else replace(self, through=last(connection))


@dataclass(frozen=True, kw_only=True)
class ParkedCount:
    """How many parked messages a filter matches."""

    messages: int
    """Those that a person may decide about."""
    through: int | None
    """The greatest of their numbers; None if there are none."""
    staying: int
    """Those that match too, and stay parked whatever is decided."""
    more: bool
    """There are more, which were not counted."""


@dataclass(frozen=True, kw_only=True)
class ParkedMessage:
    """One parked message, without its body."""

    parked_id: int
    subscription: str
    destination: str
    kind: str
    subject: str
    broker: UUID | None
    parked_at: datetime
    message_id: UUID
    service: str
    key: str | None
    message_type: str | None
    bytes: int
    created_at: datetime
    free: bool
    """Whether a person may decide about it now."""
    error: str | None
    """What its lane waits for."""

    @property
    def lane(self) -> Lane:
        """The lane that it is in."""
        return Lane(
            destination=self.destination,
            kind=Kind(self.kind),
            subject=self.subject,
            broker=self.broker,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a dict for JSON."""
        plain = {name: value for name, value in asdict(self).items() if value is not None}
        broker = plain.pop("broker", None)
        # must not be mistaken for the broker that it is parked at
        more = {} if broker is None else {"to_broker": str(broker)}
        moments = {n: v.isoformat() for n, v in plain.items() if isinstance(v, datetime)}
        return {**plain, **moments, **more, "message_id": str(self.message_id)}


def parked_messages(
    connection: psycopg.Connection[Any],
    chosen: ParkedFilter,
    limit: int | None = 100,
    *,
    to: str | None = None,
) -> list[ParkedMessage]:
    """Return the parked messages that a filter matches, those that were parked first before."""
    params = asdict(chosen) | {"limit": limit, "to": to}
    with psycopg.Cursor(connection, row_factory=class_row(ParkedMessage)) as cursor:
        return cursor.execute(LIST, params).fetchall()


def count(
    connection: psycopg.Connection[Any], chosen: ParkedFilter, most: int, *, to: str | None = None
) -> ParkedCount:
    """Count the parked messages that a filter matches, up to ``most``, in the order of parking."""
    params = asdict(chosen) | {"most": most + 1, "to": to}
    ((messages, through, found),) = fetch(connection, COUNT, params)
    return ParkedCount(
        messages=min(messages, most),
        through=through,
        staying=found - messages,
        more=found > most,
    )


def last(connection: psycopg.Connection[Any]) -> int:
    """Return the greatest number of a parked message; 0 if there is none."""
    ((number,),) = fetch(connection, LAST_PARKED)
    return int(number)
