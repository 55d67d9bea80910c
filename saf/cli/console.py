r"""Where commands print for people: what they print is data, and shown as it is.

Names, keys, errors and bodies are whatever somebody has sent. None of it reaches the terminal as a
command to it: `echo` and `plain_console` let all text through `shown`, and no command prints in
another way. What goes into JSON is escaped by that.
"""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

STACK = "stack"
"""What structlog prints on lines of its own: where an exception comes from."""

SEPARATOR = "Zs"
"""The Unicode category of what is not printable to Python, and does no harm."""


def plain_console(*, stderr: bool = False) -> Console:
    """A console that takes ``[red]`` and ``:smile:`` for names that somebody has chosen."""
    return _Plain(stderr=stderr, markup=False, emoji=False, highlight=False)


def echo(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print a line; or several, if it may have ``lines``."""
    typer.echo(shown(text, lines=lines), err=err)


def write(body: bytes) -> None:
    """Write bytes to standard output: as they are, unless that is a terminal."""
    if sys.stdout.isatty():
        echo(body.decode(errors="backslashreplace"), lines=True)
    else:
        sys.stdout.buffer.write(body)


def shown(text: str, *, lines: bool = False) -> str:
    r"""A text with what would move the cursor, ring, colour or turn other text around as escapes.

    >>> shown("Zürich \x1b[2J\x07 \u202egnp.exe\n")
    'Zürich \\x1b[2J\\x07 \\u202egnp.exe\\n'
    >>> shown("two\nlines", lines=True)
    'two\nlines'
    """
    if text.isprintable():
        return text
    return "".join(
        one
        if one.isprintable() or unicodedata.category(one) == SEPARATOR or (lines and one in "\n\t")
        else one.encode("unicode_escape").decode()
        for one in text
    )


def shown_event(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
    r"""What is logged on a terminal: a processor of structlog.

    >>> shown_event(None, "", {"key": "a\nb", "stack": "Traceback\n  \x1b[2J"})
    {'key': 'a\\nb', 'stack': 'Traceback\n  \\x1b[2J'}
    """
    return {
        name: shown(value, lines=name == STACK) if isinstance(value, str) else value
        for name, value in event.items()
    }


class _Plain(Console):
    """Lets all text through `shown`."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text, lines=True), **options)
