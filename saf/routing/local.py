"""Local routes: senders store a service's messages in the inbox of their own database.

A service may live in the database of its senders. Then its messages need not wait for a forwarder.
A *local* route has a trigger at the outbox, for its service alone: the trigger stores the message
in the inbox instead, in the sender's transaction, whatever program sends. So receivers see the
message as soon as that transaction has committed. Messages for a certain broker (``to_broker``) and
messages of conversations still go by the forwarder.

Order per key holds when a route becomes local, and when it stops being local. The trigger is
created while nobody else writes to the outbox, and only once the forwarder has nothing left for the
service. The trigger is removed while nobody writes either, so the messages that are in the inbox by
then come before those that the forwarder brings.

The trigger's condition depends only on the message and its sender: where rules restrict senders
(`saf.broker.senders`), it applies them. Its function runs with the owner's rights, because a sender
has no rights on the inbox, and only the owner may create triggers with it. It records the sender in
the same way as the forwarder (`saf.engine.storing`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from saf.database import fetch
from saf.errors import UsageError
from saf.log.cursor import COMPLETE

PATIENCE_SECONDS = 5.0
"""Longest time that senders are blocked while the forwarder finishes a service's messages."""
PAUSE_SECONDS = 0.05

TRIGGER = "outbox_local_"
"""Prefix of each trigger's name, before its route's route_id."""

CREATE = """
CREATE TRIGGER {trigger} BEFORE INSERT ON saf.outbox FOR EACH ROW WHEN (
    NEW.to_service = {service} AND NEW.to_broker IS NULL AND NEW.conversation_id IS NULL
    AND (NOT row_security_active('saf.outbox'::regclass)
         OR saf.check_sender(current_user, NEW.from_service, NEW.to_service)))
EXECUTE FUNCTION saf.store_locally()
"""
DROP = "DROP TRIGGER {trigger} ON saf.outbox"
EXISTS = """
SELECT FROM pg_trigger WHERE tgrelid = 'saf.outbox'::regclass AND tgname = %(trigger)s
"""

READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
ISOLATION = "SELECT current_setting('transaction_isolation')"

# Once this lock is granted, all transactions that have sent to the service have ended. In a READ
# COMMITTED transaction, later statements see their messages.
BE_ALONE = "LOCK TABLE saf.outbox IN SHARE ROW EXCLUSIVE MODE"
LOCK_TIMEOUT = "SELECT set_config('lock_timeout', %(milliseconds)s, true)"

STANDS_FOR_OTHERS = """
SELECT 'topic' FROM saf.topic WHERE name = %(service)s
UNION ALL SELECT 'router' FROM saf.router WHERE service = %(service)s
"""
LIVES_HERE = "SELECT FROM saf.service WHERE name = %(service)s"
LED_HERE = "SELECT destination FROM saf.route WHERE local AND service = %(service)s"

# Rows that the forwarder has not taken yet, and messages that wait on their way
LEFT = f"""
SELECT EXISTS (
    SELECT FROM saf.subscription s JOIN saf.cursor c USING (subscription_id)
    CROSS JOIN LATERAL (
        SELECT o.id, o.txid, o.to_service FROM saf.outbox o
        WHERE o.shard = c.shard AND o.txid >= pg_snapshot_xmax(c.done)
        UNION ALL
        SELECT o.id, o.txid, o.to_service FROM saf.outbox o
        WHERE o.shard = c.shard AND o.txid = ANY (ARRAY(SELECT pg_snapshot_xip(c.done)))
    ) AS after
    WHERE s.log = 'outbox' AND s.name = 'forwarder' AND after.to_service = %(service)s
      AND NOT {COMPLETE.format(row="after")}
) OR EXISTS (
    SELECT FROM saf.subscription s JOIN saf.parked p USING (subscription_id)
    WHERE s.log = 'outbox' AND p.to_service = %(service)s
)
"""


def refuse_local(connection: psycopg.Connection[Any], service: str, what: str) -> None:
    """Raise if a service has a local route, and so cannot be ``what``.

    Raises:
        UsageError: names the command that removes the route.
    """
    for (destination,) in fetch(connection, LED_HERE, {"service": service}):
        raise UsageError(
            f"service {service!r} has a local route, so it cannot be {what}: "
            f"`saf route remove {destination} --service {service}` comes first"
        )


@contextmanager
def transaction(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Run the block in the caller's transaction, or in one that can make a route local."""
    own = connection.info.transaction_status == TransactionStatus.IDLE
    with connection.transaction():
        if own:
            connection.execute(READ_COMMITTED)
        yield


def keep(
    connection: psycopg.Connection[Any], route_id: int, service: str | None, *, wanted: bool
) -> None:
    """Create or remove the trigger of a route, so that it exists if ``wanted``.

    Call it in the transaction that changes the route.

    Raises:
        UsageError: the service does not live here, stands for others, or has messages that a
            forwarder must take first; transactions that write to the outbox do not end; the
            caller's transaction is not READ COMMITTED; or the connection's user does not own the
            schema.
    """
    trigger = f"{TRIGGER}{route_id}"
    exists = bool(fetch(connection, EXISTS, {"trigger": trigger}))
    if exists == wanted:
        return
    names = {"trigger": sql.Identifier(trigger), "service": sql.Literal(service)}
    try:
        milliseconds = str(round(PATIENCE_SECONDS * 1000))
        connection.execute(LOCK_TIMEOUT, {"milliseconds": milliseconds})
        if wanted:
            assert service is not None  # noqa: S101 - a CHECK on local routes
            _may_be_local(connection, service)
            _sees_what_is_sent(connection)
            connection.execute(BE_ALONE)
            _overtake_nothing(connection, service)
            connection.execute(sql.SQL(CREATE).format(**names))
        else:
            connection.execute(sql.SQL(DROP).format(**names))
    except psycopg.errors.LockNotAvailable:
        raise UsageError(
            f"database {connection.info.dbname!r}: a transaction that writes to the outbox has not "
            f"ended in {PATIENCE_SECONDS:g} s, and a route becomes local between two of these: "
            "`saf doctor` names long ones"
        ) from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise UsageError(
            f"database {connection.info.dbname!r}: a local route has a trigger at the outbox, "
            f"which only the owner of schema saf makes and removes ({error.diag.message_primary})"
        ) from None


def _may_be_local(connection: psycopg.Connection[Any], service: str) -> None:
    params = {"service": service}
    for (what,) in fetch(connection, STANDS_FOR_OTHERS, params):
        raise UsageError(f"{service!r} is a {what}: a local route is for one service's messages")
    if not fetch(connection, LIVES_HERE, params):
        raise UsageError(
            f"service {service!r} does not live in database {connection.info.dbname!r}, and a "
            f"local route leads only to this database: `saf service create {service}` comes first"
        )


def _sees_what_is_sent(connection: psycopg.Connection[Any]) -> None:
    ((isolation,),) = fetch(connection, ISOLATION)
    if isolation != "read committed":
        raise UsageError(
            f"the transaction is one of {isolation.upper()}, which does not see what others send "
            "while it waits for them: a route becomes local in a READ COMMITTED transaction, or in "
            "one of its own"
        )


def _overtake_nothing(connection: psycopg.Connection[Any], service: str) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while fetch(connection, LEFT, {"service": service})[0][0]:
        if time.monotonic() > until:
            raise UsageError(
                f"messages for service {service!r} wait in the outbox of database "
                f"{connection.info.dbname!r}, and local ones would overtake them: let `saf "
                "forward` deliver them first (`saf status` and `saf parked` show them)"
            )
        time.sleep(PAUSE_SECONDS)
