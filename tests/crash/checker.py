"""The checker: plain SQL on the databases, and nothing of the library.

What was to arrive is in the application's own table ``sent``; the outbox is not asked, because it
is purged. Per quality of service, every message has to arrive (exactly once; at least once; at
most once), in the order of its key, unless it is one that the MOM store rejects: then it has to be
a dead letter, once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psycopg

SENT = "SELECT account, n, service, poison FROM sent"
COUNTED = "SELECT id, version FROM account"
ARRIVED = """
SELECT convert_from(body, 'UTF8') FROM saf.inbox WHERE conversation_id IS NULL ORDER BY id
"""
DEAD = """
SELECT convert_from(body, 'UTF8'), reason FROM saf.dead_letter WHERE conversation_id IS NULL
"""
LEFT = """
SELECT (SELECT count(*) FROM saf.outbox o JOIN saf.cursor c USING (shard)
        JOIN saf.subscription s USING (subscription_id)
        WHERE s.log = 'outbox' AND NOT pg_visible_in_snapshot(o.txid, c.done)
          AND (pg_visible_in_snapshot(o.txid, c.open) AND o.id <= c.position) IS NOT TRUE)
     + (SELECT count(*) FROM saf.parked)
"""

TALKS = "SELECT conversation::text, n, ended FROM talk"
HEARD = "SELECT conversation::text, n FROM heard ORDER BY number"
DEAD_TALKS = """
SELECT conversation_id::text, 0 FROM saf.dead_letter WHERE conversation_id IS NOT NULL
"""
STATES = "SELECT conversation_id::text, state FROM saf.conversation"

Message = tuple[str, int]


@dataclass(kw_only=True)
class Verdict:
    """What the checker found; each list names messages."""

    sent: int = 0
    lost: list[Message] = field(default_factory=list)
    duplicated: list[Message] = field(default_factory=list)
    unexpected: list[Message] = field(default_factory=list)
    out_of_order: list[Message] = field(default_factory=list)
    dead_wrongly: list[Message] = field(default_factory=list)
    """Dead letters that should not be, or twice; poison that is not dead."""
    ended_wrongly: list[Message] = field(default_factory=list)
    """Talks, and by how much they were said, that have not ended as they were to."""
    not_atomic: list[str] = field(default_factory=list)
    """Accounts whose version and messages differ: the harness itself is broken."""

    @property
    def findings(self) -> dict[str, list[Any]]:
        """Those that there are, by name."""
        return {n: v for n, v in vars(self).items() if isinstance(v, list) and v}


def left(source: str) -> int:
    """How many committed messages the forwarders have not dealt with."""
    with psycopg.connect(source) as connection:
        ((count,),) = connection.execute(LEFT).fetchall()
    return int(count)


def check(
    source: str, stores: Iterable[str], qualities: Mapping[str, str], queued: Iterable[str] = ()
) -> Verdict:
    """Compare what was sent with what is there, in databases that nobody writes to any more.

    ``queued`` are bodies that a queue has, in their order.
    """
    with psycopg.connect(source) as connection:
        sent = connection.execute(SENT).fetchall()
        counted = connection.execute(COUNTED).fetchall()
        dead = [(_message(b), reason) for b, reason in connection.execute(DEAD).fetchall()]
    arrived = [_message(body) for body in queued]
    for store in stores:
        with psycopg.connect(store) as connection:
            arrived += [_message(body) for (body,) in connection.execute(ARRIVED).fetchall()]
    copies, deaths = Counter(arrived), Counter(message for message, _ in dead)
    verdict = Verdict(sent=len(sent))
    verdict.not_atomic = [
        account for account, version in counted if version != sum(s[0] == account for s in sent)
    ]
    known = {(account, n): (qualities[service], poison) for account, n, service, poison in sent}
    for message, (quality, poison) in known.items():
        # what may have left at most once, and is not known to have arrived, is said to be dead
        may_die = poison or quality == "at_most_once"
        if deaths[message] > may_die or (poison and copies[message]):
            verdict.dead_wrongly.append(message)
        if poison and not deaths[message]:
            verdict.dead_wrongly.append(message)
        if quality != "at_most_once" and not copies[message] and not deaths[message]:
            verdict.lost.append(message)
        if quality != "at_least_once" and copies[message] > 1:
            verdict.duplicated.append(message)
    verdict.unexpected = sorted((copies.keys() | deaths.keys()) - known.keys())
    verdict.out_of_order = _out_of_order(arrived, known)
    return verdict


def unheard(source: str, store: str) -> int:
    """How much that was said in talks has not been heard, at either side; and ends untold."""
    talks, *sides = _talks(source, store)
    return sum(
        max(0, n - len(heard[talk])) + (ended and states.get(talk) != "closed")
        for heard, states in sides
        for talk, (n, ended) in talks.items()
    )


def listen(source: str, store: str, verdict: Verdict) -> None:
    """Add what is wrong with talks: each is 1, 2, 3 … at either side."""
    talks, *sides = _talks(source, store)
    for side in (source, store):
        with psycopg.connect(side) as connection:
            verdict.dead_wrongly += connection.execute(DEAD_TALKS).fetchall()
    verdict.sent += sum(n for n, _ in talks.values())
    for heard, states in sides:
        for talk, (n, ended) in talks.items():
            mine, said = heard[talk], range(1, n + 1)
            verdict.lost += [(talk, one) for one in said if one not in mine]
            verdict.duplicated += [(talk, one) for one in said if mine.count(one) > 1]
            verdict.out_of_order += [(talk, b) for a, b in pairwise(mine) if b < a]
            verdict.unexpected += [(talk, one) for one in mine if one not in said]
            if (states.get(talk) == "closed") != ended or states.get(talk) == "error":
                verdict.ended_wrongly.append((talk, n))
        verdict.unexpected += [(talk, 0) for talk in heard.keys() - talks.keys()]


def _talks(source: str, store: str) -> tuple[Any, ...]:
    """What was said in each talk, and whether that was all; and what either side has of them."""
    with psycopg.connect(source) as connection:
        rows = connection.execute(TALKS).fetchall()
    sides = []
    for side in (source, store):
        heard: dict[str, list[int]] = defaultdict(list)
        with psycopg.connect(side) as connection:
            states: dict[str, str] = dict(connection.execute(STATES).fetchall())
            for talk, n in connection.execute(HEARD).fetchall():
                heard[talk].append(n)
        sides.append((heard, states))
    return {talk: (n, ended) for talk, n, ended in rows}, *sides


def _message(body: str) -> Message:
    account, n, *_ = body.split()
    return account, int(n)


def _out_of_order(
    arrived: list[Message], known: Mapping[Message, tuple[str, bool]]
) -> list[Message]:
    """Messages whose first arrival comes after that of a later one of their key."""
    highest: dict[str, int] = defaultdict(int)
    seen: set[Message] = set()
    found = []
    for message in arrived:
        if message in known and message not in seen:
            account, n = message
            if n < highest[account]:
                found.append(message)
            highest[account] = max(highest[account], n)
        seen.add(message)
    return found
