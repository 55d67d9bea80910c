"""Ways to move a database, each with PostgreSQL's own tools, on real clusters."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from saf import Restored
from saf.broker.embedded import EmbeddedServer, programs
from saf.database import Dsn, fetch
from saf.destinations.postgresql.reading import known_at
from saf.repair.rebase import rebase
from tests.pipeline import bodies, connect, let_time_pass, run

SETTINGS = {
    "fsync": False,
    "full_page_writes": False,
    "shared_buffers": "32MB",
    "wal_level": "logical",
    "max_prepared_transactions": 20,
    "max_wal_senders": 40,
    "max_replication_slots": 40,
    "max_worker_processes": 40,
    "max_logical_replication_workers": 30,
    "max_sync_workers_per_subscription": 16,
    "wal_retrieve_retry_interval": "20ms",
    "wal_receiver_status_interval": "100ms",
}
KEYS = 6
PATIENCE_SECONDS = 30


@contextmanager
def cluster(version: int = 18, folder: Path | None = None) -> Iterator[EmbeddedServer]:
    """A cluster of its own, whose transaction ids have not got far."""
    parent = Path(tempfile.mkdtemp(prefix="saf-test-"))
    data = parent / "d"
    if folder is not None:
        parent.chmod(0o711)
        shutil.move(str(folder), data)
        for socket in data.glob(".s.PGSQL.*"):
            socket.unlink()
    server = EmbeddedServer(data, version, SETTINGS)
    server.start()
    try:
        yield server
    finally:
        server.stop_immediately()
        shutil.rmtree(parent, ignore_errors=True)


def tool(server: EmbeddedServer, program: str, *arguments: str, given: bytes = b"") -> bytes:
    """Run a program of PostgreSQL's, as the user that the server runs as; return its output."""
    done = attempt(server, program, *arguments, given=given)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def attempt(
    server: EmbeddedServer, program: str, *arguments: str, given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """The same, whatever its exit code."""
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        owner = server.data_dir.stat()
        user = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    return subprocess.run(
        [str(programs(server.version) / program), *arguments],
        input=given, capture_output=True, cwd="/", check=False, **user,
    )  # fmt: skip


# --- messages


def send_numbers(
    app: Dsn, *numbers: int, savepoint: bool = False, service: str = "billing"
) -> None:
    """Send each number in a transaction of its own; its key is its remainder."""
    with app.connect(role="test") as connection:
        for number in numbers:
            if savepoint:
                connection.execute("SELECT pg_current_xact_id(); SAVEPOINT one")
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) VALUES (%s, %s, %s)",
                (service, str(number % KEYS), str(number).encode()),
            )
            connection.commit()


def arrived(mom: Dsn) -> list[int]:
    """All numbers that have arrived, sorted."""
    return sorted(map(int, bodies(mom)))


def in_order(mom: Dsn) -> bool:
    """Whether the numbers of each key have arrived in the order in which they were sent."""
    found = [int(body) for body in bodies(mom)]
    of_keys = [[one for one in found if one % KEYS == key] for key in range(KEYS)]
    return all(mine == sorted(mine) for mine in of_keys)


def burn(server: EmbeddedServer | Dsn, count: int = 700) -> None:
    """Let other work use up transaction ids of a cluster."""
    dsn = server.dsn("postgres") if isinstance(server, EmbeddedServer) else server
    with connect(dsn) as connection:
        connection.execute(
            f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; "
            "END LOOP; END $$"
        )


def burn_beyond(server: EmbeddedServer, other: EmbeddedServer, by: int) -> None:
    """Let a cluster get as far ahead of another one as that, or farther."""
    burn(server, max(0, next_transaction(other) + by - next_transaction(server)))


def next_transaction(server: EmbeddedServer) -> int:
    """The transaction id that a cluster gives next."""
    with connect(server.dsn("postgres")) as connection:
        query = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        return int(fetch(connection, query)[0][0])


def repair(app: Dsn, mom: Dsn, **options: Any) -> Any:
    """What `saf rebase` does for a source with one store."""
    with connect(app) as connection, connect(mom) as store:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        return rebase(connection, {"mom": known_at(store, source)}, **options)


def wait_until(check: Callable[[], bool], what: str) -> None:
    """Wait until something is true."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not check():
        assert time.monotonic() < until, f"in vain: {what}"
        time.sleep(0.05)


# --- dumps


def dump(old: EmbeddedServer, broker: Dsn, *options: str) -> bytes:
    """A dump in the custom format, or as the options say."""
    return tool(old, "pg_dump", "-Fc", "--no-owner", *options, broker.conninfo)


def restored(new: EmbeddedServer, dumped: bytes, name: str, *options: str) -> Dsn:
    """A dump, restored into an empty database."""
    copy = new.create_database(name)
    tool(new, "pg_restore", "--no-owner", *options, "-d", copy.conninfo, given=dumped)
    return copy


# --- logical replication


CONTENT = " UNION ALL ".join(
    f"(SELECT md5(string_agg(t::text, ' ' ORDER BY t::text)) FROM saf.{table} AS t)"
    for table in ("outbox", "inbox", "cursor", "acknowledged", "watermark", "parked", "dead_letter")
)


class Subscription:
    """A database that follows another one by logical replication."""

    def __init__(self, old: Dsn, new: Dsn, name: str, *, copied: bool = False) -> None:
        self.old, self.new, self.name = old, new, name
        if not copied:
            publish(old, name)
        options = "(copy_data = false, create_slot = false)" if copied else ""
        with connect(new) as there:
            there.execute(
                sql.SQL("CREATE SUBSCRIPTION {0} CONNECTION {1} PUBLICATION {0} {2}").format(
                    sql.Identifier(name),
                    sql.Literal(old.conninfo),
                    sql.SQL(f"WITH {options}" if options else ""),
                )
            )
            if not copied:
                wait_until(lambda: self._synced(there), "the initial copy")

    @staticmethod
    def _synced(there: psycopg.Connection[Any]) -> bool:
        query = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'"
        return fetch(there, query) == [(0,)]

    def catch_up(self) -> None:
        """Wait until all that is committed is applied."""
        with connect(self.old) as here, connect(self.new) as there:
            wait_until(lambda: fetch(here, CONTENT) == fetch(there, CONTENT), "the stream")

    def cut(self) -> None:
        """The cut-over: what was sent by now has arrived, and nothing more comes."""
        self.catch_up()
        with connect(self.new) as there:
            there.execute(sql.SQL("DROP SUBSCRIPTION {}").format(sql.Identifier(self.name)))


def publish(old: Dsn, name: str) -> None:
    """Publish all that saf has."""
    with connect(old) as here:
        here.execute(
            sql.SQL("CREATE PUBLICATION {} FOR TABLES IN SCHEMA saf").format(sql.Identifier(name))
        )


def follow(old: EmbeddedServer, new: EmbeddedServer, broker: Dsn, name: str) -> Subscription:
    """A new database that follows a broker, with its schema and all that it holds."""
    follower = restored(new, dump(old, broker, "--schema-only"), name)
    return Subscription(broker, follower, name)


def set_sequences(old: Dsn, new: Dsn) -> None:
    """What logical replication does not do."""
    with connect(old) as here, connect(new) as there:
        for name, last in fetch(
            here, "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'saf'"
        ):
            if last is not None:
                fetch(
                    there,
                    "SELECT setval(%(name)s, %(last)s)",
                    {"name": f"saf.{name}", "last": last},
                )


# --- copies of the storage


@contextmanager
def storage_copy(old: EmbeddedServer, broker: Dsn, slot: str = "") -> Iterator[EmbeddedServer]:
    """A copy of a whole cluster, promoted; a slot keeps what comes after it."""
    if slot:
        publish(broker, slot)
        with connect(broker) as here:
            fetch(here, "SELECT pg_create_logical_replication_slot(%(s)s, 'pgoutput')", {"s": slot})
    parent = Path(tempfile.mkdtemp(prefix="saf-test-"))
    shutil.chown(parent, old.data_dir.stat().st_uid, old.data_dir.stat().st_gid)
    try:
        folder = parent / "d"
        host = str(broker.parts["host"])
        tool(
            old, "pg_basebackup", "-h", host, "-p", "5432", "-U", "postgres", "-D", str(folder),
            "-c", "fast", "-X", "stream", "--no-sync",
        )  # fmt: skip
        with cluster(old.version, folder) as copy:
            if slot:
                with connect(copy.dsn(broker.database)) as there:
                    there.execute(sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(slot)))
            yield copy
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def goes_on(moved: Dsn, mom: Dsn, last: int, refuses: bool = True, **options: object) -> None:
    """It is refused by name; after the repair, everything up to the last number arrives once."""
    if refuses:
        before = arrived(mom)
        with pytest.raises(Restored, match="saf rebase"):
            run(moved, mom=mom)
        assert arrived(mom) == before, "nothing was sent"
    repair(moved, mom, **options)
    run(moved, mom=mom)
    let_time_pass(moved)
    run(moved, mom=mom)
    assert arrived(mom) == list(range(last))
    assert in_order(mom)
