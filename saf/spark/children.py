"""Children: processes that live exactly as long as this one, tied by their standard input.

A child exits when its standard input closes. Some take a moment, and nothing waits for them. On
exit, Python would warn about each child that is still running, and about its pipes.
"""

from __future__ import annotations

import atexit
import os
import subprocess
from contextlib import suppress


def left_to_itself(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Return the process; when this process exits, close the child's pipes and leave it alone."""
    atexit.register(_let_go, process, os.getpid())
    return process


def _let_go(process: subprocess.Popen[bytes], parent: int) -> None:
    if os.getpid() != parent:
        return  # a fork of this process inherited the handler; it is not the child's parent
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # the child has ended, and buffered input is useless
                pipe.close()
    if process.poll() is None:
        process.returncode = 0  # so that Popen believes the child's exit code was collected
