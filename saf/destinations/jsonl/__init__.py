"""The kind ``jsonl``: a folder of files, one line of JSON for each message.

    [destinations.lake]
    kind = "jsonl"
    folder = "/data/orders"

What is in the folder is told by `saf.destinations.jsonl.folder`, what a line is by
`saf.destinations.jsonl.lines`. Whoever reads the files may delete those that it has read.

All forwarders see the folder at the same path, on a file system on which ``flock`` holds between
them: a local one, or one that is mounted with locks, such as NFS 4.
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
    """A folder of files of JSON lines."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        exactly_once=True, fences=True, reads_back=True
    )

    kind: Literal["jsonl"] = "jsonl"
    folder: Annotated[Path, AfterValidator(Path.absolute)]
    """It exists; an empty one becomes a destination at the first message."""
    max_line_bytes: Annotated[int, within(1024, 1 << 31)] | None = None
    """A message whose line is longer is a dead letter: not every reader takes long lines."""
    lock_seconds: Annotated[float, within(0.01, 86_400)] = 30.0
    """How long another forwarder that writes is waited for."""

    def open(self, name: str, *, keep: bool = False) -> Destination:  # noqa: ARG002 - nothing to keep
        """The folder."""
        from saf.destinations.jsonl.folder import Folder  # needs Arrow, which a driver does not

        return Folder(name, self)

    @classmethod
    def preload(cls) -> None:
        """The folder."""
        import saf.destinations.jsonl.folder  # noqa: F401 - to have it imported

    def identity(self, name: str) -> UUID:
        """What its ``saf.json`` says, or will say."""
        return read_identity(f"destination {name!r}", self.folder)

    def known(self, name: str, source: UUID, *, role: str) -> Known:  # noqa: ARG002 - nobody asks
        """Its marks of a source."""
        return known_of(f"destination {name!r}", self.folder, source)

    def reading(self, name: str) -> AbstractContextManager[Reading]:
        """All of its files, while none is missing."""
        from saf.destinations.jsonl.reading import read

        return read(name, self.folder)

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Whether it is there. It need not be a destination yet."""
        from saf.destinations.jsonl.folder import Folder

        Folder(name, self).look()
        yield from ()
