"""Standard streams that are closed or full: a command does its work in any case.

A service manager or a script may start ``saf`` without standard output or error (`>&-`), or with a
full disk behind it. The next file or connection would get the number of a closed descriptor, and
then the printed output. So closed descriptors are opened on the null device first. If output cannot
be written, a command ends after its work, with a sentence and without a traceback; a forwarder in a
loop continues.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Open closed standard streams on the null device."""
    for descriptor, (name, mode) in enumerate(STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - it stays open
            setattr(sys, name, null)


def is_of_output(error: OSError) -> bool:
    """Return whether writing to standard output failed: an error of a file names the file."""
    return error.filename is None and error.errno in CANNOT_BE_WRITTEN


def give_up_output() -> None:
    """Write nothing more to standard output: Python would retry on exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
