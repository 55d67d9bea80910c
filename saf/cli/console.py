"""Output of commands: safe text, whole rows, and an exit code for the process that started them.

Every value is data. Senders choose names, keys, errors and bodies, and control characters in them
must not reach the terminal. So `echo` and `plain_console` pass all text through `shown`, and no
command prints in any other way. JSON has its own escapes. Only a body is written unchanged, and
only to a pipe or a file (`write`).

Every table that a command prints is a `Listing`, which loses nothing in a narrow terminal or a
pipe. It never cuts a name, handle, number, date or error, and wraps lines only at spaces:

- In a pipe, each row is one line of any length: for grep and the like.
- In a wide terminal, each row is one line, too; but a long text, such as an error, is below its
  row.
- In a narrower terminal, the values of a row follow each other with their names, as many per line
  as fit. A value longer than a line continues on the next line, indented further.

A `Table` of rows that were found in several brokers, as sequences or as a `Page` of a longer list,
names its columns once, and shows each row behind the name of its broker. Programs read the output
of ``--json`` instead.

A command does its work even if a standard stream is closed or full. A service manager or a script
may start ``saf`` without standard output or error (`>&-`), or with a full disk behind it. The next
file or connection would get the number of a closed descriptor, and then the printed output. So
`open_standard_streams` first opens closed descriptors on the null device. If output cannot be
written, a command ends after its work, with a sentence and without a traceback; a forwarder in a
loop continues.

`EXIT_CODES` tell a scheduler what to do: nothing, retry later, or call an operator.
docs/operations.md shows this for cron, systemd and Airflow, and the files in jobs/ do it.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, Generic, TypeAlias, TypeVar

import structlog
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from saf.database.queries import Page
from saf.errors import SafError, Unavailable, UsageError
from saf.operating.wording import none_at, shown
from saf.signals import INTERRUPTED
from saf.telemetry.tracing import trace_ids

EXIT_CODES = {
    0: "done, nothing to do, or stopped on request; messages may wait for a route or a service",
    Unavailable.exit_code: "try again later: a database, a destination or Spark does not answer",
    UsageError.exit_code: "an operator must fix it: usage, settings, schema, login or rights",
    SafError.exit_code: "any other error; a question answered with no; or a comparison or an "
    "examination has found something",
    INTERRUPTED: "interrupted before the end (Ctrl-C)",
}

WIDTH = 76
"""Characters per line of a help text, in a terminal of 80 columns."""
GAP = "  "
NEW_LINES = re.compile(r"\s*\n\s*")
INDENT = "    "

CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
STACK = "stack"

LOG_LEVEL = "info"
"""Lowest level of the events that commands log."""
"""The key that structlog prints on separate lines: the origin of an exception."""


def open_standard_streams() -> None:
    """Open closed standard streams on the null device."""
    for descriptor, (name, mode) in enumerate(STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - it stays open
            setattr(sys, name, null)


def write_any_character() -> None:
    """Print characters that the locale cannot encode as `\\u2026`, instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def echo(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print one line; with ``lines``, the text may have several."""
    typer.echo(shown(text, lines=lines), err=err)


def paragraph(text: str) -> None:
    """Print a sentence of any length: on a terminal, it is wrapped at spaces."""
    plain_console().paragraph(text, others="    ")


def complain(text: str, *, lines: bool = False) -> None:
    """Print an error of any length on stderr: on a terminal, it is wrapped at spaces.

    With ``lines``, the text may have several lines.
    """
    console = plain_console(stderr=True)
    for line in f"saf: {text}".splitlines() if lines else [shown(f"saf: {text}")]:
        console.paragraph(line, style="red", others="    ")


def can_ask(*, as_json: bool = False) -> bool:
    """Return whether an operator can answer a question."""
    return sys.stdin.isatty() and not as_json


def confirm(
    question: str, *, yes: bool, lost: str = "", dry_run: str = "", as_json: bool = False
) -> None:
    """Ask an operator before something that cannot be undone; return if it may be done.

    ``lost`` names the messages that would be lost, if any. ``dry_run`` is the command's effect with
    that option instead, if it has one.

    Raises:
        UsageError: nobody can answer, and ``yes`` is false.
    """
    if yes:
        return
    if not can_ask(as_json=as_json):
        instead = f", or --dry-run to {dry_run}" if dry_run else ""
        if lost:
            raise UsageError(f"nothing is done yet: {lost} would be lost: add --yes{instead}")
        raise UsageError(f"nothing is done yet: {question} Add --yes to confirm{instead}")
    code = SafError.exit_code
    try:
        if ask(question):
            return
    except typer.Abort as abort:
        echo("", err=True)
        if isinstance(abort.__context__, KeyboardInterrupt):
            code = INTERRUPTED
    echo("nothing is done", err=True)
    raise typer.Exit(code)


def ask(question: str) -> bool:
    """Ask an operator at a terminal a question; return whether the answer is yes."""
    return typer.confirm(shown(question), err=True)


def write(body: bytes) -> None:
    """Write bytes to standard output: unchanged, or as text on a terminal."""
    if sys.stdout.isatty():
        echo(body.decode(errors="backslashreplace"), lines=True)
    else:
        sys.stdout.buffer.write(body)


def log_to_stderr() -> None:
    """Log events to stderr: readable on a terminal, otherwise one JSON object per line."""
    people = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            trace_ids,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(
                (shown_event, structlog.dev.ConsoleRenderer())
                if people
                else (structlog.processors.JSONRenderer(),)
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LOG_LEVEL),
        # the stderr of the moment: while a progress bar is shown, it replaces stderr
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def shown_event(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
    r"""Return an event for a terminal: a processor of structlog.

    >>> shown_event(None, "", {"key": "a\nb", "stack": "Traceback\n  \x1b[2J"})
    {'key': 'a\\nb', 'stack': 'Traceback\n  \\x1b[2J'}
    """
    return {
        name: shown(value, lines=name == STACK) if isinstance(value, str) else value
        for name, value in event.items()
    }


def plain_console(*, stderr: bool = False) -> PlainConsole:
    """Return a console that prints ``[red]`` and ``:smile:`` literally: they come from senders."""
    return PlainConsole(stderr=stderr, markup=False, emoji=False, highlight=False)


class PlainConsole(Console):
    """A console that passes all text through `shown`."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text in printable form."""
        return super().render_str(shown(text, lines=True), **options)

    def paragraph(self, text: str, *, style: str | None = None, others: str = "") -> None:
        """Print a text: wrapped at spaces on a terminal, as one line in a pipe."""
        lines = folded(shown(text), self.width, others=others) if self.is_terminal else [text]
        for line in lines:
            self.print(line, style=style, soft_wrap=True)


def folded(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """Return the lines of a text, wrapped at spaces only; a long word may exceed ``width``.

    ``first`` is the prefix of the first line, and ``others`` that of all other lines.

    >>> folded("cure: drop_the_old_route", 10, others="  ")
    ['cure:', '  drop_the_old_route']
    """
    return wrap(
        text,
        max(width, len(others) + 1),
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


class Listing:
    """A table with these columns.

    ``below`` names a column of long texts, which a terminal shows below their rows. ``nothing`` is
    the sentence that stands for no rows.
    """

    def __init__(self, *columns: str, below: str = "", nothing: str = "") -> None:
        self._columns = columns
        self._below = below
        self._nothing = nothing
        self._rows: list[tuple[tuple[str, ...], str]] = []

    def add(self, *cells: str, below: str = "") -> None:
        """Add a row with one text per column, and the long text, which may be empty.

        Lines of a text follow each other in one line, with a dash between them.
        """
        texts = [shown(NEW_LINES.sub(" — ", cell.strip("\n"))) for cell in (*cells, below)]
        self._rows.append((tuple(texts[:-1]), texts[-1]))

    def show(self) -> None:
        """Print the rows in the width of standard output, or that there is nothing."""
        if not self._rows:
            if self._nothing:
                echo(self._nothing)
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

        The lines of a value are joined:

        >>> listing = Listing("error")
        >>> listing.add("it failed\\n  in a row\\n")
        >>> "$".join(listing.lines(None))
        'error$it failed — in a row'

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


def is_of_output(error: OSError) -> bool:
    """Return whether writing to standard output failed; an error of a file names that file."""
    return error.filename is None and error.errno in CANNOT_BE_WRITTEN


def give_up_output() -> None:
    """Write nothing more to standard output: Python would retry on exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def in_words() -> str:
    """Return the table of exit codes for the end of a help text, which keeps its lines.

    >>> in_words().splitlines()[4]
    '75   try again later: a database, a destination or Spark does not answer'
    """
    lines = [
        fill(meaning, WIDTH, initial_indent=f"{code:<5}", subsequent_indent=" " * 5)
        for code, meaning in EXIT_CODES.items()
    ]
    return "\n".join(["\b", "Exit codes:", *lines])


T = TypeVar("T")

Found: TypeAlias = Mapping[str, Page[T]] | Mapping[str, Sequence[T]]


class Table(Generic[T]):
    """A table with these columns, behind that of the broker, if rows have one.

    Args:
        things: the rows in words, for the sentence if nothing was found.
        columns: their names.
        below: the name of a further column of long texts; see `Listing`.
        sparse: columns that are left out if no row has a value there.
        cells: returns the texts of a row, one per column, and then that for ``below``.
        plain: returns a row as a dict for JSON.
    """

    def __init__(
        self,
        *columns: str,
        things: str,
        below: str = "",
        sparse: Collection[str] = (),
        cells: Callable[[T], Sequence[str]],
        plain: Callable[[T], Mapping[str, Any]] = methodcaller("as_dict"),
    ) -> None:
        self.things = things
        self._columns = columns
        self._below = below
        self._sparse = sparse
        self._cells = cells
        self._plain = plain

    def show(
        self, found: Found[T], *, matching: bool = False, others: Collection[str] = ()
    ) -> None:
        """Print rows as lines, each behind the name of its broker; or that no broker has any.

        ``matching``: a filter chose the rows; ``others``: stores that were not asked. If no broker
        answered, print nothing: their errors say so.
        """
        nothing = none_at(self.things, found, matching=matching, others=others) if found else ""
        self._list(["broker"], (([name], row) for name, row in _rows(found)), nothing)

    def show_rows(self, rows: Iterable[T]) -> None:
        """Print rows as lines, without brokers; or a sentence if there is no row."""
        self._list([], (([], row) for row in rows), f"No {self.things}.")

    def show_any(self, found: Found[T]) -> None:
        """Print rows as lines; print nothing if there are none."""
        if any(_rows(found)):
            self.show(found)

    def plain(self, found: Found[T]) -> list[dict[str, Any]]:
        """Return rows, each with its broker, for JSON."""
        return [{"broker": name, **self._plain(row)} for name, row in _rows(found)]

    def _list(
        self, first: Sequence[str], rows: Iterable[tuple[Sequence[str], T]], nothing: str
    ) -> None:
        width = len(self._columns)
        texts = [(before, self._cells(row)) for before, row in rows]
        kept = [
            place
            for place, name in enumerate(self._columns)
            if name not in self._sparse or any(cells[place] for _, cells in texts)
        ]
        below = self._below
        if below in self._sparse and not any(cells[width] for _, cells in texts):
            below = ""
        names = [self._columns[place] for place in kept]
        listing = Listing(*first, *names, below=below, nothing=nothing)
        for before, cells in texts:
            shown_cells = [cells[place] for place in kept]
            listing.add(*before, *shown_cells, below="".join(cells[width:]))
        listing.show()


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
