"""The kind ``postgresql``: another broker's inbox.

    [destinations.mom]
    dsn = "postgresql://saf@mom/mom?password=${MOM_PASSWORD}"

What stores is in `saf.destinations.postgresql.inbox`, and needs Arrow; what reads back in
`saf.destinations.postgresql.reading`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar, Literal, Self
from uuid import UUID

from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.database.bounds import Bounds
from saf.destinations import Capabilities, Destination
from saf.destinations.marks import Known
from saf.destinations.postgresql.reading import IDENTITY, known_at, read
from saf.destinations.reading import Reading
from saf.destinations.settings import DestinationSettings, DsnField


class Postgresql(DestinationSettings):
    """A broker's inbox: where it is."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        exactly_once=True, fences=True, knows_services=True, reads_back=True
    )

    kind: Literal["postgresql"] = "postgresql"
    dsn: DsnField
    """Where the broker is."""

    def open(self, name: str, *, keep: bool = False) -> Destination:
        """The inbox, not connected yet."""
        from saf.destinations.postgresql import inbox  # needs Arrow, which a driver does not

        return inbox.PostgresInbox(name, self.dsn, keep=keep)

    @classmethod
    def preload(cls) -> None:
        """The inbox."""
        import saf.destinations.postgresql.inbox  # noqa: F401 - to have it imported

    def identity(self, name: str) -> UUID:
        """Its broker_id."""
        with (
            unavailable_if_lost(f"destination {name!r}"),
            self.dsn.connect(role="identify", autocommit=True) as connection,
        ):
            ((broker_id,),) = fetch(connection, IDENTITY)
            return UUID(str(broker_id))

    def known(self, name: str, source: UUID, *, role: str) -> Known:
        """Its watermarks of a source."""
        with (
            unavailable_if_lost(f"destination {name!r}"),
            self.dsn.connect(role=role, autocommit=True) as connection,
        ):
            check_schema(connection)
            return known_at(connection, source)

    def reading(self, name: str) -> AbstractContextManager[Reading]:
        """Its inbox, in one snapshot, safe from purges meanwhile."""
        return read(name, self.dsn)

    def broker(self) -> Dsn:
        """It is one."""
        return self.dsn

    def bounded(self, bounds: Bounds) -> Self:
        """The same with saf.toml's ``[bounds]``."""
        return self.model_copy(update={"dsn": replace(self.dsn, bounds=bounds)})
