"""The servers that rounds run on: a source and a MOM store, durable, each of its own."""

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
from tests.crash import faults
from tests.crash.plan import FAULTS, QUALITIES, Fault, Plan, plan
from tests.crash.proxy import Proxy
from tests.crash.talks import introduce
from tests.crash.writers import ACCOUNTS, TABLES

SETTINGS = {"max_prepared_transactions": 50, "max_connections": 200, "shared_buffers": "64MB"}
STORES = ("mom", "other")
DISK = "80m"
SHARDS = 4
"""Few, so that keys of several services meet in a shard, below one watermark."""
POLITE = (
    "ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (convert_from(body, 'UTF8') !~ 'poison')"
)


class Site:
    """Started once, for many rounds; with a small disk for the MOM store, where it may mount one.

    Attributes:
        disk: the folder that can be filled up; None if this user may not mount.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="saf-crash-"))
        self.folder.chmod(0o755)
        self.source = EmbeddedServer(self.folder / "source", settings=SETTINGS)
        self.mom = EmbeddedServer(self.folder / "mom", settings=SETTINGS)
        self.disk: Path | None = None

    def __enter__(self) -> Self:
        for server in (self.source, self.mom):
            server.start()
            migrate(server.create_database("saf_template"), SHARDS)
        self._mount()
        self.proxy: Any = Proxy(str(self.mom.dsn("mom").parts["host"]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.proxy.close()
        self.source.stop_immediately()
        self.mom.stop_immediately()
        if self.disk:
            subprocess.run(["umount", self.disk], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def stores(self, plan: Plan) -> dict[str, Dsn]:
        """The MOM stores of a round, directly."""
        return {name: self.mom.dsn(name) for name in STORES[: plan.destinations]}

    def by_proxy(self, plan: Plan) -> Mapping[str, Dsn | DestinationSettings]:
        """The same for the forwarders."""
        where = f"host=127.0.0.1 port={self.proxy.port} user=postgres sslmode=disable"
        return {
            name: Dsn(f"{where} gssencmode=disable dbname={name}") for name in self.stores(plan)
        }

    def fault(self, kind: str) -> Callable[[Any, Fault], None]:
        """What does a fault of this kind to a round."""
        found: Callable[[Any, Fault], None] = getattr(faults, kind)
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

    qualities: ClassVar[Mapping[str, str]] = QUALITIES
    """What each service is promised here."""

    def arrived(self) -> Sequence[str]:
        """The bodies that have arrived elsewhere than in MOM stores."""
        return []

    def prepare(self, plan: Plan) -> Dsn:
        """Fresh databases for a round; return the source's."""
        app = self._database(self.source, "app", "pg_default")
        for store in STORES:
            with self._database(self.mom, store, "small" if self.disk else "pg_default").connect(
                role="crash", autocommit=True
            ) as connection:
                connection.execute(POLITE)
                for service in QUALITIES:
                    connection.execute("INSERT INTO saf.service VALUES (%s)", [service])
        with app.connect(role="crash", autocommit=True) as connection:
            connection.execute(TABLES)
            connection.execute("INSERT INTO account SELECT unnest(%s::text[]), 0", [ACCOUNTS])
            for number, (service, quality) in enumerate(self.qualities.items()):
                connection.execute(
                    "INSERT INTO saf.route (service, destination, quality) VALUES (%s, %s, %s)",
                    [service, STORES[number % plan.destinations], quality],
                )
        if plan.dialogs:
            introduce(app, self.mom.dsn("mom"))
        return app

    def _database(self, server: EmbeddedServer, name: str, tablespace: str) -> Dsn:
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

    def _mount(self) -> None:
        disk = self.folder / "disk"
        disk.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={DISK},mode=755", "tmpfs", str(disk)]
        if (
            os.geteuid() == 0
            and not subprocess.run(["mount", *options], capture_output=True, check=False).returncode
        ):
            self.disk = disk
            space = disk / "space"
            space.mkdir()
            owner = self.mom.data_dir.stat()
            os.chown(space, owner.st_uid, owner.st_gid)
            with self.mom.dsn("postgres").connect(role="crash", autocommit=True) as connection:
                connection.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
