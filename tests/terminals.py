"""Commands on a terminal of some width."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from pathlib import Path

from tests import forked
from tests.programs import environment

ROWS = 50


def on_a_terminal(
    *arguments: str, columns: int = 80, answer: str = "", cwd: Path | None = None
) -> str:
    """What the command ``saf`` writes to a terminal, its errors too; ``answer`` is typed there."""
    terminal, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    env = {name: value for name, value in environment().items() if name != "COLUMNS"}
    with Path(os.devnull).open("rb") as nothing:
        typed = theirs if answer else nothing.fileno()
        with forked.start(arguments, env=env, cwd=cwd, streams=(typed, theirs, theirs)):
            os.write(terminal, answer.encode())
            os.close(theirs)
            said = until_the_end(terminal)
    return said.removesuffix("\r\n")


def until_the_end(terminal: int) -> str:
    """What is written to a terminal until all who can write to it have closed it; closes it too."""
    said = b""
    try:
        while data := os.read(terminal, 65536):
            said += data
    except OSError:
        pass  # Linux says the end so
    os.close(terminal)
    return said.decode()
