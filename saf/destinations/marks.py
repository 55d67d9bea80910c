"""Marks: how far a destination has got, as it knows itself and as its source remembers.

A destination keeps a mark for each source, shard and lane. The mark moves in the atomic step that
stores messages; at a broker it is a row of saf.watermark. After the destination's answer, the
source writes the same mark into saf.acknowledged, in the transaction that moves its own position
(`saf.engine.acknowledged`).

So at each contact the two marks are the same, with one exception: the answer for some messages got
lost. Then the destination's mark is higher, and the source still has these messages in hand or has
parked them, or an operator took them out of their lane (`saf.setaside.in_hand`). Any other
difference means that one side was set back, by an incomplete backup or failover:

    the destination's mark is lower            the destination was set back (`saf.errors.Behind`)
    it is higher, or has a different batch     the source was set back (`saf.errors.Ahead`)

A number alone is not enough, because numbers are used again after a set-back. So a mark also
records when its batch was opened. For messages that an operator retries, or that have found a
route, it records when that happened (saf.parked.opened_at).

A mark passes messages that were set aside. A source that was set back to a moment at which it had
such a message in hand or parked would send the message again, and find it stored. So before the
source lets a mark pass, it notes for each shard when messages were set aside
(saf.cursor.set_aside_at); also when an operator takes parked messages out of their lanes. The mark
of the shard's own lane, which every delivery meets, contains the last of these times. A source that
does not know that time was set back. It remembers the last `saf.log.cursor.TIMES` of these times.

A mark is moved, and remembered, only for shards of the chunk's messages. So an idle shard or
destination costs nothing, and a busy one costs a row per shard and chunk on either side.

Some marks are not acknowledged: those older than saf.acknowledged, and those of at_most_once,
because no task waits for their answers. They are trusted if their batch is not later than the
source's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from saf.log.cursor import TIMES
from saf.setaside.lane import Kind, Lane

PLACES = """
unnest(%(place_shards)s, %(place_epochs)s, %(place_asides)s, %(place_last)s, %(known_batches)s,
       %(known_positions)s, %(known_moments)s)
    AS p (shard, epoch, aside, last, batch, position, opened_at)
"""
"""SQL: the own places of shards, with their epochs, the last message to store, the marks known of
them, and when messages were last set aside."""

Place = tuple[str, int]
"""A lane and a shard: each place has a mark. The quality and `place_name` make the lane's name."""

MAIN = ""
"""Name of a destination's own lane."""

AGAIN, ONCE = "again:", "once:"
"""Prefixes of lane names for the marks of at_least_once and at_most_once, which drop nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Progress of a shard in a lane: everything up to (batch, position) is stored."""

    batch: int = 0
    position: int = 0
    opened_at: datetime | None = None
    """When the batch that was open as the mark moved was opened."""
    acknowledged: bool = False
    """True if the source remembers the mark; for at_most_once it need not."""
    set_aside_at: datetime | None = None
    """In a destination's own lane, when the source last set aside messages of the shard."""

    @classmethod
    def of(
        cls,
        batch: int,
        position: int,
        opened_at: datetime | None,
        acknowledged: bool = True,
        set_aside_at: datetime | None = None,
    ) -> Mark:
        """Make a mark from a row of saf.watermark or of saf.acknowledged."""
        return cls(
            batch=batch,
            position=position,
            opened_at=opened_at,
            acknowledged=acknowledged,
            set_aside_at=set_aside_at,
        )

    @property
    def number(self) -> tuple[int, int]:
        """Batch and position, by which marks are compared."""
        return self.batch, self.position

    def __str__(self) -> str:
        return f"batch {self.batch} up to {self.position}" if self.number > (0, 0) else "nothing"


NOTHING = Mark()


@dataclass(frozen=True, kw_only=True, slots=True)
class InHand:
    """The batch of a shard that its source has open, or had open last."""

    batch: int
    opened_at: datetime | None
    set_aside_at: Sequence[datetime] = ()
    """The last times at which messages of the shard were set aside, ascending."""

    def has_forgotten(self, mark: Mark) -> bool:
        """Return True if the source does not know a time of setting aside that a mark records.

        Times before all those that the source remembers cannot be judged.

        >>> first, second = datetime(2026, 1, 30), datetime(2026, 1, 31)
        >>> mark = Mark(set_aside_at=second)
        >>> [InHand(batch=1, opened_at=None, set_aside_at=times).has_forgotten(mark)
        ...  for times in ([first, second], [first], [])]
        [False, True, True]

        A source that remembers `TIMES` times cannot judge an earlier one:

        >>> later = [datetime(2026, 2, day) for day in range(1, TIMES + 1)]
        >>> full = InHand(batch=1, opened_at=None, set_aside_at=later)
        >>> between = Mark(set_aside_at=datetime(2026, 2, 1, 12))
        >>> full.has_forgotten(mark), full.has_forgotten(between)
        (False, True)
        """
        time, known = mark.set_aside_at, self.set_aside_at
        if time is None or time in known:
            return False
        return len(known) < TIMES or time > known[0]


@dataclass(frozen=True, kw_only=True)
class Known:
    """A destination's knowledge of a source."""

    destination: UUID
    marks: Mapping[Place, Mark] = field(default_factory=dict)
    epochs: Mapping[int, int] = field(default_factory=dict)
    """The highest epoch of each shard's lanes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lower:
    """A destination's mark that is lower than the acknowledged one."""

    lane: str
    shard: int
    acknowledged: Mark
    found: Mark

    def __str__(self) -> str:
        """Return the difference in words.

        >>> old, new = Mark(batch=2, position=70), Mark(batch=5, position=90)
        >>> print(Lower(lane="", shard=7, acknowledged=new, found=old))
        of shard 7 it had batch 5 up to 90, and has batch 2 up to 70
        >>> print(Lower(lane="retry", shard=7, acknowledged=old, found=NOTHING))
        of shard 7, lane 'retry', it had batch 2 up to 70, and has nothing
        """
        place = f"of shard {self.shard}" + (f", lane {self.lane!r}," if self.lane else "")
        return f"{place} it had {self.acknowledged}, and has {self.found}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Places where the two sides differ."""

    ahead: Sequence[Place] = ()
    """Places that show that the source was set back."""
    behind: Sequence[Place] = ()
    """Places that show that the destination was set back."""
    since: datetime | None = field(default=None, compare=False, repr=False)
    """The earliest ``opened_at`` of the destination's marks in the places behind."""
    lower: Lower | None = field(default=None, compare=False, repr=False)
    """The mark of one of the places behind, as an example."""


_LOOKS_ADDRESSED = re.compile(r".*@[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}@*", re.DOTALL)

_NAMES = {
    Kind.MAIN: MAIN,
    Kind.RETRY: "retry",
    Kind.REPLAY: "replay",
    Kind.DOUBT: "doubt",
    Kind.FOUND_RETRY: "found:retry",
    Kind.FOUND_REPLAY: "found:replay",
    Kind.SERVICE: "service:",
    Kind.ROUTE: "route:",
    Kind.FOUND_ROUTE: "found:route:",
}


def place_name(lane: Lane) -> str:
    """Return the name of a lane in marks. Only this function makes such names; none is ever parsed.

    Marks outlive their lanes, and are stored in other databases. So a lane's name never changes,
    and no two lanes have the same name. If a service's own name ends like the name of a broker's
    lane, one more @ tells the two apart.

    >>> at = UUID(int=7)
    >>> print(place_name(Lane(kind=Kind.ROUTE, subject="x", broker=at)))
    route:x@00000000-0000-0000-0000-000000000007
    >>> print(place_name(Lane(kind=Kind.ROUTE, subject=f"x@{at}")))
    route:x@00000000-0000-0000-0000-000000000007@
    >>> print(place_name(Lane(kind=Kind.FOUND_ROUTE, subject="x")))
    found:route:x
    """
    name = _NAMES[lane.kind] + lane.subject
    if lane.broker is not None:
        return f"{name}@{lane.broker}"
    addressable = lane.kind in (Kind.ROUTE, Kind.FOUND_ROUTE)
    return f"{name}@" if addressable and _LOOKS_ADDRESSED.fullmatch(lane.subject) else name


def shards_of(places: Iterable[Place]) -> list[int]:
    """Return the shards of places, sorted."""
    return sorted({shard for _, shard in places})


def reached(marks: Mapping[Place, Mark], behind: Iterable[Place]) -> dict[int, datetime | None]:
    """Return, for each shard behind, when the oldest batch that its marks refer to was opened.

    None: the destination has nothing of some lane of the shard.

    >>> at = datetime(2026, 1, 31)
    >>> mark = Mark(batch=1, opened_at=at)
    >>> reached({("", 7): mark, ("", 8): mark}, [("", 7), ("retry", 7)])
    {7: None}
    """
    moments: dict[int, datetime | None] = {}
    for lane, shard in behind:
        opened_at = marks.get((lane, shard), NOTHING).opened_at
        oldest = moments.get(shard, opened_at)
        moments[shard] = oldest and opened_at and min(oldest, opened_at)
    return moments


def compare(
    theirs: Mapping[Place, Mark], ours: Mapping[Place, Mark], in_hand: Mapping[int, InHand]
) -> Difference:
    """Compare a destination's marks with those that its source remembers.

    ``in_hand`` is the batch that the source has in hand for each shard. If messages are parked, the
    marks of their places look as if the source was set back. Whether it was is decided by
    `saf.engine.acknowledged.not_parked`.

    >>> one, two = Mark(batch=1, acknowledged=True), Mark(batch=2, acknowledged=True)
    >>> here, of = ("", 7), {7: InHand(batch=5, opened_at=None)}
    >>> compare({here: one}, {here: one}, of)
    Difference(ahead=[], behind=[])
    >>> compare({here: two}, {here: one}, of), compare({here: one}, {here: two}, of)
    (Difference(ahead=[('', 7)], behind=[]), Difference(ahead=[], behind=[('', 7)]))
    """
    ahead, behind = [], []
    for place in sorted(theirs.keys() | ours.keys()):
        mark, known = theirs.get(place, NOTHING), ours.get(place, NOTHING)
        lane, shard = place
        if mark.number < known.number:
            behind.append(place)
        elif _is_ahead(lane, mark, known, in_hand.get(shard)):
            ahead.append(place)
    kept = [theirs[place].opened_at for place in behind if place in theirs]
    lower = [
        Lower(lane=lane, shard=shard, acknowledged=ours[place], found=theirs.get(place, NOTHING))
        for place in behind[:1]
        for lane, shard in [place]
    ]
    return Difference(
        ahead=ahead,
        behind=behind,
        since=min(filter(None, kept), default=None),
        lower=next(iter(lower), None),
    )


def _is_ahead(lane: str, mark: Mark, known: Mark, in_hand: InHand | None) -> bool:
    """Return True if the source does not know a mark, given that the mark is not behind."""
    if mark.number == (0, 0) or (mark.number, mark.opened_at) == (known.number, known.opened_at):
        return False
    if in_hand is None:
        return True
    if mark.opened_at is not None and mark.opened_at == in_hand.opened_at:
        return False
    if mark.acknowledged:
        return True
    return lane in (MAIN, AGAIN, ONCE) and mark.batch >= in_hand.batch


ABSENT = ""
"""Text of a mark that a destination does not have; see `read`."""


def written(epoch: int, mark: Mark) -> str:
    """Return an epoch and a mark as text.

    >>> written(3, Mark(batch=5, position=90, acknowledged=True))
    '3 5 90 1 -'
    """
    moment = mark.opened_at.isoformat() if mark.opened_at else "-"
    aside = f" {mark.set_aside_at.isoformat()}" if mark.set_aside_at else ""
    return f"{epoch} {mark.batch} {mark.position} {int(mark.acknowledged)} {moment}{aside}"


def read(text: str) -> tuple[int, Mark]:
    """Return the epoch and the mark written in a text.

    >>> read(written(3, NOTHING)) == (3, NOTHING), read(ABSENT)[0]
    (True, 0)
    """
    if text == ABSENT:
        return 0, NOTHING
    epoch, batch, position, acknowledged, moment, *aside = text.split(" ")
    opened_at = None if moment == "-" else datetime.fromisoformat(moment)
    set_aside_at = datetime.fromisoformat(aside[0]) if aside else None
    answered = acknowledged == "1"
    return int(epoch), Mark.of(int(batch), int(position), opened_at, answered, set_aside_at)


def known_of(identity: UUID, texts: Mapping[Place, str]) -> Known:
    """Return a destination's knowledge of a source, from the texts of its marks."""
    states = {place: read(text) for place, text in texts.items()}
    epochs: dict[int, int] = {}
    for (_, shard), (epoch, _) in states.items():
        epochs[shard] = max(epoch, epochs.get(shard, 0))
    return Known(
        destination=identity,
        marks={place: mark for place, (_, mark) in states.items()},
        epochs=epochs,
    )
