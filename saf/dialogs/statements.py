"""Statements that write an end of a conversation, each one whole, for `saf.dialogs.dialog`.

Each has psycopg's named parameters in CASTs; see `saf.transaction`. Sending, ending and failing are
one statement each, which changes the endpoint and inserts the resulting message into the outbox.

No statement sets an end's state: the server computes the column ``state`` of saf.conversation from
facts, which are the numbers sent and received, the ends that have ended, and any error. Each event
changes one fact; `after` has the table of the results. The states are Service Broker's, with
readable names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from saf.dialogs.contracts import DEFINITION, RESERVED
from saf.message import HELLO, LINEAGE, REDIRECTED

END, ERROR, TIMER = f"{RESERVED}end-dialog", f"{RESERVED}error", f"{RESERVED}dialog-timer"
"""Types of saf's own messages."""

COMPARE = f"{RESERVED}compare"
"""Type of a message with an end's counts of messages; see `saf.dialogs.set_back`."""

DIRECT = f"{RESERVED}direct"
"""Type of an initiator's last message to a router that redirects; see `saf.dialogs.redirecting`."""


JSON = "jsonb_build_object('content-type', 'application/json')"
"""SQL: the headers of saf's own messages."""


class Code(IntEnum):
    """Codes of saf's own errors; an application's are above zero."""

    EXPIRED = -1
    """The dialog's lifetime is over."""
    QUARANTINED = -2
    """A message could not be handled."""
    VIOLATION = -3
    """A message violated the contract."""
    NO_CONTRACT = -4
    """The target does not know the contract."""
    UNRESOLVED = -5
    """A router cannot resolve the service of a message."""
    SET_BACK = -6
    """One end was set back, so it no longer knows messages that the other end knows."""
    GIVEN_UP = -7
    """An operator has given up a message that was a dead letter on its way."""


# Information about the dialog that the target needs
INTRODUCTION = f"""
jsonb_build_object('{HELLO}', jsonb_strip_nulls(jsonb_build_object(
    'contract', contract, 'version', contract_version,
    'lifetime_seconds', extract(epoch FROM expires_at - now()),
    'broker', (SELECT broker_id FROM saf.broker))))
"""
# Sent with the first message, so that the target need not ask; and with an Error, because a failed
# end sends nothing else, and the first message may not have arrived, or the target's end may be
# gone. A target's first answer names the router that has redirected the dialog.
HEADERS = f"""
CASE WHEN is_initiator AND NOT monolog AND (send_sequence = 1 OR error_code IS NOT NULL)
     THEN {INTRODUCTION}
     WHEN redirected_by IS NOT NULL AND send_sequence = 1
     THEN jsonb_build_object('{REDIRECTED}', jsonb_build_object('by', redirected_by))
     ELSE jsonb_build_object() END
|| CASE WHEN lineage IS NULL THEN jsonb_build_object()
        ELSE jsonb_build_object('{LINEAGE}', lineage) END
"""

# The row's lock defines the order: a session that waits for it sees all earlier counts, and the
# message's id is drawn under the lock.
SAY = f"""
WITH endpoint AS (
    UPDATE saf.conversation SET {{change}}, changed_at = now()
    WHERE handle = CAST(%(handle)s AS uuid) AND {{when}} RETURNING *
), said AS (
    INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                            from_initiator, sequence, message_type, headers, body)
    SELECT CAST(%(message_id)s AS uuid), service, far_service, far_broker,
           CAST(conversation_id AS text), conversation_id,
           CASE WHEN NOT monolog THEN is_initiator END, send_sequence,
           CAST(%(message_type)s AS text), CAST(%(headers)s AS jsonb) || {HEADERS},
           CAST(%(body)s AS bytea)
    FROM endpoint WHERE {{said}}
)
SELECT send_sequence FROM endpoint
"""
# A signature needs the message's number; so the endpoint changes first, and stays locked
CHANGE = f"""
UPDATE saf.conversation SET {{change}}, changed_at = now()
WHERE handle = CAST(%(handle)s AS uuid) AND {{when}}
RETURNING {{said}}, service, far_service, CAST(far_broker AS text), CAST(conversation_id AS text),
          CASE WHEN NOT monolog THEN is_initiator END, send_sequence, CAST({HEADERS} AS text)
"""
SAY_SIGNED = """
INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                        from_initiator, sequence, message_type, headers, body)
VALUES (CAST(%(message_id)s AS uuid), CAST(%(from_service)s AS text), CAST(%(to_service)s AS text),
        CAST(%(to_broker)s AS uuid), CAST(%(key)s AS text), CAST(%(conversation_id)s AS uuid),
        CAST(%(from_initiator)s AS boolean), CAST(%(sequence)s AS bigint),
        CAST(%(message_type)s AS text), CAST(%(headers)s AS jsonb), CAST(%(body)s AS bytea))
"""


@dataclass(frozen=True, kw_only=True)
class Saying:
    """Statements by which an end sends: one in all; or, to sign, the change and then the rest."""

    at_once: str
    change: str


def _saying(*, change: str, when: str, said: str) -> Saying:
    parts = {"change": change, "when": when, "said": said}
    return Saying(at_once=SAY.format(**parts), change=CHANGE.format(**parts))


# If nothing was sent, no other end exists that could receive an error or an end
HEARD_OF = "(send_sequence > 0 OR NOT is_initiator)"
COUNT = f"send_sequence = send_sequence + CASE WHEN {HEARD_OF} THEN 1 ELSE 0 END"
OVER = "coalesce(expires_at <= now(), false)"

SEND = _saying(
    change="send_sequence = send_sequence + 1",
    when=f"""state IN ('started_outbound', 'started_inbound', 'conversing') AND NOT {OVER}""",
    said="true",
)
END_HERE = _saying(
    change=f"""{COUNT}, ended_here = true, ended_there = ended_there OR monolog OR NOT {HEARD_OF},
        error_code = CASE WHEN error_code IS NULL AND {OVER} THEN {Code.EXPIRED:d}
                          ELSE error_code END,
        error_text = CASE WHEN error_code IS NULL AND {OVER} THEN 'the lifetime is over'
                          ELSE error_text END""",
    when="NOT ended_here",
    said="send_sequence > 0 AND error_code IS NULL",
)
FAILURE = "error_code = CAST(%(code)s AS int), error_text = CAST(%(text)s AS text)"
END_WITH_ERROR = _saying(
    change=f"{COUNT}, ended_here = true, {FAILURE}",
    when="NOT ended_here",
    said="send_sequence > 0",
)
FAIL = _saying(change=f"{COUNT}, {FAILURE}", when="error_code IS NULL", said="send_sequence > 0")
# Used if the other end does not know of any error, whatever this end has sent before
FAIL_SET_BACK = _saying(
    change="""send_sequence = send_sequence + 1,
        error_code = coalesce(error_code, CAST(%(code)s AS int)),
        error_text = coalesce(error_text, CAST(%(text)s AS text))""",
    when="true",
    said="true",
)

# Puts a message to oneself into the inbox, as if it came from the other end
TO_ONESELF = """
INSERT INTO saf.inbox (message_id, from_service, to_service, key, conversation_id, from_initiator,
                       message_type, headers, body, deliver_at, source)
SELECT {message_id}, service, service, CAST(conversation_id AS text), conversation_id,
       NOT is_initiator, {message_type},
       jsonb_build_object('content-type', 'application/json'), {body}, {deliver_at},
       (SELECT broker_id FROM saf.broker)
FROM endpoint WHERE {when}
"""
REMIND = TO_ONESELF.format(
    message_id="CAST(%(message_id)s AS uuid)",
    message_type="CAST(%(message_type)s AS text)",
    body="CAST(%(body)s AS bytea)",
    deliver_at="now() + make_interval(secs => CAST(%(seconds)s AS float))",
    when="true",
)
EXPIRE = TO_ONESELF.format(
    message_id="gen_random_uuid()",
    message_type=f"'{ERROR}'",
    body=f"""convert_to(CAST(jsonb_build_object(
        'code', {Code.EXPIRED:d}, 'text', 'the lifetime is over') AS text), 'UTF8')""",
    deliver_at="expires_at",
    when="expires_at IS NOT NULL",
)
# For a broker on the way that finds that an end's message leads nowhere
TELL = f"""
WITH endpoint AS (
    SELECT DISTINCT ON (conversation_id, is_initiator) c.conversation_id, c.is_initiator, c.service,
           told.error
    FROM unnest(%(conversation_id)s::uuid[], %(is_initiator)s::boolean[], %(error)s::text[])
        AS told (conversation_id, is_initiator, error)
    JOIN saf.conversation c USING (conversation_id, is_initiator)
    WHERE NOT c.ended_here AND c.error_code IS NULL
) {
    TO_ONESELF.format(
        message_id="gen_random_uuid()",
        message_type=f"'{ERROR}'",
        body=f'''convert_to(CAST(jsonb_build_object(
        'code', {Code.UNRESOLVED:d}, 'text', error) AS text), 'UTF8')''',
        deliver_at="NULL",
        when="true",
    )
}
"""
PARKED = "parked"
"""Reason of a message that is a dead letter only while the ends are told that it is given up."""


def lost_as(reason: str) -> str:
    """Return SQL for the state in which a message was given up, from its reason's column."""
    return f"""CASE {reason} WHEN '{PARKED}' THEN 'it was parked on its way'
                         ELSE 'it was a dead letter on its way, ' || {reason} END"""


# For dead letters at the source that will never be sent: the other end would wait for them. A
# target that lacks the first message has no end, and so no lifetime that could expire
GIVE_UP = f"""
WITH lost AS (
    SELECT DISTINCT ON (conversation_id, from_initiator)
           conversation_id, from_initiator, sequence,
           'message ' || sequence || ' was given up by ' || session_user || ': '
           || {lost_as("reason")} AS text
    FROM saf.dead_letter JOIN saf.subscription USING (subscription_id)
    WHERE dead_letter_id = ANY (%(dead_letter_ids)s) AND log = 'outbox'
      AND from_initiator IS NOT NULL AND sequence > 0
    ORDER BY conversation_id, from_initiator, sequence
), endpoint AS (
    UPDATE saf.conversation c SET {COUNT}, changed_at = now(),
        error_code = coalesce(c.error_code, {Code.GIVEN_UP:d}),
        error_text = coalesce(c.error_text, lost.text)
    FROM lost
    WHERE (c.conversation_id, c.is_initiator) = (lost.conversation_id, lost.from_initiator)
      AND (c.error_code IS NULL AND c.state <> 'closed'
           OR c.is_initiator AND lost.sequence = 1 AND c.error_code = {Code.EXPIRED:d})
    RETURNING c.*, convert_to(CAST(jsonb_build_object(
        'code', {Code.GIVEN_UP:d}, 'text', lost.text) AS text), 'UTF8') AS error
), said AS (
    INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                            from_initiator, sequence, message_type, headers, body)
    SELECT gen_random_uuid(), service, far_service, far_broker, CAST(conversation_id AS text),
           conversation_id, is_initiator, send_sequence, '{ERROR}',
           {JSON} || {HEADERS}, error
    FROM endpoint
) {
    TO_ONESELF.format(
        message_id="gen_random_uuid()",
        message_type=f"'{ERROR}'",
        body="error",
        deliver_at="NULL",
        when=f"NOT ended_here AND error_code = {Code.GIVEN_UP:d}",
    )
}
"""

WHAT_IS_KNOWN = f"""
SELECT b.broker_id, current_database(), k.version,
       coalesce(({DEFINITION.format(contract="k.name", version="k.version")}), '{{}}'),
       NOT EXISTS (SELECT FROM saf.service)
       OR EXISTS (SELECT FROM saf.service WHERE name = CAST(%(service)s AS text)),
       (SELECT group_id FROM saf.conversation WHERE handle = CAST(%(related)s AS uuid))
FROM saf.broker b
LEFT JOIN (SELECT name, version FROM saf.contract WHERE name = CAST(%(contract)s AS text)
           ORDER BY version DESC LIMIT 1) AS k ON true
"""
BEGIN = f"""
WITH new_group AS (
    INSERT INTO saf.conversation_group (group_id) VALUES (CAST(%(group_id)s AS uuid))
    ON CONFLICT DO NOTHING
), endpoint AS (
    INSERT INTO saf.conversation (handle, conversation_id, is_initiator, monolog, service,
        far_service, far_broker, contract, contract_version, group_id, expires_at)
    VALUES (CAST(%(handle)s AS uuid), CAST(%(conversation_id)s AS uuid), true,
            CAST(%(monolog)s AS boolean), CAST(%(service)s AS text), CAST(%(far_service)s AS text),
            CAST(%(far_broker)s AS uuid), CAST(%(contract)s AS text), CAST(%(version)s AS int),
            CAST(%(group_id)s AS uuid),
            now() + make_interval(secs => CAST(%(lifetime)s AS float)))
    RETURNING *
), lifetime AS ({EXPIRE})
SELECT FROM endpoint
"""
START_TIMER = f"""
WITH endpoint AS (
    UPDATE saf.conversation SET timer = CAST(%(message_id)s AS uuid), changed_at = now()
    WHERE handle = CAST(%(handle)s AS uuid) AND NOT ended_here AND error_code IS NULL RETURNING *
), reminder AS ({REMIND})
SELECT FROM endpoint
"""
STOP_TIMER = """
UPDATE saf.conversation SET timer = NULL WHERE handle = CAST(%(handle)s AS uuid) RETURNING handle
"""
TELL_ONESELF = f"""
WITH endpoint AS (SELECT * FROM saf.conversation WHERE handle = CAST(%(handle)s AS uuid)) {REMIND}
"""

FIELDS = "handle, conversation_id, is_initiator, monolog, service, far_service"
OPEN = f"""
SELECT b.broker_id, current_database(), contract, contract_version,
       coalesce(({DEFINITION.format(contract="c.contract", version="c.contract_version")}), '{{}}'),
       {FIELDS}
FROM saf.broker b LEFT JOIN saf.conversation c ON handle = CAST(%(handle)s AS uuid)
"""
WHY_NOT = """
SELECT b.broker_id, current_database(), c.state, c.error_code, c.error_text, c.expires_at,
       coalesce(c.expires_at <= now(), false)
FROM saf.broker b LEFT JOIN saf.conversation c ON handle = CAST(%(handle)s AS uuid)
"""


class State(StrEnum):
    """State of an endpoint."""

    STARTED_OUTBOUND = "started_outbound"
    """Begun here, nothing sent yet (SO)."""
    STARTED_INBOUND = "started_inbound"
    """Begun by the other end, first message not handled yet (SI)."""
    CONVERSING = "conversing"
    """Both ends send (CO)."""
    DISCONNECTED_INBOUND = "disconnected_inbound"
    """The far end has ended, but not this end (DI)."""
    DISCONNECTED_OUTBOUND = "disconnected_outbound"
    """This end has ended, but not the far end (DO)."""
    ERROR = "error"
    """There was an error, and this end has not ended yet (ER)."""
    CLOSED = "closed"
    """Over. The end is remembered, so that late messages do not begin it again (CD)."""


class Event(StrEnum):
    """Event at an endpoint: an action of the application, or a received message."""

    SEND = "send"
    RECEIVE = "receive"
    END = "end"
    RECEIVE_END = "receive_end"
    END_WITH_ERROR = "end_with_error"
    RECEIVE_ERROR = "receive_error"
    EXPIRE = "expire"


S, E = State, Event

TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    S.STARTED_OUTBOUND: {
        E.SEND: S.CONVERSING,
        # the other end does not know of the dialog, and never will
        E.END: S.CLOSED,
        E.END_WITH_ERROR: S.CLOSED,
        E.EXPIRE: S.ERROR,
    },
    S.STARTED_INBOUND: {
        E.SEND: S.STARTED_INBOUND,
        E.RECEIVE: S.CONVERSING,
        E.END: S.DISCONNECTED_OUTBOUND,
        E.END_WITH_ERROR: S.CLOSED,
        E.RECEIVE_ERROR: S.ERROR,
        E.EXPIRE: S.ERROR,
    },
    S.CONVERSING: {
        E.SEND: S.CONVERSING,
        E.RECEIVE: S.CONVERSING,
        E.END: S.DISCONNECTED_OUTBOUND,
        E.RECEIVE_END: S.DISCONNECTED_INBOUND,
        E.END_WITH_ERROR: S.CLOSED,
        E.RECEIVE_ERROR: S.ERROR,
        E.EXPIRE: S.ERROR,
    },
    S.DISCONNECTED_INBOUND: {
        E.END: S.CLOSED,
        E.END_WITH_ERROR: S.CLOSED,
        # the other end knows more than this end, which was set back
        E.RECEIVE_ERROR: S.ERROR,
        E.EXPIRE: S.ERROR,
    },
    S.DISCONNECTED_OUTBOUND: {
        # dropped, because the application wants no more messages
        E.RECEIVE: S.DISCONNECTED_OUTBOUND,
        E.RECEIVE_END: S.CLOSED,
        E.RECEIVE_ERROR: S.CLOSED,
        E.EXPIRE: S.CLOSED,
    },
    S.ERROR: {
        E.END: S.CLOSED,
        E.END_WITH_ERROR: S.CLOSED,
    },
    S.CLOSED: {},
}
"""Next state by state and event. An event that is missing here is refused if the application
requests it, and dropped if it is received."""


def after(state: State, event: Event) -> State | None:
    """Return the state after an event; None if the event is refused or dropped.

    >>> after(State.CONVERSING, Event.END), after(State.CLOSED, Event.SEND)
    (<State.DISCONNECTED_OUTBOUND: 'disconnected_outbound'>, None)
    """
    return TRANSITIONS[state].get(event)
