"""Where commands print for people: what they print is data, and shown as it is."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """A console that takes ``[red]`` and ``:smile:`` for names that somebody has chosen."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
