"""A server that a test starts, kills for real, stops where it is, and starts again."""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class Restartable(ABC):
    """What can be killed, and started again with its data."""

    @abstractmethod
    def start(self) -> None:
        """Start it, and wait until it answers."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it."""

    @contextmanager
    def down(self) -> Iterator[None]:
        """Killed, and started again with its data."""
        self.kill()
        try:
            yield
        finally:
            self.start()


@dataclass(kw_only=True)
class Killable(Restartable):
    """One process. What it holds outlives it."""

    process: subprocess.Popen[bytes] | None = None

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(how)
            self.process.wait(timeout=30)
            self.process = None

    def freeze(self) -> None:
        """Stop it where it is: it keeps its connections, and does nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
