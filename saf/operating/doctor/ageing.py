"""Checks of ageing: dialogs that nobody ends, messages that wait for others, dropped messages."""

from __future__ import annotations

from saf.dialogs.statements import State
from saf.operating.doctor.patient import Found, Patient
from saf.operating.wording import age, counted
from saf.setaside.dropped import Reason
from saf.setaside.lane import Kind

OVER = (State.CLOSED, State.ERROR)
"""States without anything to wait for: `dialogs_set_back` reports failed dialogs, or their
application ends them."""

DAY_SECONDS = 86400.0

OPEN = """
SELECT service, count(*), extract(epoch FROM now() - min(changed_at))::float
FROM saf.conversation
WHERE NOT monolog AND state <> ALL (%(over)s)
  AND changed_at < now() - make_interval(secs => %(seconds)s)
  AND (expires_at IS NULL OR expires_at > now())
GROUP BY service ORDER BY service
"""


def dialogs_open_for_long(patient: Patient) -> Found:
    """Report open dialogs without any message for a long time."""
    seconds = patient.limits.old_seconds
    for service, count, oldest in patient.ask(OPEN, over=list(OVER), seconds=seconds):
        yield (
            "warning",
            f"{counted(count, 'dialog')} of service {service!r} are open and silent, the longest "
            f"for {age(oldest)}: open dialogs are never removed",
            "let the application end them, or begin them with a lifetime; which ones: "
            f"{patient.command('dialog', 'list', '--service', service)}; "
            f"{patient.command('dialog', 'end', 'HANDLE')} ends one",
        )


EXPIRED = """
SELECT service, count(*), extract(epoch FROM now() - min(expires_at))::float
FROM saf.conversation
WHERE state <> ALL (%(over)s) AND expires_at < now() - make_interval(secs => %(seconds)s)
GROUP BY service ORDER BY service
"""


def dialogs_expired(patient: Patient) -> Found:
    """Report dialogs whose lifetime is over, and whose receiver has not noticed."""
    seconds = patient.limits.stuck_seconds
    for service, count, longest in patient.ask(EXPIRED, over=list(OVER), seconds=seconds):
        yield (
            "error",
            f"the lifetime of {counted(count, 'dialog')} of service {service!r} is over, the "
            f"longest for {age(longest)}, and no receiver has noticed: none is running",
            f"start the consumer of {service!r}: it gets an Error for each dialog",
        )


BLOCKED = """
SELECT s.name, count(*), count(DISTINCT p.subject), min(p.subject),
       extract(epoch FROM now() - min(p.parked_at))::float
FROM saf.parked p JOIN saf.subscription s USING (subscription_id)
WHERE p.kind = %(kind)s AND p.parked_at < now() - make_interval(secs => %(seconds)s)
GROUP BY s.name ORDER BY s.name
"""


def dialogs_blocked(patient: Patient) -> Found:
    """Report messages of dialogs that wait for a missing earlier message."""
    seconds = patient.limits.stuck_seconds
    for name, count, dialogs, first, oldest in patient.ask(
        BLOCKED, kind=Kind.AHEAD, seconds=seconds
    ):
        yield (
            "error",
            f"subscription {name!r} has {counted(count, 'message')} of "
            f"{counted(dialogs, 'dialog')} that wait for an earlier one, the oldest for "
            f"{age(oldest)}, such as those of conversation {first}",
            "search for the earlier message at the other end's broker: saf outbox list --key "
            f"{first}, saf dead list --key {first}; {patient.command('dialog', 'compare')} lets "
            "both ends compare",
        )


DROPPED = """
SELECT s.name, reason, sum(messages)::bigint, max(last_at)::text,
       (array_agg(last_message_id ORDER BY last_at DESC))[1]::text
FROM saf.dropped JOIN saf.subscription s USING (subscription_id)
WHERE reason = ANY (%(reasons)s)
GROUP BY s.name, reason HAVING max(last_at) > now() - make_interval(secs => %(seconds)s)
ORDER BY s.name, reason
"""
UNHEARD_OF = (Reason.ENDED, Reason.EXPIRED, Reason.INCOMPLETE)
"""Reasons for drops whose senders may have wanted a receiver to get the message."""


def dropped(patient: Patient) -> Found:
    """Report messages of dialogs, dropped in the last day, that their senders may miss."""
    reasons = list(UNHEARD_OF)
    for name, reason, count, last, message_id in patient.ask(
        DROPPED, reasons=reasons, seconds=DAY_SECONDS
    ):
        yield (
            "warning",
            f"subscription {name!r} has dropped {counted(count, 'message')} since counting began, "
            f"{reason}, the last at {last}: {message_id}",
            "docs/where-messages-end.md explains each reason: the dialog has told both ends",
        )


# The messages of the newest transactions of each shard: recent ones, whatever the log's size
MISADDRESSED = """
SELECT to_service, to_broker::text, count(*), max(received_at)::text
FROM (
    SELECT i.to_service, i.received_at,
           CASE WHEN i.to_broker <> b.broker_id THEN i.to_broker END AS to_broker
    FROM saf.broker b CROSS JOIN LATERAL generate_series(0, b.shards - 1) AS n (shard)
    CROSS JOIN LATERAL (
        SELECT to_service, to_broker, received_at FROM saf.inbox i
        WHERE i.shard = n.shard ORDER BY i.txid DESC LIMIT %(look)s) AS i
    WHERE EXISTS (SELECT FROM saf.service)) AS lately
WHERE to_broker IS NOT NULL OR NOT EXISTS (
    SELECT FROM saf.service AS lives WHERE lives.name = lately.to_service
    UNION ALL
    SELECT FROM saf.subscription s
    WHERE s.log = 'inbox' AND NOT s.stream
      AND (s.service IS NULL OR s.service = lately.to_service))
GROUP BY 1, 2 ORDER BY 1, 2 LIMIT %(shown)s
"""
LOOK = 100
"""Number of messages to check in each shard: the last ones."""
SHOWN = 20


def misaddressed(patient: Patient) -> Found:
    """Report recent messages for a service that does not live here, or for another broker."""
    for service, broker, count, last in patient.ask(MISADDRESSED, look=LOOK, shown=SHOWN):
        where = f"at broker {broker}, which this is not" if broker else "which does not live here"
        yield (
            "warning",
            f"{counted(count, 'message')} in the inbox, the last at {last}, are for {service!r}, "
            f"{where}: nobody receives them",
            "fix the route at the source, or create the service here: "
            + patient.command("service", "create", service),
        )
