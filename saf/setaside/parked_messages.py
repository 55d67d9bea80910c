"""Single parked messages: list them, and find which ones an operator may decide about now.

Most operators ask for lanes (`saf.setaside.waiting`); this module is for those who work on single
messages. Operators' decisions about them are in `saf.operating.decide_parked`.

Not every parked message can be decided about now (`saf.setaside.staying`). A receiver that is a
member, such as a dispatcher, has each due key of its shards in hand: from that moment it may have
the key's messages in memory. Until `REST_SECONDS` before, it has not.
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
from saf.database.pages import Page, number_at, page_of
from saf.setaside.dead import SHOWN
from saf.setaside.lane import BROKER, SAME_LANE, Kind, Lane
from saf.setaside.staying import OF_BATCH, PARKED_BY, TAKEN, Counted

REST_SECONDS = 5.0
"""Minimum seconds until a member's key is due, for an operator to decide about it."""

RESTING = f"""(NOT b.awaits_handler
 AND b.next_attempt_at > clock_timestamp() + make_interval(secs => {REST_SECONDS}))"""
"""SQL: whether no member takes messages out of the lane b for a while."""
RESTS = f"EXISTS (SELECT FROM saf.backoff b WHERE {SAME_LANE} AND {RESTING})"
STAYS = f"""
CASE WHEN s.log = 'inbox' AND %(to)s::text IS NOT NULL THEN 'arrived'
     WHEN p.kind = '{Kind.DOUBT}' THEN 'doubt'
     WHEN p.kind = '{Kind.LATER}' THEN 'later'
     WHEN p.kind = '{Kind.AHEAD}' THEN 'ahead'
     WHEN s.log = 'inbox' AND p.from_initiator IS NOT NULL AND NOT EXISTS (
         SELECT FROM saf.conversation d
         WHERE d.conversation_id = p.conversation_id AND d.is_initiator = NOT p.from_initiator)
     THEN 'no_end'
     WHEN %(to)s::text IS NOT NULL AND p.conversation_id IS NOT NULL THEN 'dialog'
     WHEN p.destination = %(to)s::text THEN 'there'
     WHEN {OF_BATCH.format(one="p", at=PARKED_BY)} THEN 'batch'
     WHEN EXISTS (
         SELECT FROM taken t
         WHERE (t.subscription_id, t.shard) = (p.subscription_id, p.shard)
           AND t.log = 'inbox' AND NOT {RESTS})
     THEN 'in_hand' END
"""
"""SQL: why an operator may not decide about the message p of the subscription s, one of
`saf.setaside.staying.WHY`; or NULL. ``to`` is the destination of a redirection, or NULL."""
FREE = f"({STAYS}) IS NULL"

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
       p.created_at, {STAYS} AS stays,
       (SELECT b.error FROM saf.backoff b WHERE {SAME_LANE}) AS error
{CHOSEN} ORDER BY p.parked_id LIMIT %(limit)s
"""

COUNT = f"""
WITH {TAKEN}
SELECT stays, count(*), max(parked_id)
FROM (SELECT p.parked_id, {STAYS} AS stays {CHOSEN} ORDER BY p.parked_id LIMIT %(most)s) AS found
GROUP BY 1 ORDER BY 1
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
    """Only those with greater numbers: the next page."""
    through: int | None = None
    """Only those up to this number, without messages parked later."""

    def until_now(self, connection: psycopg.Connection[Any]) -> Self:
        """Return the filter without messages that are parked from now on."""
        return self if self.through is not None else replace(self, through=last(connection))


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
    stays: str | None
    """Why nobody may decide about it now, one of `saf.setaside.staying.WHY`; None: operators
    may."""
    error: str | None
    """What its lane waits for."""

    @property
    def free(self) -> bool:
        """Whether an operator may decide about it now."""
        return self.stays is None

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
        plain["free"] = self.free
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
    """Return the parked messages that a filter matches, in the order of parking."""
    params = asdict(chosen) | {"limit": limit, "to": to}
    with psycopg.Cursor(connection, row_factory=class_row(ParkedMessage)) as cursor:
        return cursor.execute(LIST, params).fetchall()


def page(
    connection: psycopg.Connection[Any], chosen: ParkedFilter, limit: int
) -> Page[ParkedMessage]:
    """Return a page of `parked_messages`; it begins after the filter's ``after``."""
    return page_of(
        lambda most: parked_messages(connection, chosen, most),
        limit,
        lambda row: str(row.parked_id),
    )


def place_at(place: str | None) -> int | None:
    """Parse a place returned by an earlier page, for the next page's `ParkedFilter`.

    Raises:
        UsageError: no page of parked messages ends there.
    """
    return number_at(place, "parked messages")


def count(
    connection: psycopg.Connection[Any], chosen: ParkedFilter, most: int, *, to: str | None = None
) -> Counted:
    """Count the parked messages that a filter matches, up to ``most``, in the order of parking."""
    params = asdict(chosen) | {"most": most + 1, "to": to}
    return Counted.of(fetch(connection, COUNT, params), most)


def last(connection: psycopg.Connection[Any]) -> int:
    """Return the greatest number of a parked message; 0 if there is none."""
    ((number,),) = fetch(connection, LAST_PARKED)
    return int(number)
