"""Temporary files in memory, where the machine has room for them.

A test's database is some 300 files, and a disk takes ten times as long as memory to make them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from multiprocessing import util
from pathlib import Path

MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own in it, which nobody else can guess
FREE_GIB = 3
AVAILABLE_GIB = 6
GIB = 1 << 30
LAST = -1000


def use() -> None:
    """Put what is temporary into memory until this process ends, and for what it starts.

    A ``TMPDIR`` that somebody has set stays.
    """
    if "TMPDIR" in os.environ or not has_room():
        return
    # what is in tmp_path is little, and its names must not become too long for a socket
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="saf-", dir=MEMORY)
    Path(folder).chmod(0o755)  # PostgreSQL refuses root, and runs as somebody else
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # after multiprocessing has cleaned up, which has a folder in there
    util.Finalize(
        None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=LAST
    )


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
