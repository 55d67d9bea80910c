"""Senders: which roles may send as which service, and to which services.

A writer may send as anybody, until a broker has its first rule. From then on, the server refuses
each message for whose sender and receiver the role has no rule, by row-level security of
saf.outbox. Members of a role have the role's rules. The owner of the schema, superusers and roles
with BYPASSRLS are not restricted. When its last rule is removed, a broker lets any writer send as
anybody again.

So the first rule changes what all others may do, and so does removing the last one. Neither can
happen by accident: while other roles may write and have no rule, the first rule needs
``refuse_others``; removing the last rule needs ``allow_others``.

Row-level security is enabled only while there are rules, so a broker without rules has no cost.
Enabling it waits a short time for the transactions that write to the outbox, and then gives up.
`vouched_since` returns the message id after which ``from_service`` was checked.

Rules hold for held messages too: when they are held, cancelled or rescheduled, and again when they
are due. A message that no rule allows any more stays held, and is tried again when rules change.

PostgreSQL takes no COPY from a role that is restricted by row: such a role sends by INSERT.

Functions take a psycopg connection of the schema's owner, and write in their own transaction, or in
the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

from saf.broker import grants, whole
from saf.database import fetch, of_broker
from saf.errors import ConfigurationError, UsageError
from saf.message import MAX_NAME, fits

LOCK_TIMEOUT = "SELECT set_config('lock_timeout', '3s', true)"

SENDERS = """
SELECT role, from_service, to_service, created_at,
       to_regrole(quote_ident(role)) IS NOT NULL AS known
FROM saf.sender ORDER BY role, from_service, to_service NULLS FIRST
"""
ANY = "SELECT EXISTS (SELECT FROM saf.sender)"
ADD = """
INSERT INTO saf.sender (role, from_service, to_service)
SELECT %(role)s, %(from_service)s, unnest(%(to_services)s::text[])
ON CONFLICT DO NOTHING RETURNING to_service
"""
REMOVE = """
DELETE FROM saf.sender
WHERE role = %(role)s AND (%(from_service)s::text IS NULL OR from_service = %(from_service)s)
  AND (%(to_services)s::text[] IS NULL
       OR EXISTS (SELECT FROM unnest(%(to_services)s::text[]) AS t (name)
                  WHERE t.name IS NOT DISTINCT FROM to_service))
RETURNING from_service
"""

# Roles that may write to the outbox, are restricted by row, and neither have a rule nor are members
# of a role that has one
OTHERS = """
SELECT r.rolname FROM pg_roles r, pg_class c
WHERE c.oid = 'saf.outbox'::regclass AND r.rolname !~ '^pg_' AND NOT r.rolbypassrls
  AND NOT pg_has_role(r.oid, c.relowner, 'USAGE')
  AND has_column_privilege(r.oid, c.oid, 'body', 'INSERT')
  AND NOT EXISTS (SELECT FROM saf.sender s
                  WHERE pg_has_role(r.oid, to_regrole(quote_ident(s.role)), 'USAGE'))
ORDER BY 1
"""

# The lock is held to the end of the transaction: every sender that has drawn an id so far has
# committed, unchecked; later senders are checked.
ENABLE = "ALTER TABLE saf.outbox ENABLE ROW LEVEL SECURITY"
# last_value of an unused sequence is the next number.
SINCE_NOW = """
UPDATE saf.broker SET senders_since = (
    SELECT last_value - CASE WHEN is_called THEN 0 ELSE 1 END FROM saf.outbox_id_seq)
"""
DISABLE = "ALTER TABLE saf.outbox DISABLE ROW LEVEL SECURITY"
NO_LONGER = "UPDATE saf.broker SET senders_since = NULL"
# Changed rules may allow messages that they refused before
TRY_HELD = "UPDATE saf.held SET refused = NULL WHERE refused IS NOT NULL"

# As saf.vouch decides about each
FORBIDDEN = """
WITH waiting AS (
    SELECT 'message' AS what, sender, from_service, to_service, count(*) AS number
    FROM saf.held WHERE due IS NOT NULL GROUP BY 1, 2, 3, 4
    UNION ALL
    SELECT 'schedule', sender, from_service, to_service, count(*)
    FROM saf.schedule WHERE NOT paused GROUP BY 1, 2, 3, 4)
SELECT coalesce(sum(number) FILTER (WHERE what = 'message'), 0),
       coalesce(sum(number) FILTER (WHERE what = 'schedule'), 0)
FROM waiting w
WHERE (SELECT senders_since FROM saf.broker) IS NOT NULL
  AND NOT EXISTS (
    SELECT FROM pg_roles r, pg_class c
    WHERE r.rolname = w.sender AND c.oid = 'saf.outbox'::regclass
      AND (r.rolsuper OR r.rolbypassrls OR pg_has_role(r.oid, c.relowner, 'USAGE')))
  AND NOT EXISTS (
    SELECT FROM saf.sender s
    WHERE s.from_service = w.from_service
      AND (s.to_service = w.to_service OR s.to_service IS NULL)
      AND pg_has_role(to_regrole(quote_ident(w.sender)), to_regrole(quote_ident(s.role)), 'USAGE'))
"""

# While there are rules, sessions have row_security on (`saf.database.bounds`). So a policy that is
# added beside the rules would hide rows from existing sessions
SINCE = f"""
SELECT senders_since, CASE WHEN senders_since IS NOT NULL THEN (
    SELECT jsonb_agg(jsonb_build_array(policed, names, login))
    FROM ({whole.POLICIES}) AS p (policed, names, login)) END
FROM saf.broker
"""


@dataclass(frozen=True, kw_only=True)
class Sender:
    """One rule: a role may send as a service, to a service."""

    role: str
    from_service: str
    to_service: str | None
    """The service; None: any."""
    created_at: datetime
    known: bool
    """Whether the server has such a role."""


def senders(connection: psycopg.Connection[Any]) -> list[Sender]:
    """Return the rules of a broker; without rules, any writer may send as anybody."""
    with psycopg.Cursor(connection, row_factory=class_row(Sender)) as cursor:
        return cursor.execute(SENDERS).fetchall()


def forbidden(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    """Return how many held messages and schedules no rule allows, so that they will be refused.

    Paused schedules are not counted.
    """
    ((messages, schedules),) = fetch(connection, FORBIDDEN)
    return int(messages), int(schedules)


def vouched_since(connection: psycopg.Connection[Any]) -> int | None:
    """Return the id after which the senders of all messages were checked; None if none were.

    Raises:
        ConfigurationError: there are rules, and beside them a policy that may hide rows.
    """
    since, policies = of_broker(connection, SINCE)
    whole.refuse(policies or (), connection.info.dbname)
    return None if since is None else int(since)


def add_senders(
    connection: psycopg.Connection[Any],
    role: str,
    from_service: str,
    to_services: Sequence[str | None] = (None,),
    *,
    refuse_others: bool = False,
) -> int:
    """Let a role send as a service to these services, None being any; return how many are new.

    Raises:
        ConfigurationError: the role does not exist or is not restricted by rules, or the
            connection's user does not own the schema.
        UsageError: a name that no message could have; or it is the broker's first rule, other roles
            may write, and ``refuse_others`` is false.
        psycopg.errors.LockNotAvailable: transactions that use the outbox do not end.
    """
    for name in (from_service, *to_services):
        if name is not None and not (name and name.isprintable() and fits(name, MAX_NAME)):
            raise UsageError(
                f"{name!r} is not a service name: 1 to {MAX_NAME} bytes of printable characters"
            )
    params = {"role": role, "from_service": from_service, "to_services": [*to_services]}
    with connection.transaction():
        connection.execute(grants.TAKE_TURN)
        grants.check(connection, role)
        first = not _any(connection)
        new = len(fetch(connection, ADD, params))
        if first:
            others = [name for (name,) in fetch(connection, OTHERS)]
            if others and not refuse_others:
                raise UsageError(
                    f"this is the first rule of database {connection.info.dbname!r}: from then on, "
                    f"nobody sends without one, and {', '.join(map(repr, others))} would have "
                    "none. Use --refuse-others, and then `saf sender add` for each that may send"
                )
            connection.execute(LOCK_TIMEOUT)
            connection.execute(ENABLE)
            connection.execute(SINCE_NOW)
        connection.execute(TRY_HELD)
        return new


def remove_senders(
    connection: psycopg.Connection[Any],
    role: str,
    from_service: str | None = None,
    to_services: Sequence[str | None] | None = None,
    *,
    allow_others: bool = False,
) -> int:
    """Remove a role's rules: all, those for one sender, or some of these; return how many.

    None among ``to_services`` is the rule for any service; ``to_services=None`` is all rules.

    Raises:
        ConfigurationError: the rule does not exist.
        UsageError: no rule would be left, and ``allow_others`` is false.
        psycopg.errors.LockNotAvailable: transactions that use the outbox do not end.
    """
    params = {
        "role": role,
        "from_service": from_service,
        "to_services": to_services and [*to_services],
    }
    with connection.transaction():
        connection.execute(grants.TAKE_TURN)
        removed = len(fetch(connection, REMOVE, params))
        if not removed:
            raise ConfigurationError(
                f"database {connection.info.dbname!r} has no such rule for role {role!r}: "
                "`saf sender list` shows the rules"
            )
        if not _any(connection):
            if not allow_others:
                raise UsageError(
                    f"this is the last rule of database {connection.info.dbname!r}: without it, "
                    "any writer may send as any service. Use --allow-others"
                )
            connection.execute(LOCK_TIMEOUT)
            connection.execute(DISABLE)
            connection.execute(NO_LONGER)
        connection.execute(TRY_HELD)
        return removed


def _any(connection: psycopg.Connection[Any]) -> bool:
    ((exists,),) = fetch(connection, ANY)
    return bool(exists)
