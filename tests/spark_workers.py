"""The Python workers of Spark's, for tests that kill them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def workers(driver: int) -> list[int]:
    """Those that the daemons of a driver have forked, and no daemon."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    ours = {driver}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    daemons = [
        pid for pid in ours if b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return [pid for pid in daemons if parents[pid] in daemons]
