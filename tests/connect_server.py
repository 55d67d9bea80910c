"""A server of Spark Connect for a test: a process of its own, which shows all that it knows."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from saf.spark import java
from saf_demo.servers import free_port
from tests import short_lived
from tests.programs import environment
from tests.waits import until

SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


@dataclass(kw_only=True)
class ConnectServer:
    """One server on loopback, with two slots, whose events are in its folder."""

    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def remote(self) -> str:
        """Its address, with a token that nobody may show."""
        return f"sc://127.0.0.1:{self.port}/;user_id=saf;x-canary=canary-31"

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        events = self.folder / "events"
        events.mkdir(exist_ok=True)
        given = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            **short_lived.SETTINGS,
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": events.as_uri(),
            "spark.local.dir": str(self.folder / "local"),
        }
        settings = [part for item in given.items() for part in ("--conf", "=".join(item))]
        env = environment(**java.find().environment(), PYSPARK_PYTHON=sys.executable, **self.env)
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [SUBMIT, "--master", "local[2]", *settings, "--class", SERVER, "spark-internal"],
                env=env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        until(self.accepts, seconds=180)

    def accepts(self) -> bool:
        """Whether it accepts a connection."""
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "output").read_text()
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """Kill it and its workers."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=60)
            self.process = None


@contextmanager
def connect_server(folder: Path, **env: str) -> Iterator[ConnectServer]:
    """A server that ends with the block."""
    server = ConnectServer(folder=folder, env=env)
    try:
        server.start()
        yield server
    finally:
        server.kill()
