"""A real PgBouncer in front of a server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from psycopg.conninfo import make_conninfo

from saf.database import Dsn
from saf_demo.servers import free_port
from tests.needed import needed

CONFIGURATION = """
[databases]
* = host={host} port={port} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {here}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
ignore_startup_parameters = extra_float_digits
"""


class PgBouncer:
    """Lends few sessions of a server to many clients.

    A test that needs it is skipped on a laptop without it, and fails in CI.
    """

    def __init__(self, server: Dsn, mode: str, size: int = 1) -> None:
        program = needed("pgbouncer", "pgbouncer")
        self._port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="saf-pgbouncer-"))
        self._folder.chmod(0o755)
        file = self._folder / "pgbouncer.ini"
        file.write_text(CONFIGURATION.format(**server.parts, here=self._port, mode=mode, size=size))
        self._command = [program, str(file)]
        self._start()

    def __call__(self, dsn: Dsn) -> Dsn:
        """The same database, through here."""
        return Dsn(make_conninfo(dsn.conninfo, host="127.0.0.1", port=self._port), dsn.bounds)

    def kill(self) -> None:
        """Kill it with SIGKILL, and start another in its place."""
        self._process.kill()
        self._process.wait()
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user="nobody" if os.geteuid() == 0 else None,  # it refuses to run as root
        )

    def __enter__(self) -> Self:
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
            except OSError:
                assert time.monotonic() < until, "PgBouncer does not start"
                time.sleep(0.02)
            else:
                return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def prepared_by_name(dsn: Dsn) -> list[str]:
    """What the session that is lent next knows by a name."""
    with psycopg.connect(dsn.conninfo, autocommit=True) as connection:
        return [
            text for (text,) in connection.execute("SELECT statement FROM pg_prepared_statements")
        ]
