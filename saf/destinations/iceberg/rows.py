"""Writing rows to Parquet files for Iceberg, which identifies columns by number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record

from saf.destinations.lake.columns import rows_of

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from saf.destinations.iceberg import Iceberg

NUMBER = b"PARQUET:field_id"


def write(table: Table, messages: pa.Table, source: UUID, settings: Iceberg) -> list[DataFile]:
    """Write the files of a chunk; return their entries for the table's list of files."""
    if not messages.num_rows:
        return []
    rows = rows_of(messages, source, settings.promote)
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


def _file(table: Table, partition: tuple[Any, ...], rows: pa.Table) -> DataFile:
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
