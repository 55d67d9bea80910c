"""Listings: rows for people, that lose nothing in a narrow terminal or a pipe.

No name, handle, number or error is ever cut, and a value is never broken where something could be
copied from it:

- In a pipe each row is one line, however long: for grep and its like.
- In a terminal that is wide enough, too; but what is long, such as an error, is below its row.
- In a narrower one, the values of a row follow each other with their names, as many a line as fit.

What a program is to read, it gets by ``--json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap

from rich.cells import cell_len

from saf.cli.console import echo, plain_console, shown

GAP = "  "
INDENT = "    "


class Listing:
    """Rows with these columns; the text ``below`` a row is as long as it likes, or empty."""

    def __init__(self, *columns: str, below: str = "") -> None:
        self._columns = columns
        self._below = below
        self._rows: list[tuple[tuple[str, ...], str]] = []

    def add(self, *cells: str, below: str = "") -> None:
        """One more row."""
        self._rows.append((tuple(map(shown, cells)), shown(below)))

    def show(self) -> None:
        """Write it to standard output, as wide as that is."""
        console = plain_console()
        for line in self.lines(console.width if console.is_terminal else None):
            echo(line)

    def lines(self, width: int | None) -> Iterable[str]:
        """What is printed where a line has so many columns; None is for a pipe.

        >>> listing = Listing("broker", "reason", below="error")
        >>> listing.add("shop", "rejected", below="it is no number: seven")
        >>> "$".join(listing.lines(None))
        'broker  reason    error$shop    rejected  it is no number: seven'
        >>> "$".join(listing.lines(20))
        'broker  reason$shop    rejected$    it is no number:$    seven'
        >>> "$".join(listing.lines(15))
        'broker: shop$    reason: rejected$    it is no$    number:$    seven'
        """
        rows = [(cells, below) for cells, below in self._rows]
        if width is None:
            names = (*self._columns, self._below) if self._below else self._columns
            return _aligned([names, *((*cells, below)[: len(names)] for cells, below in rows)])
        table = _aligned([self._columns, *(cells for cells, _ in rows)])
        if all(cell_len(line) <= width for line in table):
            return [
                table[0],
                *(
                    line
                    for row, (_, below) in zip(table[1:], rows, strict=True)
                    for line in (row, *_folded(below, width))
                ),
            ]
        return [
            line
            for cells, below in rows
            for line in (*_flowing(self._columns, cells, width), *_folded(below, width))
        ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return [
        GAP.join(
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _flowing(names: Sequence[str], cells: Sequence[str], width: int) -> list[str]:
    lines: list[str] = []
    for name, cell in zip(names, cells, strict=True):
        if not cell:
            continue
        said = f"{name}: {cell}"
        if lines and cell_len(lines[-1]) + len(GAP) + cell_len(said) <= width:
            lines[-1] += GAP + said
        else:
            lines.append((INDENT if lines else "") + said)
    return lines


def _folded(text: str, width: int) -> list[str]:
    return wrap(
        text,
        max(width, 2 * len(INDENT)),
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
