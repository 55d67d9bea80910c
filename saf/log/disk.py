"""Durable files on this machine: their contents, and the names in their folders.

A new file survives a crash once `write` and then `sync` of its folder have returned. All
functions for files raise `OSError`, do not try again, and lock no file.

`unavailable_if_lost` turns errors of the local file system into saf's own errors, for kinds that
keep their messages in files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saf.errors import Refused, Unavailable

TO_MEND = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably.

    An existing folder may not be durable: the process that created it may have died before that.
    """
    folders = [folder, *(path for path in folder.parents if not path.exists())]
    folder.mkdir(parents=True, exist_ok=True)
    for path in folders:
        sync(path.parent)


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
    """Make a file's content durable that another process has written."""
    _sync(file, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def unavailable_if_lost(what: str) -> Iterator[None]:
    """Raise `Unavailable` for a file system error; `Refused` if an operator must fix the cause."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        if error.errno in TO_MEND:
            cure = "give this user a folder that it may write to"
            raise Refused(what, reason, cure) from None
        raise Unavailable(what, reason) from None
