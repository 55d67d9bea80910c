"""The command ``saf``, in an environment of its own, with its configuration.

It is started in a session of its own, so that it can be ended with all that it has started: Spark's
JVM and workers. It gets the environment of Airflow's process, from which saf.toml takes its
``${NAME}``; what Airflow itself has put there for Python (`PYTHONPATH`, a virtual environment) is
left out, because it is for another interpreter.

What the exit code says is in docs/operations.md of saf. It is never wrong to run a command again.
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
"""Exit codes: a database does not answer; a person has to mend something."""

LAST_LINES = 5
"""How many lines of what the command has said an error repeats."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """How the command has ended."""

    code: int
    said: dict[str, Any]
    """Its last line on standard output, which is JSON; empty if it has printed none."""
    errors: str
    """The last lines on standard error."""


@dataclass(frozen=True, kw_only=True)
class Saf:
    """Where the command is, and what it is given."""

    command: str = "/opt/saf/bin/saf"
    config: str | None = None
    """saf.toml; None: ``$SAF_CONFIG`` or what is in the folder of the process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, such as the dsns that saf.toml names."""

    @classmethod
    def of_connection(cls, connection_id: str) -> Saf:
        """What a connection of Airflow says in its extra: ``command``, ``config``, ``environment``.

        Raises:
            ValueError: it says something else.
        """
        from airflow.sdk import BaseHook

        extra = BaseHook.get_connection(connection_id).extra_dejson
        unknown = set(extra) - {"command", "config", "environment"}
        if unknown:
            raise ValueError(
                f"connection {connection_id!r}: its extra has {', '.join(sorted(unknown))}; "
                "it may have command, config and environment"
            )
        return cls(**extra)

    def line(self, *arguments: str) -> list[str]:
        """The words of a command."""
        configured = ["--config", self.config] if self.config else []
        return [self.command, *arguments, *configured]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command.

        Raises:
            OSError: it cannot be started.
        """
        return subprocess.Popen(  # noqa: S603 - whoever writes the DAG says which command
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
        """Run a command that only asks, without holding up the event loop.

        Raises:
            OSError: it cannot be started.
            TimeoutError: it did not end, and was killed.
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
        except asyncio.TimeoutError:  # noqa: UP041 - in Python 3.10 it is no TimeoutError yet
            raise TimeoutError(f"it has not ended within {seconds:g} s") from None
        finally:
            if process.returncode is None:
                end(process.pid, signal.SIGKILL)
                await process.wait()
        return done(
            process.returncode or 0, out.decode(errors="replace"), err.decode("utf-8", "replace")
        )

    def _environment(self) -> dict[str, str]:
        kept = {name: one for name, one in os.environ.items() if name not in NOT_FOR_SAF}
        return {**kept, **self.environment}


def finish(process: subprocess.Popen[str], say: Callable[[str], None]) -> Done:
    """Wait for the end of a command; say each line of its standard error as it comes."""
    lines: list[str] = []

    def listen() -> None:
        assert process.stderr is not None  # noqa: S101 - it was started with a pipe
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
    """How a command has ended, by what it has printed."""
    said: Any = {}
    if out.strip():
        try:
            said = json.loads(out.strip().splitlines()[-1])
        except ValueError:
            said = {}
    last = "\n".join(errors.splitlines()[-LAST_LINES:])
    return Done(code=code, said=said if isinstance(said, dict) else {}, errors=last)


def end(pid: int, how: signal.Signals) -> None:
    """Send a signal to a command and all that it has started; nothing if they are gone."""
    try:
        os.killpg(pid, how)
    except ProcessLookupError:
        return
