"""The command ``saf`` in a process of its own that costs milliseconds.

It is forked from a server that has imported what the command imports, and is otherwise what the
installed script is: its arguments, environment, folder, standard streams, signals, what runs at
its end, and its exit code. Tests that are about the script itself, or about how it starts, use
`tests.programs.BIN`.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

from tests.processes import CONTEXT

GRACE_SECONDS = 10


def saf(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run it to its end.

    Raises:
        subprocess.TimeoutExpired: it did not end, and was killed.
    """
    command = ["saf", *arguments]
    folder = str(cwd or Path.cwd())
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        process = CONTEXT.Process(
            target=_command, args=(command, dict(env), folder, _path(), out.name, err.name)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join(GRACE_SECONDS)
            raise subprocess.TimeoutExpired(command, timeout, _text(out), _text(err))
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(command, code, _text(out), _text(err))


@cache
def _path() -> list[str]:
    """Where a Python of this environment looks for modules, and not where pytest does."""
    ask = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep=chr(10))"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(ask, env=env, capture_output=True, text=True, check=True).stdout.split()


def _text(file: IO[bytes]) -> str:
    return Path(file.name).read_text()


def _command(  # noqa: PLR0917 - in another process
    command: list[str], env: dict[str, str], folder: str, path: list[str], out: str, err: str
) -> None:
    """In the forked process."""
    os.setsid()
    for number, name in ((0, os.devnull), (1, out), (2, err)):
        opened = os.open(name, os.O_RDWR | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False) for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    more = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [str(Path(sys.executable).parent), *more, *path]
    sys.argv[:] = command
    signal.signal(signal.SIGINT, signal.default_int_handler)

    from saf.cli import program
    from saf.failpoints import arm

    arm(env.get("SAF_FAILPOINT", ""))
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    else:
        code = 0
    atexit._run_exitfuncs()  # a forked process would leave them out
    sys.exit(code)
