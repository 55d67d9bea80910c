"""Two clusters that know nothing of each other, and brokers in the older one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import psycopg
import pytest

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.database import Dsn
from saf.testing.databases import Copies, Database, Databases
from tests.moves import ways


@dataclass(kw_only=True)
class Site:
    """An application's database and a MOM store in the old cluster, and a new cluster."""

    old: EmbeddedServer
    new: EmbeddedServer
    app: Dsn
    mom: Dsn
    number: int
    names: list[str] = field(default_factory=list)

    def name(self, what: str = "moved") -> str:
        """A name in the new cluster that no other test has."""
        self.names.append(f"{what}_{self.number}_{len(self.names)}")
        return self.names[-1]


class Old:
    """The old cluster, with a migrated template."""

    def __init__(self, server: EmbeddedServer, databases: Databases) -> None:
        self.server = server
        self.databases = databases
        self.template: Database = databases.create("template")
        self.used = 0
        migrate(self.template.dsn)


@pytest.fixture(scope="session")
def old() -> Iterator[Old]:
    with ExitStack() as running:
        server = running.enter_context(ways.cluster())
        ways.burn(server, 1000)
        yield Old(server, running.enter_context(closing(Databases(server.dsn("postgres")))))


@pytest.fixture(scope="session")
def new() -> Iterator[EmbeddedServer]:
    with ways.cluster() as server:
        yield server


@pytest.fixture
def site(old: Old, new: EmbeddedServer) -> Iterator[Site]:
    copies = Copies(old.databases, old.template)
    old.used += 1
    made = Site(
        old=old.server,
        new=new,
        app=copies("app").dsn,
        mom=copies("mom").dsn,
        number=old.used,
    )
    yield made
    for name in made.names:
        with psycopg.connect(new.dsn("postgres").conninfo, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    with psycopg.connect(old.server.dsn("postgres").conninfo, autocommit=True) as connection:
        slots = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        connection.execute(slots + " WHERE NOT active AND slot_type = 'logical'")
    copies.drop()
