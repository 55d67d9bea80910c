"""The command ``saf`` in a process of its own that costs milliseconds.

It is forked from a server that has imported what the command imports, and is otherwise what the
installed script is: its arguments, environment, folder, standard streams, signals, what runs at
its end, and its exit code. Tests that are about the script itself, or about how it starts, use
`tests.programs.BIN`.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, NoReturn

from saf.cli import commands, program
from saf.failpoints import arm
from tests import forked_client
from tests.forked_client import CODE_BYTES, HEAD_BYTES
from tests.processes import CONTEXT

STREAMS = 3
SCRIPT = """#!{python} -IS
import sys
sys.path.append({folder!r})
from forked_client import main
main({server!r})
"""


def saf(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run it to its end.

    Raises:
        subprocess.TimeoutExpired: it did not end, and was killed.
    """
    command = ["saf", *arguments]
    with (
        tempfile.NamedTemporaryFile(mode="a+b") as out,
        tempfile.NamedTemporaryFile(mode="a+b") as err,
        Path(os.devnull).open("rb") as nothing,
        start(
            arguments,
            env=env,
            cwd=cwd,
            streams=(nothing.fileno(), out.fileno(), err.fileno()),
            timeout=timeout,
        ) as connection,
    ):
        try:
            code = forked_client.wait(connection)
        except TimeoutError:
            raise subprocess.TimeoutExpired(command, timeout, _text(out), _text(err)) from None
        return subprocess.CompletedProcess(command, code, _text(out), _text(err))


def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None,
    streams: Sequence[int],
    timeout: float | None = None,
) -> socket.socket:
    """Start it with these standard streams; `forked_client.wait` at what is returned waits for it.

    Closing what is returned kills it, if it has not ended.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout)
    connection.connect(str(on_path().parent / "server"))
    forked_client.ask(connection, arguments, env, str(cwd or Path.cwd()), streams)
    return connection


@cache
def on_path() -> Path:
    """A folder for PATH, whose program ``saf`` is the command in a forked process."""
    given = tempfile.TemporaryDirectory(prefix="saf-forked-")
    atexit.register(given.cleanup)
    server, script = Path(given.name, "server"), Path(given.name, "bin", "saf")
    script.parent.mkdir()
    here = str(Path(__file__).parent)
    script.write_text(SCRIPT.format(python=sys.executable, folder=here, server=str(server)))
    script.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(server))
        listener.listen()
        process = CONTEXT.Process(target=_serve, args=(listener, _path()))
        process.start()
    atexit.register(process.kill)
    return script.parent


@cache
def _path() -> list[str]:
    """Where a Python of this environment looks for modules, and not where pytest does."""
    ask = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep=chr(10))"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(ask, env=env, capture_output=True, text=True, check=True).stdout.split()


def _text(file: IO[bytes]) -> str:
    return Path(file.name).read_text()


def _serve(listener: socket.socket, path: list[str]) -> None:
    """In the server: a process for each who asks, until pytest's is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    commands()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who attend are not waited for
    asked = listener.fileno()
    while asked in select.select([asked, parent.sentinel], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _attend(connection, path)
        connection.close()


def _attend(connection: socket.socket, path: list[str]) -> NoReturn:
    """In a process between the server and the command: one that can wait for it."""
    head, streams, _, _ = socket.recv_fds(connection, HEAD_BYTES, STREAMS)
    with connection.makefile("rb") as file:
        arguments, env, folder = json.loads(file.read(int.from_bytes(head, "big")))
    command = os.fork()
    if command == 0:
        connection.close()
        _command(["saf", *arguments], env, folder, path, streams)
    for stream in streams:
        os.close(stream)
    told, ended = connection.fileno(), os.pidfd_open(command)
    while ended not in select.select([told, ended], [], [])[0]:
        number = connection.recv(1)
        os.kill(command, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with suppress(OSError):  # who asked is gone
        connection.sendall(code.to_bytes(CODE_BYTES, "big", signed=True))
    os._exit(0)


def _command(
    command: list[str], env: dict[str, str], folder: str, path: list[str], streams: list[int]
) -> NoReturn:
    """In the forked process."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering, closefd=False)
        for number, mode, buffering in ((0, "r", -1), (1, "w", -1), (2, "w", 1))
    )
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    more = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [str(Path(sys.executable).parent), *more, *path]
    sys.argv[:] = command
    signal.signal(signal.SIGINT, signal.default_int_handler)

    arm(env.get("SAF_FAILPOINT", ""))
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    else:
        code = 0
    atexit._run_exitfuncs()  # a forked process would leave them out
    sys.exit(code)
