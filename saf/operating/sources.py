"""Sources: how far each was read, what is wrong with it, and operators' decisions.

`status` and `examine` read only. `resume` lets a source continue that was refused
(`saf.errors.SourceRefused`): it gives the source a new id, whose marks begin where the operator
says. So no mark ever goes back, and a process that still reads the old source stores nothing more.
The messages that were read before keep the old id in the inbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.broker import health
from saf.config import Settings, table_named
from saf.database import DURABLY, Dsn, check_schema, fetch, unavailable_if_lost
from saf.errors import UsageError, no_service, placed
from saf.setaside.audit import audit
from saf.sources import BEGINNING, GONE, Extent, Progress
from saf.sources.judging import judge
from saf.sources.ownership import FIND, MARK, READER
from saf.sources.settings import SourceSettings, Start

STATUS = f"""
SELECT s.shard, s.start_batch, s.start_position, s.added, s.pending, s.looked_at, m.name,
       topic_id, mark.batch, mark.position
FROM saf.source_shard s JOIN saf.source USING (source)
LEFT JOIN saf.source_member m ON m.member_id = s.owner
LEFT JOIN LATERAL {MARK} AS mark ON true
WHERE s.source = %(source)s ORDER BY s.shard
"""
LOCK = "SELECT source FROM saf.source WHERE name = %(name)s FOR UPDATE"
FORGET = "DELETE FROM saf.source WHERE source = %(source)s"
BEGIN_ANEW = """
INSERT INTO saf.source (name, kind, topic, topic_id)
VALUES (%(name)s, %(kind)s, %(topic)s, %(topic_id)s) RETURNING source
"""
BEGIN_SHARD = """
INSERT INTO saf.source_shard (source, shard, start_batch, start_position, added)
VALUES (%(source)s, %(shard)s, %(batch)s, %(position)s, %(added)s)
"""


@dataclass(frozen=True, kw_only=True)
class Partition(Progress):
    """How far a partition was read, and by whom."""

    pending: int | None
    looked_at: datetime | None
    owner: str | None


@dataclass(frozen=True, kw_only=True)
class SourceStatus:
    """How far a source was read."""

    name: str
    kind: str
    topic: str
    service: str
    into: str
    source: UUID | None
    """Source of its messages in the inbox; None: nothing was read yet."""
    partitions: tuple[Partition, ...] = ()

    @property
    def pending(self) -> int | None:
        """Messages that were not read yet when the source was last looked at; None: unknown."""
        known = [one.pending for one in self.partitions if one.pending is not None]
        return sum(known) if known else None

    @property
    def looked_at(self) -> datetime | None:
        """When it was last looked at."""
        return max((one.looked_at for one in self.partitions if one.looked_at), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the status as a dict for JSON."""
        found = asdict(self) | {"source": self.source and str(self.source), "pending": self.pending}
        found["partitions"] = [
            asdict(one)
            | {
                "position": placed(one.position),
                "looked_at": one.looked_at and one.looked_at.isoformat(),
            }
            for one in self.partitions
        ]
        return found


def named(settings: Settings, name: str) -> SourceSettings:
    """Return the settings of a source in saf.toml.

    Raises:
        ConfigurationError: no source has this name.
    """
    return table_named(settings.sources, "sources", name)


def status(settings: Settings, name: str) -> SourceStatus:
    """Return how far a source was read."""
    source = named(settings, name)
    into, dsn = settings.inbox_for(name)
    with _inbox(into, dsn, "status") as connection:
        return status_at(connection, name, source, into)


def status_at(
    connection: psycopg.Connection[Any], name: str, source: SourceSettings, into: str
) -> SourceStatus:
    """Return how far a source was read, given a connection to the inbox."""
    found = fetch(connection, FIND, {"name": name})
    source_id = found[0][0] if found else None
    rows = fetch(connection, STATUS, {"source": source_id}) if found else []
    return SourceStatus(
        name=name,
        kind=source.kind,
        topic=source.topic,
        service=source.service,
        into=into,
        source=source_id,
        partitions=tuple(
            Partition(
                shard=shard,
                position=max(
                    (0, 0) if start is None else (start, start_position),
                    (0, 0) if batch is None else (batch, position),
                ),
                added=None if added is None else int(added),
                pending=pending,
                looked_at=looked_at,
                owner=owner,
                topic_id=topic_id,
            )
            for shard, start, start_position, added, pending, looked_at, owner, topic_id, batch,
            position in rows
        ),
    )  # fmt: skip


def examine(settings: Settings, name: str) -> Iterator[tuple[str, str]]:
    """Yield each problem of a source, with its cure.

    Raises the errors of connecting to its broker or to the inbox.
    """
    source = named(settings, name)
    into, dsn = settings.inbox_for(name)
    with _inbox(into, dsn, "doctor") as connection:
        known = status_at(connection, name, source, into)
        if not fetch(connection, READER, {"service": source.service}):
            services = [service for (service,) in fetch(connection, "SELECT name FROM saf.service")]
            what = no_service(f"destination {into!r}", [source.service], known=services)
            yield what, f"`saf service create {source.service} --broker {into}`; its messages wait"
    extents = dict(enumerate(_extents(name, source)))
    for partition in known.partitions:
        extent = extents.get(partition.shard, GONE)
        if error := judge(name, source.topic, partition, extent):
            yield str(error), f"decide: `saf source continue {name}`"
            return


def _extents(name: str, source: SourceSettings) -> list[Extent]:
    with closing(source.open(name)) as opened:
        opened.connect()
        return [opened.extent(shard) for shard in range(opened.partitions())]


def resume(
    settings: Settings, name: str, start: Start, why: str, *, person: str | None = None
) -> SourceStatus:
    """Let a source continue at the beginning or the end of what its topic has now.

    Raises:
        UsageError: the source was not read yet.
    """
    source = named(settings, name)
    into, dsn = settings.inbox_for(name)
    with closing(source.open(name)) as opened:
        opened.connect()
        extents = [opened.extent(shard) for shard in range(opened.partitions())]
    if start == "latest" and any(extent.waiting is not None for extent in extents):
        raise UsageError(
            f"source {name!r}: topic {source.topic!r} is a queue, which has no places to skip to: "
            "purge it at its broker, and continue with `--from earliest`"
        )
    topic_id = next((extent.topic_id for extent in extents), None)
    with _inbox(into, dsn, "source") as connection:
        with connection.transaction():
            old = _forget(connection, name, into)
            params = {
                "name": name, "kind": source.kind, "topic": source.topic, "topic_id": topic_id,
            }  # fmt: skip
            ((new,),) = fetch(connection, BEGIN_ANEW, params)
            for shard, extent in enumerate(extents):
                is_latest = start == "latest"
                batch, position = extent.last if is_latest else BEGINNING
                begin = {
                    "source": new, "shard": shard, "batch": batch, "position": position,
                    "added": extent.added if is_latest else extent.removed,
                }  # fmt: skip
                connection.execute(BEGIN_SHARD, begin)
            action = f"continue source {name} from {start}"
            audit(connection, action, [old, new], why, person=person)
        return status_at(connection, name, source, into)


def forget(settings: Settings, name: str, broker: str | None, why: str) -> None:
    """Forget how far a source was read; if saf.toml still has it, it begins anew.

    Raises:
        UsageError: the inbox does not know the source.
    """
    into, dsn = _place(settings, name, broker)
    with _inbox(into, dsn, "source") as connection, connection.transaction():
        old = _forget(connection, name, into)
        audit(connection, f"forget source {name}", [old], why)


def _place(settings: Settings, name: str, broker: str | None) -> tuple[str, Dsn]:
    if broker is None and name in settings.sources:
        return settings.inbox_for(name)
    stores = {key: dsn for key, place in settings.destinations.items() if (dsn := place.broker())}
    if broker is None and len(stores) == 1:
        (broker,) = stores
    if broker not in stores:
        raise UsageError(
            f"--broker {broker or 'NAME'} is not a destination with an inbox, only "
            f"{', '.join(stores) or 'none'}"
        )
    return broker, stores[broker]


def _forget(connection: psycopg.Connection[Any], name: str, into: str) -> UUID:
    connection.execute(DURABLY)
    found = fetch(connection, LOCK, {"name": name})
    if not found:
        raise UsageError(f"source {name!r} was not read into destination {into!r} yet")
    source: UUID = found[0][0]
    connection.execute(FORGET, {"source": source})
    return source


@contextmanager
def _inbox(name: str, dsn: Dsn, role: str) -> Iterator[psycopg.Connection[Any]]:
    with (
        unavailable_if_lost(f"destination {name!r}"),
        dsn.connect(role=role, autocommit=True) as connection,
    ):
        check_schema(connection)
        health.require_rows(connection)
        yield connection
