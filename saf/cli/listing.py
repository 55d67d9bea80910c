"""Listings: rows for users that lose nothing in a narrow terminal or a pipe.

Every table that a command prints is a `Listing`. It never cuts a name, handle, number, date or
error, and wraps lines only at spaces:

- In a pipe, each row is one line of any length: for grep and the like.
- In a wide terminal, each row is one line, too; but a long text, such as an error, is below its
  row.
- In a narrower terminal, the values of a row follow each other with their names, as many per line
  as fit. A value longer than a line continues on the next line, indented further.

Programs read the output of ``--json`` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len

from saf.cli.console import echo, folded, plain_console
from saf.operating.wording import shown

GAP = "  "
INDENT = "    "
NOTHING = "nothing found"


class Listing:
    """Rows with these columns.

    ``below`` names a column of long texts, which a terminal shows below their rows.
    """

    def __init__(self, *columns: str, below: str = "") -> None:
        self._columns = columns
        self._below = below
        self._rows: list[tuple[tuple[str, ...], str]] = []

    def add(self, *cells: str, below: str = "") -> None:
        """Add a row with one text per column, and the long text, which may be empty."""
        self._rows.append((tuple(map(shown, cells)), shown(below)))

    def show(self) -> None:
        """Print the rows in the width of standard output; or a line if there are no rows."""
        if not self._rows:
            echo(NOTHING)
            return
        console = plain_console()
        for line in self.lines(console.width if console.is_terminal else None):
            echo(line)

    def lines(self, width: int | None) -> Iterable[str]:
        """Return the lines for a terminal of the given width, or for a pipe (None).

        >>> listing = Listing("broker", "reason", below="error")
        >>> listing.add("shop", "rejected", below="it is no number: seven")
        >>> "$".join(listing.lines(None))
        'broker  reason    error$shop    rejected  it is no number: seven'
        >>> "$".join(listing.lines(20))
        'broker  reason$shop    rejected$    it is no number:$    seven'
        >>> "$".join(listing.lines(15))
        'broker: shop$    reason: rejected$    it is no$    number:$    seven'

        A value too long for one line is wrapped at spaces:

        >>> listing = Listing("to")
        >>> listing.add("erp, lake, mom, shop")
        >>> "$".join(listing.lines(18))
        'to: erp, lake,$        mom, shop'
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
                    for line in (row, *folded(below, width, INDENT, INDENT))
                ),
            ]
        return [
            line
            for cells, below in rows
            for line in (
                *_flowing(self._columns, cells, width),
                *folded(below, width, INDENT, INDENT),
            )
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
        text = f"{name}: {cell}"
        if lines and cell_len(lines[-1]) + len(GAP) + cell_len(text) <= width:
            lines[-1] += GAP + text
        else:
            first = f"{INDENT if lines else ''}{name}: "
            lines += folded(cell, width, first, 2 * INDENT)
    return lines
