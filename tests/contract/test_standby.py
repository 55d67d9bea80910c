"""A dsn with several hosts, one of them a standby that is behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg.conninfo import make_conninfo

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.database import Dsn, fetch
from saf.engine.source import reading
from saf.testing.databases import QUICK
from tests.pipeline import bodies, connect, forward, send


@contextmanager
def standby_of(primary: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server that has what a stopped one has, and takes no writes; both run within."""
    primary.stop()
    folder = primary.data_dir.with_name("standby")
    subprocess.run(["cp", "-a", primary.data_dir, folder], check=True)
    standby = EmbeddedServer(folder, settings=QUICK)
    (folder / "standby.signal").touch()
    primary.start()
    standby.start()
    try:
        yield standby
    finally:
        standby.stop_immediately()


def test_of_several_hosts_only_a_primary_is_read_and_written(
    own_server: EmbeddedServer, mom: Dsn
) -> None:
    primary = own_server.create_database("app")
    migrate(primary)
    with connect(primary) as connection:
        send(connection, "old", key="k")
    with standby_of(own_server) as standby:
        hosts = [str(one.dsn("app").parts["host"]) for one in (standby, own_server)]
        parts = primary.parts | {"host": ",".join(hosts), "port": "5432,5432"}
        both = Dsn(make_conninfo("", **parts))
        with connect(primary) as connection:
            send(connection, "new", key="k")
        with reading("broker 'app'", both) as cursor:
            cursor.execute("SELECT pg_is_in_recovery()")
            assert cursor.fetchall() == [(False,)]
        forward(both, mom=mom)
        assert bodies(mom) == ["old", "new"]
        with both.connect(role="metrics") as connection:  # it looks at whatever there is
            assert fetch(connection, "SELECT pg_is_in_recovery()") == [(True,)]


@pytest.mark.parametrize("attributes", ["any", "read-write"])
def test_what_a_dsn_says_of_its_hosts_does_not_lead_to_a_standby(attributes: str) -> None:
    dsn = Dsn(f"host=a,b dbname=app target_session_attrs={attributes}")
    expected = {"any": "primary", "read-write": "read-write"}[attributes]
    assert f"target_session_attrs={expected}" in dsn.for_role("read")
    assert f"target_session_attrs={attributes}" in dsn.for_role("receive")
