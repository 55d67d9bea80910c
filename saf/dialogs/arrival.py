"""Arrival: what a delivery's messages of dialogs do to the endpoints that they are for.

It happens when a message is received, in the receiver's transaction, for all messages of a
delivery at once: the rows of their groups are locked, then those of the endpoints; the target's is
made if the message is the first; `saf.dialogs.facts` says which messages are taken; and what the
endpoints then know is written. So the application finds the state that its messages have led to,
and what it does on them commits together with their having been received.

A message that is set aside has not been received: `take_back` undoes that. One that is given up
fails its conversation, and so does one that the contract does not allow: both ends get an Error.

What is ahead of a message that is missing is parked in a lane of its conversation, and goes from
there to the delayed messages, due at once, when the missing one has come.

Related conversations are in one receiver's hand at a time, because it holds the row of their group
until it ends. Who wants it waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg

from saf import lanes
from saf.claim import Reader
from saf.database import fetch
from saf.dialogs.contracts import Contract, contracts
from saf.dialogs.dialog import Dialog
from saf.dialogs.facts import Facts, Verdict, judge
from saf.dialogs.statements import ERROR, EXPIRE, FIELDS, HELLO, Code
from saf.errors import ContractViolation
from saf.parking import AHEAD, LATER
from saf.received import Received
from saf.transaction import Entrance

End = tuple[UUID, bool]
"""A conversation, and whether it is the initiator's end."""

OF_THESE = """
unnest(%(conversation_id)s::uuid[], %(is_initiator)s::boolean[])
    AS these (conversation_id, is_initiator)
JOIN saf.conversation c USING (conversation_id, is_initiator)
"""
# In one order, so that two receivers wait for each other instead of deadlocking
LOCK_GROUPS = f"""
SELECT group_id FROM saf.conversation_group
WHERE group_id IN (SELECT group_id FROM {OF_THESE}) ORDER BY group_id FOR NO KEY UPDATE
"""
LOCK = f"""
SELECT {FIELDS}, (SELECT broker_id FROM saf.broker), contract, contract_version, group_id,
       ended_here, coalesce(expires_at <= now(), false),
       receive_sequence, ended_there, error_code, error_text, timer
FROM {OF_THESE} ORDER BY handle FOR NO KEY UPDATE OF c
"""

BEGUN = {
    "conversation_id": "uuid",
    "service": "text",
    "far_service": "text",
    "far_broker": "uuid",
    "contract": "text",
    "contract_version": "int",
    "group_id": "uuid",
    "expires_at": "timestamptz",
}
CREATE = f"""
WITH begun AS (
    SELECT * FROM unnest({", ".join(f"%({name})s::{type_}[]" for name, type_ in BEGUN.items())})
        AS begun ({", ".join(BEGUN)})
), new_group AS (
    INSERT INTO saf.conversation_group (group_id) SELECT group_id FROM begun
), endpoint AS (
    INSERT INTO saf.conversation (is_initiator, {", ".join(BEGUN)})
    SELECT false, {", ".join(BEGUN)} FROM begun RETURNING *
), lifetime AS ({EXPIRE})
SELECT FROM endpoint
"""

RECEIVED = {
    "handle": "uuid",
    "receive_sequence": "bigint",
    "ended_there": "boolean",
    "error_code": "int",
    "error_text": "text",
    "timer": "uuid",
}
RECEIVE = f"""
UPDATE saf.conversation c SET changed_at = now(), {
    ", ".join(f"{name} = r.{name}" for name in RECEIVED if name != "handle")
}
FROM unnest({", ".join(f"%({name})s::{type_}[]" for name, type_ in RECEIVED.items())})
    AS r ({", ".join(RECEIVED)})
WHERE c.handle = r.handle
"""

# What the application has done since stays: an end, a new timer
TAKE_BACK = f"{RECEIVE} AND NOT c.ended_here".replace(
    "timer = r.timer", "timer = coalesce(c.timer, r.timer)"
)

# What follows without a gap, and what waits for nothing: an Error, or what will be dropped
GO_ON = f"""
UPDATE saf.parked p SET lane = '{LATER}' || p.shard, deliver_at = now()
FROM (
    SELECT parked_id, ended OR message_type = '{ERROR}' OR receive_sequence >= sequence
           - dense_rank() OVER (PARTITION BY lane, from_initiator ORDER BY sequence) AS due
    FROM unnest(%(lane)s::text[], %(from_initiator)s::boolean[], %(receive_sequence)s::bigint[],
                %(ended)s::boolean[]) AS e (lane, from_initiator, receive_sequence, ended)
    JOIN saf.parked USING (lane, from_initiator)
    WHERE subscription_id = %(subscription_id)s AND destination = ''
) AS ahead
WHERE p.parked_id = ahead.parked_id AND due
RETURNING p.shard
"""

_enter = Entrance()


@dataclass(kw_only=True)
class Endpoint:
    """An endpoint in hand, and what it knows."""

    dialog: Dialog
    ended_here: bool
    over: bool
    stored: Facts
    facts: Facts
    failure: tuple[Code, str] | None = None

    @property
    def row(self) -> dict[str, Any]:
        """What `RECEIVE` writes."""
        return {"handle": self.dialog.handle, **vars(self.facts)}


@dataclass(kw_only=True)
class Arrival:
    """What became of the messages of a delivery."""

    raw: psycopg.Connection[Any]
    messages: list[Received] = field(default_factory=list)
    """To be handed out."""
    ahead: list[Received] = field(default_factory=list)
    """To wait for others."""
    dropped: list[Received] = field(default_factory=list)
    refused: list[tuple[Received, str]] = field(default_factory=list)
    """What is not as the contract says, and why."""
    before: dict[Received, tuple[Endpoint, Facts]] = field(default_factory=dict)
    """By message to be handed out: its endpoint, and what that knew before."""

    def take_back(self, messages: Iterable[Received]) -> None:
        """Messages that were to be handed out have not been received, in their order."""
        known: dict[UUID, Endpoint] = {}
        for message in messages:
            if message in self.before:
                endpoint, facts = self.before[message]
                if endpoint.dialog.handle not in known:
                    if facts.timer == endpoint.facts.timer:
                        facts = replace(facts, timer=None)
                    endpoint.facts = facts
                    known[endpoint.dialog.handle] = endpoint
        _write(self.raw, TAKE_BACK, known.values())

    def give_up(self, message: Received) -> None:
        """A message will never be handled: its conversation ends with an error, at both ends."""
        if message.dialog is not None:
            # what it failed with is not for the other end to read: the dead letter says it
            text = f"message {message.sequence or message.message_type} could not be handled"
            message.dialog.fail(_enter(self.raw), Code.QUARANTINED, text)


def arrive(raw: psycopg.Connection[Any], reader: Reader, messages: list[Received]) -> Arrival:
    """Let messages arrive at their endpoints; those that are of no dialog pass."""
    endpoints = _in_hand(raw, messages)
    arrival = Arrival(raw=raw)
    last: dict[End, int] = {}
    for message in messages:
        if message.message_type == ERROR and message.sequence is not None:
            last[_end(message)] = message.sequence
    for message in _in_sequence(messages):
        if message.from_initiator is None:
            arrival.messages.append(message)
            continue
        end = _end(message)
        endpoint = endpoints.get(end)
        if endpoint is None:
            waits = message.from_initiator and message.sequence is not None
            (arrival.ahead if waits else arrival.dropped).append(message)
        elif endpoint.failure or (message.sequence or 0) < last.get(end, 0):
            arrival.dropped.append(message)
        else:
            _meet(arrival, endpoint, message)
    changed = [one for one in endpoints.values() if one.facts != one.stored]
    _write(raw, RECEIVE, changed)
    for endpoint in endpoints.values():
        if endpoint.failure:
            endpoint.dialog.fail(_enter(raw), *endpoint.failure)
    _go_on(raw, reader, endpoints)
    return arrival


def _meet(arrival: Arrival, endpoint: Endpoint, message: Received) -> None:
    before, dialog = endpoint.facts, endpoint.dialog
    verdict, after = judge(before, message, ended_here=endpoint.ended_here, over=endpoint.over)
    application = after.ended_there == before.ended_there and after.error_code is None
    if verdict is Verdict.TAKE and dialog.contract and message.sequence and application:
        try:
            dialog.contract.check(
                message.message_type, message.body, from_initiator=not dialog.is_initiator
            )
        except ContractViolation as violation:
            endpoint.failure = Code.VIOLATION, str(violation)
            arrival.refused.append((message, str(violation)))
            return
    endpoint.facts = after
    if verdict is Verdict.TAKE:
        message.belongs_to(dialog)
        arrival.before[message] = endpoint, before
        arrival.messages.append(message)
    else:
        (arrival.ahead if verdict is Verdict.WAIT else arrival.dropped).append(message)


def _in_hand(raw: psycopg.Connection[Any], messages: list[Received]) -> dict[End, Endpoint]:
    """The endpoints that messages are for, locked until the transaction ends."""
    spoken = [message for message in messages if message.from_initiator is not None]
    ends = list(dict.fromkeys(map(_end, spoken)))
    rows = _lock(raw, ends)
    there = {(row[1], row[2]) for row in rows}
    hellos = {
        end: (message, message.headers.get(HELLO) or {})
        for message in spoken
        if message.sequence == 1 and not (end := _end(message))[1] and end not in there
    }
    wanted = {(row[7], row[8]) for row in rows}
    wanted |= {(hello.get("contract"), hello.get("version")) for _, hello in hellos.values()}
    wanted.discard((None, None))
    known = {(one.name, one.version): one for one in contracts(raw, [*wanted])} if wanted else {}
    if hellos:
        begun = [_begun(message, hello, known) for message, hello in hellos.values()]
        raw.execute(CREATE, _columns(BEGUN, begun))
        rows = _lock(raw, ends)
    endpoints = {(row[1], row[2]): _endpoint(row, known) for row in rows}
    for end, (_, hello) in hellos.items():
        named = hello.get("contract"), hello.get("version")
        if named[0] is not None and named not in known:
            text = f"contract {named[0]!r} version {named[1]} is not known at the target"
            endpoints[end].failure = Code.NO_CONTRACT, text
    return endpoints


def _lock(raw: psycopg.Connection[Any], ends: list[End]) -> list[tuple[Any, ...]]:
    params = {
        "conversation_id": [conversation_id for conversation_id, _ in ends],
        "is_initiator": [is_initiator for _, is_initiator in ends],
    }
    groups: set[UUID] = set()
    while True:
        groups |= {group_id for (group_id,) in fetch(raw, LOCK_GROUPS, params)}
        rows = fetch(raw, LOCK, params)
        # another group, if it was moved meanwhile
        if all(row[9] in groups for row in rows):
            return rows


def _endpoint(row: tuple[Any, ...], known: dict[tuple[str, int], Contract]) -> Endpoint:
    *fields, broker_id, contract, version, _, ended_here, over = row[:12]
    dialog = Dialog(
        **dict(zip(FIELDS.split(", "), fields, strict=True)),
        broker_id=broker_id,
        contract=known.get((contract, version)),
    )
    names = [name for name in RECEIVED if name != "handle"]
    facts = Facts(**dict(zip(names, row[12:], strict=True)))
    return Endpoint(dialog=dialog, ended_here=ended_here, over=over, stored=facts, facts=facts)


def _begun(
    message: Received, hello: dict[str, Any], known: dict[tuple[str, int], Contract]
) -> dict[str, Any]:
    """The row of a target's endpoint, from the first message of the initiator."""
    contract = known.get((hello.get("contract", ""), hello.get("version", 0)))
    seconds = hello.get("lifetime_seconds")
    expires_at: datetime | None = None
    if seconds is not None:
        expires_at = message.created_at + timedelta(seconds=float(seconds))
    return {
        "conversation_id": message.conversation_id,
        "service": message.service,
        "far_service": message.from_service,
        "far_broker": UUID(hello["broker"]) if "broker" in hello else None,
        "contract": contract and contract.name,
        "contract_version": contract and contract.version,
        "group_id": uuid4(),
        "expires_at": expires_at,
    }


def _go_on(raw: psycopg.Connection[Any], reader: Reader, endpoints: dict[End, Endpoint]) -> None:
    """What waited for messages that have arrived is due."""
    ends = [
        {
            "lane": f"{AHEAD}{conversation_id}",
            "from_initiator": not is_initiator,
            "receive_sequence": one.facts.receive_sequence,
            "ended": bool(one.facts.ended_there or one.facts.error_code is not None or one.failure),
        }
        for (conversation_id, is_initiator), one in endpoints.items()
    ]
    names = ("lane", "from_initiator", "receive_sequence", "ended")
    params = {**_columns(names, ends), "subscription_id": reader.subscription_id}
    if ends:
        lanes.time_late(raw, reader, sorted({shard for (shard,) in fetch(raw, GO_ON, params)}))


def _write(raw: psycopg.Connection[Any], statement: str, endpoints: Iterable[Endpoint]) -> None:
    if rows := [one.row for one in endpoints]:
        raw.execute(statement, _columns(RECEIVED, rows))


def _columns(names: Iterable[str], rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in names}


def _end(message: Received) -> End:
    """Which end a message is for."""
    assert message.conversation_id is not None  # noqa: S101 - it is of a dialog
    return message.conversation_id, not message.from_initiator


def _in_sequence(messages: list[Received]) -> list[Received]:
    """The messages, those of one end in the order of their numbers."""
    places: dict[End, list[int]] = defaultdict(list)
    for place, message in enumerate(messages):
        if message.from_initiator is not None and message.sequence is not None:
            places[_end(message)].append(place)
    ordered = list(messages)
    for mine in places.values():
        some = sorted((messages[place] for place in mine), key=lambda one: one.sequence or 0)
        for place, message in zip(mine, some, strict=True):
            ordered[place] = message
    return ordered
