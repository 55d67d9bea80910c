"""Local routes: senders store a service's messages in the inbox of their own database.

A service may live in the database of its senders. Then its messages need not wait for a forwarder.
A *local* route has a trigger at the outbox, for its service alone: the trigger stores the message
in the inbox instead, in the sender's transaction, whatever program sends. So receivers see the
message as soon as that transaction has committed. Messages for a certain broker (``to_broker``) and
messages of monologs still go by the forwarder.

*Dialogs.* If both services of a dialog have local routes, its messages need no forwarder in either
direction. A dialog's first message decides: if it is stored here, the initiator learns that its far
broker is its own, and addresses all later messages to it. The trigger's function stores these, and
leaves all others to the forwarder (migrations/baseline/local_dialogs.sql). Replies are addressed to
the initiator's broker in any case. The row in the inbox is the one that the forwarder would have
stored. When a route becomes local, the initiators of open dialogs learn in the same way where their
targets are (`KNOW_TARGETS`): a dialog stays with its target. While one of them cannot know, the
route does not become local.

Order per key holds when a route becomes local, and when it stops being local. The trigger is
created while nobody else writes to the outbox, and only once the forwarder has nothing left for the
service. The trigger is removed while nobody writes either, so the messages that are in the inbox by
then come before those that the forwarder brings. A dialog's message that is a dead letter on its
way is waited for: an end takes numbers in order, whichever way they come.

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
from saf.log.read import left

PATIENCE_SECONDS = 5.0
"""Longest time that senders are blocked while the forwarder finishes a service's messages."""
PAUSE_SECONDS = 0.05

TRIGGER = "outbox_local_"
"""Prefix of each trigger's name, before its route's route_id."""

CREATE = """
CREATE TRIGGER {trigger} BEFORE INSERT ON saf.outbox FOR EACH ROW WHEN (
    NEW.to_service = {service}
    AND (NEW.to_broker IS NULL AND NEW.conversation_id IS NULL
         OR NEW.conversation_id IS NOT NULL AND NEW.from_initiator IS NOT NULL)
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
    CROSS JOIN LATERAL ({left("saf.outbox", "id, txid, to_service")}) AS after
    WHERE s.log = 'outbox' AND s.name = 'forwarder' AND after.to_service = %(service)s
) OR EXISTS (
    SELECT FROM saf.subscription s JOIN saf.parked p USING (subscription_id)
    WHERE s.log = 'outbox' AND p.to_service = %(service)s
)
"""

# Initiators that have sent something, and do not know the broker of their target
UNKNOWING = """
i.is_initiator AND NOT i.monolog AND i.far_service = %(service)s AND i.far_broker IS NULL
AND i.send_sequence > 0 AND i.state <> 'closed'
"""
# The first message may not be received yet. Skips ends that a session has in hand, because that
# session may wait for the lock of saf.outbox.
KNOW_TARGETS = f"""
UPDATE saf.conversation c SET far_broker = coalesce(c.answered_by, b.broker_id)
FROM saf.broker b
WHERE c.handle IN (
    SELECT i.handle FROM saf.conversation i
    WHERE {UNKNOWING} AND (
        i.answered_by IS NOT NULL
        OR EXISTS (SELECT FROM saf.conversation t
                   WHERE t.conversation_id = i.conversation_id AND NOT t.is_initiator)
        OR i.conversation_id IN (SELECT m.conversation_id FROM saf.inbox m
                                 WHERE m.from_initiator AND m.sequence = 1))
    FOR NO KEY UPDATE SKIP LOCKED)
"""
UNKNOWN_TARGETS = f"SELECT count(*), min(i.handle::text) FROM saf.conversation i WHERE {UNKNOWING}"


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
        UsageError: the service does not live here, stands for others, has messages that a forwarder
            must take first, or has dialogs whose targets are not known yet; transactions that write
            to the outbox do not end; the caller's transaction is not READ COMMITTED; or the
            connection's user does not own the schema.
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
            _know_targets(connection, service)
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


def _know_targets(connection: psycopg.Connection[Any], service: str) -> None:
    """Let the initiators of open dialogs address the brokers of their targets."""
    params = {"service": service}
    if not fetch(connection, UNKNOWN_TARGETS, params)[0][0]:
        return
    connection.execute(KNOW_TARGETS, params)
    ((count, handle),) = fetch(connection, UNKNOWN_TARGETS, params)
    if count:
        raise UsageError(
            f"{count} open dialogs with service {service!r} began elsewhere, or are in use, and no "
            f"answer has told yet where their other ends are, such as the dialog of handle "
            f"{handle}: try again once they are answered or ended (`saf dialog list`)"
        )
