"""Children: processes that live exactly as long as this one, by their standard input.

They end by themselves when that does, which takes some of them a moment, and nobody waits for it. A
Python that takes itself apart would warn of each that is still there, and of its pipes.
"""

from __future__ import annotations

import atexit
import os
import subprocess
from contextlib import suppress


def left_to_itself(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """The same process; at the end of this one its pipes are closed, and it is let go."""
    atexit.register(_let_go, process, os.getpid())
    return process


def _let_go(process: subprocess.Popen[bytes], parent: int) -> None:
    if os.getpid() != parent:
        return  # a fork of this process has inherited it, and is not its parent
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # it has ended, and what was to be written is of no use
                pipe.close()
    if process.poll() is None:
        process.returncode = 0  # by which Popen knows that nobody wants to know
