"""Lineage: the incarnation of its broker that has sent each of an end's numbers. Pure.

A broker that was set back and repaired is a new *incarnation* of itself: from then on, it may
assign numbers that it has assigned before, to other messages. So an end that existed when its
broker was repaired has a lineage, ``((incarnation, after), …)``: numbers above ``after`` were sent
by that incarnation, up to the next pair's ``after``. Numbers before the first pair were sent by a
broker that had never been set back.

Two ends agree about a number if their lineages assign it to the same incarnation. A lineage has no
other use. It travels with each message, so agreement can be checked whenever the message arrives,
and in any order.
"""

from __future__ import annotations

from itertools import pairwise

from saf.message import LINEAGE

Lineage = tuple[tuple[int, int], ...]

HEADER = LINEAGE
"""Header with the sender's lineage; a sender without one omits it."""

LARGEST = 2**63 - 1
"""PostgreSQL's largest bigint."""


def read(said: object) -> Lineage:
    """Read a lineage from JSON; return an empty one if it cannot be read.

    >>> read([[17, 3], [21, 8]]), read(None), read([["?"]]), read([[21, 8], [17, 3]])
    (((17, 3), (21, 8)), (), (), ())
    """
    if not isinstance(said, (list, tuple)):
        return ()
    lineage: list[tuple[int, int]] = []
    for pair in said:
        match pair:
            case [int(number), int(after)] if (
                incarnation(tuple(lineage)) < number <= LARGEST and 0 <= after <= LARGEST
            ):
                lineage.append((number, after))
            case _:
                return ()
    is_ascending = all(one < other for (_, one), (_, other) in pairwise(lineage))
    return tuple(lineage) if is_ascending else ()


def incarnation(lineage: Lineage) -> int:
    """Return the incarnation that sends now; 0 if none is known.

    >>> incarnation(((17, 3), (21, 8))), incarnation(())
    (21, 0)
    """
    return lineage[-1][0] if lineage else 0


def said_by(lineage: Lineage, number: int) -> int:
    """Return the incarnation that has sent a number; 0 for the broker before any set-back.

    >>> [said_by(((17, 3), (21, 8)), number) for number in (3, 4, 8, 9)]
    [0, 17, 17, 21]
    """
    return next((broker for broker, after in reversed(lineage) if after < number), 0)


def fork(one: Lineage, other: Lineage) -> int | None:
    """Return the last number that two lineages agree about; None if they agree about all numbers.

    >>> fork(((17, 3), (21, 8)), ((17, 3),)), fork(((17, 3),), ((21, 2),)), fork((), ())
    (8, 2, None)
    """
    return min((after for _, after in {*one} ^ {*other}), default=None)
