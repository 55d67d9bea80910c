"""The servers that rounds run on: a source and a MOM store, durable, each of its own.

Where this user may, each has a small disk, and the MOM store is on a network of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from psycopg import sql

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.database import Dsn
from saf.destinations.settings import DestinationSettings
from tests.crash import (
    clocks,
    consumers,
    dashboard,
    faults,
    hangs,
    hostile,
    hubs,
    moves,
    set_backs,
    spark_faults,
    streams,
    transforms,
)
from tests.crash.checker import Verdict
from tests.crash.copies import Copies
from tests.crash.network import elsewhere
from tests.crash.plan import FAULTS, QUALITIES, Fault, Plan, plan
from tests.crash.proxy import Proxy
from tests.crash.talks import introduce
from tests.crash.writers import ACCOUNTS, TABLES
from tests.poolers import PgBouncer
from tests.server_clock import ClockedServer

SETTINGS = {"max_prepared_transactions": 50, "max_connections": 200, "shared_buffers": "64MB"}
STORES = ("mom", "other")
DISK = "120m"
POOL = 8
"""Sessions of the pooler, which are fewer than its clients would have at times."""
SHARDS = 4
"""Few, so that keys of several services meet in a shard, below one watermark."""
POLITE = (
    "ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (convert_from(body, 'UTF8') !~ 'poison')"
)
# Another cluster is younger, so there its transaction ids mean what has happened here
LIVE = """
DO $$ BEGIN FOR i IN 1..3000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$
"""


class Site:
    """Started once, for many rounds.

    Attributes:
        disks: of each server, the folder that can be filled up; none if this user may not mount.
        away: the MOM store's machine; None if this user may not make networks.
        pooler: in front of the source, in rounds that have one.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="saf-crash-"))
        self.folder.chmod(0o755)
        self.source = ClockedServer(self.folder / "source", settings=SETTINGS)
        self.mom = ClockedServer(self.folder / "mom", settings=SETTINGS)
        self.disks: dict[EmbeddedServer, Path] = {}
        self.away = elsewhere()
        self.pooler: PgBouncer | None = None
        copies = self.folder / "copies"
        copies.mkdir()
        copies.chmod(0o755)
        self.copies_of_source = Copies(self.source, copies / "source", self._furnish)
        self.copies_of_mom = Copies(self.mom, copies / "mom", self._furnish)

    def __enter__(self) -> Self:
        for server in (self.source, self.mom):
            self._mount(server)
            server.start()
            self._furnish(server)
        self.proxy: Any = Proxy(str(self.mom.dsn("mom").parts["host"]), self.away)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.proxy.close()
        self._end_pooler()
        self.source.stop_immediately()
        self.mom.stop_immediately()
        for disk in self.disks.values():
            subprocess.run(["umount", disk], check=False)
        if self.away:
            self.away.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def stores(self, plan: Plan) -> dict[str, Dsn]:
        """The MOM stores of a round, directly."""
        return {name: self.mom.dsn(name) for name in STORES[: plan.destinations]}

    def by_proxy(self, plan: Plan) -> Mapping[str, Dsn | DestinationSettings]:
        """The same for the forwarders."""
        where = f"host={self.proxy.host} port={self.proxy.port} user=postgres sslmode=disable"
        return {
            name: Dsn(f"{where} gssencmode=disable dbname={name}")
            for name in (*self.stores(plan), *self.hubs(plan))
        }

    def hubs(self, plan: Plan) -> dict[str, Dsn]:
        """The hubs of a round, which live beside the MOM stores."""
        return {name: self.mom.dsn(name) for name in hubs.HUBS[: plan.hubs]}

    def stream_places(self, app: Dsn) -> streams.Places:
        """Where the streams of a round read and write."""
        mom, other = (self.mom.dsn(store) for store in STORES)
        return streams.Places(app=app, mom=mom, other=other, folder=self.folder / "streams")

    def writers_see(self, app: Dsn) -> Dsn:
        """The application's database as its writers know it."""
        return self.pooler(app) if self.pooler else app

    def places(self, plan: Plan) -> dict[str, str]:
        """Of each service, the store that its route leads to."""
        return {
            service: STORES[number % plan.destinations]
            for number, service in enumerate(self.qualities)
        }

    def fault(self, kind: str) -> Callable[[Any, Fault], None]:
        """What does a fault of this kind to a round."""
        rooms = (faults, hangs, clocks, set_backs, moves, dashboard, spark_faults)
        found: Callable[[Any, Fault], None] = next(
            getattr(room, kind) for room in rooms if hasattr(room, kind)
        )
        return found

    def plan(self, seed: int, number: int, kinds: tuple[str, ...] = ()) -> Plan:
        """The plan of a round."""
        return plan(seed, number, kinds or FAULTS)

    def others(self) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        """More programs that run in a round, each with its arguments."""
        return []

    def checked(self, plan: Plan) -> dict[str, Dsn]:
        """The stores where messages are to arrive."""
        return self.stores(plan)

    def left(self) -> int:
        """How many messages of the MOM stores are not where they are to arrive."""
        return 0

    def look(self, verdict: Verdict) -> None:
        """Add what only this site's checker finds."""

    qualities: ClassVar[Mapping[str, str]] = QUALITIES
    """What each service is promised here."""
    notices: ClassVar[bool] = True
    """Whether its destinations keep marks, and so notice that the source was set back."""

    def arrived(self) -> Sequence[str]:
        """The bodies that have arrived elsewhere than in MOM stores."""
        return []

    def prepare(self, plan: Plan) -> Dsn:
        """Fresh databases for a round; return the source's."""
        self.copies_of_source.clear()
        self.copies_of_mom.clear()
        app = self._database(self.source, "app")
        stores = [self._database(self.mom, store) for store in STORES]
        for store in stores:
            with store.connect(role="crash", autocommit=True) as connection:
                connection.execute(POLITE)
                for service in QUALITIES:
                    connection.execute("INSERT INTO saf.service VALUES (%s)", [service])
                if plan.consumers:
                    consumers.prepare(connection)
        with app.connect(role="crash", autocommit=True) as connection:
            connection.execute(LIVE)
            connection.execute(TABLES)
            connection.execute("INSERT INTO account SELECT unnest(%s::text[]), 0", [ACCOUNTS])
            for service, destination in self.places(plan).items():
                connection.execute(
                    "INSERT INTO saf.route (service, destination, quality) VALUES (%s, %s, %s)",
                    [service, destination, self.qualities[service]],
                )
            hostile.admit(connection)
            if plan.transforms:
                transforms.watch(connection)
        if plan.dialogs:
            introduce(app, self.mom.dsn("mom"))
        for name in self.hubs(plan):
            hubs.join(app, self._database(self.mom, name), name)
        if plan.streams:
            self.stream_places(app).prepare()
        self._end_pooler()
        if plan.pooled:
            self.pooler = PgBouncer(app, "transaction", size=POOL).__enter__()
        return app

    def _end_pooler(self) -> None:
        if self.pooler:
            self.pooler.__exit__(None, None, None)
            self.pooler = None

    def _database(self, server: EmbeddedServer, name: str) -> Dsn:
        tablespace = "small" if server in self.disks else "pg_default"
        drop = "DROP DATABASE IF EXISTS {} WITH (FORCE)"
        create = "CREATE DATABASE {} TEMPLATE saf_template STRATEGY file_copy TABLESPACE {}"
        with server.dsn("postgres").connect(role="crash", autocommit=True) as connection:
            connection.execute(sql.SQL(drop).format(sql.Identifier(name)))
            connection.execute(
                sql.SQL(create).format(sql.Identifier(name), sql.Identifier(tablespace))
            )
        dsn = server.dsn(name)
        with dsn.connect(role="crash") as connection:
            connection.execute("UPDATE saf.broker SET broker_id = gen_random_uuid()")
        return dsn

    def _furnish(self, server: EmbeddedServer) -> None:
        """What each cluster has: a template, a role, and a tablespace if disks are small."""
        migrate(server.create_database("saf_template"), SHARDS)
        with server.dsn("postgres").connect(role="crash", autocommit=True) as connection:
            connection.execute(hostile.CREATE)
        if self.disks:
            disk = self.disks.get(server, server.data_dir.with_name(f"{server.data_dir.name}-disk"))
            space = disk / "space"
            space.mkdir(parents=True)
            disk.chmod(0o755)
            owner = server.data_dir.stat()
            os.chown(space, owner.st_uid, owner.st_gid)
            with server.dsn("postgres").connect(role="crash", autocommit=True) as connection:
                connection.execute(f"CREATE TABLESPACE small LOCATION '{space}'")

    def _mount(self, server: EmbeddedServer) -> None:
        disk = self.folder / f"disk-of-{server.data_dir.name}"
        disk.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={DISK},mode=755", "tmpfs", str(disk)]
        if os.geteuid() == 0:
            done = subprocess.run(["mount", *options], capture_output=True, check=False)
            if done.returncode == 0:
                self.disks[server] = disk
