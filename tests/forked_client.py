"""Asks the server of `tests.forked` for a process, and waits for its end.

It is also all that the program ``saf`` in the folder of `tests.forked` does, which starts some
hundred times: so it imports little, and nothing that is installed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
HEAD_BYTES = 8
CODE_BYTES = 4


def ask(
    connection: socket.socket,
    arguments: Sequence[str],
    env: Mapping[str, str],
    folder: str,
    streams: Sequence[int],
) -> None:
    """Start it with three streams. What is sent after it is a signal; to hang up is to kill."""
    request = json.dumps([list(arguments), dict(env), folder]).encode()
    socket.send_fds(connection, [len(request).to_bytes(HEAD_BYTES, "big")], streams)
    connection.sendall(request)


def wait(connection: socket.socket) -> int:
    """Its exit code; minus the signal that killed it.

    Raises:
        ConnectionError: the server is gone, and what it had started with it.
        TimeoutError: it did not end within the connection's time limit.
    """
    said = connection.recv(CODE_BYTES)
    if not said:
        raise ConnectionError("the server of forked processes is gone")
    return int.from_bytes(said, "big", signed=True)


def main(server: str) -> None:
    """Be that process, as far as who started this one can tell."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        folder = os.getcwd()  # noqa: PTH109 - pathlib is slow to import
        ask(connection, sys.argv[1:], os.environ, folder, (0, 1, 2))
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda which, _: connection.sendall(bytes([which])))
        code = wait(connection)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no other
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
