"""Tables: rows of several brokers, as lines for operators or as JSON for programs.

Rows are found by broker, as a sequence or as a `Page` of a longer list. A `Table` names its columns
once, and shows each row behind the name of its broker.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from saf.cli.console import Listing, echo
from saf.database.pages import Page

T = TypeVar("T")

Found: TypeAlias = Mapping[str, Page[T]] | Mapping[str, Sequence[T]]


class Table(Generic[T]):
    """A table with these columns behind that of the broker.

    Args:
        columns: their names.
        below: the name of a further column of long texts; see `Listing`.
        cells: returns the texts of a row, with that for ``below`` as the last.
    """

    def __init__(self, *columns: str, below: str = "", cells: Callable[[T], Sequence[str]]) -> None:
        self._columns = columns
        self._below = below
        self._cells = cells

    def listing(self, found: Found[T]) -> Listing:
        """Return the table of some rows."""
        listing = Listing("broker", *self._columns, below=self._below)
        for name, row in rows(found):
            *cells, last = self._cells(row)
            if self._below:
                listing.add(name, *cells, below=last)
            else:
                listing.add(name, *cells, last)
        return listing

    def show(self, found: Found[T]) -> None:
        """Print the table of some rows."""
        self.listing(found).show()

    def show_any(self, found: Found[T]) -> None:
        """Print the table of some rows; without rows, print nothing."""
        if any(rows(found)):
            self.show(found)


def rows(found: Found[T]) -> Iterator[tuple[str, T]]:
    """Yield the rows, each with its broker."""
    for name, group in found.items():
        for row in group.shown if isinstance(group, Page) else group:
            yield name, row


def rows_of(found: Found[Any]) -> list[dict[str, Any]]:
    """Return the rows, each with its broker, for JSON."""
    return [{"broker": name, **row.as_dict()} for name, row in rows(found)]


def ends(pages: Mapping[str, Page[Any]]) -> dict[str, str | None]:
    """Return the start of each broker's next page, for JSON."""
    return {name: page.next for name, page in pages.items()}


def say_next(pages: Mapping[str, Page[Any]]) -> None:
    """Print how to show each broker's next page, if any."""
    for name, page in pages.items():
        if page.next is not None:
            echo(f"{name}: continue with --broker {name} --after {shlex.quote(page.next)}")
