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

`ready` creates a missing table. A table that saf did not create is used as it is, if it can have
saf's columns. Missing columns are added: Iceberg changes no files for this, and older rows are NULL
there. If another task changes the table at the same time, `ready` tries again, `ATTEMPTS` times at
most. A table is refused, with a cure, if saf's rows do not fit: if its format is too old, its
partitions or its types differ, or another column requires a value. No existing column is changed.

`write` writes a chunk to Parquet files, one per partition. Iceberg identifies columns by number, so
each column in a file carries its number in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    TableAlreadyExistsError,
)
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table import TableProperties
from pyiceberg.table.snapshots import Operation
from pyiceberg.transforms import DayTransform, IdentityTransform, Transform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DoubleType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    TimestamptzType,
)
from sqlalchemy.exc import IntegrityError

from saf.destinations.iceberg.link import Link
from saf.destinations.iceberg.marks import name_of, put_right, text_of
from saf.destinations.lake import DESTINATION, State
from saf.destinations.lake.table import (
    COLUMNS,
    Change,
    LakeReading,
    LakeTable,
    reading,
    rows_of,
    schema,
)
from saf.destinations.settings import unusable
from saf.errors import SafError, Unavailable
from saf.failpoints import fail_point
from saf.log.columns import OF_SPARK
from saf.log.disk import make_folder

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata

    from saf.destinations.iceberg import Iceberg

NUMBER = b"PARQUET:field_id"
TYPES: Mapping[pa.DataType, PrimitiveType] = {
    OF_SPARK["string"]: StringType(),
    OF_SPARK["boolean"]: BooleanType(),
    OF_SPARK["long"]: LongType(),
    OF_SPARK["int"]: IntegerType(),
    OF_SPARK["binary"]: BinaryType(),
    OF_SPARK["timestamp"]: TimestamptzType(),
    pa.float64(): DoubleType(),
}
"""Iceberg's types by Arrow's."""
BY: Mapping[str, tuple[tuple[str | None, Transform[Any, Any]], ...]] = {
    "day": (("created_at", DayTransform()),),
    "service": (("to_service", IdentityTransform()),),
    "nothing": (),
}
"""Partitioning of a table, by the setting: columns, and the transforms of their values."""
PROPERTIES = {
    # a commit adds a file to the list of manifests; a hundred files are merged into one
    TableProperties.MANIFEST_MERGE_ENABLED: "true",
    # a commit writes the table's metadata again; a hundred older versions are kept
    TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true",
}
ATTEMPTS = 5
LEAST_VERSION = 2
"""Earlier format versions have no sequence numbers; see `saf.destinations.iceberg.marks`."""


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


@contextmanager
def read(name: str, settings: Iceberg) -> Iterator[LakeReading]:
    """Open the newest version of the table for reading."""
    with settings.connected(name) as link:
        table = link.load()

        def rows(source: UUID) -> pa.Table:
            assert table is not None  # noqa: S101 - not called without a table
            with link.errors():
                of_source = f"source = '{source}'"
                return table.scan(of_source, selected_fields=COLUMNS).to_arrow()

        gone = table is not None and removed(table)
        known = partial(link.known_of, table)
        identity = link.identity_of(table)
        yield reading(name, identity, rows if table else None, known, removed=gone)


def removed(table: IcebergTable) -> bool:
    """Return True if a table's snapshots show that rows may be missing on purpose."""
    removing = (Operation.DELETE, Operation.OVERWRITE)
    return any(
        snapshot.summary and snapshot.summary.operation in removing
        for snapshot in table.snapshots()
    )


def ready(link: Link) -> IcebergTable:
    """Return the table with all columns; create it if it does not exist.

    Raises:
        Refused: saf's messages cannot be appended to the table.
        Unavailable: the table cannot be created or changed now.
    """
    for _ in range(ATTEMPTS):
        table = link.load()
        with link.errors():
            try:
                if table is None:
                    _make(link)
                    continue
                check(link, table)
                if not _complete(link, table):
                    return table
            except (CommitFailedException, IntegrityError, TableAlreadyExistsError) as error:
                last = error  # another task may have done the same
    raise Unavailable(link.what, f"the table cannot be made ready: {link.said(last)}")


def _make(link: Link) -> None:
    settings, catalog = link.settings, link.catalog()
    *names, last = link.table
    namespace, location = tuple(names), None
    try:
        if not catalog.namespace_exists(namespace):
            catalog.create_namespace(namespace)
    except NamespaceAlreadyExistsError:
        pass  # another task has just created it
    if settings.folder:
        folder = settings.folder.joinpath(*namespace, last)
        make_folder(folder)
        location = f"file://{folder}"
    fields = [
        NestedField(number, name, type_, required=False)
        for number, (name, type_) in enumerate(wanted(link).items(), 1)
    ]
    columns = Schema(*fields)
    spec = [
        PartitionField(columns.find_field(name).field_id, 1000, transform, _field(name, transform))
        for name, transform in BY[settings.partition_by]
        if name
    ]
    catalog.create_table(
        link.table,
        columns,
        location,
        PartitionSpec(*spec),
        properties={DESTINATION: str(link.first_identity()), **PROPERTIES},
    )


def _field(name: str, transform: Transform[Any, Any]) -> str:
    return name if isinstance(transform, IdentityTransform) else f"{name}_{transform}"


def _complete(link: Link, table: IcebergTable) -> bool:
    """Add missing columns and the identity; return True if the table has changed."""
    missing = {
        name: type_
        for name, type_ in wanted(link).items()
        if name not in table.schema().column_names
    }
    lacks_identity = DESTINATION not in table.properties
    if not missing and not lacks_identity:
        return False
    with table.transaction() as transaction:
        if missing:
            with transaction.update_schema() as change:
                for name, type_ in missing.items():
                    change.add_column(name, type_)
        if lacks_identity:
            transaction.set_properties({DESTINATION: str(link.first_identity())})
    return True


def check(link: Link, table: IcebergTable) -> None:
    """Check that rows can be appended to a table as they are.

    Raises:
        Refused: they cannot.
    """
    settings = link.settings
    if table.format_version < LEAST_VERSION:
        raise unusable(
            link.what,
            f"its table has version {table.format_version} of Iceberg's format",
            f"set its property format-version to {LEAST_VERSION}, or name another table",
        )
    columns = table.schema()
    transforms = tuple(
        (columns.find_column_name(field.source_id), field.transform)
        for field in table.spec().fields
    )
    if transforms != BY[settings.partition_by]:
        names = {columns: name for name, columns in BY.items()}
        parts = ", ".join(f"{transform}({name})" for name, transform in transforms)
        raise unusable(
            link.what,
            f"its table is partitioned by {parts or 'nothing'}, not by {settings.partition_by}",
            f'set partition_by = "{names[transforms]}" in saf.toml'
            if transforms in names
            else "name another table: it is one that saf has not made",
        )
    existing = {field.name.lower(): field for field in columns.fields}
    for name, type_ in wanted(link).items():
        column = existing.pop(name.lower(), None)
        if column and (column.name != name or column.field_type != type_):
            raise unusable(
                link.what,
                f"the column {column.name!r} of its table is {column.field_type}, and {name!r} is "
                f"to be {type_}",
                "promote it by another name, or with its own type"
                if name in settings.promote
                else "name another table",
            )
    required = [field.name for field in existing.values() if field.required]
    if required:
        raise unusable(
            link.what,
            f"the column {required[0]!r} of its table must have a value",
            "ALTER TABLE … ALTER COLUMN … DROP NOT NULL, or name another table",
        )


def wanted(link: Link) -> Mapping[str, PrimitiveType]:
    """Return the columns that a table must have."""
    return {field.name: TYPES[field.type] for field in schema(link.settings)}


def write(
    table: IcebergTable, messages: pa.Table, source: UUID, settings: Iceberg
) -> list[DataFile]:
    """Write the files of a chunk; return their entries for the table's list of files."""
    if not messages.num_rows:
        return []
    rows = rows_of(messages, source, settings)
    columns = table.schema()
    rows = rows.cast(pa.schema([_numbered(field, columns) for field in rows.schema]))
    return [_file(table, partition, part) for partition, part in parts(rows, settings.partition_by)]


def parts(rows: pa.Table, partition_by: str) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    """Yield the rows of each partition, with the partition's values as Iceberg stores them."""
    if partition_by == "nothing":
        yield (), rows
        return
    if partition_by == "day":
        days = rows["created_at"].cast(pa.timestamp("us")).cast(pa.date32())
        values = days.cast(pa.int32())
    else:
        values = rows["to_service"]
    for value in pc.unique(values).to_pylist():
        yield (value,), rows.filter(pc.equal(values, value))


def _numbered(field: pa.Field, columns: Schema) -> pa.Field:
    number = columns.find_field(field.name).field_id
    return field.with_metadata({NUMBER: str(number).encode()})


def _file(table: IcebergTable, partition: tuple[Any, ...], rows: pa.Table) -> DataFile:
    out = pa.BufferOutputStream()
    pq.write_table(rows, out, compression="zstd", store_schema=False)
    content = out.getvalue()
    path = table.location_provider().new_data_location(f"{uuid4()}.parquet")
    with table.io.new_output(path).create() as file:
        file.write(content.to_pybytes())
    columns, properties = table.schema(), table.metadata.properties
    statistics = data_file_statistics_from_parquet_metadata(
        pq.read_metadata(pa.BufferReader(content)),
        compute_statistics_plan(columns, properties),
        parquet_path_to_id_mapping(columns),
    )
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(*partition),
        file_size_in_bytes=content.size,
        sort_order_id=None,
        spec_id=table.metadata.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )
