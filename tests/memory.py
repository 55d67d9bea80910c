"""Temporary files in memory, where the machine has room for them.

A test's database is some 560 files, and a disk takes ten times as long as memory to make them.
A run that is killed leaves its folder behind: the next one finds that nobody holds it, and deletes
it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own in it, which nobody else can guess
FREE_GIB = 3
AVAILABLE_GIB = 6
GIB = 1 << 30
LAST = -1000

OURS = re.compile(r"saf-[a-z0-9_]{8}")
YOUNG_SECONDS = 60
"""Whoever has just made a folder may not hold it yet."""


def use() -> None:
    """Put what is temporary into memory until this process ends, and for what it starts.

    A ``TMPDIR`` that somebody has set stays.
    """
    if "TMPDIR" in os.environ:
        return
    sweep()
    if not has_room():
        return
    # what is in tmp_path is little, and its names must not become too long for a socket
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="saf-", dir=MEMORY)
    Path(folder).chmod(0o755)  # PostgreSQL refuses root, and runs as somebody else
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # until this process ends
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # after multiprocessing has cleaned up, which has a folder in there
    util.Finalize(
        None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=LAST
    )


def sweep(memory: Path = MEMORY) -> None:
    """Delete the folders of runs that were killed: those that nobody holds."""
    for folder in memory.glob("saf-*"):
        with suppress(OSError):
            said = folder.stat()
            old = time.time() - said.st_mtime > YOUNG_SECONDS
            if OURS.fullmatch(folder.name) and old and said.st_uid == os.getuid():
                _delete_unless_held(folder)


def _delete_unless_held(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def has_room() -> bool:
    """Whether memory can be spared for the files of a whole run."""
    try:
        free = shutil.disk_usage(MEMORY).free
        told = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return False
    available = int(told[1]) * 1024 if told else 0
    return (
        os.access(MEMORY, os.W_OK) and free >= FREE_GIB * GIB and available >= AVAILABLE_GIB * GIB
    )
