"""Archived messages, as part of a read: everything in the archive that the log no longer has.

A purge archives a slot, and then truncates it. In between, or if the purge dies at that point,
messages are in both places. A read is planned while purges are locked out, and its snapshot of the
log is older than its list of the archive. So the archive has everything that left the log. `plan`
detects archived messages that are still in the log, and leaves them to the tasks that read the log.
TRUNCATE empties a whole slot, so one message answers for all messages archived together with it.

Archived messages never change. So tasks read the files that the plan names, whatever is archived
later. Their rows have no order, and have their own partitions. Filters are Arrow's, which skips
parts of a file by the file's statistics.

A read never returns fewer rows than planned: if a file was removed after planning, it fails. If the
broker was set back after its messages were archived, `plan` fails, because nothing shows which of
them left the log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from psycopg import sql
from pyarrow.fs import FileSystem, LocalFileSystem
from pyspark.sql.datasource import InputPartition

from saf.database import fetch
from saf.destinations.kinds import table_at
from saf.errors import ConfigurationError, MissingExtra, Unavailable
from saf.log.archive import pieces
from saf.log.columns import plain
from saf.log.ring import SIZES, SLOTS
from saf.log.slot_rows import WHOSE
from saf.spark.table import fields
from saf.spark.table.filters import Condition
from saf.spark.table.part import Query

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

BATCH_BYTES = 4 << 20
MOST_ROWS = 1 << 16
TYPES = {"id": pa.int64(), "shard": pa.int64(), "created_at": pa.timestamp("us", "UTC")}
"""Arrow types of the non-text columns that have filters."""

PLACE = ("shard", "txid", "id", "message_id")
"""The columns that identify a message in its log."""

# The index is (shard, txid); the other columns detect a different message after a set-back
IS_THERE = """
SELECT EXISTS (SELECT FROM {slot} WHERE shard = %(shard)s AND txid = %(txid)s::text::xid8
               AND id = %(id)s AND message_id = %(message_id)s::uuid)
"""

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, repr=False)
class Archived(InputPartition):
    """The files that one task reads."""

    what: str
    """Name of the archive in error messages."""
    broker: str
    """The broker's name, as in `saf.spark.table.part.Part`."""
    table: Delta | None
    """The table; None if the files are in a folder."""
    paths: tuple[str, ...]
    in_log: tuple[tuple[int, int], ...]
    """Archives (slot, number) in the table whose messages are still in the log."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The part of a log that an archive has."""

    files: Mapping[str, int]
    """Size in bytes of each file, by path."""
    incarnation: int
    """The broker's incarnation when its messages were archived."""
    in_log: tuple[tuple[int, int], ...] = ()
    """See `Archived.in_log`."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log, while purges are locked out."""

    connection: psycopg.Connection[Any]
    name: str
    broker_id: str
    incarnation: int
    filled: Collection[int]
    """The slots that contain messages."""

    @classmethod
    def of(cls, connection: psycopg.Connection[Any], name: str) -> Log:
        """Query a broker for its identity and the filled slots of a log."""
        ((broker_id, incarnation),) = fetch(connection, WHOSE)
        sizes = fetch(connection, SIZES, {"log": name, "slots": SLOTS})
        return cls(
            connection=connection,
            name=name,
            broker_id=broker_id,
            incarnation=incarnation,
            filled=[slot for slot, empty in sizes if not empty],
        )

    def has(self, slot: int, message: Message) -> bool:
        """Return whether a slot contains a message."""
        if slot not in self.filled:
            return False
        query = sql.SQL(IS_THERE).format(slot=sql.Identifier("saf", f"{self.name}_{slot}"))
        given = {**message, "message_id": str(message["message_id"])}
        ((exists,),) = fetch(self.connection, query, given)
        return bool(exists)


def plan(
    place: str,
    broker: str,
    log: Log,
    conditions: Collection[Condition],
    partitions: int,
) -> list[Archived]:
    """Find the files with messages that left a log, and divide them among tasks.

    Raises:
        ConfigurationError: the broker was set back later, so nothing shows which messages left.
        Refused: the table is not an archive.
        Unavailable: the archive cannot be read.
    """
    settings = cast("Delta | None", table_at(place))
    what = f"archive {place}"
    with readable(what):
        found = (
            _in_folder(Path(place), log)
            if settings is None
            else _in_table(settings, log, conditions)
        )
    if found.files and found.incarnation != log.incarnation:
        raise ConfigurationError(
            f"the option archive: broker {broker!r} was repaired after it was set back, so {place} "
            "may have messages that its log has again. Let saf purge write to another "
            "archive, and read this one separately"
        )
    return [
        Archived(what=what, broker=broker, table=settings, paths=paths, in_log=found.in_log)
        for paths in _divided(found.files, partitions)
    ]


def _in_folder(folder: Path, log: Log) -> Found:
    found = pieces(folder.absolute(), log.broker_id, log.name)
    lives = {item.incarnation for item in found}
    left = [item.path for item in found if not log.has(item.slot, _first(item.path))]
    return Found(
        files={str(path): path.stat().st_size for path in left},
        incarnation=log.incarnation if lives <= {log.incarnation} else 0,
    )


def _first(path: Path) -> Message:
    """Return the first message of a file."""
    with pq.ParquetFile(path) as file:
        rows = next(file.iter_batches(batch_size=1, columns=[*PLACE]))
    return cast("Message", rows.to_pylist()[0])


def _in_table(settings: Delta, log: Log, conditions: Iterable[Condition]) -> Found:
    try:
        from saf.destinations.delta import archive
    except ImportError:
        raise MissingExtra("delta", "an archive in a Delta table") from None
    link = archive.link_of(settings)
    with link.errors():
        table = link.load()
        if table is None:  # nothing was archived yet
            return Found(files={}, incarnation=log.incarnation)
        archive.checked(link, table)
        of = (table, log.broker_id, log.name)
        in_log = [
            (slot, number) for slot in log.filled for number in archive.in_log(*of, slot, log.has)
        ]
        actions = pa.table(table.get_add_actions(flatten=True)).select(["path", "size_bytes"])
        bytes_of = dict(zip(*(column.to_pylist() for column in actions.columns), strict=True))
        fragments = archive.messages_of(*of).get_fragments(filter=expression(conditions))
        life = table.transaction_version(archive.life_mark(log.broker_id, log.name))
        return Found(
            files={fragment.path: bytes_of[fragment.path] for fragment in fragments},
            incarnation=life or 0,
            in_log=tuple(in_log),
        )


def _divided(files: Mapping[str, int], number: int) -> list[tuple[str, ...]]:
    """Divide files among up to ``number`` tasks, balanced by size.

    >>> _divided({"a": 1, "b": 5, "c": 3}, 2)
    [('b',), ('c', 'a')]
    """
    parts: list[list[str]] = [[] for _ in range(number)]
    sizes = [0] * number
    for path, size in sorted(files.items(), key=lambda file: -file[1]):
        least = sizes.index(min(sizes))
        parts[least].append(path)
        sizes[least] += size
    return [tuple(paths) for paths in parts if paths]


def read(part: Archived, query: Query) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task's files, in the requested schema.

    Raises:
        Unavailable: a file is unreadable, or gone.
    """
    wanted = expression(query.conditions)
    for slot, number in part.in_log:
        wanted &= ~((ds.field("slot") == slot) & (ds.field("purge") == number))
    with readable(part.what):
        files = _filesystem(part)
        for path in part.paths:
            for rows in _rows(files, path, query.names, wanted):
                if rows.num_rows:
                    yield fields.shaped(plain(rows), query.asked, part.broker)


def _filesystem(part: Archived) -> FileSystem:
    if part.table is None:
        return LocalFileSystem()
    from saf.destinations.delta.files import Files

    return Files(part.table.table, part.table.folder, part.table.options).filesystem


def _rows(
    files: FileSystem, path: str, names: list[str], wanted: pc.Expression
) -> Iterator[pa.RecordBatch]:
    file = ds.dataset(path, filesystem=files, format="parquet")
    groups = [group for fragment in file.get_fragments() for group in fragment.row_groups]
    size = sum(group.total_byte_size for group in groups)
    count = sum(group.num_rows for group in groups)
    yield from file.to_batches(
        columns=names,
        filter=wanted,
        batch_size=max(1, min(MOST_ROWS, BATCH_BYTES * count // max(1, size))),
        batch_readahead=1,
        fragment_readahead=1,
    )


def expression(conditions: Iterable[Condition]) -> pc.Expression:
    """Translate a database's conditions for Arrow, which compares texts by their bytes, too.

    >>> one = Condition(column="id", operator=">", values=(7,), text="id > 7")
    >>> str(expression([one]))
    '(true and (id > 7))'
    """
    found = pc.scalar(True)
    for condition in conditions:
        found &= _as_arrow(condition)
    return found


def _as_arrow(condition: Condition) -> pc.Expression:
    column, kind = ds.field(condition.column), TYPES.get(condition.column, pa.string())
    if condition.operator in ("null", "not null"):
        return column.is_null() if condition.operator == "null" else column.is_valid()
    if condition.column == "shard":  # a number may not fit into the column's own type
        column = column.cast(kind)
    values = [
        v.astimezone(UTC) if condition.column == "created_at" else v for v in condition.values
    ]
    if condition.operator == "in":
        return column.isin(pa.array(values, kind))
    (value,) = pa.array(values, kind)
    return {
        ">": column > value,
        ">=": column >= value,
        "<": column < value,
        "<=": column <= value,
    }[condition.operator]


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Translate errors of the file system, or of Arrow, to `Unavailable`."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Unavailable(what, " ".join(reason.split()) or type(error).__name__) from None
