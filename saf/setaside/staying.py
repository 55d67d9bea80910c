"""Staying: why operators may be unable to decide about a message that is set aside.

A process may be about to deliver or to handle it, or the decision is impossible for it. Messages
that a forwarder's open batch has set aside beyond its position are in hand: while they are set
aside, and only then, the batch knows not to send them as well, or to set them aside again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from saf.log.shards import ALL_SHARDS, LAST

WHY: Mapping[str, str] = MappingProxyType(
    {
        "in_hand": "somebody has it in hand, or will within seconds: decide again in a moment",
        "batch": "the forwarder's open batch has set it aside, and has not passed it yet: decide "
        "once it has",
        "doubt": "it may have arrived, so the next run turns it into a dead letter: decide then",
        "later": "it waits for its deliver_at, and holds nobody up",
        "ahead": "it waits for an earlier message of its dialog, without which it means nothing",
        "no_end": "the end of its dialog is not here: nobody could be told",
        "dialog": "the other end of its dialog is where it is",
        "there": "it waits for that destination already",
        "arrived": "it has arrived where it is handled: only a forwarder's messages go elsewhere",
        "stopped": "the decision was stopped before it: decide again",
    }
)
"""Why a message stays as it is, in words."""

# The newest version of each cursor, as in saf.log.shards
TAKEN = f"""
taken AS MATERIALIZED (
    SELECT c.subscription_id, c.shard, s.log, c.position, c.opened_at
    FROM saf.subscription s CROSS JOIN {ALL_SHARDS} AS h (shard)
    CROSS JOIN LATERAL (
        SELECT * FROM saf.cursor
        WHERE (subscription_id, shard, batch) <= (s.subscription_id, h.shard, {LAST})
        ORDER BY subscription_id DESC, shard DESC, batch DESC LIMIT 1) AS c
    WHERE c.subscription_id = s.subscription_id AND c.shard = h.shard
      AND CASE WHEN s.log = 'outbox' THEN c.open IS NOT NULL ELSE c.owner IS NOT NULL END)
"""
OF_BATCH = """EXISTS (
    SELECT FROM taken t
    WHERE (t.subscription_id, t.shard) = ({one}.subscription_id, {one}.shard)
      AND t.log = 'outbox' AND {one}.id > t.position AND {one}.{at} t.opened_at)"""
"""SQL: whether a forwarder's open batch, one of `TAKEN`, has set a row aside and is not past it.
``at`` is the column that shows this, and the comparison: `PARKED_BY`, `DEAD_SINCE`."""
PARKED_BY, DEAD_SINCE = "opened_at =", "dead_letter_at >="


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Number of messages set aside that a filter matches."""

    messages: int
    """Messages that an operator may decide about."""
    through: int | None
    """The greatest of their numbers; None if there are none."""
    stays: Mapping[str, int]
    """Further matches, which stay whatever is decided, by reason: the keys of `WHY`."""
    more: bool
    """Whether there are more, which were not counted."""

    @property
    def staying(self) -> int:
        """Number of messages that stay."""
        return sum(self.stays.values())

    @classmethod
    def of(cls, rows: Iterable[tuple[str | None, int, int | None, bool]]) -> Self:
        """Return the result of counting up to a limit.

        ``rows`` contain the reason, or None; the count and the greatest number up to the limit; and
        whether the message beyond the limit is one of them.

        >>> Counted.of([(None, 2, 7, False), ("later", 1, 6, False), ("batch", 0, None, True)])
        Counted(messages=2, through=7, stays={'later': 1}, more=True)
        """
        found = {why: (count, through, more) for why, count, through, more in rows}
        messages, through, _ = found.get(None, (0, None, False))
        return cls(
            messages=messages,
            through=through,
            stays={why: count for why, (count, *_) in found.items() if why is not None and count},
            more=any(more for *_, more in found.values()),
        )


def in_words(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return how many messages stay, by reason in words; ``counts`` are by the keys of `WHY`.

    >>> in_words([{"later": 2}, {"later": 2}])
    {'it waits for its deliver_at, and holds nobody up': 4}
    """
    found: Counter[str] = Counter()
    for count in counts:
        for why, number in count.items():
            found[WHY[why]] += number
    return dict(found)
