"""The databases of the machines: copies of a template, and emptied between their examples.

To empty a database takes a few milliseconds, and to make one a few hundred. What the template held
is kept in a schema of its own, so it does not matter which tables there are.

Few shards, so that keys meet in one and two forwarders have some each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from saf.broker.migrate import migrate
from saf.database import Dsn, connections
from saf.testing.databases import Database, Databases, embedded_server

SHARDS = 4
LOCK_TIMEOUT = "10s"
"""Nobody else is there, so whoever waits for a lock does so for ever."""

# Partitions are emptied by themselves; generated columns cannot be written
TABLES = """
SELECT c.oid::regclass::text, c.relkind = 'p',
       (SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute
        WHERE attrelid = c.oid AND attnum > 0 AND attgenerated = '' AND NOT attisdropped)
FROM pg_class c WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind IN ('r', 'p')
  AND NOT c.relispartition AND c.relname <> 'alembic_version' ORDER BY 1
"""
USED_SLOTS = """
SELECT c.oid::regclass::text FROM pg_class c
WHERE c.relnamespace = 'saf'::regnamespace AND c.relispartition AND c.relkind = 'r'
  AND pg_relation_size(c.oid) > 0
"""
SEQUENCES = """
SELECT format('ALTER SEQUENCE %s RESTART', pg_get_serial_sequence('saf.' || name, number))
FROM (VALUES ('outbox', 'id'), ('inbox', 'id'), ('route_version', 'version')) AS v (name, number)
"""
HELD = "SELECT EXISTS (SELECT FROM {})"
KEEP = "CREATE TABLE pristine.{} AS TABLE saf.{}"
KEPT = "SELECT relname FROM pg_class WHERE relnamespace = 'pristine'::regnamespace"
OTHERS = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"


@dataclass(eq=False)
class Place:
    """A broker's database, which may be restored elsewhere."""

    database: Database
    person: psycopg.Connection[Any]
    """Somebody who looks at it, and does what people do; in autocommit."""

    @property
    def dsn(self) -> Dsn:
        """Where it is."""
        return self.database.dsn

    def let_go(self) -> None:
        """Nobody looks at it any more."""
        self.person.close()


class Site:
    """Makes databases for machines, on one server."""

    def __init__(self, databases: Databases) -> None:
        self.databases = databases
        self.closing = ExitStack()
        """What goes with it."""
        self.template = databases.create("stateful")
        migrate(self.template.dsn, SHARDS)
        with self.template.connect() as connection:
            connection.execute("CREATE SCHEMA pristine")
            for table, partitioned, _ in connection.execute(TABLES).fetchall():
                name = sql.Identifier(table.removeprefix("saf."))
                held = connection.execute(sql.SQL(HELD).format(sql.SQL(table))).fetchone()
                if held == (True,) and not partitioned:
                    connection.execute(sql.SQL(KEEP).format(name, name))

    def create(self, name: str) -> Place:
        """One more broker."""
        made = self.databases.create_broker(name, self.template)
        bound_waiting(made)
        with made.connect(autocommit=True) as connection:
            # the broker's identity is its own
            connection.execute("TRUNCATE pristine.broker")
            connection.execute("INSERT INTO pristine.broker SELECT * FROM saf.broker")
        place = Place(made, made.connect(autocommit=True))
        self.closing.callback(place.let_go)
        return place

    def close(self) -> None:
        """Let go of it all, and of what the forwarders of this process have kept."""
        self.closing.close()
        connections.forget()

    @staticmethod
    def empty(place: Place) -> None:
        """Make a database what it was when it was made; nobody else is at work in it."""
        person = place.person
        for (gid,) in person.execute(PREPARED).fetchall():
            person.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        kept = {name for (name,) in person.execute(KEPT).fetchall()}
        # foreign keys are triggers, and hold again in the end
        script = ["SET session_replication_role = replica"]
        for table, partitioned, columns in person.execute(TABLES).fetchall():
            if not partitioned:
                script.append(f"DELETE FROM {table}")
            if (name := table.removeprefix("saf.")) in kept:
                script.append(
                    f"INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE "
                    f"SELECT {columns} FROM pristine.{name}"
                )
        used = [slot for (slot,) in person.execute(USED_SLOTS).fetchall()]
        if used:
            script.append(f"TRUNCATE {', '.join(used)}")
        script += [restart for (restart,) in person.execute(SEQUENCES).fetchall()]
        script.append("SET session_replication_role = DEFAULT")
        person.execute("; ".join(script))


def bound_waiting(database: Database) -> None:
    """Let what waits for a lock fail, and not the whole test hang."""
    with database.connect(autocommit=True) as connection:
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET lock_timeout = {}").format(
                sql.Identifier(database.dsn.database), sql.Literal(LOCK_TIMEOUT)
            )
        )


@contextmanager
def own_site() -> Iterator[Site]:
    """A site with a server of its own."""
    with embedded_server() as server, closing(Databases(server.dsn("postgres"))) as databases:
        site = Site(databases)
        try:
            yield site
        finally:
            site.close()
