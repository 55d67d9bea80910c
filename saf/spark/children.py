"""Children: processes that live exactly as long as this one, by their standard input.

They end by themselves when their standard input does. That takes some of them a moment, and nobody
waits for it. While Python ends, it would warn of each child that is still there, and of its pipes.
"""

from __future__ import annotations

import atexit
import os
import subprocess
from contextlib import suppress


def left_to_itself(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Return a process whose pipes are closed, and which is left alone, when this one ends."""
    atexit.register(_let_go, process, os.getpid())
    return process


def _let_go(process: subprocess.Popen[bytes], parent: int) -> None:
    if os.getpid() != parent:
        return  # a fork of this process has inherited the handler, and is not the child's parent
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # the child has ended, and what was to be written is of no use
                pipe.close()
    if process.poll() is None:
        process.returncode = 0  # this tells Popen that nobody waits for the child's exit code
