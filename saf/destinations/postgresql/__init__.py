"""The kind ``postgresql``: another broker's inbox.

    [destinations.mom]
    dsn = "postgresql://saf_forwarder@mom/mom?password=${MOM_PASSWORD}"

`saf.destinations.postgresql.inbox` stores messages, and needs Arrow. `read` reads them back: the
inbox's messages of a source, and its watermarks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self
from uuid import UUID

import psycopg
from psycopg import sql

from saf.database import Dsn, check_schema, fetch, of_broker, unavailable_if_lost
from saf.database.bounds import Bounds
from saf.destinations import (
    Capabilities,
    Compared,
    Destination,
    FewMessages,
    Figures,
    Reading,
)
from saf.destinations.marks import Known, Mark, Place
from saf.destinations.settings import DestinationSettings, DsnField, Guarantee
from saf.log.side import IN_RANGE, PLAIN, Side, in_order, open_side, shard_of

SERVER = """
SELECT current_setting('server_version'), current_setting('synchronous_standby_names') <> '',
       (SELECT count(*) FROM pg_stat_replication)
"""

IDENTITY = "SELECT broker_id FROM saf.broker"

# Old versions of a mark may still exist; see saf.log.shards.newest
KNOWN = """
SELECT DISTINCT ON (lane, shard) lane, shard, epoch, batch, position, opened_at, acknowledged,
       set_aside_at
FROM saf.watermark WHERE source = %(source)s ORDER BY lane, shard, batch DESC
"""

# The destination's own column counts in the destination's number of shards
STORED = f"""
SELECT message_id, {{shard}} AS shard, id, to_service, to_broker, key, created_at,
       'stored' AS state
FROM saf.inbox WHERE source = %(source)s AND {IN_RANGE}
"""
FIGURES_STORED = f"""
SELECT shard, count(*), count(*) FILTER (WHERE {PLAIN}),
       coalesce(sum(uuid_hash_extended(message_id, 0)) FILTER (WHERE {PLAIN}), 0)::text
FROM ({STORED}) AS stored GROUP BY shard
"""
HELD = """
SELECT to_service, min(created_at) FROM saf.inbox
WHERE source = %(source)s AND to_service = ANY (%(topics)s::text[]) GROUP BY to_service
"""


class Postgresql(DestinationSettings):
    """Settings of a broker's inbox."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        holds=True,
        exactly_once=True,
        fences=True,
        knows_services=True,
        reads_back=True,
        takes_parts=True,
    )

    kind: Literal["postgresql"] = "postgresql"
    dsn: DsnField
    """Address of the broker."""

    def open(self, name: str, *, keep: bool = False) -> Destination:
        """Return the inbox as a destination; see `DestinationSettings.open`."""
        from saf.destinations.postgresql import inbox  # needs Arrow, which drivers lack

        return inbox.PostgresInbox(name, self.dsn, keep=keep)

    def few_messages(self) -> Callable[[], FewMessages] | None:
        """Return what opens a session; see `DestinationSettings.few_messages`."""
        from saf.destinations.postgresql import little

        return partial(little.FewMessages, self.dsn)

    def identity(self, name: str) -> UUID:
        """Return the broker_id; see `DestinationSettings.identity`."""
        with (
            unavailable_if_lost(f"destination {name!r}"),
            self.dsn.connect(role="identify", autocommit=True) as connection,
        ):
            (broker_id,) = of_broker(connection, IDENTITY)
            return UUID(str(broker_id))

    def known(self, name: str, source: UUID, *, role: str) -> Known:
        """Return the watermarks of a source; see `DestinationSettings.known`."""
        with (
            unavailable_if_lost(f"destination {name!r}"),
            self.dsn.connect(role=role, autocommit=True) as connection,
        ):
            check_schema(connection)
            return known_at(connection, source)

    def reading(self, name: str) -> AbstractContextManager[Reading]:
        """Open the inbox for reading in one snapshot; nothing is purged while it is open."""
        return read(name, self.dsn)

    def broker(self) -> Dsn:
        """Return the dsn: each inbox belongs to a broker."""
        return self.dsn

    def guarantee(self, name: str) -> Guarantee:
        """Return the promise of the server's settings; see `DestinationSettings.guarantee`."""
        with (
            unavailable_if_lost(f"destination {name!r}"),
            self.dsn.connect(role="doctor", autocommit=True) as connection,
        ):
            ((version, synchronous, standbys),) = fetch(connection, SERVER)
        findings = []
        if standbys and not synchronous:
            findings.append((
                f"a failover to one of its {standbys} standbys may lose acknowledged messages, "
                "because commits do not wait for it",
                "synchronous_standby_names at the server",
            ))  # fmt: skip
        return Guarantee(
            server=f"PostgreSQL {version}, database {self.dsn.database!r}",
            promise=f"{self.quality.replace('_', ' ')}; a crash of the process or of the machine "
            "loses nothing that was acknowledged",
            more=findings,
        )

    def bounded(self, bounds: Bounds) -> Self:
        """Return these settings with saf.toml's ``[bounds]``."""
        return self.model_copy(update={"dsn": replace(self.dsn, bounds=bounds)})


@dataclass(frozen=True)
class InboxReading:
    """An inbox as a `saf.destinations.Reading`, in one snapshot."""

    side: Side

    @property
    def name(self) -> str:
        """The destination's name."""
        return self.side.name

    def identity(self) -> UUID:
        """Return the broker_id."""
        (broker_id,) = of_broker(self.side.connection, IDENTITY)
        return UUID(str(broker_id))

    def purged(self) -> str | None:
        """Return "inbox", unless nothing was ever purged from it; then None."""
        return "inbox" if self.side.may_be_purged() else None

    def known(self, source: UUID) -> Known:
        """Return the watermarks of a source."""
        return known_at(self.side.connection, source)

    def figures(self, what: Compared) -> Iterable[Figures]:
        """Return the figures of each shard, which the server computes."""
        query = sql.SQL(FIGURES_STORED).format(shard=shard_of(what.shards))
        for shard, stored, plain, hashed in self.side.fetch(query, _params(what)):
            yield Figures(shard, stored, plain, int(hashed))

    def stored(self, what: Compared, shards: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        """Yield the messages of some shards and all topics; the server sorts them by message id."""
        rows = sql.SQL(STORED).format(shard=shard_of(what.shards))
        return self.side.stream(in_order(rows, shards, state="state"), _params(what))

    def begun(self, source: UUID, topics: Collection[str]) -> Iterable[tuple[Any, ...]]:
        """Return when the oldest message of each topic was created. Reads the whole inbox."""
        return self.side.fetch(HELD, {"source": source, "topics": [*topics]})


@contextmanager
def read(name: str, dsn: Dsn) -> Iterator[Reading]:
    """Open an inbox for reading, safe from purges. Its snapshot is taken at the first query."""
    with open_side(name, f"destination {name!r}", dsn, "inbox") as side:
        yield InboxReading(side)


def known_at(connection: psycopg.Connection[Any], source: UUID) -> Known:
    """Return a broker's knowledge of a source."""
    (destination,) = of_broker(connection, IDENTITY)
    marks: dict[Place, Mark] = {}
    epochs: dict[int, int] = {}
    for lane, shard, epoch, *mark in fetch(connection, KNOWN, {"source": source}):
        marks[lane, shard] = Mark.of(*mark)
        epochs[shard] = max(epoch, epochs.get(shard, 0))
    return Known(destination=destination, marks=marks, epochs=epochs)


def _params(scope: Compared) -> dict[str, Any]:
    return {
        "source": scope.source,
        "since": scope.since,
        "until": scope.until,
        "topics": [*scope.topics],
    }
