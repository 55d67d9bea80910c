"""Files of tables on this machine, read and written by pyiceberg.

A file is durable when its stream is closed: its content and its name. So everything that a commit
refers to is durable before the commit. Folders are created only inside a table's own folder: if a
disk is no longer mounted, nothing is written.

This module does not use Arrow, because a forwarder's driver reads a table's metadata.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream

from saf.log import disk

NAME = f"{__name__}.LocalFiles"
"""Name by which pyiceberg finds the class."""
FILE = re.compile(r"^file:(//(localhost)?(?=/))?")


def path_of(location: str) -> Path:
    """Return the path of a file that a table refers to.

    >>> [str(path_of(one)) for one in ("file:///lake/a", "file:/lake/a", "/lake/a")]
    ['/lake/a', '/lake/a', '/lake/a']
    """
    return Path(FILE.sub("", location))


class Synced(io.BufferedWriter):
    """A stream into a new file, which is durable once closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(io.FileIO(path, "xb"))

    def close(self) -> None:
        """Sync the file and its folder to the disk."""
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
            super().close()
            disk.sync(self._path.parent)


class LocalFile(InputFile, OutputFile):
    """One file."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._path = path_of(location)

    def __len__(self) -> int:
        return self._path.stat().st_size

    def exists(self) -> bool:
        """Return True if the file exists."""
        return self._path.exists()

    def open(self, seekable: bool = True) -> InputStream:  # noqa: ARG002 - it always is
        """Open the file for reading."""
        return self._path.open("rb")

    def to_input_file(self) -> InputFile:
        """Return the file for reading."""
        return self

    def create(self, overwrite: bool = False) -> OutputStream:
        """Create the file and open it for writing.

        Raises:
            FileNotFoundError: the table's folder does not exist.
        """
        if overwrite:
            self._path.unlink(missing_ok=True)
        folder = self._path.parent
        if not folder.exists():
            folder.mkdir(exist_ok=True)  # fails without the table's folder
            disk.sync(folder.parent)
        return Synced(self._path)


class LocalFiles(FileIO):
    """Files of this machine."""

    def new_input(self, location: str) -> InputFile:
        """Return a file for reading."""
        return LocalFile(location)

    def new_output(self, location: str) -> OutputFile:
        """Return a file for writing."""
        return LocalFile(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Remove a file."""
        path_of(location if isinstance(location, str) else location.location).unlink()
