"""The kind ``postgresql``: another broker's inbox.

    [destinations.mom]
    dsn = "postgresql://saf_forwarder@mom/mom?password=${MOM_PASSWORD}"

`saf.destinations.postgresql.inbox` stores messages, and needs Arrow.
`saf.destinations.postgresql.reading` reads them back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar, Literal, Self
from uuid import UUID

from saf.database import Dsn, check_schema, fetch, of_broker, unavailable_if_lost
from saf.database.bounds import Bounds
from saf.destinations import Capabilities, Destination
from saf.destinations.marks import Known
from saf.destinations.postgresql.reading import IDENTITY, known_at, read
from saf.destinations.reading import Reading
from saf.destinations.settings import DestinationSettings, DsnField, Guarantee

SERVER = """
SELECT current_setting('server_version'), current_setting('synchronous_standby_names') <> '',
       (SELECT count(*) FROM pg_stat_replication)
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
