"""Messages that a receiver has read and not given to its handlers, because it was told to stop.

They are put back as if they had not been read: each shard goes back to the first of these messages,
and a message that was read from a lane stays in the lane. No attempt is counted.

A shard cannot go back behind a completed message: batch handlers may have handled later messages of
other keys. And messages of dialogs have arrived at their ends, which reading them again does not
undo. Such messages are set aside in the lanes of their keys instead, and are due immediately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saf.received import Received
from saf.receiving.hand import Hand

WHY = "its receiver was told to stop"
"""Reason shown for a message that waits in a lane after it was put back."""


class PutBack:
    """Messages of one delivery that were not given to handlers."""

    def __init__(self) -> None:
        self._messages: dict[Received, None] = {}
        self._in_lanes: set[Received] = set()
        """Messages that are set aside in lanes instead."""
        self._again: dict[int, int] = {}
        """First message id to read again, by shard that goes back."""

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, message: Received) -> bool:
        return message in self._messages

    def add(self, message: Received) -> None:
        """Put back a message."""
        self._messages[message] = None

    def reopen(
        self, hand: Hand, messages: Sequence[Received], complete: Iterable[Received]
    ) -> list[Received]:
        """Move shards back; return the messages, in order, that must be set aside instead.

        Args:
            hand: the shards.
            messages: the messages of the delivery, in order.
            complete: the messages of the delivery that are handled or set aside.
        """
        back = [entry for entry in messages if entry in self._messages]
        if hand.spoken:
            self._in_lanes.update(back)
            return back
        first: dict[int, int] = {}
        for entry in back:
            if entry.parked_id is None:
                first.setdefault(entry.shard, entry.id)
        passed = {
            entry.shard
            for entry in complete
            if entry.parked_id is None and entry.id > first.get(entry.shard, entry.id)
        }
        for shard, id_ in first.items():
            if shard not in passed:
                self._again[shard] = id_
                hand.shards[shard].reopen(id_ - 1)
        aside = [entry for entry in back if entry.parked_id is None and entry.shard in passed]
        self._in_lanes.update(aside)
        return aside

    def stays(self, one: Received) -> bool:
        """Return whether a message stays where it was read from, and will be read again."""
        if one.parked_id is not None:
            return one in self._messages and one not in self._in_lanes
        first_id = self._again.get(one.shard)
        return first_id is not None and one.id >= first_id
