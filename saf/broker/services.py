"""Services, and the subscriptions that read their messages.

Messages are addressed to a *service*. A service is created with a subscription of the same name,
and most services need no other. With more subscriptions, each reads all messages that are addressed
to the service, with separate cursors, parked messages and dead letters. A subscription without a
service reads the whole inbox.

A broker without services stores messages for any service. A broker with services stores messages
for these only: others are refused, and wait at their source, with that reason, until their service
is created. So the first service affects the messages of all others. This cannot happen by accident:
while the inbox has messages for other services, these must be created together with the first one,
or ``refuse_others`` must be set.

The inbox may have messages for a service that does not exist: stored while the broker had no
services, or before the service was removed. A removed service has handled its messages, so creating
it again must not hand them out by accident: ``start`` must say where its subscription begins.

An operator may pause a subscription: its receivers, whatever they are, hand out no messages until
it is resumed. Deliveries in hand end as usual, and messages keep arriving.

Functions take a psycopg connection and write in their own transaction, or in the caller's.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf import errors
from saf.broker.fairness import Column, Fairness
from saf.database import fetch
from saf.errors import ConfigurationError, UsageError
from saf.log.rates import per_second
from saf.log.read import UNREAD, left
from saf.log.shards import living
from saf.message import MAX_NAME, fits
from saf.routing.local import refuse_local
from saf.setaside.audit import audit
from saf.setaside.dead import SHOWN

Start = Literal["beginning", "now"]
"""The first message that a new subscription reads: the oldest still stored, or the next."""

OWN = "saf/"
"""Prefix of the services that saf itself sends to, which nobody misses."""

SERVICES = """
SELECT v.name, v.created_at,
       ARRAY(SELECT s.name FROM saf.subscription s WHERE s.service = v.name ORDER BY s.name)
           AS subscriptions,
       own.paused_at, own.paused_by, own.paused_why, own.rate, own.concurrency, own.fair_by,
       own.priority_by, own.priority
FROM saf.service v
LEFT JOIN saf.subscription own ON (own.log, own.name, own.service) = ('inbox', v.name, v.name)
ORDER BY v.name
"""
CREATE_SERVICE = """
INSERT INTO saf.service (name) VALUES (%(name)s) ON CONFLICT DO NOTHING RETURNING name
"""
ADDRESSED = """
SELECT to_service, count(*) FROM saf.inbox
WHERE to_service <> ALL (%(names)s) AND NOT starts_with(to_service, %(own)s)
GROUP BY to_service ORDER BY count(*) DESC, to_service
"""
STORED = """
SELECT to_service, count(*) FROM saf.inbox
WHERE to_service = ANY (%(names)s) AND NOT EXISTS (SELECT FROM saf.service WHERE name = to_service)
GROUP BY to_service ORDER BY to_service
"""
REMOVE_SERVICE = "DELETE FROM saf.service WHERE name = %(name)s RETURNING name"

SUBSCRIPTIONS = """
SELECT subscription_id, name, service, created_at, paused_at, paused_by, paused_why, rate,
       concurrency, fair_by, priority_by, priority
FROM saf.subscription WHERE log = 'inbox' AND NOT stream
"""
PAUSE = """
UPDATE saf.subscription
SET paused_at = clock_timestamp(), paused_by = session_user, paused_why = %(why)s
WHERE subscription_id = %(subscription_id)s AND paused_at IS NULL
"""
LIMIT = """
UPDATE saf.subscription SET rate = %(rate)s, concurrency = %(concurrency)s
WHERE subscription_id = %(subscription_id)s
"""
# Seats that are too many stay: receivers use the first ones only
SEATS = """
INSERT INTO saf.seat (subscription_id, seat)
SELECT %(subscription_id)s, generate_series(1, %(concurrency)s) ON CONFLICT DO NOTHING
"""
# What was taken at the old rate does not count at the new one
ANEW = "DELETE FROM saf.allotment WHERE subscription_id = %(subscription_id)s AND destination = ''"
RESUME = """
UPDATE saf.subscription SET paused_at = NULL, paused_by = NULL, paused_why = NULL
WHERE subscription_id = %(subscription_id)s AND paused_at IS NOT NULL
"""
IS_STREAM = "SELECT FROM saf.subscription WHERE (log, name) = ('inbox', %(name)s) AND stream"
NAMED = f"{SUBSCRIPTIONS} AND name = %(name)s"
LIST = f"{SUBSCRIPTIONS} ORDER BY name"
KNOWS_SERVICE = "SELECT FROM saf.service WHERE name = %(name)s"
CREATE_SUBSCRIPTION = """
INSERT INTO saf.subscription (name, log, service) VALUES (%(name)s, 'inbox', %(service)s)
ON CONFLICT DO NOTHING RETURNING subscription_id
"""
SET_FAIRNESS = """
UPDATE saf.subscription
SET fair_by = %(fair_by)s, priority_by = %(priority_by)s, priority = %(priority)s::jsonb
WHERE subscription_id = %(subscription_id)s
"""
CREATE_CURSORS = """
INSERT INTO saf.cursor (subscription_id, shard, done)
SELECT %(subscription_id)s, generate_series(0, shards - 1),
       CASE WHEN %(start)s = 'now' THEN pg_current_snapshot() ELSE '1:1:' END
FROM saf.broker
"""

# Large bodies at a service's own subscription that lack their last fragment
INCOMPLETE = """
WITH incomplete AS (
    SELECT conversation_id
    FROM saf.subscription s
    JOIN saf.conversation c ON c.service = s.service
    JOIN saf.fragment f USING (conversation_id)
    WHERE s.subscription_id = %(subscription_id)s AND s.name = s.service
      AND f.from_initiator <> c.is_initiator AND f.sequence <= c.receive_sequence)
"""
LEFT_OVER = f"""
{INCOMPLETE}
SELECT EXISTS (
           SELECT FROM saf.cursor c
           CROSS JOIN LATERAL ({left("saf.inbox", "id, txid, to_service")}) AS i
           WHERE c.subscription_id = %(subscription_id)s
             AND (%(service)s::text IS NULL OR i.to_service = %(service)s)),
       EXISTS (SELECT FROM saf.parked WHERE subscription_id = %(subscription_id)s),
       EXISTS (SELECT FROM saf.dead_letter WHERE subscription_id = %(subscription_id)s),
       EXISTS (SELECT FROM incomplete)
"""
UNREAD_MESSAGES = f"""
SELECT since.message_id, since.key, since.id
FROM saf.subscription s CROSS JOIN LATERAL (SELECT since.* FROM {UNREAD}) AS since
WHERE s.subscription_id = %(subscription_id)s
"""
COUNTED = f"""
{INCOMPLETE}
SELECT (SELECT count(*) FROM ({UNREAD_MESSAGES}) AS found),
       (SELECT count(*) FROM saf.parked WHERE subscription_id = %(subscription_id)s),
       (SELECT count(*) FROM saf.dead_letter WHERE subscription_id = %(subscription_id)s),
       (SELECT count(DISTINCT conversation_id) FROM incomplete)
"""
# Fragments have no ids, so the dialog's id is named
NAMED_MESSAGES = f"""
{INCOMPLETE}
SELECT message_id, left(coalesce(key, message_id::text), {SHOWN}) FROM (
    (SELECT 1 AS kind, * FROM ({UNREAD_MESSAGES}) AS found ORDER BY id LIMIT %(most)s)
    UNION ALL
    (SELECT 2, message_id, key, parked_id FROM saf.parked
     WHERE subscription_id = %(subscription_id)s ORDER BY parked_id LIMIT %(most_aside)s)
    UNION ALL
    (SELECT 3, message_id, key, dead_letter_id FROM saf.dead_letter
     WHERE subscription_id = %(subscription_id)s ORDER BY dead_letter_id LIMIT %(most_aside)s)
    UNION ALL
    SELECT DISTINCT 4, conversation_id, NULL, 0 FROM incomplete) AS named
ORDER BY kind, id
"""
MOST_UNREAD = 10_000
"""How many unread messages the audit of a removal names; it counts all."""
SAMPLE = 10
"""How many messages are read for their keys."""
REMOVE_SUBSCRIPTION = "DELETE FROM saf.subscription WHERE subscription_id = %(subscription_id)s"


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What operators have decided about how a subscription hands out its messages.

    A field is None if nothing was decided.
    """

    paused_at: datetime | None = None
    paused_by: str | None = None
    """The login that paused it."""
    paused_why: str | None = None
    """The reason that the operator gave; may be empty."""
    rate: str | None = None
    """Most messages that all its receivers may take in a time, e.g. 100/s."""
    concurrency: int | None = None
    """Most deliveries of all its receivers at a time."""
    fair_by: str | None = None
    priority_by: Column | None = None
    priority: dict[str, float] | None = None

    @property
    def limits(self) -> str:
        """Its limits in words; empty without limits."""
        parts = [self.rate] if self.rate is not None else []
        if self.concurrency is not None:
            parts.append(f"{self.concurrency} at a time")
        return ", ".join(parts)

    @property
    def fairness(self) -> Fairness:
        """How its messages are shared out among groups and classes; false if it is not fair."""
        return Fairness(
            fair_by=self.fair_by, priority_by=self.priority_by, priority=self.priority or {}
        )


@dataclass(frozen=True, kw_only=True)
class Service(Decided):
    """A service that lives at a broker, with what was decided about its own subscription."""

    name: str
    created_at: datetime
    subscriptions: list[str]


@dataclass(frozen=True, kw_only=True)
class Subscription(Decided):
    """A named reader of the inbox."""

    subscription_id: int
    name: str
    service: str | None
    """The service whose messages it reads; None: all messages."""
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class LeftOver:
    """The messages that subscriptions have not handled.

    >>> print(LeftOver(unread=1, dead=2) + LeftOver(parked=1200))
    1,203 messages (1 unread, 1,200 parked, 2 dead)
    >>> print(LeftOver(incomplete=1))
    1 message (0 unread, 0 parked, 1 incomplete)
    """

    unread: int = 0
    parked: int = 0
    dead: int = 0
    incomplete: int = 0
    """Large bodies of which only a part has arrived."""
    keys: tuple[str, ...] = ()
    """The keys of the first messages, or their ids."""

    def __add__(self, other: LeftOver) -> LeftOver:
        return LeftOver(
            unread=self.unread + other.unread,
            parked=self.parked + other.parked,
            dead=self.dead + other.dead,
            incomplete=self.incomplete + other.incomplete,
            keys=(*self.keys, *other.keys),
        )

    def __bool__(self) -> bool:
        return self.messages > 0

    @property
    def messages(self) -> int:
        """Number of all of them."""
        return self.unread + self.parked + self.dead + self.incomplete

    @property
    def kinds(self) -> str:
        """Their numbers, in words."""
        kinds = [f"{self.unread:,} unread", f"{self.parked:,} parked"]
        kinds += [f"{self.dead:,} dead"] * bool(self.dead)
        kinds += [f"{self.incomplete:,} incomplete"] * bool(self.incomplete)
        return ", ".join(kinds)

    def __str__(self) -> str:
        plural = "" if self.messages == 1 else "s"
        return f"{self.messages:,} message{plural} ({self.kinds})"


def service_names(connection: psycopg.Connection[Any]) -> list[str]:
    """Return the names of a broker's services. If it has none, it takes messages for any."""
    return [name for (name,) in fetch(connection, "SELECT name FROM saf.service ORDER BY name")]


def services(connection: psycopg.Connection[Any]) -> list[Service]:
    """Return the services of a broker, by name."""
    with psycopg.Cursor(connection, row_factory=class_row(Service)) as cursor:
        return cursor.execute(SERVICES).fetchall()


def lives_here(connection: psycopg.Connection[Any], name: str) -> bool:
    """Whether this broker has a service of that name."""
    return bool(fetch(connection, KNOWS_SERVICE, {"name": name}))


def refused(connection: psycopg.Connection[Any], names: Iterable[str]) -> dict[str, int]:
    """Return services that a broker with only these would refuse, with their stored messages.

    Empty if the broker already has services, because it already refuses all others.
    """
    wanted = list(names)
    if not wanted or services(connection):
        return {}
    return dict(fetch(connection, ADDRESSED, {"names": wanted, "own": OWN}))


def stored(connection: psycopg.Connection[Any], names: Iterable[str]) -> dict[str, int]:
    """Return services that do not exist here, with the number of messages stored for them."""
    return dict(fetch(connection, STORED, {"names": list(names)}))


def in_words(counts: Mapping[str, int]) -> str:
    """Return services and numbers of messages in words.

    >>> in_words({"billing": 1, "orders": 2000})
    "'billing' (1), 'orders' (2,000)"
    """
    counted = [f"{name!r} ({count:,})" for name, count in counts.items()]
    return ", ".join(counted[: errors.NAMED]) + (", …" if len(counted) > errors.NAMED else "")


def create_services(
    connection: psycopg.Connection[Any],
    names: Sequence[str],
    *,
    refuse_others: bool = False,
    start: Start | None = None,
) -> list[str]:
    """Create services at this broker, each with its own subscription; return the new ones.

    Args:
        connection: a connection to the broker.
        names: the services.
        refuse_others: create a broker's first services even if its inbox has messages for others.
        start: the first message that the new subscriptions read. It must be given if the inbox has
            messages for the new services: a removed service of this name may have handled them.

    Raises:
        UsageError: a name that no message could have; or they would be the first, the inbox has
            messages for others, and ``refuse_others`` is false; or the inbox has messages for them,
            and ``start`` is not given.
    """
    for name in names:
        _check("service", name)
    with connection.transaction():
        if not refuse_others and (others := refused(connection, names)):
            raise UsageError(_first(names, others))
        if start is None and (older := stored(connection, names)):
            raise UsageError(_handed_out_again(older))
        created = [name for name in names if fetch(connection, CREATE_SERVICE, {"name": name})]
        for name in created:
            create_subscription(connection, name, service=name, start=start or "beginning")
        return created


def create_service(
    connection: psycopg.Connection[Any],
    name: str,
    *,
    refuse_others: bool = False,
    start: Start | None = None,
) -> bool:
    """Create one service at this broker; False if it exists. See `create_services`."""
    return bool(create_services(connection, [name], refuse_others=refuse_others, start=start))


def remove_service(
    connection: psycopg.Connection[Any], name: str, *, discard: bool = False
) -> LeftOver:
    """Remove a service and its subscriptions; this broker stores no messages for it any more.

    Return the discarded messages, as `remove_subscription` does.

    Raises:
        ConfigurationError: the service does not exist.
        UsageError: it has a local route, by which senders store messages for it here; or one of its
            subscriptions has messages left, and ``discard`` is false.
    """
    discarded = LeftOver()
    with connection.transaction():
        refuse_local(connection, name, "removed")
        for item in subscriptions(connection):
            if item.service == name:
                discarded += remove_subscription(connection, item.name, discard=discard)
        if not fetch(connection, REMOVE_SERVICE, {"name": name}):
            known = [service.name for service in services(connection)]
            raise ConfigurationError(_unknown(connection, "service", name, known))
    return discarded


def subscriptions(connection: psycopg.Connection[Any]) -> list[Subscription]:
    """Return the subscriptions of a broker's inbox, by name."""
    with psycopg.Cursor(connection, row_factory=class_row(Subscription)) as cursor:
        return cursor.execute(LIST).fetchall()


def subscription(connection: psycopg.Connection[Any], name: str) -> Subscription:
    """Return the subscription of that name.

    Raises:
        ConfigurationError: it does not exist; the error names the existing ones.
    """
    with psycopg.Cursor(connection, row_factory=class_row(Subscription)) as cursor:
        found = cursor.execute(NAMED, {"name": name}).fetchone()
    if found is None:
        if fetch(connection, IS_STREAM, {"name": name}):
            raise ConfigurationError(
                f"subscription {name!r} belongs to a stream, so no receiver may read it: "
                "`saf subscription drop` forgets a stream"
            )
        known = [item.name for item in subscriptions(connection)]
        raise ConfigurationError(_unknown(connection, "subscription", name, known))
    return found


def create_subscription(
    connection: psycopg.Connection[Any],
    name: str,
    *,
    service: str | None,
    start: Start = "beginning",
) -> bool:
    """Add a reader of a service's messages, or of all messages; return False if it exists.

    Raises:
        ConfigurationError: the service does not live here, or another subscription has the name.
    """
    _check("subscription", name)
    with connection.transaction():
        if service is not None and not lives_here(connection, service):
            known = [item.name for item in services(connection)]
            raise ConfigurationError(_unknown(connection, "service", service, known))
        created = fetch(connection, CREATE_SUBSCRIPTION, {"name": name, "service": service})
        if not created:
            existing = subscription(connection, name)
            if existing.service != service:
                raise ConfigurationError(
                    f"subscription {name!r} already exists, and reads "
                    + (f"service {existing.service!r}" if existing.service else "all services")
                )
            return False
        connection.execute(CREATE_CURSORS, {"subscription_id": created[0][0], "start": start})
        return True


def own_subscription(connection: psycopg.Connection[Any], service: str) -> Subscription:
    """Return a service's own subscription, which has its name.

    Raises:
        ConfigurationError: the service does not exist, or its own subscription was removed.
    """
    if not lives_here(connection, service):
        known = [item.name for item in services(connection)]
        raise ConfigurationError(_unknown(connection, "service", service, known))
    found = subscription(connection, service)
    if found.service != service:
        raise ConfigurationError(
            f"subscription {service!r} does not read service {service!r}: `saf subscription` "
            "pauses and resumes the service's other subscriptions"
        )
    return found


def pause(connection: psycopg.Connection[Any], name: str, why: str = "") -> bool:
    """Pause a subscription: its receivers hand out no messages until it is resumed.

    Return False if it is paused already. The audit records it.

    Raises:
        ConfigurationError: the subscription does not exist, or belongs to a stream.
    """
    return _decide(connection, name, "pause", PAUSE, why)


def resume(connection: psycopg.Connection[Any], name: str, why: str = "") -> bool:
    """Resume a paused subscription; return False if it is not paused. The audit records it.

    Raises:
        ConfigurationError: the subscription does not exist, or belongs to a stream.
    """
    return _decide(connection, name, "resume", RESUME, why)


MOST_DELIVERIES = 1000
"""The largest concurrency of a subscription."""

Unchanged = Literal["unchanged"]


def limit(
    connection: psycopg.Connection[Any],
    name: str,
    *,
    rate: str | Unchanged | None = "unchanged",
    concurrency: int | Unchanged | None = "unchanged",
    why: str = "",
) -> Subscription:
    """Set the limits of a subscription, for all its receivers together; return it.

    Dispatchers do not obey them: endpoints have limits of their own. The audit records a change.

    Args:
        connection: a connection to the broker.
        name: the subscription; each service has one of its own name.
        rate: most messages in a time, e.g. 100/s, 30/min or 500/h; None: unlimited.
        concurrency: most deliveries at a time, at most `MOST_DELIVERIES`; None: unlimited.
        why: the reason, for the audit.

    Raises:
        ConfigurationError: the subscription does not exist, or belongs to a stream.
        UsageError: a limit is not of this form.
    """
    with connection.transaction():
        before = subscription(connection, name)
        after = replace(
            before,
            rate=before.rate if rate == "unchanged" else rate,
            concurrency=before.concurrency if concurrency == "unchanged" else concurrency,
        )
        _check_limits(after)
        if after != before:
            params = {
                "subscription_id": after.subscription_id,
                "rate": after.rate,
                "concurrency": after.concurrency,
            }
            connection.execute(LIMIT, params)
            if after.concurrency is not None:
                connection.execute(SEATS, params)
            if after.rate != before.rate:
                connection.execute(ANEW, params)
            audit(connection, f"limit subscription {name} to {after.limits or 'none'}", [], why)
    return after


def _check_limits(wanted: Subscription) -> None:
    if wanted.rate is not None:
        try:
            per_second(wanted.rate)
        except ValueError as error:
            raise UsageError(f"rate: {error}") from None
    if wanted.concurrency is not None and not 1 <= wanted.concurrency <= MOST_DELIVERIES:
        raise UsageError(
            f"concurrency: {wanted.concurrency} is not between 1 and {MOST_DELIVERIES}"
        )


def _decide(
    connection: psycopg.Connection[Any], name: str, verb: str, statement: str, why: str
) -> bool:
    with connection.transaction():
        found = subscription(connection, name)
        params = {"subscription_id": found.subscription_id, "why": why}
        changed = connection.execute(statement, params).rowcount == 1
        if changed:
            audit(connection, f"{verb} subscription {name}", [], why)
    return changed


def set_fairness(
    connection: psycopg.Connection[Any],
    name: str,
    *,
    fair_by: str | None = None,
    priority: Mapping[str, float] | None = None,
    priority_by: Column = "message_type",
) -> Fairness:
    """Share out a subscription's messages among groups; without values, not any longer.

    Receivers follow it from their next connection on: restart running workers.

    Args:
        connection: a connection to the broker.
        name: the subscription; a service has one of its own name.
        fair_by: what makes a message's group; each group gets its share of a delivery: ``key``;
            ``key:/``, the key up to its first ``/``; ``header:tenant``, a header; ``message_type``;
            or ``from_service``. None: all messages are one group.
        priority: weight of each class, such as ``{"Alarm": 10}``; others have weight 1.
        priority_by: the column of the classes, ``message_type`` or ``from_service``.

    Raises:
        ConfigurationError: the subscription does not exist.
        UsageError: a value is out of range, or processors or dispatchers read the subscription.
    """
    wanted = Fairness(
        fair_by=fair_by,
        priority_by=priority_by if priority else None,
        priority=priority or {},
    )
    with connection.transaction():
        found = subscription(connection, name)
        params: dict[str, Any] = {"subscription_id": found.subscription_id}
        if wanted and (members := living(connection, found.subscription_id)):
            raise UsageError(
                f"processors or dispatchers own the shards of subscription {name!r}: "
                f"{', '.join(members)}. They receive in no fair order: stop them first, or create "
                f"a subscription of its own"
            )
        params |= {
            "fair_by": wanted.fair_by,
            "priority_by": wanted.priority_by,
            "priority": json.dumps(dict(wanted.priority)) if wanted.priority else None,
        }
        connection.execute(SET_FAIRNESS, params)
    return wanted


def refuse_fair(found: Subscription, readers: str) -> None:
    """Refuse a subscription to readers that own shards, if it is fair.

    Raises:
        UsageError: it is fair.
    """
    if found.fairness:
        raise UsageError(
            f"subscription {found.name!r} is fair ({found.fairness}), and {readers} receive in no "
            f"fair order: read another subscription, or make it unfair: `saf subscription set "
            f"{shlex.quote(found.name)} --unfair`"
        )


def left_over(connection: psycopg.Connection[Any], names: Iterable[str]) -> LeftOver:
    """Count the messages that some subscriptions have not handled. Only reads.

    Raises:
        ConfigurationError: a subscription does not exist.
    """
    found = [_left_over(connection, subscription(connection, name), SAMPLE) for name in names]
    return sum((left for left, _ in found), LeftOver())


def _left_over(
    connection: psycopg.Connection[Any], reader: Subscription, most_aside: int | None
) -> tuple[LeftOver, list[UUID]]:
    """Count a subscription's messages; return also the first ids, of each kind at most some."""
    params = {
        "subscription_id": reader.subscription_id,
        "most": MOST_UNREAD if most_aside is None else most_aside,
        "most_aside": most_aside,
    }
    ((unread, parked, dead, incomplete),) = fetch(connection, COUNTED, params)
    rows = fetch(connection, NAMED_MESSAGES, params)
    keys = tuple(key for _, key in rows[:SAMPLE])
    left = LeftOver(unread=unread, parked=parked, dead=dead, incomplete=incomplete, keys=keys)
    return left, [message_id for message_id, _ in rows]


def remove_subscription(
    connection: psycopg.Connection[Any], name: str, *, discard: bool = False
) -> LeftOver:
    """Remove a reader, with its parked messages and dead letters. Stop its receivers first.

    Return the messages that are discarded by this, and record them in the audit: their numbers, the
    ids of those that were set aside, and the ids of the first `MOST_UNREAD` others. The dialog's id
    stands for a large body of which only a part has arrived.

    Raises:
        ConfigurationError: the subscription does not exist.
        UsageError: it has messages left, and ``discard`` is false.
    """
    with connection.transaction():
        found = subscription(connection, name)
        params = {"subscription_id": found.subscription_id, "service": found.service}
        ((unread, parked, dead, incomplete),) = fetch(connection, LEFT_OVER, params)
        kinds = {
            "messages to be read": unread,
            "parked messages": parked,
            "dead letters": dead,
            "large bodies received in part": incomplete,
        }
        left = [kind for kind, exists in kinds.items() if exists]
        discarded = LeftOver()
        if left and not discard:
            raise UsageError(
                f"subscription {name!r} has {' and '.join(left)}: handle them first, or "
                "discard them with --discard"
            )
        if left:
            discarded, message_ids = _left_over(connection, found, None)
            why = f"subscription {name!r} is removed, and has {discarded}"
            audit(connection, f"discard with subscription {name}", message_ids, why)
        connection.execute(REMOVE_SUBSCRIPTION, params)
    return discarded


def _check(what: str, name: str) -> None:
    if not isinstance(name, str) or not name or not fits(name, MAX_NAME) or not name.isprintable():
        raise UsageError(
            f"{what} {name!r}: a name has 1 to {MAX_NAME} bytes of printable characters"
        )


def _handed_out_again(older: Mapping[str, int]) -> str:
    return (
        f"the inbox already has messages for {in_words(older)}, which a removed service of this "
        f'name may have handled. `saf service create {shlex.join(older)} --from-now` (start="now") '
        'reads only new ones; --from-start (start="beginning") hands out all of them'
    )


def _first(names: Sequence[str], others: Mapping[str, int]) -> str:
    new = ", ".join(map(repr, names))
    return (
        f"{new} would be the first here, and messages for others would wait at their sources from "
        f"then on; the inbox has messages for {in_words(others)}. Create those in the same command "
        "(`saf service create` takes several), or add --refuse-others (refuse_others=True)"
    )


def _unknown(
    connection: psycopg.Connection[Any], what: str, name: str, known: Sequence[str]
) -> str:
    """Return the error for a service or a subscription that a broker lacks."""
    hint = ""
    if near := difflib.get_close_matches(name, known, n=1):
        hint = f" Did you mean {near[0]!r}?"
    elif known:
        more = ", …" if len(known) > errors.NAMED else ""
        hint = f" It has {', '.join(map(repr, known[: errors.NAMED]))}{more}."
    return (
        f"database {connection.info.dbname!r} has no {what} {name!r}.{hint} "
        f"Create it: `{shlex.join(('saf', 'service', 'create', name))}`"
    )
