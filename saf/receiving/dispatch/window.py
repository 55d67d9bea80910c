"""The window: a dispatcher's messages in memory, its requests in flight, and its progress.

The window holds the next messages of the shards that this member owns, each in the lane of its key.
One message of each lane is in flight at a time, and lanes take turns. A message's walk is:

    QUEUED      in memory, behind the earlier messages of its key
    IN_FLIGHT   its key has its turn. QUEUED again if it was not sent, or is to be sent again: a
                batch was refused, or the endpoint is down
    ENDED       it has an outcome (`saf.receiving.outcome`), as with any receiver. A dialog's
                message gets its outcome as its end receives it (`saf.receiving.dispatch.talking`)

A message that is expired, too large, delayed, or behind others of its key ends without being sent.
`saf.receiving.dispatch.judging` chooses the outcome that follows from an answer, and
`saf.receiving.dispatch.progress` tracks a shard's progress.

Nothing here queries the database. `Window.marks` returns the ended walks as `Marks`, which one
transaction writes (`saf.receiving.dispatch.marking`): only then are they complete for other members
too. From then on the window counts them as written. If writing fails, throw the window away:
messages in flight, or answered and not marked, are sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from saf.errors import Fenced
from saf.message import Message
from saf.received import Received
from saf.receiving.dispatch.progress import InHand, Mark
from saf.receiving.dispatch.replies import Answer
from saf.receiving.dispatch.talking import Talked
from saf.receiving.outcome import HANDLED, Dead, Outcome, Parked
from saf.receiving.retries import FailedAttempt, Waiting
from saf.setaside.isolation import said
from saf.setaside.lane import Kind


class State(StrEnum):
    """The place of a message on its walk; see the module's docstring."""

    QUEUED = "queued"
    IN_FLIGHT = "in flight"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Walk:
    """A message, and its state with the data of that state."""

    message: Received
    late: bool = False
    """True if the message waited in saf.parked for its deliver_at."""
    alone: bool = False
    """True if the message is sent in a request of its own next, because a batch was refused."""
    state: State = State.QUEUED
    outcome: Outcome | None = None
    """Outcome of a message that has ended; None for a dialog's message that its end receives."""
    reply: Message | None = None
    """Reply of the endpoint that has accepted the message."""
    talked: Talked | None = None
    """Result with which a dialog's message is received."""

    def __str__(self) -> str:
        message = self.message
        ended = f": {self.outcome}" if self.state is State.ENDED else ""
        return f"message {message.message_id} of {message.lane!r}, {self.state}{ended}"

    def step(self, state: State, *after: State) -> Walk:
        """Go on to a state, after one of these."""
        if self.state not in after:
            raise AssertionError(f"{self}: it cannot be {state}")
        self.state = state
        return self

    def end(self, outcome: Outcome) -> Walk:
        """End with an outcome."""
        self.outcome = outcome
        return self.step(State.ENDED, State.QUEUED, State.IN_FLIGHT)


def dead(reason: str, error: str) -> Dead:
    """Return the outcome of a message that an endpoint has rejected, or that has expired."""
    return Dead(reason=reason, error=said(error), fails=reason != "expired")


@dataclass(kw_only=True)
class Marks:
    """Rows to write in one transaction."""

    cursors: list[Mark] = field(default_factory=list)
    ended: list[Walk] = field(default_factory=list)
    """Messages whose walk has ended, except those that need only their shard's mark."""
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """New waiting states of lanes."""
    counted: dict[str, FailedAttempt] = field(default_factory=dict)
    """Attempts of lanes that already wait, which count now."""
    succeeded: list[str] = field(default_factory=list)
    """Lanes without messages in memory."""
    timed: set[int] = field(default_factory=set)
    """Shards with delayed messages removed."""
    attempts: list[tuple[Received, Answer]] = field(default_factory=list)
    """Failed attempts, for operators."""
    messages: int = 0
    """Number of messages completed: all but those that waited already, and wait elsewhere."""
    accepted: int = 0
    """Number of these messages that the endpoint has accepted."""

    @property
    def outcomes(self) -> dict[Received, Outcome]:
        """Outcomes of messages, except those that the ends of dialogs receive."""
        return {walk.message: walk.outcome for walk in self.ended if walk.outcome is not None}

    @property
    def talked(self) -> dict[Received, Talked]:
        """Results of messages that the ends of dialogs receive."""
        return {walk.message: walk.talked for walk in self.ended if walk.talked is not None}


@dataclass(kw_only=True)
class Lane:
    """The messages of a key in memory, in order; the first ones may be in flight, together."""

    name: str
    shard: int
    parked: bool
    """True if the messages were read from saf.parked, and not from the log."""
    queue: deque[Walk] = field(default_factory=deque)
    in_flight: int = 0


class Window:
    """Messages of a dispatcher in memory; see the module's docstring."""

    def __init__(self) -> None:
        self.shards: dict[int, InHand] = {}
        self.lanes: dict[str, Lane] = {}
        self.in_flight = 0
        self.held = 0
        """Number of messages in memory."""
        self.bytes = 0
        """Total size of their bodies in bytes."""
        self.leaving: Collection[int] = frozenset()
        """Shards whose further messages must not be sent."""
        self._ready: deque[Lane] = deque()
        self._resting: set[str] = set()
        self._stopped: set[str] = set()
        self._new = Marks()
        self._writing = 0
        """Number of complete messages that are being marked."""

    @property
    def unmarked(self) -> int:
        """Number of complete messages that are not marked yet."""
        return self._new.messages + self._writing

    @property
    def known_lanes(self) -> list[str]:
        """Lanes that are in memory, or were and are not marked yet."""
        return [*self.lanes, *self._stopped, *self._new.succeeded]

    @property
    def known_late(self) -> list[int]:
        """Parked ids of delayed messages that must not be read again."""
        late = [walk for lane in self.lanes.values() for walk in lane.queue if walk.late]
        ids = (walk.message.parked_id for walk in [*late, *self._new.ended])
        return [parked_id for parked_id in ids if parked_id is not None]

    @property
    def anything_ready(self) -> bool:
        """True if a message could be sent."""
        if not self.leaving:
            return bool(self._ready)
        return any(lane.shard not in self.leaving for lane in self._ready)

    @property
    def resting(self) -> int:
        """Number of keys that rest until they are woken."""
        return len(self._resting)

    # Incoming messages

    def add(self, message: Received, outcome: Outcome | None = None) -> None:
        """Take a message that was read: from the log, or because its deliver_at has come.

        If it has an outcome, it is not sent.
        """
        if message.shard not in self.shards:
            return
        walk = Walk(message, late=message.parked_id is not None)
        if not walk.late:
            hand = self.shards[message.shard]
            hand.read = max(hand.read, message.id)
            hand.pending[message.id] = None
        if outcome is None and message.lane in self._stopped:
            outcome = Parked.of(Kind.KEY, message.lane)
        if outcome is None:
            self._queue(walk, parked=False)
        else:
            self._complete(walk.end(outcome))

    def add_parked(self, lane: str, shard: int, messages: Iterable[Received]) -> None:
        """Take the first messages of a due lane; an empty lane is done."""
        if lane in self.lanes or lane in self._stopped or shard not in self.shards:
            return
        first = list(messages)
        for message in first:
            self._queue(Walk(message), parked=True)
        if not first:
            self._new.succeeded.append(lane)
            self._touch(shard)

    def _queue(self, walk: Walk, *, parked: bool) -> None:
        message = walk.message
        lane = self.lanes.get(message.lane)
        if lane is None:
            lane = Lane(name=message.lane, shard=message.shard, parked=parked)
            self.lanes[message.lane] = lane
            self._ready.append(lane)
        lane.queue.append(walk)
        self.held += 1
        self.bytes += message.size

    # Outgoing messages

    def next(self) -> Walk | None:
        """Return the next message to send; from now on, it is in flight."""
        for _ in range(len(self._ready)):
            lane = self._ready.popleft()
            if lane.shard in self.leaving:
                self._ready.append(lane)
                continue
            return self._off(lane)
        return None

    def next_of(self, walk: Walk) -> Walk | None:
        """Return the next message of a key in flight, to be sent in the same request."""
        lane = self.lanes[walk.message.lane]
        return self._off(lane) if len(lane.queue) > lane.in_flight else None

    def _off(self, lane: Lane) -> Walk:
        walk = lane.queue[lane.in_flight].step(State.IN_FLIGHT, State.QUEUED)
        lane.in_flight += 1
        self.in_flight += 1
        return walk

    def done(self, walk: Walk, reply: Message | None = None) -> None:
        """Note that the endpoint has accepted a message, and may have replied."""
        self._new.accepted += 1
        walk.reply = reply
        self._end(walk.end(HANDLED))

    def talked(self, walk: Walk, result: Talked) -> None:
        """Note the result of a dialog's message, which the marks receive."""
        self._new.accepted += result.sent
        walk.talked = result
        self._end(walk.step(State.ENDED, State.IN_FLIGHT))

    def put_back(self, walk: Walk) -> None:
        """Queue a message again, after the other lanes, as if it had not been sent."""
        self._stands(self._landed(walk.step(State.QUEUED, State.IN_FLIGHT)))

    def rest(self, walk: Walk) -> None:
        """Make a message's key wait until it is woken, as if the message had not been sent."""
        self._resting.add(self._landed(walk.step(State.QUEUED, State.IN_FLIGHT)).name)

    def wake(self, name: str) -> None:
        """Give a resting lane its turn again."""
        if name in self._resting:
            self._resting.discard(name)
            self._stands(self.lanes[name])

    def reject(self, walk: Walk, reason: str, error: str) -> None:
        """Make a dead letter of a message that the endpoint has rejected. Its key continues."""
        self._end(walk.end(dead(reason, error)))

    def wait(self, walk: Walk, waiting: Waiting) -> None:
        """Make a message wait in its key's lane, and the key's other messages behind it."""
        lane = self._landed(walk)
        for queued in lane.queue:
            self._complete(queued.end(Parked.of(Kind.KEY, lane.name)))
        self._let_go(lane.queue)
        self._touch(lane.shard)
        self._new.waiting[lane.name] = waiting
        self._stopped.add(lane.name)
        del self.lanes[lane.name]

    def note(self, walk: Walk, answer: Answer) -> None:
        """Record a failed attempt for operators."""
        self._new.attempts.append((walk.message, answer))
        self._touch(walk.message.shard)

    def count(self, failed: Iterable[FailedAttempt]) -> None:
        """Count the attempts of lanes that already wait."""
        for attempt in failed:
            owned = attempt.shard in self.shards and attempt.shard not in self.leaving
            if owned and attempt.lane not in self.lanes:
                self._new.counted[attempt.lane] = attempt
                self._touch(attempt.shard)

    def _landed(self, walk: Walk) -> Lane:
        lane = self.lanes[walk.message.lane]
        lane.in_flight -= 1
        self.in_flight -= 1
        return lane

    def _stands(self, lane: Lane) -> None:
        """Give a lane its turn, unless more of its messages are in flight."""
        if not lane.in_flight:
            self._ready.append(lane)

    def _end(self, walk: Walk) -> None:
        lane = self._landed(walk)
        lane.queue.remove(walk)  # the first, or one of the first, which are in flight
        self._let_go([walk])
        self._complete(walk)
        if lane.queue:
            self._stands(lane)
            return
        del self.lanes[lane.name]
        if lane.parked:
            self._new.succeeded.append(lane.name)

    def _complete(self, walk: Walk) -> None:
        """Note that a walk has ended, for the next marks."""
        message = walk.message
        moved = message.parked_id is not None and isinstance(walk.outcome, Parked)
        self._new.messages += not moved
        if message.parked_id is None:
            self.shards[message.shard].complete(message.id)
            if walk.outcome is HANDLED and walk.reply is None:
                return  # its shard's mark is enough, so its body need not stay in memory
        elif walk.late or moved:
            self._new.timed.add(message.shard)
        self._touch(message.shard)
        self._new.ended.append(walk)

    def _let_go(self, walks: Collection[Walk]) -> None:
        self.held -= len(walks)
        self.bytes -= sum(walk.message.size for walk in walks)

    def _touch(self, shard: int) -> None:
        self.shards[shard].touched = True

    # Marks

    def marks(self) -> Marks | None:
        """Return the rows to write, if any; call `written` afterwards."""
        touched = [hand for hand in self.shards.values() if hand.touched or hand.closes]
        if not touched:
            return None
        marks, self._new = self._new, Marks()
        self._writing += marks.messages
        marks.cursors = [hand.mark() for hand in touched]
        return marks

    def written(self, marks: Marks) -> None:
        """Note that these marks are written: the database knows which lanes wait."""
        self._writing -= marks.messages
        self._stopped.difference_update(marks.waiting)

    # Taking and dropping shards

    def busy(self) -> set[int]:
        """Return the shards with messages in flight or unmarked."""
        return {lane.shard for lane in self.lanes.values() if lane.in_flight} | {
            hand.shard for hand in self.shards.values() if hand.touched
        }

    def own(self, hands: Iterable[InHand]) -> list[int]:
        """Keep the shards that are still owned, add the new ones, and drop the others.

        Return the dropped shards.

        Raises:
            Fenced: a dropped shard has messages in flight or unmarked.
        """
        now = {hand.shard: hand for hand in hands}
        gone = [
            shard
            for shard, hand in self.shards.items()
            if shard not in now or now[shard].epoch != hand.epoch
        ]
        if self.busy() & set(gone):
            raise Fenced("the inbox", gone)
        for shard in gone:
            del self.shards[shard]
        for shard, hand in now.items():
            self.shards.setdefault(shard, hand)
        if gone:
            dropped = set(gone)
            self._ready = deque(one for one in self._ready if one.shard not in dropped)
            for lane in [one for one in self.lanes.values() if one.shard in dropped]:
                self._let_go(lane.queue)
                del self.lanes[lane.name]
            self._resting.intersection_update(self.lanes)
        return gone
