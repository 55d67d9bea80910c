"""Backups of the machines' databases, and setting a database back to one.

A copy in the same cluster stands for a cluster that is set back as a whole: batches, epochs and ids
are what they were, and transaction ids mean what they meant. A dump in another cluster is a logical
backup: there they mean nothing.
"""

from __future__ import annotations

import subprocess
from contextlib import closing

from psycopg import sql

from saf.broker.embedded import DEFAULT_VERSION, programs
from saf.testing.databases import Database, Databases, embedded_server
from tests.stateful.site import OTHERS, Place, Site, bound_waiting

COPY = "CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy"
# A younger cluster's transaction ids are below ours, as they are where one restores
BURN = """
DO $$ BEGIN FOR i IN 1..5000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$
"""


class Backups:
    """The newest backup of each place, until they are cleared."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._elsewhere: Databases | None = None
        self._taken: dict[Place, Database] = {}
        self._home: dict[Place, Database] = {}
        self._moved: list[tuple[Databases, Database]] = []
        with site.template.connect(autocommit=True) as connection:
            connection.execute(BURN)

    def take(self, place: Place) -> None:
        """Back a database up; whoever is connected to it is cut off.

        One that lives elsewhere meanwhile keeps the backup that it has.
        """
        if not self.at_home(place):
            return
        if place in self._taken:
            self.site.databases.drop(self._taken.pop(place))
        self._cut_off(place)
        self._taken[place] = self.site.databases.create("backup", place.dsn.database)
        self._meet(place)

    def set_back(self, place: Place, *, logical: bool) -> None:
        """Make a database what it was at its backup."""
        backup = self._taken[place]
        self._cut_off(place)
        if logical:
            self._restore(place, backup)
        else:
            place.database = self._home.pop(place, place.database)
            name = place.dsn.database
            self.site.databases.drop(place.database)
            with self.site.databases.server.connect(role="test", autocommit=True) as connection:
                connection.execute(
                    sql.SQL(COPY).format(sql.Identifier(name), sql.Identifier(backup.dsn.database))
                )
        bound_waiting(place.database)
        self._meet(place)

    def cleared(self) -> Backups:
        """These, without any; each place is its own database again, whatever it holds."""
        for place, home in self._home.items():
            place.person.close()
            place.database = home
            self._meet(place)
        for databases, database in self._moved:
            databases.drop(database)
        for backup in self._taken.values():
            self.site.databases.drop(backup)
        self._taken.clear()
        self._home.clear()
        self._moved.clear()
        return self

    def at_home(self, place: Place) -> bool:
        """Whether it is where it was made."""
        return place not in self._home

    def _restore(self, place: Place, backup: Database) -> None:
        if self._elsewhere is None:
            server = self.site.closing.enter_context(embedded_server())
            databases = Databases(server.dsn("postgres"))
            self._elsewhere = self.site.closing.enter_context(closing(databases))
        restored = self._elsewhere.create(backup.dsn.database[-8:])
        folder = programs(DEFAULT_VERSION)
        dump = subprocess.run(
            [folder / "pg_dump", "--no-owner", backup.conninfo], capture_output=True, check=True
        )
        subprocess.run(
            [folder / "psql", "-qX", "-v", "ON_ERROR_STOP=1", restored.conninfo],
            input=dump.stdout,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        self._moved.append((self._elsewhere, restored))
        self._home.setdefault(place, place.database)
        place.database = restored

    @staticmethod
    def _cut_off(place: Place) -> None:
        place.person.execute(OTHERS)
        place.person.close()

    @staticmethod
    def _meet(place: Place) -> None:
        place.person = place.database.connect(autocommit=True)
