"""Tables: rows of several brokers, as lines for operators or as JSON for programs.

Rows are found by broker, as a sequence or as a `Page` of a longer list. A `Table` names its columns
once, and shows each row behind the name of its broker.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, Generic, TypeAlias, TypeVar

from saf.cli.console import Listing, echo
from saf.database.pages import Page

T = TypeVar("T")

Found: TypeAlias = Mapping[str, Page[T]] | Mapping[str, Sequence[T]]


class Table(Generic[T]):
    """A table whose first column is the broker, followed by these.

    Args:
        columns: their names.
        below: the name of a further column of long texts; see `Listing`.
        cells: returns the texts of a row, one per column, and then that for ``below``.
        plain: returns a row as a dict for JSON.
    """

    def __init__(
        self,
        *columns: str,
        below: str = "",
        cells: Callable[[T], Sequence[str]],
        plain: Callable[[T], Mapping[str, Any]] = methodcaller("as_dict"),
    ) -> None:
        self._columns = columns
        self._below = below
        self._cells = cells
        self._plain = plain

    def show(self, found: Found[T]) -> None:
        """Print rows as lines."""
        listing = Listing("broker", *self._columns, below=self._below)
        for name, row in _rows(found):
            cells, width = self._cells(row), len(self._columns)
            listing.add(name, *cells[:width], below="".join(cells[width:]))
        listing.show()

    def show_any(self, found: Found[T]) -> None:
        """Print rows as lines; print nothing if there are none."""
        if any(_rows(found)):
            self.show(found)

    def plain(self, found: Found[T]) -> list[dict[str, Any]]:
        """Return rows, each with its broker, for JSON."""
        return [{"broker": name, **self._plain(row)} for name, row in _rows(found)]


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, group in found.items():
        for row in group.shown if isinstance(group, Page) else group:
            yield name, row


def rows_of(found: Found[Any]) -> list[dict[str, Any]]:
    """Return rows, each with its broker, for JSON."""
    return [{"broker": name, **row.as_dict()} for name, row in _rows(found)]


def results_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each broker's result, with the broker, for JSON."""
    return [{"broker": name, **result.as_dict()} for name, result in found.items()]


def ends(pages: Mapping[str, Page[Any]]) -> dict[str, str | None]:
    """Return the start of each broker's next page, for JSON."""
    return {name: page.next for name, page in pages.items()}


def say_next(pages: Mapping[str, Page[Any]]) -> None:
    """Print how to show each broker's next page, if any."""
    for name, page in pages.items():
        if page.next is not None:
            after = f"--broker {shlex.quote(name)} --after {shlex.quote(page.next)}"
            echo(f"{name}: continue with {after}")
