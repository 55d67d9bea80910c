"""Slots of logs in a Delta table: messages that have left their broker, each stored once.

    broker_id, log    the broker and the log; the table is partitioned by them
    slot, purge       the slot, and the number of the slot's archive: 1, 2, …
    txid, id, …       the message, with the columns of a log in Spark (`saf.columns.IN_TABLES`)

An archive of a slot is one commit. It stores the number of the purge in an application transaction
that is named by broker, log and slot. The slot is truncated afterwards. If the process dies before
that, the next archive finds the messages that the table has, and adds only the rest. If two
processes archive a slot at the same time, the second commit fails, and that process begins again.

The table belongs to the archive: forwarded messages need another table, because they would be in
this one twice. A vacuum removes files that a killed process leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable, Field, Schema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction

from saf.columns import IN_TABLES, SPARK
from saf.database import Dsn
from saf.destinations.delta.files import OURS, Files, commit, gathered, sync, write
from saf.destinations.delta.link import Link
from saf.destinations.delta.table import PROPERTIES, check_others, type_of
from saf.destinations.lake import ARCHIVE
from saf.destinations.settings import unusable
from saf.destinations.texts import uuids
from saf.errors import Unavailable
from saf.failpoints import fail_point
from saf.log.archive import SlotRows, reading
from saf.log.columns import OF_SPARK, plain
from saf.log.disk import make_folder
from saf.log.ring import Contents

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

BY = ("broker_id", "log")
COLUMNS = pa.schema(
    [
        ("broker_id", pa.string()),
        ("log", pa.string()),
        ("slot", pa.int32()),
        ("purge", pa.int64()),
        ("txid", pa.int64()),
        *((name, OF_SPARK[SPARK[type_]]) for name, type_ in IN_TABLES.items()),
    ]
)
COUNTED = ("slot", "purge", "id", "created_at")
"""Columns whose minimum and maximum are recorded for each file."""
FILE_BYTES = 64 << 20
"""Bytes in memory at which a file is written."""
ATTEMPTS = 5
SEVERAL = 0
"""Stands for an incarnation if the broker was repaired between archives in this table."""
RECENT = 3
"""Latest versions to make durable before a slot is archived."""


class DeltaArchive:
    """Stores slots of one broker in a table: a `saf.log.ring.Archive`."""

    def __init__(self, dsn: Dsn, settings: Delta) -> None:
        self._dsn = dsn
        self._link = link_of(settings)
        self._files = Files(settings.table, settings.folder, settings.options)

    def __call__(self, contents: Contents) -> str | None:
        """Make the messages of a slot rows of the table; None if their number has changed.

        Raises:
            Refused: the table is unsuitable.
            Unavailable: the table cannot be written to, or the database does not answer.
        """
        for _ in range(ATTEMPTS):
            with reading(self._dsn, contents.slot) as rows, self._link.errors():
                table = self._table()
                # the process that made it, or archived the slot, may have died right after that
                sync(table, self._files, max(table.version() - RECENT, -1))
                added = _Added(rows, contents, table, self._files)
                if added.write() != contents.messages:
                    added.forget()
                    return None
                if added.files and not added.commit(self._link.what):
                    added.forget()
                    continue
            fail_point("archived")
            return f"delta:{self._link.settings.table}"
        raise Unavailable(self._link.what, "others archive the same slot again and again")

    def _table(self) -> DeltaTable:
        """Load the table; create it if it does not exist."""
        folder = self._link.settings.folder
        if folder:
            make_folder(folder)
        last: DeltaError | None = None
        for _ in range(ATTEMPTS):
            if table := self._link.load():
                return checked(self._link, table)
            try:
                DeltaTable.create(
                    self._link.settings.table,
                    COLUMNS,
                    partition_by=[*BY],
                    description="messages that left their brokers, archived by saf purge",
                    configuration={
                        ARCHIVE: "true",
                        **PROPERTIES,
                        "delta.dataSkippingStatsColumns": ",".join(COUNTED),
                    },
                    storage_options=self._link.settings.options,
                    raise_if_key_not_exists=False,
                )
            except DeltaError as error:  # another purge may have done the same
                last = error
        raise Unavailable(self._link.what, self._link.said(last) if last else "cannot be made")


class _Added:
    """Rows that one archive of a slot adds to a version of the table."""

    def __init__(self, rows: SlotRows, contents: Contents, table: DeltaTable, files: Files) -> None:
        slot = contents.slot
        self._rows = rows
        self._contents = contents
        self._table = table
        self._files = files
        self._mark = purge_mark(rows.broker_id, slot.log, slot.number)
        self._life = life_mark(rows.broker_id, slot.log)
        self._purge = (table.transaction_version(self._mark) or 0) + 1
        self.files: list[AddAction] = []

    def write(self) -> int:
        """Write missing messages to files; return the number of messages in the slot."""
        known = self._known()
        count = 0
        for rows in gathered(self._rows.batches(), FILE_BYTES):
            count += rows.num_rows
            new = self._shaped(rows)
            if len(known):
                new = new.filter(pc.invert(pc.is_in(_keys(new), known)))
            if new.num_rows:
                self.files += write(self._files, new, BY, COUNTED)
        return count

    def commit(self, what: str) -> bool:
        """Make the files rows; return False if another archive of the slot came first."""
        fail_point("archive_written")
        life = self._table.transaction_version(self._life)
        own_life = self._rows.incarnation
        numbers = [(self._mark, self._purge)]
        if life != own_life:
            numbers.append((self._life, own_life if life is None else SEVERAL))
        return commit(what, self._table, self._files, self.files, by=BY, numbers=numbers)

    def forget(self) -> None:
        """Remove the files, which no reader knows."""
        self._files.remove(file.path for file in self.files)

    def _known(self) -> pa.Array:
        """Return the keys of the slot's messages that the table has already."""
        contents = self._contents
        archived = messages_of(self._table, self._rows.broker_id, contents.slot.log)
        condition = (ds.field("slot") == contents.slot.number) & (
            ds.field("id") >= contents.first_id
        )
        condition &= ds.field("id") <= contents.last_id
        return _keys(archived.to_table(columns=["id", "message_id"], filter=condition))

    def _shaped(self, rows: pa.Table) -> pa.Table:
        """Return rows of a slot with the columns of the table."""
        constants = {
            "broker_id": self._rows.broker_id,
            "log": self._contents.slot.log,
            "slot": self._contents.slot.number,
            "purge": self._purge,
        }
        rows = pa.Table.from_batches([plain(batch) for batch in rows.to_batches()]).combine_chunks()
        columns = []
        for field in COLUMNS:
            if field.name in constants:
                column = pa.repeat(pa.scalar(constants[field.name], field.type), rows.num_rows)
            elif field.name not in rows.column_names:  # an outbox lacks it
                column = pa.nulls(rows.num_rows, field.type)
            else:
                column = rows[field.name]
                if IN_TABLES.get(field.name) == "uuid":
                    column = uuids(column.combine_chunks())
            columns.append(column.cast(field.type))
        return pa.table(columns, schema=COLUMNS)


def purge_mark(broker_id: str, log: str, slot: int) -> str:
    """Return the name of the transaction that has the number of a slot's last archive."""
    return f"{OURS}archive:{broker_id}:{log}:{slot}"


def life_mark(broker_id: str, log: str) -> str:
    """Return the name of the transaction that has the broker's incarnation."""
    return f"{OURS}archive:{broker_id}:{log}:incarnation"


def checked(link: Link, table: DeltaTable) -> DeltaTable:
    """Return the table if it is an archive.

    Raises:
        Refused: it is not an archive.
    """
    metadata = table.metadata()
    if ARCHIVE not in metadata.configuration or metadata.partition_columns != [*BY]:
        raise unusable(
            link.what,
            "it is a table for something else, such as messages that are forwarded",
            "name another table for the archive, which saf makes",
        )
    fields = {field.name: field for field in table.schema().fields}
    for field in Schema.from_arrow(COLUMNS).fields:
        existing: Field | None = fields.pop(field.name, None)
        if existing is None or existing.type != field.type:
            kind = "is missing" if existing is None else f"is {type_of(existing)}"
            raise unusable(link.what, f"its column {field.name!r} {kind}", "name another table")
    check_others(link.what, table, [*fields.values()])
    return table


def messages_of(table: DeltaTable, broker_id: str, log: str) -> ds.Dataset:
    """Return the rows of a broker's log."""
    return table.to_pyarrow_dataset(
        file_pruning_predicate=[("broker_id", "=", broker_id), ("log", "=", log)]
    )


def in_log(
    table: DeltaTable,
    broker_id: str,
    log: str,
    slot: int,
    has: Callable[[int, Mapping[str, Any]], bool],
) -> Iterator[int]:
    """Yield the numbers of a slot's archives whose messages are still in the log.

    ``has`` tells whether a message is in the slot. A TRUNCATE removes everything in a slot. So an
    archive's messages are either all in the log, or all gone; and if they are gone, so are those of
    the earlier archives.
    """
    last = table.transaction_version(purge_mark(broker_id, log, slot)) or 0
    messages = messages_of(table, broker_id, log)
    for number in range(last, 0, -1):
        condition = (ds.field("slot") == slot) & (ds.field("purge") == number)
        sample = messages.head(1, columns=["shard", "txid", "id", "message_id"], filter=condition)
        if not sample.num_rows or not has(slot, sample.to_pylist()[0]):
            return
        yield number


def link_of(settings: Delta) -> Link:
    """Return the archive's table for deltalake."""
    return Link(settings.table, settings, f"the archive {settings.table!r}")


def _keys(rows: pa.Table) -> pa.Array:
    """Return keys that identify a broker's messages, even across a set-back."""
    ids = rows["id"].cast(pa.string())
    keys = pc.binary_join_element_wise(ids, rows["message_id"].cast(pa.string()), " ")
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
