"""A broker that is restored from a dump into another cluster, and its repair."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from saf.broker.embedded import EmbeddedServer, programs
from saf.database import Dsn, fetch
from saf.destinations.postgresql import known_at
from saf.operating.repair.rebase import rebase
from tests.pipeline import connect

VERSION = 18


@pytest.fixture
def elsewhere() -> Iterator[EmbeddedServer]:
    """Another cluster, whose transaction ids have not got far."""
    folder = Path(tempfile.mkdtemp(prefix="saf-test-"))
    server = EmbeddedServer(folder / "pg", VERSION, {"fsync": False})
    server.start()
    yield server
    server.stop_immediately()
    shutil.rmtree(folder, ignore_errors=True)


def restore(app: Dsn, server: EmbeddedServer, name: str = "app") -> Dsn:
    """A dump of a database, restored into another cluster."""
    copy = server.create_database(name)
    dump = subprocess.run(
        [programs(VERSION) / "pg_dump", "--no-owner", app.conninfo], capture_output=True, check=True
    )
    subprocess.run(
        [programs(VERSION) / "psql", "-qX", "-v", "ON_ERROR_STOP=1", copy.conninfo],
        input=dump.stdout, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return copy


def burn_transaction_ids(dsn: Dsn, count: int = 2000) -> None:
    """Get far ahead of a new cluster."""
    with connect(dsn) as connection:
        connection.execute(
            f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; "
            "END LOOP; END $$"
        )


def repair(app: Dsn, mom: Dsn) -> object:
    with connect(app) as connection, connect(mom) as store:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        return rebase(connection, {"mom": known_at(store, source)})
