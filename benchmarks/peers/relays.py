"""The processes that relay for one system, each in the system's own Python (see `run`)."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_SECONDS = 900
"""After so long, a relay is taken for stuck, and killed."""


class Failed(Exception):
    """A system did not do what it was told; the table says so."""


class Relays:
    """Relays that stay from the first `start` to `stop`, and do what they are told together.

    Raises:
        Failed: one has ended, or does not come to an end; then none is left.
    """

    def __init__(self, python: Path, module: str, count: int, env: Mapping[str, str]) -> None:
        self.warm = False
        """Whether what is hot in them is compiled."""
        self._count = count
        self._env = env
        self._command = [str(python), "-m", "benchmarks.peers.run", module]
        self._running: list[subprocess.Popen[str]] = []

    @property
    def processes(self) -> list[int]:
        """The ids of those that run."""
        return [one.pid for one in self._running]

    def prepare(self) -> None:
        """Have the system make its tables.

        Raises:
            subprocess.CalledProcessError: it could not.
        """
        subprocess.run([*self._command, "prepare"], env=self._env, cwd=ROOT, check=True)

    def start(self) -> None:
        """Have all ready, if they are not."""
        if not self._running:
            self._running = [
                subprocess.Popen(
                    [*self._command, "relay", str(number)], env=self._env, cwd=ROOT, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
                for number in range(self._count)
            ]  # fmt: skip
            self._hear("ready\n")

    def drain(self) -> None:
        """Move what is pending."""
        self._tell("drain")
        self._hear("done\n")

    def stay(self) -> None:
        """Move whatever comes from now on, until `leave`."""
        self._tell("stay")

    def leave(self) -> None:
        """Stay no longer."""
        self._tell("stop")
        self._hear("done\n")

    def once(self) -> None:
        """Move what is pending by processes of their own, from their start to their exit."""
        relays = [
            subprocess.Popen([*self._command, "once", str(number)], env=self._env, cwd=ROOT)
            for number in range(self._count)
        ]
        if any(list(map(subprocess.Popen.wait, relays))):
            raise Failed("a relay failed")

    def stop(self) -> None:
        """Let them end."""
        for one in self._running:
            assert one.stdin is not None
            one.stdin.close()
        for one in self._running:
            one.wait()
        self._running, self.warm = [], False

    def _tell(self, line: str) -> None:
        try:
            for one in self._running:
                assert one.stdin is not None
                one.stdin.write(f"{line}\n")
                one.stdin.flush()
        except BrokenPipeError:
            self._kill()
            raise Failed("a relay has ended") from None

    def _hear(self, expected: str) -> None:
        watchdog = threading.Timer(LONGEST_SECONDS, self._kill)
        watchdog.start()
        said = [one.stdout.readline() for one in self._running if one.stdout is not None]
        watchdog.cancel()
        if any(line != expected for line in said) or not said:
            self._kill()
            raise Failed(f"a relay ended without {expected.strip()!r}")

    def _kill(self) -> None:
        killed, self._running, self.warm = self._running, [], False
        for one in killed:
            one.kill()
            one.wait()
