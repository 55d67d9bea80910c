"""Lineage: which incarnation of its broker has said which numbers of an end. Pure.

A broker that was set back and repaired is a new *incarnation* of itself: from then on, it may give
numbers that it has given before, to other messages. So an end that was there when its broker was
repaired has a lineage, ``((incarnation, after), …)``: numbers above ``after`` were said by that
incarnation, up to the next one's ``after``. Numbers before the first pair were said by a broker
that had never been set back.

Two ends agree about a number if their lineages give it to the same incarnation. Nothing else is
asked of a lineage. It travels with each message, so the question can be answered whenever the
message arrives, and in whatever order.
"""

from __future__ import annotations

from itertools import pairwise

from saf.message import LINEAGE

Lineage = tuple[tuple[int, int], ...]

HEADER = LINEAGE
"""The header with the sender's lineage; where it is missing, the sender has none."""

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
    rises = all(one < other for (_, one), (_, other) in pairwise(lineage))
    return tuple(lineage) if rises else ()


def incarnation(lineage: Lineage) -> int:
    """The incarnation that speaks now; 0 where none is known.

    >>> incarnation(((17, 3), (21, 8))), incarnation(())
    (21, 0)
    """
    return lineage[-1][0] if lineage else 0


def said_by(lineage: Lineage, number: int) -> int:
    """The incarnation that has said a number; 0 for the broker before any set-back.

    >>> [said_by(((17, 3), (21, 8)), number) for number in (3, 4, 8, 9)]
    [0, 17, 17, 21]
    """
    return next((one for one, after in reversed(lineage) if after < number), 0)


def fork(one: Lineage, other: Lineage) -> int | None:
    """The last number that two lineages agree about; None if they agree about all numbers.

    >>> fork(((17, 3), (21, 8)), ((17, 3),)), fork(((17, 3),), ((21, 2),)), fork((), ())
    (8, 2, None)
    """
    return min((after for _, after in {*one} ^ {*other}), default=None)
