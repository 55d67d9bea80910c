"""The progress of a forwarder: a bar on a terminal while there is work, or events in the log.

The bar never mixes with other output. Standard output stays standard output, even while the bar is
on a terminal: the bar is removed before such output, and returns with the next progress. Events
logged during that time appear above the bar.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

import rich.progress
from rich.console import Console

from saf.telemetry.logger import Log

if TYPE_CHECKING:
    from saf.forwarding.summary import Progress


log = Log("saf.forward")


class ProgressLog:
    """Logs an event at an interval, where no terminal could show a bar."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = monotonic() + seconds

    def show(self, progress: Progress) -> None:
        """Log the progress, unless it was logged just now."""
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
        """The function that shows progress; None without a terminal."""
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
        """Remove the bar until there is new progress."""
        with self._turn:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
