"""A hand: the shards that a transaction has locked, and the messages read from them.

A hand holds no connection. `saf.receiving.claim` locks and writes, `saf.receiving.reading` reads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from saf.received import Received
from saf.receiving.outcome import OVERDUE, UNREADABLE, Outcome, Parked
from saf.setaside.lane import Kind

if TYPE_CHECKING:
    from saf.signing.signer import Signer

# Fates of a message. NOW: may be handed out; SPOKEN: a dialog's message, only in its turn; BEHIND:
# its key waits
NOW, LATE, EXPIRED, SPOKEN, UNREAD, BEHIND = range(6)

NO_IDS = "{}"
"""An empty set of ids in PostgreSQL's form."""


class Place(NamedTuple):
    """Where to read on in the open batch of a shard. Snapshots are text."""

    shard: int
    done: str
    open: str | None
    after: int
    """The id after which to read."""
    beyond: str
    """Ids after it that are complete already, as an int8multirange."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The subscription of the inbox that reads, and the member that reads for it, if any."""

    subscription_id: int
    name: str
    service: str | None
    owner: UUID | None = None
    """Member that reads: claims only its own shards. None: claims shards without an owner."""
    types: Collection[str | None] | None = None
    """Message types that the reader has handlers for; None: all types."""
    signer: Signer | None = None
    """Signs messages sent on the dialogs of the reader's messages."""
    passes: bool = False
    """True if the reader passes messages of dialogs on unchanged, without an end of its own."""

    @property
    def converses(self) -> bool:
        """Return whether the reader is an end of dialogs: only a service's own subscription is.

        Others listen in.
        """
        return self.name == self.service and not self.passes


@dataclass(kw_only=True)
class Cursor:
    """The cursor of a shard. Snapshots are text."""

    shard: int
    batch: int
    epoch: int = 0
    done: str = ""
    open: str | None = None
    position: int = 0
    beyond: str = NO_IDS
    """Ids beyond the position that were complete when the cursor was read."""


@dataclass(kw_only=True)
class Shard(Cursor):
    """The cursor of a shard in hand; `saf.receiving.claim.move` writes it."""

    allowance: int | None = None
    until: str | None = None
    """The snapshot for which ``cuts`` were found."""
    cuts: list[str] = field(default_factory=list)
    """Transaction ids at which the next batches may end, in order."""
    closed: tuple[int, str, str, str | None, list[str], int] | None = None
    """The batch closed last, with the state that `reopen` restores."""
    ahead: bool = False
    """True if messages were taken ahead of the position; see `saf.receiving.ahead`."""
    taken: Sequence[int] = ()
    """Ids of these messages."""
    left: Sequence[int] | None = None
    """Ids of the batch that stay incomplete, ascending: all up to the last one. None: unknown."""

    @property
    def place(self) -> Place:
        """Where to read on."""
        return Place(self.shard, self.done, self.open, self.position, self.beyond)

    def open_at(self, snapshot: str) -> None:
        """Open a batch: up to the next cut, or up to the snapshot if no cut is left."""
        self.batch += 1
        if self.cuts:
            self.until, self.open = snapshot, cut(snapshot, int(self.cuts.pop(0)))
        else:
            self.until, self.open = None, snapshot

    def close(self) -> None:
        """Close the batch, which is complete."""
        assert self.open is not None  # noqa: S101 - only an open batch is closed
        self.closed = self.batch, self.done, self.open, self.until, [*self.cuts], self.position
        self.done, self.open, self.position, self.beyond = self.open, None, 0, NO_IDS
        if self.until is not None and self.cuts:
            self.open_at(self.until)
        else:
            self.until = None

    def extend(self, snapshot: str, first: int | None, position: int, beyond: str) -> None:
        """Open a batch of the rest of this one, and of later messages up to a snapshot.

        ``first`` is the first transaction with an incomplete message; None: the batch begins where
        it began. ``position`` and ``beyond`` show the complete messages.
        """
        if first is not None:
            self.done = cut(snapshot, first)
        self.batch += 1
        self.open, self.until, self.cuts = snapshot, None, []
        self.position, self.beyond = position, beyond

    def reopen(self, position: int) -> None:
        """Go back in the batch that was read: only messages up to the position are complete."""
        if self.closed is not None:
            self.batch, self.done, self.open, self.until, self.cuts, self.position = self.closed
            self.closed = None
        if self.ahead:
            self.taken, self.left = [id_ for id_ in self.taken if id_ <= position], None
        else:
            self.position = position


@dataclass(kw_only=True)
class Hand:
    """The shards that this transaction has locked, and the messages read from them."""

    reader: Reader
    transaction: str
    """The id of the transaction that holds the locks."""
    shards: dict[int, Shard]
    marked: bool = False
    """True if the connection shows without a query whether the transaction is over."""
    failed: frozenset[int] = frozenset()
    """Shards whose last delivery did not complete."""
    waiting: frozenset[str] = frozenset()
    """Lanes of the keys in these shards that wait."""
    late: list[int] = field(default_factory=list)
    """Shards with delayed messages that are due."""
    crowded: frozenset[int] = frozenset()
    """Shards in which keys or delayed messages wait."""
    now: str = ""
    """The snapshot at which batches are opened."""
    opened: frozenset[int] = frozenset()
    """Shards whose batch was opened when they were locked."""
    full: bool = False
    """True if the shards have more messages than one delivery."""
    written: dict[int, int] = field(default_factory=dict)
    """Positions already written, by shard."""
    messages: list[Received] = field(default_factory=list)
    """Messages to hand out, in order."""
    outcomes: dict[Received, Outcome] = field(default_factory=dict)
    """Outcomes of messages not to hand out."""
    spoken: bool = False
    """True if any of the messages belongs to a dialog."""

    @property
    def unwritten(self) -> list[Shard]:
        """The shards whose stored cursors differ from these."""
        return [
            shard
            for number, shard in self.shards.items()
            if self.written.get(number) != shard.position
        ]

    @property
    def all(self) -> list[Received]:
        """All messages that were read."""
        return [*self.messages, *self.outcomes]

    def take(self, message: Received, fate: int) -> None:
        """Add a message, to be handed out unless its fate is an outcome."""
        outcome = outcome_of(message, fate)
        if outcome is not None:
            self.outcomes[message] = outcome
        else:
            self.spoken = self.spoken or fate == SPOKEN
            self.messages.append(message)


def outcome_of(message: Received, fate: int) -> Outcome | None:
    """Return the outcome of a message that is not handed out; None for one that is."""
    if fate == UNREAD:
        return UNREADABLE
    if fate == EXPIRED:
        return OVERDUE
    if fate == LATE:
        return Parked.of(Kind.LATER, message.shard)
    return Parked.of(Kind.KEY, message.lane) if fate == BEHIND else None


def cut(snapshot: str, txid: int) -> str:
    """Return the part of a snapshot that lies before a transaction.

    >>> cut("10:20:10,15", 12), cut("10:20:10,15", 17), cut("18:20:18", 17)
    ('10:12:10', '10:17:10,15', '17:17:')
    """
    running = [number for number in snapshot.split(":")[2].split(",") if number]
    before = [number for number in running if int(number) < txid]
    return f"{before[0] if before else txid}:{txid}:{','.join(before)}"


def without(snapshot: str, txid: int) -> str:
    """Return a snapshot in which one transaction counts as still in progress.

    >>> without("10:20:10,15", 16), without("20:20:", 19), without("20:20:", 25)
    ('10:20:10,15,16', '19:20:19', '20:20:')
    """
    first, end, running = snapshot.split(":")
    if txid >= int(end):
        return snapshot
    numbers = sorted({int(number) for number in running.split(",") if number} | {txid})
    return f"{min(int(first), txid)}:{end}:{','.join(map(str, numbers))}"
