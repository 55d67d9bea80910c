"""Programs of a soak: each is a process with a log, and ends with whoever has started it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.needed import needed
from tests.programs import ROOT, environment

PATIENCE_SECONDS = 40.0
"""How long a program may take to end."""


class Programs:
    """Those that run."""

    def __init__(self, logs: Path, given: Mapping[str, str]) -> None:
        self.logs, self._given = logs, given
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)
        # a soak that is killed leaves nothing behind that goes on with its databases
        self._tied = [needed("setpriv", "util-linux"), "--pdeathsig", "KILL"]

    def start(self, name: str, command: Sequence[str | Path]) -> None:
        """Start a program under a name."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*self._tied, *command],
                cwd=ROOT,
                env=environment(**self._given),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the soak alone
            )

    def ended(self) -> dict[str, int]:
        """Those that have ended by themselves, and with what code."""
        codes = {name: one.poll() for name, one in self.running.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def stand_still(self, still: bool, *, but: str) -> None:
        """Let all but one program, and all processes below them, stand still, or go on."""
        for name, one in self.running.items():
            for process in family(one.pid) if name != but else ():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP if still else signal.SIGCONT)

    def stop(self, *names: str) -> dict[str, int]:
        """End some, or all, and return what they say by their codes, where that is not 0."""
        some = {name: self.running.pop(name) for name in names or [*self.running]}
        for one in some.values():
            with suppress(ProcessLookupError):
                one.send_signal(signal.SIGTERM)
        until = time.monotonic() + PATIENCE_SECONDS
        for one in some.values():
            with suppress(subprocess.TimeoutExpired):
                one.wait(max(until - time.monotonic(), 0.1))
        for one in some.values():
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
        return {name: one.returncode for name, one in some.items() if one.returncode}


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it; none if it is gone."""
    with suppress(psutil.NoSuchProcess):
        one = psutil.Process(pid)
        return [one, *one.children(recursive=True)]
    return []
