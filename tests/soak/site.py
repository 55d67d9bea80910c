"""The site of a soak: a folder with a PostgreSQL server, a Redis server, saf.toml, and logs."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.broker.services import create_services
from saf.database import Dsn
from saf_demo.servers import free_port
from tests.programs import BIN
from tests.redis_server import RedisServer
from tests.soak.application import SHOP, WAREHOUSE
from tests.soak.ledger import TABLES
from tests.soak.programs import Programs

SETTINGS = {"max_connections": 200, "shared_buffers": "64MB", "track_wal_io_timing": True}
STREAM = "{saf}:events"
TOKEN = "looking-all-the-time"
CONFIGURATION = """
[brokers.shop]
dsn = "{app}"
[brokers.mom]
dsn = "{mom}"
[destinations.mom]
dsn = "{mom}"
[destinations.shop]
dsn = "{app}"
[destinations.events]
kind = "redis"
server = "{redis}"
topic = "{{service}}"
[[routes]]
service = "events"
destination = "events"
[[routes]]
service = "shop"
destination = "shop"
[forwarder]
default_destination = "mom"
interval_seconds = 0.2
[purge]
retention_seconds = {retention}
rotate_after_seconds = {rotation}
[endpoints.hooks]
broker = "mom"
url = "http://127.0.0.1:{endpoint}/hook"
[ui]
token = "{token}"
"""


class Site:
    """What a piece runs on; it stays for the next one.

    Args:
        folder: where it is.
        rotation_seconds: how old a slot of a log becomes before the next one is begun.
    """

    def __init__(self, folder: Path, *, rotation_seconds: float) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        self.rotation_seconds = rotation_seconds
        self.server = EmbeddedServer(self.folder / "postgres", settings=SETTINGS)
        (self.folder / "redis").mkdir(exist_ok=True)
        self.redis = RedisServer(
            folder=self.folder / "redis",
            settings={"auto-aof-rewrite-percentage": "100", "auto-aof-rewrite-min-size": "64mb"},
        )
        self.config = self.folder / "saf.toml"
        self.ports = {name: free_port() for name in ("endpoint", "ui", "metrics", "forward")}
        self.ports["dispatch"] = free_port()

    def start(self) -> None:
        """Start the servers; make the brokers if they are not there."""
        self.server.start()
        self.redis.start()
        self.app, self.mom = (self.server.create_database(one) for one in ("app", "mom"))
        for dsn, services in (
            (self.app, [SHOP]),
            (self.mom, ["billing", "totals", "hooks", WAREHOUSE]),
        ):
            migrate(dsn)
            with dsn.connect(role="soak", autocommit=True) as connection:
                connection.execute(TABLES)
                create_services(connection, services)
        self.config.write_text(
            CONFIGURATION.format(
                app=self.app.conninfo,
                mom=self.mom.conninfo,
                redis=self.redis.address,
                endpoint=self.ports["endpoint"],
                retention=self.rotation_seconds,
                rotation=self.rotation_seconds,
                token=TOKEN,
            )
        )

    def stop(self) -> None:
        """Stop the servers."""
        with closing(self.redis.client()) as client:
            client.shutdown(nosave=True)
        self.redis.kill()
        self.server.stop()

    def programs(self) -> Programs:
        """Start everybody but the application."""
        some = Programs(
            self.folder / "logs",
            {
                "SOAK_APP": self.app.conninfo,
                "SOAK_MOM": self.mom.conninfo,
                "SAF_CONFIG": str(self.config),
            },
        )
        saf, port = str(BIN / "saf"), {name: str(one) for name, one in self.ports.items()}
        some.start("endpoint", [sys.executable, "-m", "tests.soak.endpoint", port["endpoint"]])
        for name in ("billing", "totals", WAREHOUSE, SHOP):
            some.start(name, [saf, "worker", f"tests.soak.consumers:{name}"])
        reader = [sys.executable, "-m", "tests.soak.reader", self.redis.address, STREAM]
        some.start("reader", reader)
        some.start("dispatch", [saf, "dispatch", "--loop", "--metrics", f":{port['dispatch']}"])
        some.start("forward", [saf, "forward", "--loop", "--metrics", f":{port['forward']}"])
        some.start("metrics", [saf, "metrics", "--listen", f":{port['metrics']}"])
        some.start("ui", [saf, "ui", "--port", port["ui"], "--write"])
        return some

    def application(self, rate: float) -> list[str]:
        """The command of the application."""
        return [sys.executable, "-m", "tests.soak.application", str(rate)]

    def brokers(self) -> dict[str, Dsn]:
        """Both databases."""
        return {"app": self.app, "mom": self.mom}


class Visitor:
    """Who looks at the dashboard and at the figures all the time, a page after the other."""

    PAGES = ("/", "/pending", "/parked", "/dead", "/outbox", "/members", "/dialogs", "/routes")

    def __init__(self, ports: dict[str, int]) -> None:
        self._client = httpx.Client(timeout=30)
        self._ports = ports
        self._visits = 0

    def look(self) -> None:
        """Fetch the next page, and all figures; whatever is refused raises."""
        at = f"http://127.0.0.1:{self._ports['ui']}"
        if not self._visits:
            self._post(f"{at}/login", {"token": TOKEN, "name": "soak"})
        page = self.PAGES[self._visits % len(self.PAGES)]
        self._visits += 1
        self._client.get(at + page).raise_for_status()
        for name in ("metrics", "forward", "dispatch"):
            self._client.get(f"http://127.0.0.1:{self._ports[name]}/metrics").raise_for_status()

    def _post(self, url: str, form: dict[str, Any]) -> None:
        answer = self._client.post(url, data=form)
        if answer.status_code != httpx.codes.SEE_OTHER:
            raise RuntimeError(f"{url} answers {answer.status_code}")

    def close(self) -> None:
        """Go."""
        self._client.close()
