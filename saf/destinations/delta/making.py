"""Tables that fit saf's rows: how a Delta table is created and checked, and the rows in its files.

`ready` creates a missing table. A table that saf did not create is used as it is, if it can have
saf's columns. Missing columns are added: Delta changes no files for this, and older rows are NULL
there. If another task changes the table at the same time, `ready` tries again, `ATTEMPTS` times at
most.

A table is refused, with a cure, if saf's rows do not fit: if its partitions or its types differ, or
if it requires values, constraints or features that saf does not provide. An archive of logs is
refused, too. No existing column is changed.

A row has the columns in `saf.destinations.lake.columns`. `parts` splits rows by the partitions of
the table's files, and `statistics` describes a file for readers that skip files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Field, Schema
from deltalake.exceptions import DeltaError

from saf.destinations.lake import columns
from saf.destinations.lake.state import ARCHIVE, DAY, DESTINATION
from saf.destinations.queues import unusable
from saf.destinations.texts import moments
from saf.errors import Unavailable

if TYPE_CHECKING:
    from saf.destinations.delta import Delta
    from saf.destinations.delta.link import Link

BY: Mapping[str, tuple[str, ...]] = {"day": (DAY,), "service": ("to_service",), "nothing": ()}
"""Columns that a table is partitioned by, by the setting."""
COUNTED = ("id", "created_at")
"""Columns whose minimum and maximum are recorded for each file."""
PROPERTIES = {
    # readers may skip files only by these columns, because only these are counted
    "delta.dataSkippingStatsColumns": ",".join(COUNTED),
    # a task first reads the log since the last checkpoint
    "delta.checkpointInterval": "20",
}
NOT_KEPT = {
    "columnMapping": "columns have other names in its files (column mapping)",
    "generatedColumns": "it has columns that are computed",
    "identityColumns": "it has columns that number themselves",
    "rowTracking": "it numbers its rows (row tracking)",
    "icebergCompatV1": "its files are read as Iceberg, too",
    "icebergCompatV2": "its files are read as Iceberg, too",
}
"""Table features that require more of a writer, each with the reason why saf refuses it."""
ATTEMPTS = 5


def ready(link: Link) -> DeltaTable:
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
            except DeltaError as error:
                last = error  # another task may have done the same
    raise Unavailable(link.what, f"the table cannot be made ready: {link.said(last)}")


def _make(link: Link) -> None:
    settings = link.settings
    DeltaTable.create(
        settings.table,
        schema(settings),
        partition_by=[*BY[settings.partition_by]],
        description="messages, appended by saf",
        configuration={DESTINATION: str(link.first_identity()), **PROPERTIES},
        storage_options=settings.options,
        raise_if_key_not_exists=False,
    )


def _complete(link: Link, table: DeltaTable) -> bool:
    """Add missing columns or the identity; return True if the table has changed."""
    existing = {field.name for field in table.schema().fields}
    missing = [
        field
        for field in Schema.from_arrow(schema(link.settings)).fields
        if field.name not in existing
    ]
    if missing:
        table.alter.add_columns(missing)
    elif DESTINATION not in table.metadata().configuration:
        identity = {DESTINATION: str(link.first_identity())}
        table.alter.set_table_properties(identity, raise_if_not_exists=False)
    else:
        return False
    return True


def check(link: Link, table: DeltaTable) -> None:
    """Check that rows can be appended to a table as they are.

    Raises:
        Refused: they cannot.
    """
    settings, target = link.settings, schema(link.settings)
    if ARCHIVE in table.metadata().configuration:
        raise unusable(
            link.what,
            "its table is an archive of logs, where messages are that `saf purge` took",
            "name another table",
        )
    partitions = tuple(table.metadata().partition_columns)
    if partitions != BY[settings.partition_by]:
        names = {columns: name for name, columns in BY.items()}
        raise unusable(
            link.what,
            f"its table is partitioned by {', '.join(partitions) or 'nothing'}, not by "
            f"{settings.partition_by}",
            f'set partition_by = "{names[partitions]}" in saf.toml'
            if partitions in names
            else "name another table: it is one that saf has not made",
        )
    existing = {field.name.lower(): field for field in table.schema().fields}
    for field in Schema.from_arrow(target).fields:
        column = existing.pop(field.name.lower(), field)
        if column.type != field.type or column.name != field.name:
            raise unusable(
                link.what,
                f"the column {column.name!r} of its table is {type_of(column)}, and "
                f"{field.name!r} is to be {type_of(field)}",
                "promote it by another name, or with its own type"
                if field.name in settings.promote
                else "name another table",
            )
    check_others(link.what, table, [*existing.values()])


def check_others(what: str, table: DeltaTable, others: Collection[Field]) -> None:
    """Check that rows need only their own columns; ``others`` are the table's remaining columns.

    Raises:
        Refused: rows need more.
    """
    required = [field.name for field in others if not field.nullable]
    if required:
        raise unusable(
            what,
            f"the column {required[0]!r} of its table must have a value",
            "ALTER TABLE … ALTER COLUMN … DROP NOT NULL, or name another table",
        )
    properties = table.metadata().configuration
    features = {*(table.protocol().writer_features or ())}
    if properties.get("delta.columnMapping.mode", "none") != "none":
        features.add("columnMapping")
    if any("delta.generationExpression" in (field.metadata or {}) for field in others):
        features.add("generatedColumns")
    for feature, why in NOT_KEPT.items():
        if feature in features:
            raise unusable(what, why, "name another table, which saf makes itself")
    if any(name.startswith("delta.constraints.") for name in properties):
        raise unusable(
            what,
            "its table has constraints, which saf does not check",
            "drop them, or check the messages where they are read",
        )


def type_of(field: object) -> str:
    """Return the type of a column in Delta's words."""
    return str(getattr(field, "type", field)).removeprefix('PrimitiveType("').removesuffix('")')


def schema(settings: Delta) -> pa.Schema:
    """Return the columns that a table must have."""
    return columns.schema(settings.promote, day=settings.partition_by == "day")


def rows_of(messages: pa.Table, source: UUID, settings: Delta) -> pa.Table:
    """Return messages as rows."""
    day = settings.partition_by == "day"
    return columns.rows_of(messages, source, settings.promote, day=day)


def parts(rows: pa.Table, by: Sequence[str]) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """Yield the partition's values, and its rows without these columns, for each partition.

    >>> rows = pa.table({"day": [7, None, 7], "id": [1, 2, 3]})
    >>> [(values, part["id"].to_pylist()) for values, part in parts(rows, ["day"])]
    [({'day': '7'}, [1, 3]), ({'day': None}, [2])]
    """
    if not by:
        yield {}, rows
        return
    column, *rest = by
    values = rows[column].cast(pa.string())
    for value in pc.unique(values).to_pylist():
        mask = pc.is_null(values) if value is None else pc.equal(values, value)
        for values_of_rest, part in parts(rows.filter(mask).drop_columns([column]), rest):
            yield {column: value, **values_of_rest}, part


def statistics(rows: pa.Table, counted: Sequence[str]) -> str:
    """Return the statistics of a file, by which readers skip files that they do not need.

    They cover the columns in the table's property `delta.dataSkippingStatsColumns`: some readers
    take a missing value to mean that a file has none.
    """
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    for name in counted:
        column = rows[name]
        if column.null_count == rows.num_rows:
            continue
        ends = _written(pa.array(pc.min_max(column).values(), column.type))
        least[name], greatest[name] = ends.to_pylist()
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": least,
            "maxValues": greatest,
            "nullCount": {name: rows[name].null_count for name in counted},
        }
    )


def _written(ends: pa.Array) -> pa.Array:
    """Return dates and times in the format of a table's log.

    >>> _written(pa.array([7], pa.timestamp("us"))).to_pylist()
    ['1970-01-01T00:00:00.000007']
    >>> _written(pa.array([7], pa.date32())).to_pylist(), _written(pa.array([7])).to_pylist()
    (['1970-01-08'], [7])
    """
    if pa.types.is_timestamp(ends.type):
        texts = moments(ends)
        return texts if ends.type.tz else pc.utf8_rtrim(texts, "Z")
    return ends.cast(pa.string()) if pa.types.is_date(ends.type) else ends
