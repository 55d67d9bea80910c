"""An Iceberg table to which chunks are appended as in `saf.destinations.lake.table`.

A chunk becomes one Parquet file per partition. The commit replaces the catalog's entry of the
table: it adds a snapshot with these files to the branch ``main``, and the marks
(`saf.destinations.iceberg.marks`). Iceberg's commits are optimistic, and that is the fence: a
commit requires that ``main`` still ends with the snapshot whose marks were read. If any other
commit has come first, for whatever shards, this one fails, and the marks are read again. To change
only marks, a snapshot without files is added: only a commit that moves ``main`` is fenced.

pyiceberg would retry a commit automatically, with the marks that it was given. Marks would go back,
and messages would be stored twice. So its retries are turned off.

On this machine, files are durable before the commit (`saf.destinations.iceberg.link`), and the
catalog's database makes the commit durable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table import TableProperties
from pyiceberg.table.snapshots import Operation

from saf.destinations.iceberg.link import Link
from saf.destinations.iceberg.making import ready, write
from saf.destinations.iceberg.marks import name_of, put_right, text_of
from saf.destinations.lake.state import DESTINATION, State
from saf.destinations.lake.table import COLUMNS, Change, LakeReading, LakeTable, reading
from saf.errors import SafError, Unavailable
from saf.failpoints import fail_point

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata

    from saf.destinations.iceberg import Iceberg


@dataclass(kw_only=True)
class Opened:
    """The table as read by this process."""

    table: IcebergTable
    identity: UUID


class Table(LakeTable[Opened]):
    """A table as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Iceberg) -> None:
        super().__init__(name)
        self._link = Link(name, settings)

    def close(self) -> None:
        """Forget the version that was read, and close the connection."""
        super().close()
        self._link.close()

    def _identity(self, opened: Opened) -> UUID:
        return opened.identity

    def _state(self, opened: Opened, source: UUID) -> State:
        return self._link.state(opened.table, source)

    def _open(self) -> Opened:
        table = ready(self._link)
        return Opened(table=table, identity=UUID(table.properties[DESTINATION]))

    @contextmanager
    def _current(self) -> Iterator[Opened]:
        try:
            opened = self._ready()
            with self._link.errors():
                table = self._link.load()
                if table is None or _shape(table) != _shape(opened.table):
                    # set back, created again, or altered while this process had it open
                    super().close()
                    opened = self._ready()
                else:
                    opened.table = table
                yield opened
        except SafError:
            self.close()
            raise

    def _commit(self, opened: Opened, change: Change) -> bool:
        table = opened.table
        state = self._state(opened, change.source)
        repairs = put_right(table.metadata)
        table.metadata = _for_one_commit(table.metadata)
        files = write(table, change.rows, change.source, self._link.settings)
        fail_point("mom_insert")
        transaction = table.transaction()
        append = transaction.update_snapshot().merge_append()
        name, number = name_of(change.source), table.metadata.next_sequence_number()
        entry = text_of(state, change.moved, change.epochs, append.snapshot_id, number)
        append.snapshot_properties = {name: entry}
        for file in files:
            append.append_data_file(file)
        append.commit()
        properties = {**repairs, name: entry}
        transaction.set_properties({key: text for key, text in properties.items() if text})
        if removed := [key for key, text in properties.items() if text is None]:
            transaction.remove_properties(*removed)
        try:
            transaction.commit_transaction()
        except CommitFailedException:
            for file in files:
                with suppress(OSError):
                    table.io.delete(file.file_path)
            return False
        except ValueError as error:  # a commit to another branch took its number
            raise Unavailable(self.what, self._link.said(error)) from None
        return True


def _shape(table: IcebergTable) -> tuple[UUID, int, int]:
    """Return a value that changes with the table itself, its columns or its partitions."""
    metadata = table.metadata
    return metadata.table_uuid, metadata.current_schema_id, metadata.default_spec_id


def _for_one_commit(table: TableMetadata) -> TableMetadata:
    """Return the metadata for a commit; it is not written, because the catalog has its own.

    It turns off retries, and lacks older snapshots, because pyiceberg copies each one a dozen
    times.
    """
    heads = {entry.snapshot_id for entry in table.refs.values()}
    changed = {
        "properties": {**table.properties, TableProperties.COMMIT_NUM_RETRIES: "0"},
        "snapshots": [entry for entry in table.snapshots if entry.snapshot_id in heads],
        "snapshot_log": [],
    }
    return table.model_copy(update=changed)


def read(link: Link) -> LakeReading:
    """Open the newest version of the table for reading."""
    table = link.load()

    def rows(source: UUID) -> pa.Table:
        assert table is not None  # noqa: S101 - not called without a table
        with link.errors():
            of_source = f"source = '{source}'"
            return table.scan(of_source, selected_fields=COLUMNS).to_arrow()

    gone = table is not None and removed(table)
    known = partial(link.known_of, table)
    identity = link.identity_of(table)
    return reading(link.name, identity, rows if table else None, known, removed=gone)


def removed(table: IcebergTable) -> bool:
    """Return True if a table's snapshots show that rows may be missing on purpose."""
    removing = (Operation.DELETE, Operation.OVERWRITE)
    return any(
        snapshot.summary and snapshot.summary.operation in removing
        for snapshot in table.snapshots()
    )
