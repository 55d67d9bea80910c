"""The kind ``delta``: a table of Delta Lake, to which messages are appended exactly once.

    [destinations.lake]
    kind = "delta"
    table = "/data/lake/messages"           # or s3://bucket/messages
    partition_by = "day"

    [destinations.lake.promote]             # members of JSON bodies that get a column
    amount = "double"

`saf.destinations.delta.table` describes how a chunk is stored, `saf.destinations.lake.table` the
rows, `saf.destinations.delta.files` where the marks are. The client is the extra ``delta``, the
package deltalake: no JVM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, ValidationError

from saf.database import Dsn
from saf.destinations.lake import LakeSettings, said
from saf.errors import MissingExtra

if TYPE_CHECKING:
    from saf.destinations.delta.link import Link
    from saf.log.ring import Archive

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^/]+/.+")


def _table(text: str) -> str:
    if "://" not in text:
        if not text:
            raise ValueError("is empty")
        return str(Path(text).absolute())
    if not ADDRESS.fullmatch(text) or text.startswith("file:"):
        raise ValueError(f"{text!r} is neither a folder nor an address such as s3://bucket/table")
    return text.rstrip("/")


class Delta(LakeSettings):
    """Settings of a table of Delta Lake."""

    client: ClassVar[str | None] = "deltalake"
    stores: ClassVar[tuple[str, str]] = ("table", "Table")

    kind: Literal["delta"] = "delta"
    table: Annotated[str, AfterValidator(_table)]
    """Table: an existing folder, or an address such as `s3://bucket/table`. An empty one becomes a
    table at the first message."""
    storage_options: dict[str, SecretStr] = Field(default_factory=dict)
    """Options of the object store's client, such as `AWS_ACCESS_KEY_ID`; all of their values count
    as secret."""

    @property
    def has_day(self) -> bool:
        """Return True if the table is partitioned by day: its rows name the day."""
        return self.partition_by == "day"

    @property
    def folder(self) -> Path | None:
        """Folder of the table, if it is on this machine."""
        return None if "://" in self.table else Path(self.table)

    @property
    def options(self) -> dict[str, str]:
        """Options of deltalake for an object store; it waits within saf's bounds."""
        if self.folder:
            return {}
        waits = {
            "connect_timeout": f"{self.bounds.network_seconds:g}s",
            "timeout": f"{self.bounds.statement_seconds:g}s",
            "retry_timeout": f"{self.bounds.statement_seconds:g}s",
        }
        return waits | said(self.storage_options)

    @contextmanager
    def connected(self, name: str) -> Iterator[Link]:
        """Open a link; see `LinkedSettings.connected`."""
        yield self._module(name, "link").Link(name, self)

    @classmethod
    def at(cls, place: str) -> Self:
        """Return the settings of an archive; see `saf.destinations.delta.archive`."""
        try:
            return cls.model_validate({"table": place})
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None

    def archive(self, dsn: Dsn) -> Archive:
        """Return the archive that stores slots in the table; see `DestinationSettings.archive`."""
        try:
            from saf.destinations.delta.archive import DeltaArchive
        except ImportError:
            raise MissingExtra("delta", "an archive in a Delta table") from None
        return DeltaArchive(dsn, self)

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the table's problems; see `DestinationSettings.problems`."""
        with self.connected(name) as link:
            from saf.destinations.delta.link import restored
            from saf.destinations.delta.table import check

            table = link.load()
            if table is None:
                return
            check(link, table)
            with link.errors():
                version = restored(table)
        if version is not None:
            yield (
                f"its table was restored to an older version, by version {version}: Delta keeps "
                "saf's marks then, and not the messages",
                "saf reconcile, which names missing messages; restore a copy of the folder instead",
            )
