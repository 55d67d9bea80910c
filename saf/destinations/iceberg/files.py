"""The files of tables on this machine, as pyiceberg reads and writes them.

What is written is durable when its stream is closed: the content of the file, and its name. So all
that a commit refers to is durable before the commit. No folder is made but those in a table's own:
where no disk is mounted any more, nothing is written.

This module does without Arrow, because a forwarder's driver reads what a table says of itself.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream

from saf.log import disk

NAME = f"{__name__}.LocalFiles"
"""The name by which pyiceberg finds it."""
FILE = re.compile(r"^file:(//(localhost)?(?=/))?")


def path_of(location: str) -> Path:
    """Return the path of a file that a table refers to.

    >>> [str(path_of(one)) for one in ("file:///lake/a", "file:/lake/a", "/lake/a")]
    ['/lake/a', '/lake/a', '/lake/a']
    """
    return Path(FILE.sub("", location))


class Synced(io.BufferedWriter):
    """A stream into a new file, which is durable when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(io.FileIO(path, "xb"))

    def close(self) -> None:
        """Bring the file to the disk."""
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
        """Whether it is there."""
        return self._path.exists()

    def open(self, seekable: bool = True) -> InputStream:  # noqa: ARG002 - it always is
        """Open it for reading."""
        return self._path.open("rb")

    def to_input_file(self) -> InputFile:
        """Return it for reading."""
        return self

    def create(self, overwrite: bool = False) -> OutputStream:
        """Open it for writing; it must not be there.

        Raises:
            FileNotFoundError: the table's folder is not there.
        """
        if overwrite:
            self._path.unlink(missing_ok=True)
        folder = self._path.parent
        if not folder.exists():
            folder.mkdir(exist_ok=True)  # fails without the table's folder
            disk.sync(folder.parent)
        return Synced(self._path)


class LocalFiles(FileIO):
    """All files of this machine."""

    def new_input(self, location: str) -> InputFile:
        """Return a file for reading."""
        return LocalFile(location)

    def new_output(self, location: str) -> OutputFile:
        """Return a file for writing."""
        return LocalFile(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Remove a file."""
        path_of(location if isinstance(location, str) else location.location).unlink()
