"""The window: what a dispatcher has in memory, which requests are in flight, and how far it is.

It holds the next messages of the shards that this member owns, each in the lane of its key. Of each
lane, one message is in flight at a time, and lanes take turns. A message is complete if it was
answered, or is parked, or is a dead letter; `saf.dispatch.progress` keeps how far a shard is.

Nothing here asks the database. `Window.marks` gives what is to be written, and from then on the
window is as if it were written. If writing fails, throw the window away: what was in flight, or
answered and not marked, is sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from uuid import UUID

from saf.dispatch.answers import Answer
from saf.dispatch.marks import Marks
from saf.dispatch.progress import InHand
from saf.dispatch.talking import Outcome
from saf.errors import Fenced
from saf.message import Message
from saf.received import Received
from saf.receiving.retries import Waiting


@dataclass(kw_only=True)
class Lane:
    """The messages of a key in memory, in order; the first of them may be in flight, together."""

    name: str
    shard: int
    parked: bool
    """Whether they were read from where they wait, and not from the log."""
    queue: deque[Received] = field(default_factory=deque)
    in_flight: int = 0


class Window:
    """See the top of this module."""

    def __init__(self) -> None:
        self.shards: dict[int, InHand] = {}
        self.lanes: dict[str, Lane] = {}
        self.in_flight = 0
        self.held = 0
        """How many messages are in memory."""
        self.bytes = 0
        """How many bytes their bodies have."""
        self.leaving: Collection[int] = frozenset()
        """Shards of which no further message is to be sent."""
        self._ready: deque[Lane] = deque()
        self._resting: set[str] = set()
        self._stopped: set[str] = set()
        self._late: set[int] = set()
        self._new = Marks()
        self._writing = 0
        """How many messages are complete, and are being marked."""

    @property
    def unmarked(self) -> int:
        """How many messages are complete, and not marked yet."""
        return self._new.messages + self._writing

    @property
    def known_lanes(self) -> list[str]:
        """The lanes that are in memory, or were, and are not marked yet."""
        return [*self.lanes, *self._stopped, *self._new.succeeded]

    @property
    def known_late(self) -> list[int]:
        """The messages whose deliver_at has come, by parked_id, that are not to be read again."""
        return [
            *self._late,
            *self._new.unpark,
            *(one for one, _ in self._new.move),
            *(one.parked_id for one, _ in self._new.talked if one.parked_id is not None),
        ]

    @property
    def ids(self) -> set[UUID]:
        """The ids of the messages in memory."""
        return {one.message_id for lane in self.lanes.values() for one in lane.queue}

    @property
    def anything_ready(self) -> bool:
        """Whether a message could be sent."""
        if not self.leaving:
            return bool(self._ready)
        return any(lane.shard not in self.leaving for lane in self._ready)

    @property
    def resting(self) -> int:
        """How many keys have to wait until they are woken."""
        return len(self._resting)

    # What comes in

    def add(self, message: Received, *, behind: bool) -> None:
        """Take a message of a log that was read; ``behind`` others of its key that wait."""
        hand = self._read(message)
        if behind or message.lane in self._stopped:
            self._new.park.append(message)
            self._complete(message, hand)
            return
        self._queue(message, parked=False)

    def postpone(self, message: Received) -> None:
        """Let a message that was read wait for its time."""
        self._new.late.append(message)
        self._new.timed.add(message.shard)
        self._complete(message, self._read(message))

    def bury(self, message: Received, reason: str, error: str | None) -> None:
        """Make a dead letter of a message that was read; without an error, it is unreadable."""
        if error is None:
            self._new.unreadable.append(message)
        else:
            self._new.bury.append((message, reason, error))
        if message.parked_id is not None:
            self._new.timed.add(message.shard)  # perhaps the last one that waited for its time
        self._complete(message, self._read(message))

    def add_parked(self, lane: str, shard: int, messages: Iterable[Received]) -> None:
        """Take the first messages of a lane whose time has come; none are left if it is empty."""
        if lane in self.lanes or lane in self._stopped or shard not in self.shards:
            return
        some = list(messages)
        for message in some:
            self._queue(message, parked=True)
        if not some:
            self._new.succeeded.append(lane)
            self._touch(shard)

    def add_late(self, message: Received, *, behind: bool) -> None:
        """Take a message whose deliver_at has come; ``behind`` others of its key that wait."""
        if message.shard not in self.shards:
            return
        if behind or message.lane in self._stopped:
            self._move(message)
            return
        assert message.parked_id is not None  # noqa: S101 - it waited
        self._late.add(message.parked_id)
        self._queue(message, parked=False)

    def _read(self, message: Received) -> InHand | None:
        """Note that a message of the log was read, and is not complete."""
        if message.parked_id is not None:
            return None
        hand = self.shards[message.shard]
        hand.read = max(hand.read, message.id)
        hand.pending[message.id] = None
        return hand

    def _queue(self, message: Received, *, parked: bool) -> None:
        lane = self.lanes.get(message.lane)
        if lane is None:
            lane = Lane(name=message.lane, shard=message.shard, parked=parked)
            self.lanes[message.lane] = lane
            self._ready.append(lane)
        lane.queue.append(message)
        self.held += 1
        self.bytes += message.size

    # What goes out

    def next(self) -> Received | None:
        """Give the next message to send; from now on, it is in flight."""
        for _ in range(len(self._ready)):
            lane = self._ready.popleft()
            if lane.shard in self.leaving:
                self._ready.append(lane)
                continue
            return self._off(lane)
        return None

    def next_of(self, message: Received) -> Received | None:
        """Give the next message of the key of one that is in flight, to be sent with it."""
        lane = self.lanes[message.lane]
        return self._off(lane) if len(lane.queue) > lane.in_flight else None

    def _off(self, lane: Lane) -> Received:
        message = lane.queue[lane.in_flight]
        lane.in_flight += 1
        self.in_flight += 1
        return message

    def done(self, message: Received, reply: Message | None = None) -> None:
        """The endpoint has accepted a message, and perhaps answered."""
        self._new.accepted += 1
        if reply is not None:
            self._new.replies.append((message, reply))
        self._end(message)

    def talked(self, message: Received, outcome: Outcome) -> None:
        """Something has come of a message of a dialog: the marks receive it."""
        self._new.accepted += outcome.sent
        self._new.talked.append((message, outcome))
        self._end(message)

    def put_back(self, message: Received) -> None:
        """Let a message be sent again, after the other lanes, as if it had not been sent."""
        self._stands(self._landed(message))

    def rest(self, message: Received) -> None:
        """Let the key of a message wait until it is woken, as if the message had not been sent."""
        self._resting.add(self._landed(message).name)

    def wake(self, name: str) -> None:
        """Let a lane that rests have its turn again."""
        if name in self._resting:
            self._resting.discard(name)
            self._stands(self.lanes[name])

    def reject(self, message: Received, reason: str, error: str) -> None:
        """The endpoint has rejected a message: a dead letter. Its key goes on."""
        self._new.bury.append((message, reason, error))
        self._end(message)

    def wait(self, message: Received, waiting: Waiting) -> None:
        """Let a message wait in the lane of its key, and what is in memory of the key behind it."""
        lane = self._landed(message)
        hand = self.shards[message.shard]
        for one in lane.queue:
            if one.parked_id is None:
                self._new.park.append(one)
                self._complete(one, hand)
            else:
                self._move(one)
        self._let_go(lane.queue)
        self._touch(message.shard)
        self._new.waiting[lane.name] = waiting
        self._stopped.add(lane.name)
        del self.lanes[lane.name]

    def note(self, message: Received, answer: Answer) -> None:
        """Remember for people that an attempt has failed."""
        self._new.attempts.append((message, answer))
        self._touch(message.shard)

    def count(self, lanes: Iterable[Waiting]) -> None:
        """Let lanes that wait already have other attempts."""
        for one in lanes:
            owned = one.shard in self.shards and one.shard not in self.leaving
            if owned and one.lane not in self.lanes:
                self._new.waiting[one.lane] = one
                self._touch(one.shard)

    def _landed(self, message: Received) -> Lane:
        lane = self.lanes[message.lane]
        lane.in_flight -= 1
        self.in_flight -= 1
        return lane

    def _stands(self, lane: Lane) -> None:
        """Let a lane have its turn, unless more of it is in flight."""
        if not lane.in_flight:
            self._ready.append(lane)

    def _end(self, message: Received) -> None:
        lane = self._landed(message)
        lane.queue.popleft()
        self.held -= 1
        self.bytes -= message.size
        self._complete(message, self.shards[message.shard])
        if lane.queue:
            self._stands(lane)
            return
        del self.lanes[lane.name]
        if lane.parked:
            self._new.succeeded.append(lane.name)

    def _complete(self, message: Received, hand: InHand | None) -> None:
        self._new.messages += 1
        if message.parked_id is None:
            assert hand is not None  # noqa: S101 - it is of the log
            hand.complete(message.id)
            return
        self._forget_late(message)
        self._touch(message.shard)
        # where a message of a dialog waits, it is received, and perhaps waits on
        if not (self._new.talked and self._new.talked[-1][0] is message):
            self._new.unpark.append(message.parked_id)

    def _let_go(self, messages: Collection[Received]) -> None:
        self.held -= len(messages)
        self.bytes -= sum(one.size for one in messages)

    def _move(self, message: Received) -> None:
        assert message.parked_id is not None  # noqa: S101 - it waits already
        self._new.move.append((message.parked_id, message.lane))
        self._new.timed.add(message.shard)
        self._forget_late(message)
        self._touch(message.shard)

    def _forget_late(self, message: Received) -> None:
        if message.parked_id in self._late:
            self._late.discard(message.parked_id)
            self._new.timed.add(message.shard)

    def _touch(self, shard: int) -> None:
        self.shards[shard].touched = True

    # What is written

    def marks(self) -> Marks | None:
        """What is to be written, if there is anything; say so by `written`."""
        touched = [hand for hand in self.shards.values() if hand.touched or hand.closes]
        if not touched:
            return None
        marks, self._new = self._new, Marks()
        self._writing += marks.messages
        marks.cursors = [hand.mark() for hand in touched]
        return marks

    def written(self, marks: Marks) -> None:
        """These marks are written: what they let wait is known to the database."""
        self._writing -= marks.messages
        self._stopped.difference_update(marks.waiting)

    # Shards that come and go

    def busy(self) -> set[int]:
        """The shards of which something is in flight, or not marked."""
        return {lane.shard for lane in self.lanes.values() if lane.in_flight} | {
            hand.shard for hand in self.shards.values() if hand.touched
        }

    def own(self, hands: Iterable[InHand]) -> list[int]:
        """Keep the shards that are still owned, take the new ones, and drop the others.

        Return the shards that were dropped.

        Raises:
            Fenced: something is under way in one of them.
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
                self._late.difference_update(one.parked_id or 0 for one in lane.queue)
                del self.lanes[lane.name]
            self._resting.intersection_update(self.lanes)
        return gone
