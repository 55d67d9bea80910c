"""Creating a table, and checking that it fits saf's rows.

A table that saf did not create is used as it is, if it can have saf's columns. Missing columns are
added: Delta changes no files for this, and older rows are NULL there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from deltalake import DeltaTable, Field, Schema
from deltalake.exceptions import DeltaError

from saf.destinations.delta.columns import BY, COUNTED, schema
from saf.destinations.lake.names import ARCHIVE, DESTINATION
from saf.destinations.queues import unusable
from saf.errors import Unavailable

if TYPE_CHECKING:
    from saf.destinations.delta.link import Link

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
