"""Endpoints in a receiver's hand: locked, created for introducing messages, and written.

An initiator that has begun a dialog with a router learns its true far end from the first answer.
From then on it addresses the service that the router has resolved to, here or at a routing service
(`saf.dialogs.redirecting`).

Locks are taken in one order, so that two receivers wait for each other instead of deadlocking:
first the rows of the groups, then those of the endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import psycopg

from saf.database import fetch
from saf.dialogs.contracts import Contract, contracts
from saf.dialogs.dialog import Dialog
from saf.dialogs.facts import Facts, Lineage, read_lineage
from saf.dialogs.introduction import Introduction, introduction
from saf.dialogs.redirecting import go_direct, may_go_direct
from saf.dialogs.statements import COMPARE, ERROR, EXPIRE, FIELDS, Code
from saf.message import HELLO
from saf.received import Received

End = tuple[UUID, bool]
"""One end: the conversation's id, and True for the initiator's end."""

OF_THESE = """
unnest(%(conversation_id)s::uuid[], %(is_initiator)s::boolean[])
    AS these (conversation_id, is_initiator)
JOIN saf.conversation c USING (conversation_id, is_initiator)
"""
LOCK_GROUPS = f"""
SELECT group_id FROM saf.conversation_group
WHERE group_id IN (SELECT group_id FROM {OF_THESE}) ORDER BY group_id FOR NO KEY UPDATE
"""
LOCK = f"""
SELECT {FIELDS}, (SELECT broker_id FROM saf.broker), contract, contract_version, group_id,
       ended_here, coalesce(expires_at <= now(), false),
       receive_sequence, ended_there, error_code, error_text, timer, answered_by,
       send_sequence, lineage, far_lineage
FROM {OF_THESE} ORDER BY handle FOR NO KEY UPDATE OF c
"""

ENDED = f"SELECT conversation_id, is_initiator FROM {OF_THESE} WHERE c.ended_here"

BEGUN = {
    "conversation_id": "uuid",
    "service": "text",
    "far_service": "text",
    "far_broker": "uuid",
    "contract": "text",
    "contract_version": "int",
    "group_id": "uuid",
    "expires_at": "timestamptz",
    "redirected_by": "text",
}
# If the broker was set back, or the message is not a dialog's first, an earlier end may have
# existed here, whose numbers this one assigns again: see saf.dialogs.set_back
CREATE = f"""
WITH begun AS (
    SELECT * FROM unnest({", ".join(f"%({name})s::{type_}[]" for name, type_ in BEGUN.items())},
                         %(late)s::boolean[]) AS begun ({", ".join(BEGUN)}, late)
), new_group AS (
    INSERT INTO saf.conversation_group (group_id) SELECT group_id FROM begun
), endpoint AS (
    INSERT INTO saf.conversation (is_initiator, lineage, {", ".join(BEGUN)})
    SELECT false, CASE WHEN late OR incarnation > 1
                       THEN jsonb_build_array(jsonb_build_array(incarnation, 0)) END,
           {", ".join(BEGUN)}
    FROM begun, saf.broker RETURNING *
), lifetime AS ({EXPIRE})
SELECT FROM endpoint
"""

# Follows the routers' resolutions to the service that answers. A router that assigns another key
# ends the way (to_key IS NULL): messages must continue to go through it.
REDIRECTED = """
WITH RECURSIVE way (conversation_id, service, broker) AS (
    SELECT c.conversation_id, far_service, far_broker
    FROM unnest(%(conversation_id)s::uuid[]) AS answered (conversation_id)
    JOIN saf.conversation c ON c.conversation_id = answered.conversation_id AND is_initiator
    UNION
    SELECT way.conversation_id, r.service, coalesce(r.broker, way.broker)
    FROM way JOIN saf.resolved_conversation r
        ON r.key = way.conversation_id::text AND r.router = way.service AND r.to_key IS NULL
)
UPDATE saf.conversation c SET far_service = way.service, far_broker = way.broker
FROM way JOIN unnest(%(conversation_id)s::uuid[], %(from_service)s::text[])
    AS answered (conversation_id, from_service)
    ON answered.conversation_id = way.conversation_id AND answered.from_service = way.service
WHERE c.conversation_id = way.conversation_id AND is_initiator
"""

RECEIVED = {
    "handle": "uuid",
    "receive_sequence": "bigint",
    "ended_there": "boolean",
    "error_code": "int",
    "error_text": "text",
    "timer": "uuid",
    "answered_by": "uuid",
}
RECEIVE = f"""
UPDATE saf.conversation c SET changed_at = now(), {
    ", ".join(f"{name} = r.{name}" for name in RECEIVED if name != "handle")
}
FROM unnest({", ".join(f"%({name})s::{type_}[]" for name, type_ in RECEIVED.items())})
    AS r ({", ".join(RECEIVED)})
WHERE c.handle = r.handle
"""

# The application's later changes stay: an end, a new timer
TAKE_BACK = f"""
UPDATE saf.conversation c SET changed_at = now(), timer = coalesce(c.timer, r.timer), {
    ", ".join(f"{name} = r.{name}" for name in RECEIVED if name not in ("handle", "timer"))
}
FROM unnest({", ".join(f"%({name})s::{type_}[]" for name, type_ in RECEIVED.items())})
    AS r ({", ".join(RECEIVED)})
WHERE c.handle = r.handle AND NOT c.ended_here
"""


@dataclass(kw_only=True)
class Endpoint:
    """An endpoint in hand, and its facts."""

    dialog: Dialog
    ended_here: bool
    over: bool
    stored: Facts
    facts: Facts
    sent: int
    """Number of the last message sent."""
    lineage: Lineage
    """Empty if its broker was never set back."""
    far_lineage: Lineage
    failure: tuple[Code, str] | None = None
    answers: bool = False
    """True if the other end has asked how much this end has sent and received."""
    asks: bool = False
    """True if the endpoint waits for a message that may be lost."""

    @property
    def row(self) -> dict[str, Any]:
        """Row for `RECEIVE`."""
        return {"handle": self.dialog.handle, **vars(self.facts)}


def in_hand(raw: psycopg.Connection[Any], messages: list[Received]) -> dict[End, Endpoint]:
    """Return the endpoints that messages are for, locked until the transaction ends."""
    spoken = [message for message in messages if message.from_initiator is not None]
    ends = list(dict.fromkeys(map(end_of, spoken)))
    rows = _lock(raw, ends)
    existing = {(row[1], row[2]) for row in rows}
    hellos = {
        end: (message, introduction(message))
        for message in sorted(spoken, key=_begins)
        if (_begins(message) or _is_late(message)) and message.from_service
        if (end := end_of(message)) not in existing
    }
    wanted = {(row[7], row[8]) for row in rows}
    wanted |= {(hello.contract, hello.version) for _, hello in hellos.values()}
    wanted.discard((None, None))
    known = {(one.name, one.version): one for one in contracts(raw, [*wanted])} if wanted else {}
    if hellos:
        new = [_begun(message, hello, known) for message, hello in hellos.values()]
        raw.execute(CREATE, columns((*BEGUN, "late"), new))
        rows = _lock(raw, ends)
    if answers := _answers_of_others(spoken, rows):
        raw.execute(
            REDIRECTED,
            {
                "conversation_id": [one.conversation_id for one in answers],
                "from_service": [one.from_service for one in answers],
            },
        )
        go_direct(raw, answers)
        rows = _lock(raw, ends)
    endpoints = {(row[1], row[2]): _endpoint(row, known) for row in rows}
    for end, (_, hello) in hellos.items():
        if hello.problem is not None:
            endpoints[end].failure = Code.VIOLATION, hello.problem
        if hello.contract is not None and (hello.contract, hello.version) not in known:
            text = f"contract {hello.contract!r} version {hello.version} is not known at the target"
            endpoints[end].failure = Code.NO_CONTRACT, text
    return endpoints


def ended_here(raw: psycopg.Connection[Any], ends: Iterable[End]) -> set[End]:
    """Return which of these ends have ended; an end that has ended stays so."""
    places = [*ends]
    params = {
        "conversation_id": [conversation_id for conversation_id, _ in places],
        "is_initiator": [is_initiator for _, is_initiator in places],
    }
    return {(one, is_initiator) for one, is_initiator in fetch(raw, ENDED, params)}


def _lock(raw: psycopg.Connection[Any], ends: list[End]) -> list[tuple[Any, ...]]:
    params = {
        "conversation_id": [conversation_id for conversation_id, _ in ends],
        "is_initiator": [is_initiator for _, is_initiator in ends],
    }
    groups: set[UUID] = set()
    while True:
        groups |= {group_id for (group_id,) in fetch(raw, LOCK_GROUPS, params)}
        rows = fetch(raw, LOCK, params)
        # another group, if the dialog was moved in between
        if all(row[9] in groups for row in rows):
            return rows


def _answers_of_others(spoken: list[Received], rows: list[tuple[Any, ...]]) -> list[Received]:
    """Return first answers that come from a service other than the addressed one."""
    far = {(row[1], row[2]): row[5] for row in rows}
    firsts = [one for one in spoken if one.sequence == 1 and not one.from_initiator]
    return [one for one in firsts if far.get(end_of(one), one.from_service) != one.from_service]


def _endpoint(row: tuple[Any, ...], known: dict[tuple[str, int], Contract]) -> Endpoint:
    *fields, broker_id, contract, version, _, ended_here, is_over = row[:12]
    dialog = Dialog(
        **dict(zip(FIELDS.split(", "), fields, strict=True)),
        broker_id=broker_id,
        contract=known.get((contract, version)),
    )
    names = [name for name in RECEIVED if name != "handle"]
    *known_facts, sent, lineage, far_lineage = row[12:]
    facts = Facts(**dict(zip(names, known_facts, strict=True)))
    return Endpoint(
        dialog=dialog, ended_here=ended_here, over=is_over, stored=facts, facts=facts, sent=sent,
        lineage=read_lineage(lineage), far_lineage=read_lineage(far_lineage),
    )  # fmt: skip


def _begins(message: Received) -> bool:
    """Return whether a message is the first of its dialog."""
    first = message.sequence == 1 and message.message_type != COMPARE
    return first and bool(message.from_initiator)


def _is_late(message: Received) -> bool:
    """Return whether a later message also carries the introduction for an end missing here."""
    if not message.from_initiator or message.message_type not in (COMPARE, ERROR):
        return False
    return (message.sequence or 0) > 0 and message.may_say(HELLO)


def _begun(
    message: Received, hello: Introduction, known: dict[tuple[str, int], Contract]
) -> dict[str, Any]:
    """Return the row of a target's endpoint, made from the initiator's first message."""
    contract = known.get((hello.contract or "", hello.version or 0))
    return {
        "conversation_id": message.conversation_id,
        "service": message.service,
        "far_service": message.from_service,
        "far_broker": hello.broker,
        "contract": contract and contract.name,
        "contract_version": contract and contract.version,
        "group_id": uuid4(),
        "expires_at": hello.expires_at,
        "redirected_by": may_go_direct(message),
        "late": not _begins(message),
    }


def write(raw: psycopg.Connection[Any], statement: str, endpoints: Iterable[Endpoint]) -> None:
    """Write endpoints' facts, by the statement `RECEIVE` or `TAKE_BACK`."""
    if rows := [endpoint.row for endpoint in endpoints]:
        raw.execute(statement, columns(RECEIVED, rows))


def columns(names: Iterable[str], rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Convert rows to arrays by column, as unnest takes them."""
    return {name: [row[name] for row in rows] for name in names}


def end_of(message: Received) -> End:
    """Return the end that a message is for."""
    assert message.conversation_id is not None  # noqa: S101 - messages of dialogs have one
    return message.conversation_id, not message.from_initiator
