"""A hand: the shards that a transaction has locked, and the messages that were read of them.

It holds no connection. `saf.receiving.claim` locks and writes, `saf.receiving.reading` reads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from saf.received import Received

if TYPE_CHECKING:
    from saf.signing.signer import Signer

# Fates of a message. NOW: it can be handed out; a message of a dialog only if it is its turn
NOW, LATE, EXPIRED, SPOKEN, UNREAD = 0, 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Who reads: a subscription of the inbox, and the member that reads for it, if there is one."""

    subscription_id: int
    name: str
    service: str | None
    owner: UUID | None = None
    """The member that reads: it claims its own shards only. None: claims those that nobody owns."""
    types: Collection[str | None] | None = None
    """The types of messages that it has handlers for; None: it takes all."""
    signer: Signer | None = None
    """Signs what is said on the dialogs of its messages."""

    @property
    def converses(self) -> bool:
        """Whether it is an end of dialogs. A service's own subscription is; others listen in."""
        return self.name == self.service


@dataclass(kw_only=True)
class Shard:
    """The cursor of a shard in hand; `move` writes it. Snapshots are held as text."""

    shard: int
    batch: int
    done: str
    open: str | None
    position: int
    allowance: int | None
    until: str | None
    """The snapshot for which ``cuts`` were found."""
    cuts: list[str]
    """Transaction ids at which the next batches may end, in order."""
    epoch: int
    closed: tuple[int, str, str, str | None, list[str]] | None = None
    """The batch that was closed last, with what `reopen` needs to know of it."""

    def open_at(self, snapshot: str) -> None:
        """Open a batch: up to the next cut, or up to the snapshot if there is no cut."""
        self.batch += 1
        if self.cuts:
            self.until = self.until or snapshot
            self.open = cut(self.until, int(self.cuts.pop(0)))
        else:
            self.until, self.open = None, snapshot

    def close(self) -> None:
        """Close the batch, which is complete."""
        assert self.open is not None  # noqa: S101 - only what is open is closed
        self.closed = self.batch, self.done, self.open, self.until, [*self.cuts]
        self.done, self.open, self.position = self.open, None, 0
        if self.until is not None and self.cuts:
            self.open_at(self.until)
        else:
            self.until = None

    def reopen(self, position: int) -> None:
        """Go back in the batch that was read: only what is up to the position is complete."""
        if self.closed is not None:
            self.batch, self.done, self.open, self.until, self.cuts = self.closed
        self.position = position


@dataclass(kw_only=True)
class Hand:
    """The shards that this transaction has locked, and what was read of them."""

    reader: Reader
    transaction: str
    """The id of the transaction that has locked them."""
    shards: dict[int, Shard]
    marked: bool = False
    """Whether the connection tells without asking if the transaction is over."""
    failed: frozenset[int] = frozenset()
    """The shards whose last delivery did not come to its end."""
    waiting: frozenset[str] = frozenset()
    """The lanes of keys in these shards that wait."""
    late: list[int] = field(default_factory=list)
    """The shards with delayed messages whose time has come."""
    crowded: frozenset[int] = frozenset()
    """The shards in which keys or delayed messages wait."""
    written: dict[int, int] = field(default_factory=dict)
    """The positions that are written already, by shard."""
    messages: list[Received] = field(default_factory=list)
    """The messages to hand out, in order."""
    aside: dict[int, list[Received]] = field(
        default_factory=lambda: {LATE: [], EXPIRED: [], UNREAD: []}
    )
    """The messages not to hand out now, by their fate."""
    spoken: bool = False
    """Whether any of the messages belongs to a dialog."""

    @property
    def unwritten(self) -> list[Shard]:
        """The shards whose cursors are not yet written as they are here."""
        return [
            one
            for number, one in self.shards.items()
            if one.closed is not None or self.written.get(number) != one.position
        ]

    @property
    def all(self) -> list[Received]:
        """Every message that was read."""
        return [*self.messages, *(one for some in self.aside.values() for one in some)]

    def take(self, message: Received, fate: int) -> None:
        """Add a message to the others that have the same fate."""
        self.spoken = self.spoken or fate == SPOKEN
        self.aside.get(fate, self.messages).append(message)


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

    >>> without("10:20:10,15", 12), without("20:20:", 19), without("20:20:", 25)
    ('10:20:10,12,15', '19:20:19', '20:20:')
    """
    first, end, running = snapshot.split(":")
    if txid >= int(end):
        return snapshot
    numbers = sorted({int(number) for number in running.split(",") if number} | {txid})
    return f"{min(int(first), txid)}:{end}:{','.join(map(str, numbers))}"
