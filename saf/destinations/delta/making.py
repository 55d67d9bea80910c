"""Making a table, and making sure that it takes what saf writes.

A table that somebody else has made is taken as it is, if it can have saf's columns. Columns that it
does not have are added: Delta changes no file for that, and older rows are NULL there.
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
    # readers may leave out files by these columns only, because only these are counted
    "delta.dataSkippingStatsColumns": ",".join(COUNTED),
    # a task reads the log since the last checkpoint when it begins
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
"""Features of tables that ask something of those who append, with the reason why saf does not."""
ATTEMPTS = 5


def ready(link: Link) -> DeltaTable:
    """Return the table, made if it is not there, with all columns.

    Raises:
        Refused: it is no table that saf's messages can be appended to.
        Unavailable: it cannot be made or changed now.
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
    """Make sure that rows can be appended to a table as they are.

    Raises:
        Refused: they cannot.
    """
    settings, wanted = link.settings, schema(link.settings)
    if ARCHIVE in table.metadata().configuration:
        raise unusable(
            link.what,
            "its table is an archive of logs, where messages are that `saf purge` took",
            "name another table",
        )
    by = tuple(table.metadata().partition_columns)
    if by != BY[settings.partition_by]:
        named = {columns: name for name, columns in BY.items()}
        raise unusable(
            link.what,
            f"its table is partitioned by {', '.join(by) or 'nothing'}, not by "
            f"{settings.partition_by}",
            f'set partition_by = "{named[by]}" in saf.toml'
            if by in named
            else "name another table: it is one that saf has not made",
        )
    there = {field.name.lower(): field for field in table.schema().fields}
    for field in Schema.from_arrow(wanted).fields:
        found = there.pop(field.name.lower(), field)
        if found.type != field.type or found.name != field.name:
            raise unusable(
                link.what,
                f"the column {found.name!r} of its table is {type_of(found)}, and "
                f"{field.name!r} is to be {type_of(field)}",
                "promote it by another name, or with its own type"
                if field.name in settings.promote
                else "name another table",
            )
    check_others(link.what, table, [*there.values()])


def check_others(what: str, table: DeltaTable, others: Collection[Field]) -> None:
    """Make sure that rows need nothing but their own columns; ``others`` are the table's others.

    Raises:
        Refused: they do.
    """
    needed = [field.name for field in others if not field.nullable]
    if needed:
        raise unusable(
            what,
            f"the column {needed[0]!r} of its table must have a value",
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
    """Return the type of a column as Delta names it."""
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
    """Add what a table lacks; return whether it has changed."""
    there = {field.name for field in table.schema().fields}
    missing = [
        field
        for field in Schema.from_arrow(schema(link.settings)).fields
        if field.name not in there
    ]
    if missing:
        table.alter.add_columns(missing)
    elif DESTINATION not in table.metadata().configuration:
        mine = {DESTINATION: str(link.first_identity())}
        table.alter.set_table_properties(mine, raise_if_not_exists=False)
    else:
        return False
    return True
