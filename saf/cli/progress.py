"""The progress of a forwarder: a bar on a terminal while there is work, or events in the log.

The bar is out of the way. Whatever else is printed is printed by itself, where it belongs: what
goes to standard output goes there, also while the bar is on a terminal; so the bar goes before it
and comes back with the next news. What is logged meanwhile is above the bar.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

import rich.progress
from rich.console import Console

from saf.logger import Log

if TYPE_CHECKING:
    from saf.forwarding.meter import Progress


log = Log("saf.forward")


class ProgressLog:
    """An event in the log every so many seconds, where nobody would see a bar."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = monotonic() + seconds

    def show(self, progress: Progress) -> None:
        """Say how far it is, unless that was said just now."""
        if monotonic() >= self._next:
            self._next = monotonic() + self._seconds
            log.info("progress", done=progress.done, total=progress.total)


class ProgressBar:
    """A bar on a terminal; nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._turn = Lock()

    @property
    def watching(self) -> Callable[[Progress], None] | None:
        """What shows how far the work is; None where nobody would see it."""
        return self._show if self._console.is_terminal else None

    def _show(self, progress: Progress) -> None:
        with self._turn:
            if self._bar is None:
                columns = (
                    *rich.progress.Progress.get_default_columns(),
                    rich.progress.MofNCompleteColumn(),
                )
                self._bar = rich.progress.Progress(
                    *columns, console=self._console, transient=True, redirect_stdout=False
                )
                self._bar.start()
                self._task = self._bar.add_task("forwarding", total=None)
            self._bar.update(self._task, completed=progress.done, total=progress.total)

    def clear(self) -> None:
        """Take the bar away, until there is something to show again."""
        with self._turn:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
