"""Senders: which roles may send as which service, and to which services.

A writer may send as anybody, until a broker has its first rule. From then on, the server refuses
each message for whose sender and receiver the role has no rule, by row-level security of
saf.outbox. Members of a role may do what it may. The owner of the schema, superusers and roles with
BYPASSRLS are not restricted. With its last rule a broker lets any writer send as anybody again.

So the first rule changes what all others may, and so does the last one. Nobody does that unawares:
while other roles may write and have no rule, ``refuse_others`` has to be said; and at the last
rule, ``allow_others``.

Row-level security is enabled only while there are rules, so a broker without any pays nothing.
Enabling it waits for the transactions that write to the outbox, for a short time, and then gives
up. `vouched_since` says from which message on ``from_service`` is more than the sender's own word.

PostgreSQL takes no COPY from a role that is restricted by row: such a role sends by INSERT.

Functions take a psycopg connection of the schema's owner, and write in a transaction of their own,
or in the caller's.
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

# Who may write to the outbox, is restricted by row, and neither has a rule nor is a member of a
# role that has one
OTHERS = """
SELECT r.rolname FROM pg_roles r, pg_class c
WHERE c.oid = 'saf.outbox'::regclass AND r.rolname !~ '^pg_' AND NOT r.rolbypassrls
  AND NOT pg_has_role(r.oid, c.relowner, 'USAGE')
  AND has_column_privilege(r.oid, c.oid, 'body', 'INSERT')
  AND NOT EXISTS (SELECT FROM saf.sender s
                  WHERE pg_has_role(r.oid, to_regrole(quote_ident(s.role)), 'USAGE'))
ORDER BY 1
"""

# The lock lasts to the end of the transaction: whoever has drawn an id so far has committed, and
# was not checked; whoever draws one later is.
ENABLE = "ALTER TABLE saf.outbox ENABLE ROW LEVEL SECURITY"
# A sequence that has given no number yet says the one that comes next.
SINCE_NOW = """
UPDATE saf.broker SET senders_since = (
    SELECT last_value - CASE WHEN is_called THEN 0 ELSE 1 END FROM saf.outbox_id_seq)
"""
DISABLE = "ALTER TABLE saf.outbox DISABLE ROW LEVEL SECURITY"
NO_LONGER = "UPDATE saf.broker SET senders_since = NULL"

# While there are rules, sessions have row_security on (`saf.database.bounds`). So a policy that
# somebody adds beside the rules would hide rows from sessions that are there already
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
    """None: any."""
    created_at: datetime
    known: bool
    """Whether the server has such a role."""


def senders(connection: psycopg.Connection[Any]) -> list[Sender]:
    """Return the rules of a broker; while there are none, any writer may send as anybody."""
    with psycopg.Cursor(connection, row_factory=class_row(Sender)) as cursor:
        return cursor.execute(SENDERS).fetchall()


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
        ConfigurationError: there is no such role, it is not restricted by rules, or the
            connection's user does not own the schema.
        UsageError: a name that no message could have; or it is the broker's first rule, other roles
            may write, and ``refuse_others`` does not say that those may not send any more.
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
                    "none. Say --refuse-others, and then `saf sender add` for each that shall send"
                )
            connection.execute(LOCK_TIMEOUT)
            connection.execute(ENABLE)
            connection.execute(SINCE_NOW)
        return new


def remove_senders(
    connection: psycopg.Connection[Any],
    role: str,
    from_service: str | None = None,
    to_services: Sequence[str | None] | None = None,
    *,
    allow_others: bool = False,
) -> int:
    """Take away a role's rules: all, those for one sender, or some of these; return how many.

    None among ``to_services`` is the rule for any service; instead of them, it is all rules.

    Raises:
        ConfigurationError: there is no such rule.
        UsageError: no rule would be left, and ``allow_others`` does not say that any writer may
            send as anybody again.
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
                "`saf sender list` shows those that there are"
            )
        if not _any(connection):
            if not allow_others:
                raise UsageError(
                    f"this is the last rule of database {connection.info.dbname!r}: without it, "
                    "any writer may send as anybody. Say --allow-others"
                )
            connection.execute(LOCK_TIMEOUT)
            connection.execute(DISABLE)
            connection.execute(NO_LONGER)
        return removed


def _any(connection: psycopg.Connection[Any]) -> bool:
    ((some,),) = fetch(connection, ANY)
    return bool(some)
