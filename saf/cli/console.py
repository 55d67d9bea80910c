r"""Where commands print for people: what they print is data, and shown as it is.

Names, keys, errors and bodies are whatever somebody has sent. None of it reaches the terminal as a
command to it: `echo` and `plain_console` let all text through `shown`, and no command prints in
another way. JSON escapes it in its own way.
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
"""What structlog prints on lines of its own: where an exception comes from."""


def write_any_character() -> None:
    """Print as `\\u2026` what the locale cannot encode; Python would end with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def plain_console(*, stderr: bool = False) -> PlainConsole:
    """Return a console that takes ``[red]`` and ``:smile:`` for text that somebody has chosen."""
    return PlainConsole(stderr=stderr, markup=False, emoji=False, highlight=False)


def echo(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print one line. With ``lines``, the text may be several."""
    typer.echo(shown(text, lines=lines), err=err)


def paragraph(text: str) -> None:
    """Print a sentence, however long: on a terminal it is broken at spaces."""
    plain_console().paragraph(text, others="    ")


def write(body: bytes) -> None:
    """Write bytes to standard output: as they are, or as text if that is a terminal."""
    if sys.stdout.isatty():
        echo(body.decode(errors="backslashreplace"), lines=True)
    else:
        sys.stdout.buffer.write(body)


def shown_event(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
    r"""Return an event as a terminal is to show it: a processor of structlog.

    >>> shown_event(None, "", {"key": "a\nb", "stack": "Traceback\n  \x1b[2J"})
    {'key': 'a\\nb', 'stack': 'Traceback\n  \\x1b[2J'}
    """
    return {
        name: shown(value, lines=name == STACK) if isinstance(value, str) else value
        for name, value in event.items()
    }


def folded(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """Return the lines of a text, broken at spaces only; a long word is longer than ``width``.

    ``first`` and ``others`` are what the first line and the others begin with.

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
    """A console that lets all text through `shown`."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as it is to be printed."""
        return super().render_str(shown(text, lines=True), **options)

    def paragraph(self, text: str, *, style: str | None = None, others: str = "") -> None:
        """Print a text: on a terminal broken at spaces, in a pipe as one line."""
        lines = folded(shown(text), self.width, others=others) if self.is_terminal else [text]
        for line in lines:
            self.print(line, style=style, soft_wrap=True)
