"""The checker: plain SQL on the databases, and nothing of the library.

What was to arrive is in the application's own table ``sent``; the outbox is not asked, because it
is purged. Each message has to have one of the ends of docs/where-messages-end.md that its promise
allows: stored (exactly once; at least once; at most once) in the order of its key, or a dead
letter, once, for a reason that it gave. Where something was set back, `tests.crash.past` says what
else may be. What is said in talks is looked at by `tests.crash.hearing`,
and what receivers drop by `tests.crash.drops`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.crash.past import Known, Message, Past, life, message

COUNTED = """
SELECT id FROM account WHERE version <> (SELECT count(*) FROM sent WHERE account = account.id)
"""
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
     + (SELECT count(*) FROM saf.held WHERE due IS NOT NULL)
"""
RECEIVED = "SELECT body FROM effect ORDER BY number"


@dataclass(kw_only=True)
class Verdict:
    """What the checker found; each list names messages."""

    sent: int = 0
    lost: list[Any] = field(default_factory=list)
    duplicated: list[Any] = field(default_factory=list)
    unexpected: list[Any] = field(default_factory=list)
    out_of_order: list[Any] = field(default_factory=list)
    dead_wrongly: list[Any] = field(default_factory=list)
    """Dead letters that should not be, or twice, or stored as well; poison that is not dead."""
    received_wrongly: list[Any] = field(default_factory=list)
    """What has taken effect otherwise than it is stored: not, more often, in another order."""
    ended_wrongly: list[Any] = field(default_factory=list)
    """Talks, and by how much they were said, that have not ended as they were to."""
    dropped_wrongly: list[Any] = field(default_factory=list)
    """Counts of what receivers have dropped that nothing in the round explains."""
    answered_wrongly: list[str] = field(default_factory=list)
    """What the dashboard said to a visitor, where a page or an honest word was due."""
    refused_wrongly: list[str] = field(default_factory=list)
    """What readers of a queue have refused to read, which had lost nothing."""
    not_refused: list[str] = field(default_factory=list)
    """Set-backs after which forwarders went on as if nothing were."""
    not_repaired: list[str] = field(default_factory=list)
    """What the documented repair said where it did not help."""
    allowed: list[str] = field(default_factory=list)
    """What somebody could do without the right to."""
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
    source: str,
    stores: Iterable[str],
    qualities: Mapping[str, str],
    queued: Iterable[str] = (),
    past: Past | None = None,
) -> Verdict:
    """Compare what was sent with what is there, in databases that nobody writes to any more.

    ``queued`` are bodies that a queue has, in their order.
    """
    past = past or Past()
    with psycopg.connect(source) as connection:
        counted = connection.execute(COUNTED).fetchall()
        dead = [(message(body), reason) for body, reason in connection.execute(DEAD).fetchall()]
    arrived = [message(body) for body in queued]
    for store in stores:
        with psycopg.connect(store) as connection:
            arrived += [message(body) for (body,) in connection.execute(ARRIVED).fetchall()]
    sent, copies, deaths = life(source), Counter(arrived), Counter(one for one, _ in dead)
    known = past.forgotten | sent
    verdict = Verdict(sent=len(sent), not_atomic=[account for (account,) in counted])
    for one, facts in known.items():
        quality = qualities[facts.service]
        ended = copies[one] + deaths[one]
        if one in sent and quality != "at_most_once" and not ended:
            verdict.lost.append(one)
        if quality != "at_least_once" and copies[one] > 1 + past.again[one]:
            verdict.duplicated.append(one)
        both = copies[one] and deaths[one] and quality == "exactly_once"
        if (both and not past.again[one]) or deaths[one] > 1 or (facts.poison and copies[one]):
            verdict.dead_wrongly.append(one)
        if one in sent and facts.poison and not deaths[one]:
            verdict.dead_wrongly.append(one)
    verdict.dead_wrongly += [
        (one, reason)
        for one, reason in dead
        if one in known and reason not in _reasons(known[one], qualities)
    ]
    verdict.unexpected = sorted((copies.keys() | deaths.keys()) - known.keys())
    # what a crash has lost at most once may come after all, once later ones of its key have come
    late = {one for one in past.again if qualities[known[one].service] == "at_most_once"}
    for one_life in (*past.lives, sent):
        mine = one_life.keys() - past.out_of_turn - late
        verdict.out_of_order += _out_of_order(arrived, mine)
    return verdict


def unreceived(stores: Iterable[str], services: Collection[str]) -> int:
    """How much that the stores have for services has not been dealt with by their consumers."""
    count = 0
    for store in stores:
        stored, received, dead = _consumed(store, services)
        count += len(stored) - len(received) - len(dead)
    return count


def receive(stores: Iterable[str], services: Collection[str], verdict: Verdict) -> None:
    """Add what consumers have done otherwise than once for each message, in order."""
    for store in stores:
        stored, received, dead = _consumed(store, services)
        # only what was mortal, which the application says, may have died with the receiver
        ended = Counter(received) + Counter(dead)
        verdict.received_wrongly += list((ended - Counter(stored)) + (Counter(stored) - ended))
        there, happened = _by_account(stored, dead), _by_account(received, dead)
        verdict.received_wrongly += [key for key in there if there[key] != happened[key]]


def _reasons(facts: Known, qualities: Mapping[str, str]) -> set[str]:
    """The reasons for which a message may be dead."""
    reasons = {
        "rejected": facts.poison,
        "expired": facts.mortal,
        # what may have left at most once, and is not known to have arrived, is said to be dead
        "unavailable": qualities[facts.service] == "at_most_once",
    }
    return {reason for reason, allowed in reasons.items() if allowed}


def _consumed(
    store: str, services: Collection[str]
) -> tuple[list[Message], list[Message], list[Message]]:
    """What is stored for services, what has taken effect of that, and what is dead, in order."""
    with psycopg.connect(store) as connection:
        lists = [
            [message(body) for body, *_ in connection.execute(query).fetchall()]
            for query in (ARRIVED, RECEIVED, DEAD)
        ]
    stored, received, dead = lists
    return [one for one in stored if one[0].partition("-")[0] in services], received, dead


def _by_account(messages: Iterable[Message], dead: Collection[Message]) -> dict[str, list[Message]]:
    found: dict[str, list[Message]] = defaultdict(list)
    for one in messages:
        if one not in dead:
            found[one[0]].append(one)
    return found


def _out_of_order(arrived: list[Message], mine: Collection[Message]) -> list[Message]:
    """Messages whose first arrival comes after that of a later one of their key."""
    highest: dict[str, int] = defaultdict(int)
    found = []
    for one in dict.fromkeys(arrived):
        account, n, _ = one
        if one in mine:
            if n < highest[account]:
                found.append(one)
            highest[account] = max(highest[account], n)
    return found
