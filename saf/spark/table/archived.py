"""What has left a log, as a read finds it in an archive: all that the log does not have any more.

A purge archives a slot, and then truncates it. In between, or if it dies there, messages are in
both places. A read is planned while purges are kept off, and its snapshot of the log is the older
one: so what has left the log is in the archive, and what of the archive is in the log still can be
found out, and is left to those who read the log. A TRUNCATE takes all of a slot, so one message of
what was archived together tells of the others.

What is archived never changes. So tasks read the files that the plan has named, whatever is
archived later. They come in no order, and in partitions of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import sql

from saf.database import fetch
from saf.destinations.archives import table_at
from saf.errors import ConfigurationError, MissingExtra
from saf.log.archive import pieces
from saf.log.ring import SIZES, SLOTS
from saf.log.slot_rows import WHOSE
from saf.spark.table.archived_rows import Archived, expression, readable
from saf.spark.table.filters import Condition

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

PLACE = ("shard", "txid", "id", "message_id")
"""The columns by which a message is found in its log."""

# The index is (shard, txid); the others tell a message from one that a set-back has put there
IS_THERE = """
SELECT EXISTS (SELECT FROM {slot} WHERE shard = %(shard)s AND txid = %(txid)s::text::xid8
               AND id = %(id)s AND message_id = %(message_id)s::uuid)
"""

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an archive has of a log."""

    files: Mapping[str, int]
    """The size of each file, by its path."""
    incarnation: int
    """The one in which the broker was archived."""
    in_log: tuple[tuple[int, int], ...] = ()
    """As in `Archived`."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log, while purges are kept off."""

    connection: psycopg.Connection[Any]
    name: str
    broker_id: str
    incarnation: int
    filled: Collection[int]
    """The slots that hold something."""

    @classmethod
    def of(cls, connection: psycopg.Connection[Any], name: str) -> Log:
        """Ask a broker for it."""
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
        """Whether a message is in a slot."""
        if slot not in self.filled:
            return False
        query = sql.SQL(IS_THERE).format(slot=sql.Identifier("saf", f"{self.name}_{slot}"))
        given = {**message, "message_id": str(message["message_id"])}
        ((there,),) = fetch(self.connection, query, given)
        return bool(there)


def plan(
    place: str,
    broker: str,
    log: Log,
    conditions: Collection[Condition],
    partitions: int,
) -> list[Archived]:
    """Find the files with what has left a log, and divide them among tasks.

    Raises:
        ConfigurationError: the broker was set back since, so nobody knows what has left.
        Refused: the table is no archive.
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
            "may have messages that its log has again. Let saf purge archive into another place, "
            "and read this archive alone"
        )
    return [
        Archived(what=what, broker=broker, table=settings, paths=paths, in_log=found.in_log)
        for paths in _divided(found.files, partitions)
    ]


def _in_folder(folder: Path, log: Log) -> Found:
    found = pieces(folder.absolute(), log.broker_id, log.name)
    lives = {one.incarnation for one in found}
    left = [one.path for one in found if not log.has(one.slot, _first(one.path))]
    return Found(
        files={str(path): path.stat().st_size for path in left},
        incarnation=log.incarnation if lives <= {log.incarnation} else 0,
    )


def _first(path: Path) -> Message:
    """A message of a file."""
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
            files={one.path: bytes_of[one.path] for one in fragments},
            incarnation=life or 0,
            in_log=tuple(in_log),
        )


def _divided(files: Mapping[str, int], number: int) -> list[tuple[str, ...]]:
    """Divide files among so many tasks, or fewer, by their sizes.

    >>> _divided({"a": 1, "b": 5, "c": 3}, 2)
    [('b',), ('c', 'a')]
    """
    parts: list[list[str]] = [[] for _ in range(number)]
    sizes = [0] * number
    for path, size in sorted(files.items(), key=lambda one: -one[1]):
        least = sizes.index(min(sizes))
        parts[least].append(path)
        sizes[least] += size
    return [tuple(paths) for paths in parts if paths]
