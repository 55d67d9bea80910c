"""The checker of talks: plain SQL on the databases, and nothing of the library.

Each talk was said as 1, 2, 3 … and has to be heard so at either side, and to be closed if it has
ended. Where a side was set back, it may fail instead, but at all of its ends. A talk by hubs may
begin a second time there, by another hub. Then it has two dialogs at the store: one of them goes on
as if it were the only one, and the other one fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from itertools import pairwise

import psycopg

from tests.crash.checker import Verdict
from tests.crash.past import Past

TALKS = "SELECT conversation::text, n, ended FROM talk"
HEARD = "SELECT talk::text, conversation::text, n FROM heard ORDER BY number"
# What an end has said that is forgotten, or to one that is forgotten, is dead after a set-back
DEAD = """
SELECT conversation_id::text, reason, error FROM saf.dead_letter
WHERE conversation_id IS NOT NULL AND NOT (%(went_back)s AND reason IN ('no_dialog', 'rejected'))
"""
ENDS = """
SELECT conversation_id::text, state, error_code IS NOT NULL, is_initiator, send_sequence,
       receive_sequence, error_text
FROM saf.conversation
"""


@dataclass(kw_only=True)
class Side:
    """What one side knows of the talks, without dialogs that failed while their talks go on."""

    heard: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    closed: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)
    """Those that it has ended itself, or both: it hears no more, and of no failure either."""
    failed: set[str] = field(default_factory=set)
    known: dict[str, list[str]] = field(default_factory=dict)
    """All ends, each in words."""


def unheard(source: str, store: str, past: Past | None = None) -> int:
    """How much that was said in talks has not been heard, at either side; and ends untold."""
    past = past or Past()
    talks, sides = _talks(source, store)
    failed = sides[0].failed | sides[1].failed
    return sum(
        max(0, n - len(side.heard[talk])) + (ended and talk not in side.closed)
        if talk not in failed
        else talk in side.known.keys() - side.failed - side.over
        for side in sides
        for talk, (n, ended) in talks.items()
    ) + sum(len(_untold(side, talks.keys(), past)) for side in sides)


def listen(
    source: str, store: str, verdict: Verdict, past: Past | None = None, hubs: Iterable[str] = ()
) -> None:
    """Add what is wrong with talks."""
    past = past or Past()
    talks, sides = _talks(source, store)
    failed = sides[0].failed | sides[1].failed if past.went_back else set()
    for place in (source, store, *hubs):
        with psycopg.connect(place) as connection:
            dead = connection.execute(DEAD, {"went_back": past.went_back})
            verdict.dead_wrongly += dead.fetchall()
            verdict.ended_wrongly += [
                (place, conversation)
                for conversation, _, with_error, *_ in connection.execute(ENDS).fetchall()
                if with_error and not past.went_back
            ]
    verdict.sent += sum(n for n, _ in talks.values())
    for side in sides:
        for talk, (n, ended) in talks.items():
            if talk in failed:
                if talk in side.known.keys() - side.failed - side.over:
                    verdict.ended_wrongly.append((talk, n, *(one.known.get(talk) for one in sides)))
                continue
            mine, said = side.heard[talk], range(1, n + 1)
            verdict.lost += [(talk, one) for one in said if one not in mine]
            verdict.duplicated += [(talk, one) for one in said if mine.count(one) > 1]
            verdict.out_of_order += [(talk, b) for a, b in pairwise(mine) if b < a]
            verdict.unexpected += [(talk, one) for one in mine if one not in said]
            if (talk in side.closed) != ended or talk in side.failed:
                verdict.ended_wrongly.append((talk, n, *(one.known.get(talk) for one in sides)))
        verdict.unexpected += [(talk, 0) for talk in side.heard.keys() - talks.keys() - past.talks]
        verdict.ended_wrongly += [(talk, 0) for talk in _untold(side, talks.keys(), past)]


def _untold(side: Side, talks: Set[str], past: Past) -> set[str]:
    """Ends that go on, and do not know yet that their other end has forgotten them."""
    return (side.heard.keys() & past.talks) - talks - side.failed - side.over


def _talks(source: str, store: str) -> tuple[dict[str, tuple[int, bool]], list[Side]]:
    """What was said in each talk, and whether that was all; and what either side has of them."""
    with psycopg.connect(source) as connection:
        rows = connection.execute(TALKS).fetchall()
    sides = []
    for place in (source, store):
        side = Side()
        with psycopg.connect(place) as connection:
            ends = connection.execute(ENDS).fetchall()
            heard = connection.execute(HEARD).fetchall()
        talk_of: dict[str, str] = {conversation: talk for talk, conversation, _ in heard}
        failed = {conversation for conversation, _, with_error, *_ in ends if with_error}
        go_on = {talk for conversation, talk in talk_of.items() if conversation not in failed}
        over = {one for one in failed if talk_of.get(one) in go_on}
        for talk, conversation, n in heard:
            if conversation not in over:
                side.heard[talk].append(n)
        for conversation, state, with_error, *more in ends:
            if conversation in over:
                continue
            talk = talk_of.get(conversation, str(conversation))
            side.known.setdefault(talk, []).append(f"{conversation} {state} {more}")
            if state == "closed":
                side.closed.add(talk)
            if state.startswith(("closed", "disconnected")):
                side.over.add(talk)
            if with_error:
                side.failed.add(talk)
        sides.append(side)
    return {talk: (n, ended) for talk, n, ended in rows}, sides
