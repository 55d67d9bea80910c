"""Progress in a shard: what is complete is never read again, and nothing else is passed by."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from saf.receiving.dispatch.progress import InHand, Mark
from saf.receiving.hand import NO_IDS


def ids_of(text: str) -> set[int]:
    """The numbers in a multirange of PostgreSQL."""
    pairs = re.findall(r"\[(\d+),(\d+)\)", text)
    return {number for first, end in pairs for number in range(int(first), int(end))}


def multirange(ids: set[int]) -> str:
    return "{" + ",".join(f"[{one},{one + 1})" for one in sorted(ids)) + "}" if ids else NO_IDS


@dataclass
class Stored:
    """What the database keeps of a shard: saf.cursor and saf.dispatched."""

    position: int = 0
    ids: set[int] = field(default_factory=set)
    closed: bool = False

    def write(self, mark: Mark) -> None:
        """As `saf.receiving.dispatch.marking` does."""
        assert not self.closed
        assert mark.closed or mark.position >= self.position
        self.position, self.closed = mark.position, mark.closed
        if mark.new:
            self.ids |= ids_of(mark.ids)
            self.ids = {one for one in self.ids if one > self.position}

    def taken_over(self) -> InHand:
        return InHand(
            shard=0,
            epoch=1,
            batch=1,
            done="1:1:",
            open="9:9:",
            position=self.position,
            beyond=multirange(self.ids),
        )


batches = st.sets(st.integers(1, 60), max_size=25).map(sorted)
steps = st.lists(st.tuples(st.sampled_from("rccccmmx"), st.integers(0, 1000)), max_size=80)


@settings(max_examples=500)
@given(batch=batches, steps=steps)
def test_what_is_marked_is_not_read_again_and_all_else_is(
    batch: list[int], steps: list[tuple[str, int]]
) -> None:
    stored, done, marked = Stored(), set[int](), set[int]()
    hand = stored.taken_over()

    def unread() -> list[int]:
        known = ids_of(hand.beyond)
        return [one for one in batch if one > hand.read and one not in known]

    def read(number: int) -> None:
        found = unread()
        for one in found[:number]:
            assert one not in marked
            hand.read = max(hand.read, one)
            hand.pending[one] = None
        hand.whole = len(found) <= number

    def mark() -> None:
        if hand.touched or hand.closes:
            stored.write(hand.mark())
            marked.update(done)
            if not stored.closed:
                complete = {one for one in batch if one <= stored.position} | stored.ids
                assert set(batch) & complete <= done
                assert marked <= complete

    for what, number in [*steps, ("r", 1000)]:
        if stored.closed:
            break
        if what == "r":
            read(1 + number % 5 if number < 1000 else number)
        elif what == "c" and hand.pending:
            one = list(hand.pending)[number % len(hand.pending)]
            hand.complete(one)
            done.add(one)
        elif what == "m":
            mark()
        elif what == "x":
            hand = stored.taken_over()
            done = set(marked)
    while not stored.closed:
        read(1000)
        for one in list(hand.pending):
            hand.complete(one)
            done.add(one)
        mark()
    assert done == set(batch)


@given(batch=batches)
def test_there_are_no_more_ranges_than_messages_that_wait(batch: list[int]) -> None:
    hand = Stored().taken_over()
    for one in batch:
        hand.pending[one] = None
    hand.read = max(batch, default=0)
    waiting = batch[::7]
    for one in batch:
        if one not in waiting:
            hand.complete(one)
    mark = hand.mark()
    assert mark.ids.count("[") <= len(waiting)
