"""The kind ``jsonl``: a folder of files, one line of JSON for each message.

    [destinations.lake]
    kind = "jsonl"
    folder = "/data/orders"

`saf.destinations.jsonl.folder` describes the folder, `saf.destinations.jsonl.folder` the lines.
Readers may delete files that they have read.

All forwarders see the folder at the same path. ``flock`` must work between them, so the file system
is local, or mounted with locks, such as NFS 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from uuid import UUID

from pydantic import AfterValidator

from saf.destinations import Capabilities, Destination
from saf.destinations.jsonl.state import known_of, read_identity
from saf.destinations.marks import Known
from saf.destinations.reading import Reading
from saf.destinations.settings import DestinationSettings, within


class Jsonl(DestinationSettings):
    """Settings of a folder of files of JSON lines."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        exactly_once=True, fences=True, reads_back=True, takes_parts=True
    )

    kind: Literal["jsonl"] = "jsonl"
    folder: Annotated[Path, AfterValidator(Path.absolute)]
    """Existing folder. An empty folder becomes a destination at the first message."""
    max_line_bytes: Annotated[int, within(1024, 1 << 31)] | None = None
    """Longest line; longer messages are dead letters, because not all readers accept long lines."""
    lock_seconds: Annotated[float, within(0.01, 86_400)] = 30.0
    """Seconds that a forwarder waits for another one that is writing."""

    def open(self, name: str, *, keep: bool = False) -> Destination:  # noqa: ARG002 - nothing to keep
        """Return the folder as a destination; see `DestinationSettings.open`."""
        from saf.destinations.jsonl.folder import Folder  # needs Arrow, which drivers lack

        return Folder(name, self)

    def identity(self, name: str) -> UUID:
        """Return the folder's identity, stored or future; see `DestinationSettings.identity`."""
        return read_identity(f"destination {name!r}", self.folder)

    def known(self, name: str, source: UUID, *, role: str) -> Known:  # noqa: ARG002 - unused here
        """Return the folder's marks of a source; see `DestinationSettings.known`."""
        return known_of(f"destination {name!r}", self.folder, source)

    def reading(self, name: str) -> AbstractContextManager[Reading]:
        """Open all files of the folder for reading; see `DestinationSettings.reading`.

        Raises:
            CannotReadBack: some files are gone.
        """
        from saf.destinations.jsonl.folder import read

        return read(name, self.folder)

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Raise if the folder cannot be used. It need not be a destination yet."""
        from saf.destinations.jsonl.folder import Folder

        Folder(name, self).look()
        yield from ()
