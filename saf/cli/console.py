r"""Output of commands for users: all values are data, and are shown literally.

Senders choose names, keys, errors and bodies. None of them may reach the terminal as control
characters: `echo` and `plain_console` pass all text through `shown`, and no command prints in any
other way. JSON has its own escapes.
"""

from __future__ import annotations

import io
import sys
from textwrap import wrap
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from saf.operating.wording import shown

STACK = "stack"
"""The key that structlog prints on separate lines: the origin of an exception."""


def write_any_character() -> None:
    """Print characters that the locale cannot encode as `\\u2026`, instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def plain_console(*, stderr: bool = False) -> PlainConsole:
    """Return a console that prints ``[red]`` and ``:smile:`` literally: they come from senders."""
    return PlainConsole(stderr=stderr, markup=False, emoji=False, highlight=False)


def echo(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print one line; with ``lines``, the text may have several."""
    typer.echo(shown(text, lines=lines), err=err)


def paragraph(text: str) -> None:
    """Print a sentence of any length: on a terminal, it is wrapped at spaces."""
    plain_console().paragraph(text, others="    ")


def write(body: bytes) -> None:
    """Write bytes to standard output: unchanged, or as text on a terminal."""
    if sys.stdout.isatty():
        echo(body.decode(errors="backslashreplace"), lines=True)
    else:
        sys.stdout.buffer.write(body)


def shown_event(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
    r"""Return an event for a terminal: a processor of structlog.

    >>> shown_event(None, "", {"key": "a\nb", "stack": "Traceback\n  \x1b[2J"})
    {'key': 'a\\nb', 'stack': 'Traceback\n  \\x1b[2J'}
    """
    return {
        name: shown(value, lines=name == STACK) if isinstance(value, str) else value
        for name, value in event.items()
    }


def folded(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """Return the lines of a text, wrapped at spaces only; a long word may exceed ``width``.

    ``first`` and ``others`` are prefixes of the first line and of the others.

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
