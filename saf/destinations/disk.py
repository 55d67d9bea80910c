"""Files on this machine, written durably, for kinds that keep their messages in them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saf.errors import Refused, Unavailable

TO_MEND = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


@contextmanager
def unavailable_if_lost(what: str) -> Iterator[None]:
    """Raise `Unavailable` for what a file system says; `Refused` if a person has to mend it."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        if error.errno in TO_MEND:
            cure = "give this user a folder that it may write to"
            raise Refused(what, reason, cure) from None
        raise Unavailable(what, reason) from None


def write(file: Path, content: Any) -> None:
    """Write a file durably. Its name is durable only after `sync` of its folder."""
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def sync(folder: Path) -> None:
    """Make the names of a folder's files durable."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(file: Path) -> None:
    """Make the content of a file durable that somebody else has written."""
    _sync(file, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
