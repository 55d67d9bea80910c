"""Files that programs leave behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def files_where(folder: Path, is_it: Callable[[bytes], bool]) -> list[Path]:
    """The files below a folder whose bytes are such, but for saf.toml.

    A process that ends may delete its own files and folders meanwhile.
    """
    found = []
    for place, _, names in os.walk(folder):
        for file in (Path(place, name) for name in names if name != "saf.toml"):
            with suppress(FileNotFoundError):
                if file.is_file() and is_it(file.read_bytes()):
                    found.append(file)
    return found
