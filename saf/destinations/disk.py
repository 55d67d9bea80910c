"""Errors of the local file system, for kinds that keep their messages in files."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from saf.errors import Refused, Unavailable

TO_MEND = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


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
