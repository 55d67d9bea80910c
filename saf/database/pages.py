"""Pages of long lists: some rows, and the place where the next page begins.

A place is a text with the last row's values of the columns that its list is sorted by. So inserted
or deleted rows before it do not move other rows. Each list reads its own places back, and rejects a
place that none of its pages has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from saf.errors import UsageError

T = TypeVar("T")

DIGITS = 18
"""Digits that every bigint may have."""


@dataclass(frozen=True, kw_only=True)
class Page(Generic[T]):
    """Some rows of a list."""

    shown: Sequence[T] = ()
    next: str | None = None
    """Where the next page begins; None: no next page."""


def page_of(
    read: Callable[[int | None], Sequence[T]], limit: int | None, place: Callable[[T], str]
) -> Page[T]:
    """Return a page of up to ``limit`` rows, or of all.

    Args:
        read: returns the given number of rows, in the list's order. It is asked for one more than
            the limit, to find out whether another page exists.
        limit: at least one; None for all rows.
        place: returns where a page begins that comes after this row.

    >>> page_of(lambda most: "abcd"[:most], 3, str), page_of(lambda most: "abc"[:most], 3, str)
    (Page(shown='abc', next='c'), Page(shown='abc', next=None))
    """
    if limit is None:
        return Page(shown=read(None))
    found = read(limit + 1)
    more = len(found) > limit
    return Page(shown=found[:limit], next=place(found[limit - 1]) if more else None)


def foreign(
    place: str, what: str, *, said: str = "the place at the end of the page before"
) -> UsageError:
    """Return the error for a place at which no page of a list ends."""
    return UsageError(f"no page of {what} ends at {place!r}: use {said}")


def number_at(place: str | None, what: str) -> int | None:
    """Return the number that a page of a list ends at; None for the first page.

    >>> number_at("17", "the audit"), number_at(None, "the audit")
    (17, None)

    Raises:
        UsageError: it is not a number.
    """
    if place is None:
        return None
    if not (place.isascii() and place.isdecimal() and len(place) <= DIGITS):
        raise foreign(place, what)
    return int(place)
