"""A Redis server for a test: on a port and in a folder of its own, killed for real."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from saf_demo import servers
from saf_demo.servers import free_port
from tests.killable import Killable
from tests.needed import installed
from tests.waits import until

SETTINGS = {"auto-aof-rewrite-percentage": "0", "repl-diskless-sync-delay": "0"}


@dataclass(kw_only=True)
class RedisServer(Killable):
    """One server. What it holds is in its folder, so that it can be started again."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    port: int = 0
    options: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Where it is, as saf.toml says it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, **settings: str) -> None:
        """Start it, and wait until it answers."""
        self.port = self.port or free_port()
        self.settings |= settings
        given = SETTINGS | self.settings
        with installed():
            program, *arguments = servers.redis(self.folder, self.port, given)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [program, *self.options, *arguments], stdout=log, stderr=log
            )
        until(self.answers, seconds=30)

    def answers(self) -> bool:
        """Whether it answers, and has read its data."""
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            with closing(self.client(socket_timeout=5)) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False
        except redis.AuthenticationError:
            return True

    def client(self, **given: Any) -> Any:
        """A client of it; the types of its answers are those of no single version."""
        return redis.Redis(port=self.port, **given)

    def empty(self) -> None:
        """Let it lose everything."""
        with closing(self.client()) as client:
            client.flushall()

    def entries(self, topic: str = "billing", tag: str = "saf") -> list[Mapping[str, str]]:
        """The fields of a stream's entries, in their order."""
        with closing(self.client(decode_responses=True)) as client:
            return [fields for _, fields in client.xrange(f"{{{tag}}}:{topic}")]


@contextmanager
def redis_server(folder: Path, *options: str, **settings: str) -> Iterator[RedisServer]:
    """A server with these settings, besides `SETTINGS`."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(
        folder=folder,
        settings={name.replace("_", "-"): value for name, value in settings.items()},
        options=options,
    )
    server.start()
    try:
        yield server
    finally:
        server.kill()
