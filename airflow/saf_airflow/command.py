"""The command ``saf``, in a separate environment, with its configuration.

It starts in a separate session, so that it can be ended together with its child processes: Spark's
JVM and workers. It gets the environment of Airflow's process, from which saf.toml takes its
``${NAME}``. Airflow's own Python settings (`PYTHONPATH`, a virtual environment) are removed,
because they are for another interpreter.

Exit codes are listed in docs/operations.md of saf. Running a command again is always safe.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

NOT_FOR_SAF = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")

TRY_AGAIN, MEND = 75, 2
"""Exit codes: a database does not answer; an operator must fix something."""

LAST_LINES = 5
"""Lines of the command's output that an error repeats."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """Result of a command."""

    code: int
    said: dict[str, Any]
    """Last line on standard output, parsed as JSON; empty if nothing was printed."""
    errors: str
    """Last lines on standard error."""


@dataclass(frozen=True, kw_only=True)
class Saf:
    """Location of the command, with its configuration."""

    command: str = "/opt/saf/bin/saf"
    config: str | None = None
    """Path of saf.toml; None: ``$SAF_CONFIG``, or saf.toml in the process's folder."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further variables that saf.toml refers to."""
    connections: Mapping[str, str] = field(default_factory=dict)
    """Variables that get the DSN of an Airflow connection: its id by the variable's name. They are
    read where the command starts, so no DAG and no trigger contains a password."""

    def line(self, *arguments: str) -> list[str]:
        """Return the words of a command line."""
        configured = ["--config", self.config] if self.config else []
        return [self.command, *arguments, *configured]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command.

        Raises:
            OSError: the command cannot be started.
        """
        return subprocess.Popen(  # noqa: S603 - the DAG's author chooses the command
            self.line(*arguments),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    async def ask(self, *arguments: str, seconds: float = 120.0) -> Done:
        """Run a read-only command without blocking the event loop.

        Raises:
            OSError: the command cannot be started.
            TimeoutError: the command did not end, and was killed.
        """
        process = await asyncio.create_subprocess_exec(
            *self.line(*arguments),
            env=self._environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), seconds)
        except asyncio.TimeoutError:  # noqa: UP041 - not yet a TimeoutError in Python 3.10
            raise TimeoutError(f"it has not ended within {seconds:g} s") from None
        finally:
            if process.returncode is None:
                end(process.pid, signal.SIGKILL)
                await process.wait()
        return done(
            process.returncode or 0, out.decode(errors="replace"), err.decode("utf-8", "replace")
        )

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in NOT_FOR_SAF}
        return {**kept, **self.environment}


def finish(process: subprocess.Popen[str], say: Callable[[str], None]) -> Done:
    """Wait for the end of a command; pass on each line of its standard error immediately."""
    lines: list[str] = []

    def listen() -> None:
        assert process.stderr is not None  # noqa: S101 - started with a pipe
        for line in process.stderr:
            say(line.rstrip())
            lines.append(line)
            del lines[:-LAST_LINES]

    listening = Thread(target=listen, daemon=True)
    listening.start()
    assert process.stdout is not None  # noqa: S101 - the same
    out = process.stdout.read()
    code = process.wait()
    listening.join()
    return done(code, out, "".join(lines))


def done(code: int, out: str, errors: str) -> Done:
    """Return the result of a command from its output."""
    document: Any = {}
    if out.strip():
        try:
            document = json.loads(out.strip().splitlines()[-1])
        except ValueError:
            document = {}
    last = "\n".join(errors.splitlines()[-LAST_LINES:])
    return Done(code=code, said=document if isinstance(document, dict) else {}, errors=last)


def end(pid: int, how: signal.Signals) -> None:
    """Send a signal to a command and its child processes; do nothing if they are gone."""
    try:
        os.killpg(pid, how)
    except ProcessLookupError:
        return
