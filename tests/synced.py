"""What this process makes durable, by its paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def synced() -> Iterator[set[Path]]:
    """The files and folders that were synced within it; they are synced."""
    found: set[Path] = set()
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        found.add(Path(f"/proc/self/fd/{descriptor}").readlink())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noting)
        yield found
