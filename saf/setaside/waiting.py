"""Waiting: a broker's waiting lanes and the reasons, for operators; and retrying them now.

`parked` lists the lanes, page by page. `due` tells how many lanes a retry would try now, and how
many would keep waiting. `retry_now` makes the next attempts due.

Some lanes wait for events that an operator's "now" cannot hasten: the time of each message, an
earlier message of the dialog, a receiver that handles the type, the end of a destination's pause,
or an operator's decision about a dead letter of the same key. `retry_now` leaves them as they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row
from pydantic import Field, StringConstraints, TypeAdapter

from saf.database import fetch
from saf.database.queries import Page, foreign, page_of
from saf.setaside.audit import audit
from saf.setaside.dead import SHOWN
from saf.setaside.fingerprint import PARKED_GROUP
from saf.setaside.lane import (
    BROKER,
    NO_BROKER,
    OF_SERVICE,
    ORIGIN,
    SAME_LANE,
    THE_LANE,
    WAITS_FOR,
    Kind,
)
from saf.setaside.parking import BLOCKED, Backoff


@dataclass(frozen=True, kw_only=True)
class Parked(Backoff):
    """A lane that waits, and the number of its messages."""

    messages: int
    """Counted up to the requested maximum."""
    subscription: str
    awaits_handler: bool
    message_type: str | None
    """The type that it needs a handler for."""

    @property
    def words(self) -> str:
        """What its messages wait for, in words."""
        return self.own.of_reader(
            self.subscription, awaits_handler=self.awaits_handler, message_type=self.message_type
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the lane as a dict for JSON."""
        moments = {
            "next_attempt_at": self.next_attempt_at.isoformat(),
            "since": self.since.isoformat(),
        }
        # must not be mistaken for the broker that the lane is in
        plain = asdict(self)
        broker = plain.pop("broker")
        return {
            **plain,
            **moments,
            "waits_for": self.waits_for,
            "to_broker": broker and str(broker),
        }


@dataclass(frozen=True, kw_only=True)
class Waiting(Page[Parked]):
    """Waiting lanes of a broker: one page, the number of all lanes, and their messages."""

    lanes: int = 0
    messages: int = 0


Place = list[str]
"""One lane's values of the columns that the list is sorted by; see `PLACE`."""


@dataclass(frozen=True, kw_only=True)
class _Parked(Parked):
    lanes: int
    place: str


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Which lanes to choose; None means any."""

    subscription: str | None = None
    destination: str | None = None
    waits_for: str | None = None
    """What their messages wait for; see `saf.setaside.lane.WaitsFor`."""
    origin: str | None = None
    """Where their messages come from; see `saf.setaside.lane.Origin`."""
    subject: str | None = None
    subject_contains: str | None = None
    """A part of the subject, case-insensitive."""
    group: str | None = None
    """The id of a failure group; see `saf.setaside.fingerprint`."""


ANY = Lanes()


@dataclass(frozen=True, kw_only=True)
class Due:
    """Numbers of lanes of a broker that a retry would affect."""

    tried: int
    others: int
    """Lanes that match, but would keep waiting."""


# The lanes that block most come first. A page begins after a place, so that lanes that come or go
# before it move no others; a lane that is tried in the meantime changes its place.
PLACE = f"log = 'inbox', subscription, kind = ANY (%(of_service)s), -attempts, {THE_LANE}"
PLACE_TYPES = ("bool", "text", "bool", "int", "text", "text", "text", "uuid")
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
LessAttempts = Annotated[int, Field(ge=-(1 << 31), le=0)]
PLACES = TypeAdapter(tuple[bool, Text, bool, LessAttempts, Text, Text, Text, UUID])
"""Places that a database accepts."""

# Messages are counted only for the lanes that are shown. Messages that are ahead of others have no
# time, so their lane has no backoff; neither has a lane that an operator has taken messages from.
# The index alone lists all lanes.
PARKED = f"""
SELECT subscription, destination, kind, subject, {BROKER}, attempts, next_attempt_at, due, error,
       since, needs_operator, awaits_handler, message_type, lanes, to_jsonb(ARRAY[
           (log = 'inbox')::text, subscription, (kind = ANY (%(of_service)s))::text,
           (-attempts)::text, destination, kind, subject, broker::text])::text AS place,
       (SELECT count(*) FROM (SELECT FROM saf.parked p WHERE {SAME_LANE} LIMIT %(most)s) AS counted
       ) AS messages,
       EXISTS (SELECT FROM saf.backoff m
               WHERE (m.subscription_id, m.destination, m.kind, m.subject, m.broker)
                     = (b.subscription_id, b.destination, '{Kind.MAIN}', '', '{NO_BROKER}')
                 AND m.paused_at IS NOT NULL) AS paused
FROM (SELECT * FROM (
          SELECT w.*, s.name AS subscription, s.log, next_attempt_at <= now() AS due,
                 count(*) OVER () AS lanes
          FROM (SELECT subscription_id, {THE_LANE}, attempts, next_attempt_at, error, since,
                       awaits_handler, message_type, needs_operator
                FROM saf.backoff
                UNION ALL
                SELECT subscription_id, {THE_LANE}, 0, timestamptz '{BLOCKED}',
                       CASE kind WHEN '{Kind.AHEAD}'
                                 THEN 'an earlier message of the dialog is missing'
                                 ELSE 'nothing in saf.backoff says when it is tried' END,
                       (SELECT min(parked_at) FROM saf.parked p WHERE {SAME_LANE}), false, NULL,
                       false
                FROM (SELECT DISTINCT subscription_id, {THE_LANE} FROM saf.parked) AS b
                WHERE NOT EXISTS (SELECT FROM saf.backoff p WHERE {SAME_LANE})) AS w
          JOIN saf.subscription s USING (subscription_id)
          WHERE (%(subscription)s::text IS NULL OR s.name = %(subscription)s)
            AND (%(destination)s::text IS NULL OR w.destination = %(destination)s)
            AND (%(waits_for)s::text IS NULL OR {WAITS_FOR} = %(waits_for)s)
            AND (%(origin)s::text IS NULL OR {ORIGIN} = %(origin)s)
            AND (%(subject)s::text IS NULL OR w.subject = %(subject)s)
            AND (%(subject_contains)s::text IS NULL
                 OR strpos(lower(w.subject), lower(%(subject_contains)s)) > 0)
            AND {PARKED_GROUP}) AS every
      WHERE %(after)s::text[] IS NULL OR ({PLACE})
            > ({", ".join(f"(%(after)s::text[])[{n}]::{t}" for n, t in enumerate(PLACE_TYPES, 1))})
      ORDER BY {PLACE} LIMIT %(limit)s) AS b
ORDER BY {PLACE}
"""
PARKED_MESSAGES = """
SELECT count(*) FROM saf.parked JOIN saf.subscription USING (subscription_id)
WHERE %(subscription)s::text IS NULL OR name = %(subscription)s
"""

OF_LANES = f"""
  AND {PARKED_GROUP}
  AND (%(destination)s::text IS NULL OR destination = %(destination)s)
  AND (%(waits_for)s::text IS NULL OR {WAITS_FOR} = %(waits_for)s)
  AND (%(origin)s::text IS NULL OR {ORIGIN} = %(origin)s)
  AND (%(subject)s::text IS NULL OR subject = %(subject)s)
  AND (%(subject_contains)s::text IS NULL
       OR strpos(lower(subject), lower(%(subject_contains)s)) > 0)
  AND (%(subscription)s::text IS NULL OR subscription_id IN (
      SELECT subscription_id FROM saf.subscription WHERE name = %(subscription)s))
"""
# Messages after a dead letter would be handled before it. Dead letters are read once for all
UNDECIDED = f"""
(next_attempt_at = '{BLOCKED}' AND kind = '{Kind.KEY}' AND NOT awaits_handler
 AND (subscription_id, subject) IN (
    SELECT subscription_id, coalesce(key, message_id::text) FROM saf.dead_letter))
"""
TRIED = f"""
kind <> '{Kind.LATER}' AND paused_at IS NULL AND NOT awaits_handler AND NOT {UNDECIDED} {OF_LANES}
"""
"""SQL: whether `retry_now` makes a lane of saf.backoff due; its parameters are those of `Lanes`."""
# In the order in which all transactions lock lanes, to avoid deadlocks
RETRY_NOW = f"""
WITH chosen AS (
    SELECT subscription_id, {THE_LANE} FROM saf.backoff WHERE {TRIED}
    ORDER BY subscription_id, {THE_LANE} FOR UPDATE)
UPDATE saf.backoff b SET next_attempt_at = now() FROM chosen p WHERE {SAME_LANE}
"""
# The index that orders a lane finds its first messages, however many there are
FIRST_KEYS = f"""
SELECT left(coalesce(p.key, p.message_id::text), {SHOWN})
FROM (SELECT * FROM saf.backoff WHERE {TRIED}) AS b CROSS JOIN LATERAL (
    SELECT key, message_id, parked_id FROM saf.parked p WHERE {SAME_LANE}
    ORDER BY id LIMIT %(limit)s) AS p
ORDER BY parked_id LIMIT %(limit)s
"""
COUNT_UNDECIDED = f"SELECT count(*) FROM saf.backoff WHERE {UNDECIDED} {OF_LANES}"

# Lanes of messages that wait for an earlier message of a dialog have no row here
COUNT = f"SELECT count(*) FROM saf.backoff WHERE {TRIED}"


def parked(
    connection: psycopg.Connection[Any],
    limit: int | None = None,
    subscription: str | None = None,
    *,
    lanes: Lanes = ANY,
    after: Place | None = None,
    most: int | None = None,
) -> Waiting:
    """Return up to ``limit`` lanes that wait in a broker, or in one of its subscriptions.

    ``after`` is where the page begins; see `place_at`. With ``most``, at most this many messages
    are counted per lane, and the sum over all lanes is not.
    """
    chosen = replace(lanes, subscription=subscription) if subscription else lanes
    params = {"of_service": list(OF_SERVICE), "after": after, "most": most, **asdict(chosen)}

    def read(limit: int | None) -> list[_Parked]:
        with psycopg.Cursor(connection, row_factory=class_row(_Parked)) as cursor:
            return cursor.execute(PARKED, params | {"limit": limit}).fetchall()

    page = page_of(read, limit, lambda lane: lane.place)
    return Waiting(
        shown=tuple(
            Parked(**{f.name: getattr(lane, f.name) for f in fields(Parked)}) for lane in page.shown
        ),
        next=page.next,
        lanes=page.shown[0].lanes if page.shown else 0,
        messages=fetch(connection, PARKED_MESSAGES, params)[0][0] if most is None else 0,
    )


def place_at(place: str | None) -> Place | None:
    """Parse a place returned by an earlier page, for the next call of `parked`.

    >>> place_at('["false", "forwarder", "true", "-4", "mom", "service", "billing"]')
    Traceback (most recent call last):
    saf.errors.UsageError: no page of lanes ends at '["false", "forwarder", "true", "-4", "mom", \
"service", "billing"]': use the place at the end of the page before

    Raises:
        UsageError: no page of lanes ends there.
    """
    if place is None:
        return None
    try:
        return [str(value) for value in PLACES.validate_json(place)]
    except ValueError:
        raise foreign(place, "lanes") from None


def due(connection: psycopg.Connection[Any], lanes: Lanes = ANY) -> Due:
    """Return how many of the lanes would be tried now. Reads only."""
    ((tried,),) = fetch(connection, COUNT, asdict(lanes))
    every = parked(connection, 1, lanes=lanes, most=1).lanes
    return Due(tried=tried, others=max(0, every - tried))


def retry_now(
    connection: psycopg.Connection[Any],
    destination: str | None = None,
    *,
    lanes: Lanes = ANY,
    why: str = "",
    person: str | None = None,
) -> int:
    """Make the next attempts of lanes due now; return the number of lanes.

    Keys that wait for an operator to decide about a dead letter keep waiting; see `undecided`. With
    ``why`` or ``person``, the action is written to the audit.
    """
    chosen = replace(lanes, destination=destination) if destination else lanes
    with connection.transaction():
        count = connection.execute(RETRY_NOW, asdict(chosen)).rowcount
        if count and (why or person):
            audit(connection, f"retry-now of {count} lanes", [], why, person=person)
    return count


def first_keys(connection: psycopg.Connection[Any], limit: int, lanes: Lanes = ANY) -> list[str]:
    """Return the keys of the first messages that a retry would try now, or their ids."""
    return [key for (key,) in fetch(connection, FIRST_KEYS, asdict(lanes) | {"limit": limit})]


def undecided(connection: psycopg.Connection[Any], lanes: Lanes = ANY) -> int:
    """Return how many keys wait until an operator retries or discards their dead letter."""
    ((count,),) = fetch(connection, COUNT_UNDECIDED, asdict(lanes))
    return int(count)
