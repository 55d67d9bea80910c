"""Ways to move a database, each with PostgreSQL's own tools, on real clusters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from saf import Restored
from saf.broker.embedded import DEFAULT_VERSION, EmbeddedServer, programs
from saf.database import Dsn, fetch
from saf.destinations.postgresql import known_at
from saf.errors import UsageError
from saf.operating.repair.rebase import rebase
from tests.needed import absent, needed
from tests.pages import blocks, page
from tests.pipeline import bodies, connect, let_time_pass, run
from tests.programs import activated
from tests.programs import run as run_program
from tests.server_clock import ClockedServer

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
def cluster_with_clock() -> Iterator[EmbeddedServer]:
    """A cluster with a clock that `set_clock` sets while the server runs."""
    needed("gcc", "gcc")
    with cluster(of=ClockedServer) as server:
        yield server


def set_clock(server: EmbeddedServer, seconds: int) -> None:
    """Move a server's clock."""
    assert isinstance(server, ClockedServer)
    server.set_clock(seconds)
    with connect(server.dsn("postgres")) as connection:
        ((now,),) = fetch(connection, "SELECT extract(epoch FROM clock_timestamp())::float")
    assert abs(now - time.time() - seconds) < PATIENCE_SECONDS


@contextmanager
def cluster_of_epoch_1() -> Iterator[EmbeddedServer]:
    """A cluster whose transaction ids have wrapped around once."""
    with cluster() as server:
        reset_wal(server, "-e", "1")
        yield server


@contextmanager
def cluster(
    version: int = 18, folder: Path | None = None, of: type[EmbeddedServer] = EmbeddedServer
) -> Iterator[EmbeddedServer]:
    """A separate cluster with low transaction ids."""
    try:
        programs(version)
    except UsageError as missing:
        absent(f"PostgreSQL {version} ({missing})", f"apt install postgresql-{version}")
    parent = Path(tempfile.mkdtemp(prefix="saf-test-"))
    data = parent / "d"
    if folder is not None:
        parent.chmod(0o711)
        shutil.move(str(folder), data)
        for socket in data.glob(".s.PGSQL.*"):
            socket.unlink()
    server = of(data, version, SETTINGS)
    server.start()
    try:
        yield server
    finally:
        server.stop_immediately()
        shutil.rmtree(parent, ignore_errors=True)


def tool(server: EmbeddedServer, program: str, *arguments: str, given: bytes = b"") -> bytes:
    """Run a program of PostgreSQL as the server's user; return its output."""
    done = attempt(server, program, *arguments, given=given)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout


def attempt(
    server: EmbeddedServer, program: str, *arguments: str, given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Like `tool`, without a check of the exit code."""
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        owner = server.data_dir.stat()
        user = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    return subprocess.run(
        [str(programs(server.version) / program), *arguments],
        input=given, capture_output=True, cwd=server.data_dir, check=False, **user,
    )  # fmt: skip


def recipe(kind: str, old: Dsn, new: Dsn, name: str = "moving", lines: slice = slice(None)) -> Dsn:
    """Run a recipe of docs/moving.md, or some lines of a recipe; return the new database.

    ``name``: the name for files, publications and slots.
    """
    (script,) = blocks(page("moving.md"), kind)
    script = re.sub(r"\bmoving\b", name, "".join(script.splitlines(keepends=True)[lines]))
    path = f"{programs(DEFAULT_VERSION)}:{activated()}"
    with tempfile.TemporaryDirectory() as folder:
        done = run_program(
            ["bash", "-euxo", "pipefail", "-c", script],
            env={"PATH": path, "OLD_DSN": old.conninfo, "NEW_DSN": new.conninfo},
            cwd=Path(folder),
        )
    assert done.returncode == 0, done.stderr
    return new


# --- messages


def send_numbers(
    app: Dsn, *numbers: int, savepoint: bool = False, service: str = "billing"
) -> None:
    """Send each number in a separate transaction, with its remainder as key."""
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
    """Return the numbers that have arrived, sorted."""
    return sorted(map(int, bodies(mom)))


def in_order(mom: Dsn) -> bool:
    """Tell whether the numbers of each key have arrived in the order of sending."""
    found = [int(body) for body in bodies(mom)]
    of_keys = [[one for one in found if one % KEYS == key] for key in range(KEYS)]
    return all(mine == sorted(mine) for mine in of_keys)


def burn(server: EmbeddedServer | Dsn, count: int = 700) -> None:
    """Use up transaction ids of a cluster."""
    dsn = server.dsn("postgres") if isinstance(server, EmbeddedServer) else server
    with connect(dsn) as connection:
        connection.execute(
            f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; "
            "END LOOP; END $$"
        )


def burn_beyond(server: EmbeddedServer, other: EmbeddedServer, by: int) -> None:
    """Use up transaction ids until a cluster is ahead of another by ``by`` or more."""
    burn(server, max(0, next_transaction(other) + by - next_transaction(server)))


def next_transaction(server: EmbeddedServer) -> int:
    """Return the next transaction id of a cluster."""
    with connect(server.dsn("postgres")) as connection:
        query = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        return int(fetch(connection, query)[0][0])


def repair(app: Dsn, mom: Dsn, **options: Any) -> Any:
    """Repair a source with one store, as `saf rebase` does."""
    with connect(app) as connection, connect(mom) as store:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        return rebase(connection, {"mom": known_at(store, source)}, **options)


def wait_until(check: Callable[[], bool], what: str) -> None:
    """Wait until a check succeeds."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not check():
        assert time.monotonic() < until, f"in vain: {what}"
        time.sleep(0.05)


def template_copy(server: EmbeddedServer, broker: Dsn, name: str) -> Dsn:
    """Copy a database by CREATE DATABASE … TEMPLATE."""
    with connect(server.dsn("postgres")) as connection:
        sessions = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %(name)s"
        fetch(connection, sessions, {"name": broker.database})
        query = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
        connection.execute(query.format(sql.Identifier(name), sql.Identifier(broker.database)))
    return server.dsn(name)


def drop_database(server: EmbeddedServer, name: str) -> None:
    """Drop a database, even with sessions in it."""
    with connect(server.dsn("postgres")) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


# --- dumps


def dump(old: EmbeddedServer, broker: Dsn, *options: str) -> bytes:
    """Return a dump, in the custom format unless options name another."""
    return tool(old, "pg_dump", "-Fc", "--no-owner", *options, broker.conninfo)


def restored(new: EmbeddedServer, dumped: bytes, name: str, *options: str) -> Dsn:
    """Restore a dump into an empty database."""
    copy = new.create_database(name)
    tool(new, "pg_restore", "--no-owner", *options, "-d", copy.conninfo, given=dumped)
    return copy


# --- logical replication


CONTENT = " UNION ALL ".join(
    f"(SELECT md5(string_agg(t::text, ' ' ORDER BY t::text)) FROM saf.{table} AS t)"
    for table in ("outbox", "inbox", "cursor", "acknowledged", "watermark", "parked", "dead_letter")
)


SYNCED = "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel"


@dataclass(frozen=True)
class Subscription:
    """A database that follows another by logical replication."""

    old: Dsn
    new: Dsn
    name: str

    def catch_up(self) -> None:
        """Wait until every commit is applied."""
        with connect(self.old) as here, connect(self.new) as there:
            wait_until(lambda: fetch(here, CONTENT) == fetch(there, CONTENT), "the stream")

    def cut(self, *, sequences: bool = True) -> None:
        """Cut over: wait until every message has arrived, then end the subscription."""
        self.catch_up()
        recipe("cut", self.old, self.new, self.name, lines=slice(None if sequences else -1, None))


def synced(old: Dsn, new: Dsn, name: str) -> Subscription:
    """A subscription whose initial copy is done."""
    with connect(new) as there:
        wait_until(lambda: fetch(there, SYNCED) == [(True,)], "the initial copy")
    return Subscription(old, new, name)


def follow(old: Dsn, new: Dsn, name: str) -> Subscription:
    """Let an empty database follow a broker, with its schema and rows."""
    recipe("follow", old, new, name)
    return synced(old, new, name)


# --- copies of the storage


Copying = Callable[
    [EmbeddedServer, Mapping[str, Dsn]], AbstractContextManager[dict[str, Subscription]]
]


@contextmanager
def storage_copy(old: EmbeddedServer, *options: str) -> Iterator[EmbeddedServer]:
    """A running copy of a whole cluster; a standby with ``-R``."""
    parent = Path(tempfile.mkdtemp(prefix="saf-test-"))
    shutil.chown(parent, old.data_dir.stat().st_uid, old.data_dir.stat().st_gid)
    try:
        folder = parent / "d"
        host = str(old.dsn("postgres").parts["host"])
        tool(
            old, "pg_basebackup", "-h", host, "-p", "5432", "-U", "postgres", "-D", str(folder),
            "-c", "fast", "-X", "stream", "--no-sync", *options,
        )  # fmt: skip
        with cluster(old.version, folder) as copy:
            yield copy
    finally:
        shutil.rmtree(parent, ignore_errors=True)


@contextmanager
def followed_copy(
    old: EmbeddedServer, brokers: Mapping[str, Dsn]
) -> Iterator[dict[str, Subscription]]:
    """A copy of a cluster whose brokers follow their originals, by name."""
    for name, broker in brokers.items():
        recipe("slot", broker, broker, name)
    with storage_copy(old) as copy:
        followers = {}
        for name, broker in brokers.items():
            new = copy.dsn(broker.database)
            recipe("catch-up", broker, new, name)
            followers[name] = synced(broker, new, name)
        yield followers


def catch_up(primary: EmbeddedServer, standby: EmbeddedServer) -> None:
    """Wait until a standby has replayed every commit."""
    with connect(primary.dsn("postgres")) as here, connect(standby.dsn("postgres")) as there:
        fetch(here, "SELECT pg_switch_wal()")
        ((now,),) = fetch(here, "SELECT pg_current_wal_lsn()")
        replayed = "SELECT pg_last_wal_replay_lsn() >= %(now)s::pg_lsn"
        wait_until(lambda: fetch(there, replayed, {"now": now}) == [(True,)], "the standby")


def cut_off(standby: EmbeddedServer) -> None:
    """Disconnect a standby from its primary, so that it lags."""
    with connect(standby.dsn("postgres")) as there:
        there.execute("ALTER SYSTEM SET primary_conninfo = ''")
        there.execute("SELECT pg_reload_conf()")
        receiving = "SELECT FROM pg_stat_wal_receiver"
        wait_until(lambda: not fetch(there, receiving), "the end of the stream")


def promote(standby: EmbeddedServer) -> None:
    """Promote a standby."""
    with connect(standby.dsn("postgres")) as there:
        assert fetch(there, "SELECT pg_promote()") == [(True,)]


@contextmanager
def created_subscriber(
    old: EmbeddedServer, brokers: Mapping[str, Dsn]
) -> Iterator[dict[str, Subscription]]:
    """Turn a standby into a subscriber, with a subscription for each broker."""
    with storage_copy(old, "-R") as standby:
        catch_up(old, standby)
        standby.stop()
        named = [
            option
            for name, broker in brokers.items()
            for option in (
                f"--database={broker.database}", f"--publication={name}",
                f"--subscription={name}", f"--replication-slot={name}",
            )
        ]  # fmt: skip
        tool(
            standby, "pg_createsubscriber", "-D", str(standby.data_dir), "-U", "postgres",
            "-s", str(standby.data_dir), "-P", old.dsn("postgres").conninfo, *named,
        )  # fmt: skip
        standby.start()
        yield {
            name: Subscription(broker, standby.dsn(broker.database), name)
            for name, broker in brokers.items()
        }


COLUMN_OPTIONS = "SELECT DISTINCT split_part(o, '=', 1) FROM pg_attribute, unnest(attoptions) AS o"


@contextmanager
def upgraded(old: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Upgrade a cluster of an older version by pg_upgrade."""
    with cluster() as new:
        _need_new_enough(old, new)
        old.stop()
        new.stop()
        tool(new, "pg_checksums", "--disable", "-D", str(new.data_dir))  # older ones have none
        tool(
            new, "pg_upgrade", "-b", str(programs(old.version)), "-B", str(programs(new.version)),
            "-d", str(old.data_dir), "-D", str(new.data_dir), "-s", str(new.data_dir),
            "-U", "postgres", "--no-sync",
        )  # fmt: skip
        new.start()
        yield new


def _need_new_enough(old: EmbeddedServer, new: EmbeddedServer) -> None:
    """Need the new version's release to know the column options of the old one's.

    Minor releases add such options, and pg_upgrade fails if only the old cluster's release has one.
    """
    with connect(old.dsn("postgres")) as here, connect(new.dsn("postgres")) as there:
        there.execute("CREATE TEMP TABLE known (a int)")
        for (option,) in fetch(here, COLUMN_OPTIONS):
            try:
                there.execute(f"ALTER TABLE known ALTER a SET ({option} = 1)".encode())
            except psycopg.errors.InvalidParameterValue:
                absent(
                    f"PostgreSQL {new.version} as new as this PostgreSQL {old.version}",
                    f"install a newer release of {new.version}, or an older one of {old.version}",
                )


def reset_wal(server: EmbeddedServer, *options: str) -> None:
    """Stop a server, reset its WAL and perhaps its counters, and start it."""
    server.stop()
    tool(server, "pg_resetwal", *options, "-D", str(server.data_dir))
    server.start()


# --- tables rewritten in place

TABLES = """
SELECT c.oid::regclass::text, max(i.indexrelid::regclass::text),
       (SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '')
FROM pg_class c LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indpred IS NULL
WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind = 'r'
GROUP BY c.oid ORDER BY c.oid::regclass = 'saf.cursor'::regclass DESC, 1
"""


def clustered(broker: Dsn) -> None:
    """CLUSTER each table that has an index."""
    with connect(broker) as connection:
        for table, index, _ in fetch(connection, TABLES):
            if index is not None:
                connection.execute(f"CLUSTER {table} USING {index.removeprefix('saf.')}".encode())


def repacked(broker: Dsn) -> None:
    """Rewrite the rows of each table in a separate transaction, as pg_repack does."""
    with connect(broker) as connection:
        connection.execute("SET session_replication_role = replica")
        for table, _, columns in fetch(connection, TABLES):
            with connection.transaction():
                connection.execute(
                    f"CREATE TEMP TABLE new ON COMMIT DROP AS TABLE {table}".encode()
                )
                connection.execute(f"DELETE FROM {table}".encode())
                connection.execute(
                    f"INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE "
                    f"SELECT {columns} FROM new".encode()
                )


def truncated(broker: Dsn) -> None:
    """Truncate every table, as a test cleaner does."""
    with connect(broker) as connection:
        tables = ", ".join(table for table, _, _ in fetch(connection, TABLES))
        connection.execute(f"TRUNCATE {tables}".encode())


def delivers_all(moved: Dsn, mom: Dsn, last: int, refuses: bool = True, **options: object) -> None:
    """Check that a move is refused, and that after the repair every number arrives once."""
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
