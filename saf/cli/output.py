"""Standard streams that are closed or full: a command does its work all the same.

A service manager or a script may start ``saf`` without standard output or error (`>&-`), or with a
full disk behind it. A closed descriptor would be given to the next file or connection that is
opened, which would then get what is printed. So whatever is closed is opened on the null device
first. Output that cannot be written ends a command with a sentence and not with a traceback, after
its work; a forwarder in a loop goes on.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Open those of the three standard streams that are closed on the null device."""
    for descriptor, (name, mode) in enumerate(STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free is this one
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - it stays open
            setattr(sys, name, null)


def is_of_output(error: OSError) -> bool:
    """Whether standard output is what could not be written: an error of a file names the file."""
    return error.filename is None and error.errno in CANNOT_BE_WRITTEN


def give_up_output() -> None:
    """Write nothing more to standard output: Python would try again at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
