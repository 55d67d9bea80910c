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

Functions take a psycopg connection and write in their own transaction, or in the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf import errors
from saf.database import fetch
from saf.errors import ConfigurationError, UsageError
from saf.log.read import left
from saf.message import MAX_NAME, fits
from saf.routing.local import refuse_local
from saf.setaside.audit import audit

Start = Literal["beginning", "now"]
"""The first message that a new subscription reads: the oldest still stored, or the next."""

OWN = "saf/"
"""Prefix of the services that saf itself sends to, which nobody misses."""

SERVICES = """
SELECT v.name, v.created_at,
       ARRAY(SELECT s.name FROM saf.subscription s WHERE s.service = v.name ORDER BY s.name)
           AS subscriptions
FROM saf.service v ORDER BY v.name
"""
CREATE_SERVICE = """
INSERT INTO saf.service (name) VALUES (%(name)s) ON CONFLICT DO NOTHING RETURNING name
"""
ADDRESSED = """
SELECT to_service, count(*) FROM saf.inbox
WHERE to_service <> ALL (%(names)s) AND NOT starts_with(to_service, %(own)s)
GROUP BY to_service ORDER BY count(*) DESC, to_service
"""
REMOVE_SERVICE = "DELETE FROM saf.service WHERE name = %(name)s RETURNING name"

SUBSCRIPTIONS = """
SELECT subscription_id, name, service, created_at FROM saf.subscription
WHERE log = 'inbox' AND NOT stream
"""
IS_STREAM = "SELECT FROM saf.subscription WHERE (log, name) = ('inbox', %(name)s) AND stream"
NAMED = f"{SUBSCRIPTIONS} AND name = %(name)s"
LIST = f"{SUBSCRIPTIONS} ORDER BY name"
KNOWS_SERVICE = "SELECT FROM saf.service WHERE name = %(name)s"
CREATE_SUBSCRIPTION = """
INSERT INTO saf.subscription (name, log, service) VALUES (%(name)s, 'inbox', %(service)s)
ON CONFLICT DO NOTHING RETURNING subscription_id
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
# Fragments have no ids, so the dialog's id is named
GIVEN_UP = f"""
{INCOMPLETE}
SELECT message_id FROM saf.parked WHERE subscription_id = %(subscription_id)s
UNION SELECT message_id FROM saf.dead_letter WHERE subscription_id = %(subscription_id)s
UNION SELECT conversation_id FROM incomplete
"""
REMOVE_SUBSCRIPTION = "DELETE FROM saf.subscription WHERE subscription_id = %(subscription_id)s"


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service that lives at a broker."""

    name: str
    created_at: datetime
    subscriptions: list[str]


@dataclass(frozen=True, kw_only=True)
class Subscription:
    """A named reader of the inbox."""

    subscription_id: int
    name: str
    service: str | None
    """The service whose messages it reads; None: all messages."""
    created_at: datetime


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


def create_services(
    connection: psycopg.Connection[Any], names: Sequence[str], *, refuse_others: bool = False
) -> list[str]:
    """Create services at this broker, each with its own subscription; return the new ones.

    Their subscriptions also read messages that were stored for them before.

    Raises:
        UsageError: a name that no message could have; or they would be the first, the inbox has
            messages for others, and ``refuse_others`` is false.
    """
    for name in names:
        _check("service", name)
    with connection.transaction():
        if not refuse_others and (others := refused(connection, names)):
            raise UsageError(_first(names, others))
        created = [name for name in names if fetch(connection, CREATE_SERVICE, {"name": name})]
        for name in created:
            create_subscription(connection, name, service=name)
        return created


def create_service(
    connection: psycopg.Connection[Any], name: str, *, refuse_others: bool = False
) -> bool:
    """Create one service at this broker; False if it exists. See `create_services`."""
    return bool(create_services(connection, [name], refuse_others=refuse_others))


def remove_service(
    connection: psycopg.Connection[Any], name: str, *, discard: bool = False
) -> list[UUID]:
    """Remove a service and its subscriptions; this broker stores no messages for it any more.

    Return the ids of messages that are given up, as `remove_subscription` does.

    Raises:
        ConfigurationError: the service does not exist.
        UsageError: it has a local route, by which senders store messages for it here; or one of its
            subscriptions has messages left, and ``discard`` is false.
    """
    given_up: list[UUID] = []
    with connection.transaction():
        refuse_local(connection, name, "removed")
        for item in subscriptions(connection):
            if item.service == name:
                given_up += remove_subscription(connection, item.name, discard=discard)
        if not fetch(connection, REMOVE_SERVICE, {"name": name}):
            known = [service.name for service in services(connection)]
            raise ConfigurationError(_unknown("service", name, known))
    return given_up


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
        raise ConfigurationError(_unknown("subscription", name, known))
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
            raise ConfigurationError(_unknown("service", service, known))
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


def remove_subscription(
    connection: psycopg.Connection[Any], name: str, *, discard: bool = False
) -> list[UUID]:
    """Remove a reader, with its parked messages and dead letters. Stop its receivers first.

    Return the ids of messages that are given up by this, and record them in the audit. The dialog's
    id stands for a large body of which only a part has arrived.

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
        given_up: list[UUID] = []
        if left and not discard:
            raise UsageError(
                f"subscription {name!r} has {' and '.join(left)}: handle them first, or "
                "discard them with --discard"
            )
        if left:
            given_up = [message_id for (message_id,) in fetch(connection, GIVEN_UP, params)]
            why = f"subscription {name!r} is removed, and has {' and '.join(left)}"
            audit(connection, "discard", given_up, why)
        connection.execute(REMOVE_SUBSCRIPTION, params)
    return given_up


def _check(what: str, name: str) -> None:
    if not isinstance(name, str) or not name or not fits(name, MAX_NAME) or not name.isprintable():
        raise UsageError(
            f"{what} {name!r}: a name has 1 to {MAX_NAME} bytes of printable characters"
        )


def _first(names: Sequence[str], others: Mapping[str, int]) -> str:
    counted = [f"{name!r} ({count:,})" for name, count in others.items()]
    counts = ", ".join(counted[: errors.NAMED]) + (", …" if len(counted) > errors.NAMED else "")
    new = ", ".join(map(repr, names))
    return (
        f"{new} would be the first here, and messages for others would wait at their sources from "
        f"then on; the inbox has messages for {counts}. Create those in the same command (`saf "
        "service create` takes several), or add --refuse-others (refuse_others=True)"
    )


def _unknown(what: str, name: str, known: list[str]) -> str:
    others = f", only {', '.join(map(repr, known))}" if known else ""
    return f"no {what} {name!r} here{others}: create it with `saf {what} create`"
