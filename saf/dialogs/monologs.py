"""Gaps in monologs: an Error replaces messages that are lost for good, so no gap is silent.

Subscribers do not answer a monolog, so its ends cannot compare (`saf.dialogs.set_back`). But a
repair is connected to both sides, and queries a destination's inbox for the progress of each
monolog (`received_monologs`).

*The publisher was set back* (`publisher_set_back`). A monolog that the publisher remembers ends,
because subscribers may have received more than it knows. A forgotten monolog also ends, if a
destination has received some of its messages.

*A destination was set back* (`subscribers_set_back`). The repair sends again the messages that the
destination has lost and the publisher's broker still has (`saf.operating.repair.send_again`).
Messages that are neither in the destination's inbox nor on their way are lost, or may be: the
subscribers get an Error in their place. The monolog continues, because it is complete at other
destinations.

- *The inbox has messages of the monolog.* Messages after the lowest number in the inbox are lost if
  they are neither in the inbox nor on their way. Earlier messages were purged, or do not concern a
  subscriber that began late.
- *The inbox has none.* All were purged, or lost. If the caller reports that messages may be lost
  that can no longer be compared, the Error reports them too.
- *The publisher's broker has forgotten the monolog*, which has ended there. If the End has not
  arrived and is not on its way, it is lost.

Both sides are read while forwarders are at work, the publisher's first: messages that are complete
there were stored at the destination earlier, unless they are lost.

*An operator gives up a message on its way* (a dead letter). `GIVE_UP` puts an Error in its place,
and the monolog continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch, records
from saf.dialogs.statements import END, ERROR, JSON, Code, lost_as

PUBLISHER = "the publisher was set back"
"""Text of the Error that ends a monolog because of its publisher; no other Error contains it."""

# Texts of Errors; %1$s and %2$s are the lowest and the highest number of the lost messages
LOST = (
    "the broker of the subscribers was set back: of messages %1$s to %2$s, some are lost there; "
    "later messages continue"
)
NOTHING_LEFT = (
    "the broker of the subscribers was set back, and no longer knows this monolog: of "
    "messages %1$s to %2$s, some may be lost there, and it is unknown which; later messages "
    "continue"
)
FORGOTTEN = (
    "the broker of the subscribers was set back: messages from %1$s on are lost there, "
    "and the monolog is over"
)

# The numbers that have arrived. An Error of a set-back also stands for missing earlier numbers.
RECEIVED_MONOLOGS = f"""
SELECT conversation_id, max(from_service) AS from_service, max(to_service) AS to_service,
       max(sequence) AS sequence,
       CAST(range_agg(int8range(
           CASE WHEN message_type = '{ERROR}' AND position(%(set_back)s::bytea IN body) > 0
                THEN 1 ELSE sequence END, sequence, '[]')) AS text) AS numbers,
       bool_or(message_type = '{END}') IS TRUE AS ended,
       bool_or(message_type = '{ERROR}' AND position(%(publisher)s::bytea IN body) > 0) IS TRUE
           AS failed
FROM saf.inbox
WHERE source = %(source)s AND from_initiator IS NULL AND sequence > 0
  AND conversation_id IS NOT NULL
GROUP BY conversation_id
"""

# Messages on their way to a destination: pending, or parked or dead for it or before any route
SENT_MONOLOGS = """
WITH under_way AS (
    SELECT conversation_id, range_agg(int8range(sequence, sequence, '[]')) AS numbers
    FROM (
        SELECT o.conversation_id, o.sequence, o.from_initiator
        FROM saf.subscription s JOIN saf.cursor c USING (subscription_id)
        JOIN saf.outbox o ON o.shard = c.shard
        WHERE s.log = 'outbox' AND s.name = 'forwarder'
          AND (pg_visible_in_snapshot(o.txid, c.done)
               OR pg_visible_in_snapshot(o.txid, c.open) AND o.id <= c.position) IS NOT TRUE
        UNION ALL
        SELECT conversation_id, sequence, from_initiator
        FROM (SELECT subscription_id, destination, conversation_id, sequence, from_initiator
              FROM saf.parked
              UNION ALL
              SELECT subscription_id, destination, conversation_id, sequence, from_initiator
              FROM saf.dead_letter) AS aside
        JOIN saf.subscription USING (subscription_id)
        WHERE log = 'outbox' AND destination IN (%(destination)s, '')
    ) AS one
    WHERE from_initiator IS NULL AND conversation_id IS NOT NULL AND sequence > 0
    GROUP BY conversation_id
)
SELECT conversation_id, c.service, c.far_service, c.send_sequence, c.changed_at,
       c.error_code IS NOT NULL, CAST(coalesce(numbers, '{}') AS text)
FROM under_way FULL JOIN (SELECT * FROM saf.conversation WHERE monolog) AS c USING (conversation_id)
"""

IN_PLACE = f"""
INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                        sequence, message_type, headers, body)
SELECT gen_random_uuid(), from_service, to_service, to_broker, CAST(conversation_id AS text),
       conversation_id, sequence, '{ERROR}', {JSON},
       convert_to(CAST(jsonb_build_object('code', {{code}}, 'text', text) AS text), 'UTF8')
FROM {{failed}}
"""
THESE = """
unnest(%(conversation_id)s::uuid[], %(from_service)s::text[], %(to_service)s::text[],
       %(sequence)s::bigint[]) AS heard (conversation_id, from_service, to_service, sequence)
"""

FAIL = f"""
WITH failed AS (
    UPDATE saf.conversation c SET send_sequence = send_sequence + 1, changed_at = now(),
        error_code = {Code.SET_BACK:d},
        error_text = '{PUBLISHER}: it has no memory of what it had sent after '
            || 'message ' || send_sequence || ', and subscribers may have received more'
    WHERE monolog AND NOT ended_here AND error_code IS NULL AND (%(every)s::boolean OR EXISTS (
        SELECT FROM {THESE}
        WHERE heard.conversation_id = c.conversation_id AND heard.sequence > c.send_sequence))
    RETURNING service AS from_service, far_service AS to_service, far_broker AS to_broker,
              conversation_id, send_sequence AS sequence, error_text AS text
)
{IN_PLACE.format(code=int(Code.SET_BACK), failed="failed")}
"""

FAIL_FORGOTTEN = IN_PLACE.format(
    code=int(Code.SET_BACK),
    failed=f"""(
    SELECT conversation_id, max(from_service) AS from_service, max(to_service) AS to_service,
           CAST(NULL AS uuid) AS to_broker, max(sequence) + 1 AS sequence,
           '{PUBLISHER}: it does not remember this monolog, and had sent '
           || max(sequence) || ' messages or more' AS text
    FROM {THESE} WHERE NOT EXISTS (SELECT FROM saf.conversation c
                                   WHERE c.conversation_id = heard.conversation_id)
    GROUP BY conversation_id) AS forgotten""",
)

# The Error's number is that of the last message that it replaces
TELL_OF_LOSS = IN_PLACE.format(
    code=int(Code.SET_BACK),
    failed="""(
    SELECT conversation_id, from_service, to_service, CAST(%(broker)s AS uuid) AS to_broker,
           upper(lost) - 1 AS sequence, format(why, lower(lost), upper(lost) - 1) AS text
    FROM unnest(%(conversation_id)s::uuid[], %(from_service)s::text[], %(to_service)s::text[],
                %(sent)s::bigint[], %(received)s::text[], %(under_way)s::text[], %(why)s::text[])
        AS told (conversation_id, from_service, to_service, sent, received, under_way, why)
    CROSS JOIN LATERAL (SELECT CAST(received AS int8multirange) AS here) AS received
    CROSS JOIN LATERAL (
        SELECT int8multirange(int8range(coalesce(lower(here), 1), sent, '[]'))
               - here - CAST(under_way AS int8multirange) AS lost) AS compared
    WHERE sent > 0 AND NOT isempty(lost)) AS gaps""",
)

# Goes to the subscribers at the copy's destination; to all subscribers if it had none yet
GIVE_UP = IN_PLACE.format(
    code=int(Code.GIVEN_UP),
    failed=f"""(
    SELECT conversation_id, from_service, to_service, sequence,
           CAST(brokers ->> destination AS uuid) AS to_broker,
           'message ' || sequence || ' was given up by ' || session_user || ': '
           || {lost_as("reason")}
           || '; what is sent after it goes on' AS text
    FROM saf.dead_letter JOIN saf.subscription USING (subscription_id)
    LEFT JOIN (SELECT brokers FROM saf.route_version ORDER BY version DESC LIMIT 1) AS known ON true
    WHERE dead_letter_id = ANY (%(dead_letter_ids)s) AND log = 'outbox'
      AND from_initiator IS NULL AND conversation_id IS NOT NULL AND sequence > 0) AS given_up""",
)


@dataclass(frozen=True, kw_only=True)
class ReceivedMonolog:
    """A monolog as received in a destination's inbox."""

    conversation_id: UUID
    from_service: str
    to_service: str
    sequence: int
    """Highest number that has arrived."""
    numbers: str
    """Numbers that have arrived, as an int8multirange; an Error of a set-back stands for all
    numbers before it."""
    ended: bool
    failed: bool
    """True if an Error about the publisher's set-back has arrived."""

    @property
    def goes_on(self) -> bool:
        """True if the subscribers expect more messages."""
        return not (self.ended or self.failed)


@dataclass(frozen=True, kw_only=True)
class SentMonolog:
    """A monolog of a publisher's broker, with its messages on their way to a destination."""

    from_service: str
    to_service: str
    sequence: int
    """Number of the last message sent."""
    changed_at: datetime
    """Time of that message, or earlier."""
    failed: bool
    under_way: str
    """Numbers on their way, as an int8multirange."""


Sent = Mapping[UUID, SentMonolog | None]
"""Monologs; None for forgotten ones with messages on their way."""


def received_monologs(connection: psycopg.Connection[Any], source: UUID) -> list[ReceivedMonolog]:
    """Return a destination's progress in a source's monologs. Reads the whole inbox.

    Call it on a destination's database; ``source`` is the publishers' broker.
    """
    params = {
        "source": source,
        "set_back": f'"code": {Code.SET_BACK:d},'.encode(),
        "publisher": PUBLISHER.encode(),
    }
    return records(connection, ReceivedMonolog, RECEIVED_MONOLOGS, params)


def publisher_set_back(
    connection: psycopg.Connection[Any], since: datetime | None, known: Iterable[ReceivedMonolog]
) -> None:
    """End monologs whose subscribers may have received more than this broker knows.

    Call it in the transaction of the repair.

    Args:
        connection: to the publishers' broker.
        since: as for `saf.dialogs.set_back.announce`; None: end only monologs with more messages
            received than sent.
        known: the destinations' progress in this broker's monologs.
    """
    params = _columns(monolog for monolog in known if monolog.goes_on)
    connection.execute(FAIL, params | {"every": since is not None})
    connection.execute(FAIL_FORGOTTEN, params)


def _columns(known: Iterable[ReceivedMonolog]) -> dict[str, list[Any]]:
    monologs = [*known]
    names = ("conversation_id", "from_service", "to_service", "sequence")
    return {name: [getattr(monolog, name) for monolog in monologs] for name in names}


def sent_monologs(connection: psycopg.Connection[Any], destination: str) -> Sent:
    """Return a broker's monologs, with the messages on their way. Reads the outbox."""
    return {
        conversation_id: None
        if publisher is None
        else SentMonolog(
            from_service=publisher,
            to_service=topic,
            sequence=sequence,
            changed_at=changed_at,
            failed=failed,
            under_way=under_way,
        )
        for conversation_id, publisher, topic, sequence, changed_at, failed, under_way in fetch(
            connection, SENT_MONOLOGS, {"destination": destination}
        )
    }


def subscribers_set_back(
    connection: psycopg.Connection[Any],
    broker: UUID,
    sent: Sent,
    received: Iterable[ReceivedMonolog],
    *,
    is_behind: Callable[[UUID], bool],
    may_lack: Callable[[UUID, SentMonolog], bool],
) -> None:
    """Tell a destination's subscribers which messages are lost. Call it in a transaction.

    Args:
        connection: to the publishers' broker.
        broker: the destination's broker_id.
        sent: the monologs of the publishers' broker; read before the destination's inbox.
        received: the monologs in the destination's inbox, since it was set back.
        is_behind: returns whether the destination has lost messages of a monolog's shard.
        may_lack: returns whether the destination may have lost messages of such a monolog when it
            has none of its messages.
    """
    losses: list[tuple[UUID, str, str, int, str, str, str]] = []
    by_number = {monolog.conversation_id: monolog for monolog in received}
    for number, monolog in by_number.items():
        if not is_behind(number):
            continue
        address = number, monolog.from_service, monolog.to_service
        known = sent.get(number)
        if known is not None and not known.failed:
            losses.append((*address, known.sequence, monolog.numbers, known.under_way, LOST))
        elif number not in sent and monolog.goes_on:
            losses.append((*address, monolog.sequence + 1, monolog.numbers, "{}", FORGOTTEN))
    for number, known in sent.items():
        if known is None or known.failed or number in by_number or not is_behind(number):
            continue
        if may_lack(number, known):
            address = number, known.from_service, known.to_service
            losses.append((*address, known.sequence, "{}", known.under_way, NOTHING_LEFT))
    names = ("conversation_id", "from_service", "to_service", "sent", "received", "under_way")
    columns = zip(*losses, strict=True) if losses else [()] * (len(names) + 1)
    params = dict(zip((*names, "why"), map(list, columns), strict=True))
    connection.execute(TELL_OF_LOSS, params | {"broker": broker})
