"""The truth about messages: what was sent, and which ends each of them may have.

It is told of what the machine did (committed, rolled back, a route changed, a person retried) and
of what is seen: bodies in inboxes, in dead letters, in what is parked, in the outbox. It knows
nothing of cursors, watermarks or lanes, so it cannot be wrong in the way in which they are.

At any time, a message that is seen somewhere was committed, is stored no more often than its
service was promised, and in the order of its key; and one that was committed is somewhere. In the
end each has exactly one of the ends that a message may have: stored, a dead letter for a reason
that it gave, or discarded by a person. One that was rolled back has none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from uuid import UUID

AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE = "at_most_once", "at_least_once", "exactly_once"
REJECTED, EXPIRED, MAY_HAVE_LEFT = "rejected", "expired", "unavailable"


@dataclass(kw_only=True, eq=False)
class Sent:
    """One message, and what may become of it."""

    name: str
    """Unique, and the first word of its body."""
    service: str
    key: str
    number: int
    """Its place among those of its key."""
    matches: set[str]
    """Destinations that routes may have led it to."""
    qualities: set[str]
    """Of the routes that it may have gone by."""
    message_id: UUID | None = None
    topic: bool = False
    """Each destination is to have it."""
    poison: bool = False
    """Destinations reject it."""
    mortal: bool = False
    """It says when it is of no use any more."""
    committed: bool = False
    may_expire: bool = False
    """That time has come while it was under way."""
    may_vanish: bool = False
    """It goes at most once, and a process died meanwhile."""
    again: Counter[str] = field(default_factory=Counter)
    """By destination: how often it was handed out once more, because somebody asked for it."""
    discarded: set[str] = field(default_factory=set)
    """The destinations for which a person gave it up; the empty one is all of them."""
    forgotten: bool = False
    """Its source was set back to before it was sent: where it has arrived, it stays."""
    out_of_turn: bool = False
    """Its destination was set back to before it arrived, so it comes again, after others."""

    @property
    def body(self) -> str:
        """What it says."""
        return f"{self.name} poison" if self.poison else self.name


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What was true of a source when a backup of it was taken."""

    again: Mapping[str, Counter[str]]
    """Of the messages that were committed, by name."""
    discarded: Mapping[str, set[str]]
    settled: frozenset[str]
    """Those that had arrived, and the source knew it."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is in the databases, by the names of messages."""

    stored: Mapping[str, Sequence[str]]
    """By destination, in the order of arrival."""
    dead: Sequence[tuple[str, str, str]]
    """Name, destination (empty for all) and reason."""
    parked: Sequence[str]
    outbox: frozenset[str]


class Truth:
    """All messages of one example."""

    def __init__(self) -> None:
        self.sent: dict[str, Sent] = {}
        self.uncertain: Counter[str] = Counter()
        """By destination: how many copies of topics a repair said that it may lack."""
        self._numbers: Counter[str] = Counter()

    def new(
        self,
        service: str,
        key: str,
        matches: Iterable[str],
        quality: str,
        *,
        topic: bool,
        poison: bool,
        mortal: bool,
    ) -> Sent:
        """A message that a transaction is about to send."""
        self._numbers[key] += 1
        number = self._numbers[key]
        message = Sent(
            name=f"{key}/{number}",
            service=service,
            key=key,
            number=number,
            matches=set(matches),
            qualities={quality},
            topic=topic,
            poison=poison,
            mortal=mortal,
        )
        self.sent[message.name] = message
        return message

    @property
    def committed(self) -> list[Sent]:
        """Those that exist."""
        return [one for one in self.sent.values() if one.committed]

    def remember(self, settled: Iterable[str]) -> Memory:
        """A backup of the source is taken; what has arrived, and is known to, is ``settled``."""
        there = [one for one in self.committed if not one.forgotten]
        return Memory(
            again={one.name: Counter(one.again) for one in there},
            discarded={one.name: set(one.discarded) for one in there},
            settled=frozenset(settled),
        )

    def set_back(self, memory: Memory) -> None:
        """The source is what it was then; what it had delivered since may come again, once."""
        for one in self.committed:
            one.forgotten = one.name not in memory.again
            if one.forgotten:
                continue
            one.again = Counter(memory.again[one.name])
            one.discarded = set(memory.discarded[one.name])
            if one.name not in memory.settled:
                one.again[""] += 1
                one.may_vanish |= AT_MOST_ONCE in one.qualities

    def lost_at(self, before: Sequence[str], after: Sequence[str]) -> None:
        """A destination is what it was: what it had stored since has to come again."""
        for name in {*before} - {*after}:
            self.sent[name].out_of_turn = True

    def replayed(self, message_ids: Set[UUID], seen: Seen) -> list[str]:
        """A person has compared, and had these sent again; which of them nobody had told of.

        What a store had before it was set back is missing there until somebody compares, or until
        newer messages of the key come: then the forwarder has to notice.
        """
        found = []
        for one in self.committed:
            if one.message_id not in message_ids:
                continue
            newer = {
                it.name for it in self.committed if it.key == one.key and it.number > one.number
            }
            passed = any(newer & {*seen.stored[there]} for there in one.matches)
            if not one.may_vanish and (passed or not one.out_of_turn):
                found.append(f"lost until somebody compared: {one.name}")
            one.out_of_turn = True
        return found

    def wrong_now(self, seen: Seen) -> list[str]:
        """What must not be so at any time."""
        return [
            *self._unexpected(seen),
            *self._too_often(seen),
            *self._out_of_order(seen),
            *self._dead_wrongly(seen),
            *self._gone(seen),
        ]

    def wrong_in_the_end(self, seen: Seen) -> list[str]:
        """What must not be so once all is up and nothing moves any more."""
        found = [f"parked for ever: {name}" for name in sorted(set(seen.parked))]
        dead = {(name, destination) for name, destination, _ in seen.dead}
        uncertain = Counter(self.uncertain)
        for one in self.committed:
            if one.forgotten:
                continue
            stored = {there for there, names in seen.stored.items() if one.name in names}
            gone = {there for there in one.discarded if (one.name, there) not in dead}
            buried = {there for name, there in dead if name == one.name}
            if one.topic:
                for there in one.matches:
                    ends = (there in stored) + bool({there, ""} & (gone | buried))
                    if not ends and one.out_of_turn and uncertain[there]:
                        uncertain[there] -= 1
                        continue
                    found += self._ends(f"{one.name} at {there}", ends, one)
            else:
                found += self._ends(one.name, bool(stored) + bool(gone) + len(buried), one)
        return found + self.wrong_now(seen)

    def _ends(self, what: str, ends: int, one: Sent) -> Iterator[str]:
        # what may have left at most once, and is not known to have arrived, is said to be dead
        unsure = AT_MOST_ONCE in one.qualities
        if not ends and not one.may_vanish:
            yield f"lost: {what}"
        if ends > 1 and not unsure and not sum(one.again.values()):
            yield f"more than one end: {what}"

    def _unexpected(self, seen: Seen) -> Iterator[str]:
        everywhere = {name for names in seen.stored.values() for name in names}
        for name in sorted(everywhere | {name for name, *_ in seen.dead} | set(seen.parked)):
            if name not in self.sent or not self.sent[name].committed:
                yield f"unexpected: {name}"
        for there, names in seen.stored.items():
            for name in names:
                if name in self.sent and there not in self.sent[name].matches:
                    yield f"led astray: {name} at {there}"

    def _too_often(self, seen: Seen) -> Iterator[str]:
        copies = {there: Counter(names) for there, names in seen.stored.items()}
        for one in self.committed:
            if AT_LEAST_ONCE in one.qualities:
                continue
            by_store = Counter({there: found[one.name] for there, found in copies.items()})
            if one.topic:
                twice = [t for t, n in by_store.items() if n > 1 + one.again[t] + one.again[""]]
            else:
                most = 1 + sum(one.again.values())
                twice = [t for t, n in by_store.items() if n] if by_store.total() > most else []
            if twice:
                yield f"duplicated: {one.name} at {', '.join(twice)}"

    def _out_of_order(self, seen: Seen) -> Iterator[str]:
        for there, names in seen.stored.items():
            by_key: dict[str, list[int]] = defaultdict(list)
            for name in dict.fromkeys(names):
                one = self.sent.get(name)
                if one is not None and not one.again and not one.out_of_turn:
                    by_key[one.key].append(one.number)
            for key, numbers in by_key.items():
                if any(later < earlier for earlier, later in pairwise(numbers)):
                    yield f"out of order: {key} at {there}: {numbers}"

    def _dead_wrongly(self, seen: Seen) -> Iterator[str]:
        for (name, there), count in Counter((name, there) for name, there, _ in seen.dead).items():
            if count > 1:
                yield f"dead twice: {name} for {there or 'all'}"
        for name, _, reason in seen.dead:
            one = self.sent.get(name)
            allowed = one and {
                REJECTED: one.poison,
                EXPIRED: one.may_expire,
                MAY_HAVE_LEFT: AT_MOST_ONCE in one.qualities,
            }
            if allowed and not allowed.get(reason):
                yield f"dead wrongly: {name}, {reason}"

    def _gone(self, seen: Seen) -> Iterator[str]:
        somewhere = {name for names in seen.stored.values() for name in names}
        somewhere |= {name for name, *_ in seen.dead} | set(seen.parked) | seen.outbox
        for one in self.committed:
            excused = one.discarded or one.may_vanish or one.forgotten or one.out_of_turn
            if one.name not in somewhere and not excused:
                yield f"nowhere: {one.name}"
