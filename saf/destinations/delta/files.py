"""Files of a table, read and written on this machine or in an object store.

On this machine, a file is durable when `Files.write` returns: its content and its name.
`Files.sync` makes deltalake's own files durable. In an object store, everything acknowledged is
durable.

The object store's client is deltalake's own, so that both find the same login. It holds Python's
GIL while it opens, lists and removes files. So each chunk begins with a call that does not hold it
(`Files.there`): a store that hangs is noticed there, and no other thread of the process waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import (
    FileSelector,
    FileSystem,
    FileType,
    LocalFileSystem,
    PyFileSystem,
    SubTreeFileSystem,
)

from saf.database import pinned
from saf.log import disk


class Files:
    """Files of one table, by their paths in the table."""

    def __init__(self, address: str, folder: Path | None, options: Mapping[str, str]) -> None:
        """``folder``: the table's folder, if it is on this machine."""
        self._folder = folder
        self._store = None if folder else DeltaStorageHandler(address, dict(options))
        self.filesystem: FileSystem = (
            SubTreeFileSystem(str(folder), LocalFileSystem())
            if folder
            else PyFileSystem(self._store)
        )
        """The table's folder, for readers of Parquet."""

    def names(self, folder: str) -> Sequence[str]:
        """Return the names in a folder."""
        entries = self.filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
        return [entry.base_name for entry in entries]

    def there(self, path: str) -> bool:
        """Return True if a file exists."""
        return bool(self.filesystem.get_file_info(path).type == FileType.File)

    def content(self, path: str) -> bytes:
        """Return the bytes of a file."""
        with self.filesystem.open_input_file(path) as file:
            return bytes(file.read(file.size()))  # in one request

    def readable(self, path: str) -> Any:
        """Open a file for a reader of Parquet."""
        return self.filesystem.open_input_file(path)

    def write(self, path: str, content: bytes) -> None:
        """Write a new file."""
        if self._folder is None:
            upload = pinned.output(self._store, path)
            upload.write(content)
            upload.close()  # the file exists only now
            return
        file = self._folder / path
        if file.parent != self._folder and not file.parent.exists():
            file.parent.mkdir(exist_ok=True)  # fails without the table's folder
            disk.sync(self._folder)
        disk.write(file, content)
        disk.sync(file.parent)

    def sync(self, paths: Iterable[str]) -> None:
        """Make existing files durable, and their names."""
        if self._folder is None:
            return
        files = [self._folder / path for path in paths]
        for file in files:
            with suppress(FileNotFoundError):
                disk.sync_file(file)
        for folder in {self._folder, *(file.parent for file in files)}:
            disk.sync(folder)

    def remove(self, paths: Iterable[str]) -> list[str]:
        """Remove files that no reader knows; return the paths that could not be removed."""
        failed = []
        for path in paths:
            try:
                self.filesystem.delete_file(path)
            except OSError:
                failed.append(path)
        return failed


def sizes_of(table: DeltaTable) -> list[int]:
    """Return the size in bytes of each file in a version of a table."""
    return [*map(int, pa.table(table.get_add_actions(flatten=True))["size_bytes"].to_pylist())]
