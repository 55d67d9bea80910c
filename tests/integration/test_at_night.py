"""docs/troubleshooting.md at night: each symptom is caused for real, and its section ends it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo
from psycopg.errors import AdminShutdown

from saf.broker.embedded import EmbeddedServer, programs
from saf.broker.grants import Kind, grant
from saf.broker.migrate import migrate
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf_demo.servers import free_port
from tests import symptoms
from tests.certificates import certificate
from tests.earlier import put_back
from tests.needed import absent, needed
from tests.next_package import next_package
from tests.pages import blocks, page, prepared, shell
from tests.pipeline import connect
from tests.programs import (
    BIN,
    INSTALLED,
    configuration,
    environment,
    run,
    saf,
    send,
)
from tests.restored import VERSION
from tests.ring import leave_slot
from tests.symptoms import AGAIN, OPERATOR, PAGE, arrived, forward, handle, purging
from tests.waits import BLOCKED, until

pytestmark = pytest.mark.full

KILLED = 128 + signal.SIGKILL
DISK = "40m"
MIB = 2**20


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Where saf.toml is."""
    return prepared(tmp_path, app, mom)


def section(name: str) -> tuple[list[str], str]:
    """Return the texts that a section's heading quotes, and the section's commands."""
    parts = re.split(r"^(?=##+ )", page(PAGE), flags=re.MULTILINE)
    (part,) = (part for part in parts if f"<!-- test: {name} -->\n" in part)
    heading, _, rest = part.partition("\n")
    (script,) = blocks(rest, name)
    return re.findall(r'"([^"]+)"', heading), script


def seen(name: str, printed: str) -> None:
    """Check that saf prints what the section's heading quotes."""
    quoted, _ = section(name)
    symptoms.seen(quoted, printed)


def follow(name: str, folder: Path, app: Dsn, mom: Dsn, *, path: str = "", **values: str) -> str:
    """Run a section's commands, with these values for its words in capitals."""
    _, script = section(name)
    return shell(symptoms.filled(script, values), folder, app, mom, path=path)


def test_each_section_is_followed() -> None:
    night = page(PAGE).partition("## At night\n")[2].partition("\n## ")[0]
    followed = re.findall(r'\bfollow\(\s*"([\w-]+)"', Path(__file__).read_text())
    assert sorted(followed) == sorted(re.findall(r"<!-- test: ([\w-]+) -->", night))
    assert len(re.findall("^### ", night, re.MULTILINE)) == len(followed) - len(["reload"])


def test_a_message_without_a_route(folder: Path, app: Dsn, mom: Dsn) -> None:
    file = folder / "saf.toml"
    file.write_text(re.sub(r"(?m)^default_destination.*\n", "", file.read_text()))
    sent = send(app, 3)
    forward(folder, 0)
    seen("no-route", saf("parked", "list", cwd=folder).stdout)
    assert arrived(mom) == []
    follow("no-route", folder, app, mom)
    assert arrived(mom) == sent


def test_a_service_that_is_misspelt(folder: Path, app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) VALUES ('biling', 'A-1', 'paid')"
        )
    forward(folder, 0)
    seen("service", saf("parked", "list", cwd=folder).stdout)
    assert arrived(mom) == []
    printed = follow("service", folder, app, mom)
    assert "A-1" in printed.rpartition("forwarded")[2], "the message can be read"
    assert arrived(mom) == ["paid"]


@pytest.fixture
def small_disk(own_server: EmbeddedServer) -> Iterator[Path]:
    """A file system of some megabytes, with the server's tablespace `small`."""
    disk = own_server.data_dir.with_name("disk")
    disk.mkdir()
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    mount = [*as_root, "mount", "-t", "tmpfs", "-o", f"size={DISK},mode=777", "tmpfs", str(disk)]
    if shutil.which(mount[0]) is None or subprocess.run(mount, check=False).returncode != 0:
        absent("the right to mount a small file system", "run as root")
    space = disk / "space"
    space.mkdir()
    owner = own_server.data_dir.stat()
    os.chown(space, owner.st_uid, owner.st_gid)
    with connect(own_server.dsn("postgres")) as connection:
        connection.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
    yield disk
    own_server.stop_immediately()
    subprocess.run([*as_root, "umount", disk], check=True)


def fill(disk: Path) -> Path:
    """Write a file that leaves not a byte; return its path."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def on_the_small_disk(server: EmbeddedServer, name: str) -> Dsn:
    """Create a broker in the tablespace `small`."""
    with connect(server.dsn("postgres")) as connection:
        connection.execute(f"CREATE DATABASE {name} TABLESPACE small")
    dsn = server.dsn(name)
    migrate(dsn)
    return dsn


def test_a_full_disk_of_the_store(
    own_server: EmbeddedServer, small_disk: Path, app: Dsn, tmp_path: Path
) -> None:
    mom = on_the_small_disk(own_server, "mom")
    folder = purging(prepared(tmp_path, app, mom))
    send(app, 4000, "m" * 2000)
    forward(folder, 0)
    handle(mom)
    with connect(mom) as connection:
        leave_slot(connection, "inbox")
    filler = fill(small_disk)
    sent = send(app, 2500, "n" * 2000)
    seen("disk", forward(folder, AGAIN))
    os.truncate(filler, filler.stat().st_size - 2 * MIB)
    follow("disk", folder, app, mom)
    assert sorted(arrived(mom)) == sorted(sent)


def test_a_store_that_is_down(own_server: EmbeddedServer, app: Dsn, tmp_path: Path) -> None:
    mom = own_server.create_database("mom")
    migrate(mom)
    folder = prepared(tmp_path, app, mom)
    sent = send(app, 3)
    own_server.stop()
    seen("unavailable", forward(folder, AGAIN))
    own_server.start()
    follow("unavailable", folder, app, mom)
    assert arrived(mom) == sent


def test_a_backup_that_was_restored_over_its_database(folder: Path, app: Dsn, mom: Dsn) -> None:
    tools = programs(VERSION)
    sent = send(app, 3, "before")
    dump = folder / "shop.dump"
    subprocess.run([tools / "pg_dump", "-Fc", "-f", dump, app.conninfo], check=True)
    forward(folder, 0)
    sent += send(app, 2, "after")
    restore: list[str | Path] = [tools / "pg_restore", "--no-owner", "-d", app.conninfo, dump]
    assert run(restore).returncode != 0, "the tables exist"
    seen("restored-over", forward(folder, OPERATOR))
    follow("restored-over", folder, app, mom)
    assert sorted(arrived(mom)) == sorted(sent)


def test_a_forwarder_that_is_killed_in_the_middle(folder: Path, app: Dsn, mom: Dsn) -> None:
    sent = send(app, 30)
    command = ["bash", "-c", f"{BIN / 'saf'} forward; exit $?"]
    with connect(mom) as watcher, mom.connect(role="test") as store:
        store.execute("LOCK TABLE saf.inbox IN SHARE MODE")
        terminal = subprocess.Popen(
            command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
        )
        until(lambda: fetch(watcher, BLOCKED) != [(0,)])
        children = Path(f"/proc/{terminal.pid}/task/{terminal.pid}/children").read_text()
        os.kill(int(children), signal.SIGKILL)
        _, printed = terminal.communicate()
        assert terminal.returncode == KILLED
        seen("killed", printed)
    assert arrived(mom) == []
    follow("killed", folder, app, mom)
    assert sorted(arrived(mom)) == sorted(sent)


def test_a_database_of_the_revision_before(folder: Path, app: Dsn, mom: Dsn) -> None:
    sent = send(app, 3)
    put_back(app)
    seen("older", forward(folder, OPERATOR))
    follow("older", folder, app, mom)
    assert arrived(mom) == sent


def test_a_package_of_the_revision_before(folder: Path, app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    sent = send(app, 3)
    newer = next_package(tmp_path / "next")
    program = tmp_path / "bin" / "saf"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(newer))} exec {sys.executable} -m saf "$@"\n'
    )
    program.chmod(0o755)
    for dsn in (app, mom):
        migrated = run([program, "migrate", "--dsn", dsn.conninfo], cwd=folder)
        assert migrated.returncode == 0, migrated.stderr
    seen("newer", forward(folder, OPERATOR))
    follow("newer", folder, app, mom, path=f"{program.parent}:{INSTALLED}")
    assert arrived(mom) == sent


def test_a_table_that_is_locked(folder: Path, app: Dsn, mom: Dsn) -> None:
    with (folder / "saf.toml").open("a") as file:
        file.write("[bounds]\nlock_seconds = 1\n")
    sent = send(app, 3)
    with closing(app.connect(role="report")) as connection:
        connection.execute("LOCK TABLE saf.cursor IN ACCESS EXCLUSIVE MODE")
        seen("locked", forward(folder, AGAIN))
        pid = connection.info.backend_pid
        named = f"pg_terminate_backend({pid})"
        until(lambda: named in saf("doctor", cwd=folder).stdout)
        follow("locked", folder, app, mom, PID=str(pid))
        with pytest.raises(AdminShutdown):
            connection.execute("SELECT 1")
    assert arrived(mom) == sent


def test_a_slot_of_the_ring_that_is_still_needed(folder: Path, app: Dsn, mom: Dsn) -> None:
    purging(folder)
    created = saf("subscription", "create", "audit", "--all-services", cwd=folder)
    assert created.returncode == 0, created.stderr
    send(app, 3)
    forward(folder, 0)
    handle(mom)
    with connect(mom) as store:
        leave_slot(store, "inbox")
    seen("needed", saf("purge", "--broker", "mom", cwd=folder).stdout)
    printed = follow("needed", folder, app, mom)
    assert "subscription 'audit'" in printed
    assert re.search(r"inbox +0 +purged +3", printed)


def issue(folder: Path, authority: Path, authority_key: Path, *, days: int) -> None:
    """Write a certificate for localhost to server.crt, and its key to server.key."""
    openssl = needed("openssl", "openssl")
    request, signed = folder / "server.csr", folder / "server.crt"
    key = folder / "server.key"
    commands: list[list[str | Path]] = [
        ["req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-out", request,
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key],
        ["x509", "-req", "-in", request, "-CA", authority, "-CAkey", authority_key, "-out", signed,
         "-CAcreateserial", "-copy_extensions", "copy", "-days", str(days)],
    ]  # fmt: skip
    for command in commands:
        subprocess.run([openssl, *command], check=True, capture_output=True)


@pytest.fixture
def install(own_server: EmbeddedServer, tmp_path: Path) -> Callable[[int], None]:
    """Gives the server a certificate that is valid for some days, which may be negative."""
    authority = certificate(tmp_path)
    owner = own_server.data_dir.stat()

    def install(days: int) -> None:
        issue(tmp_path, *authority, days=days)
        for name in ("server.crt", "server.key"):
            file = own_server.data_dir / name
            shutil.copy(tmp_path / name, file)
            os.chown(file, owner.st_uid, owner.st_gid)
            file.chmod(0o600)

    return install


# the embedded servers are built without TLS
@pytest.mark.parametrize("pg_version", [15], indirect=True, ids=["postgresql-15"])
def test_a_certificate_that_has_expired(
    own_server: EmbeddedServer,
    install: Callable[[int], None],
    new_broker: Callable[[str], Dsn],
    tmp_path: Path,
) -> None:
    app, store = new_broker("app"), own_server.create_database("mom")
    migrate(store)
    with connect(store) as connection:
        create_service(connection, "billing")
        port = free_port()
        for name, value in {
            "ssl": "on",
            "listen_addresses": "127.0.0.1",
            "port": str(port),
        }.items():
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
    hba = own_server.data_dir / "pg_hba.conf"
    hba.write_text("local all all trust\nhostssl all all all trust\n")
    install(-1)
    own_server.stop()
    own_server.start()
    tls = {"host": "localhost", "hostaddr": "127.0.0.1", "port": str(port)}
    trusted = {"sslmode": "verify-full", "sslrootcert": str(tmp_path / "certificate.pem")}
    mom = Dsn(make_conninfo(store.conninfo, **tls, **trusted))
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    sent = send(app, 3)
    seen("certificate", forward(tmp_path, AGAIN))
    dates = follow("certificate", tmp_path, app, mom, HOST="127.0.0.1", PORT=str(port))
    assert "notAfter=" in dates
    install(2)
    socket = store.parts["host"]
    follow("reload", tmp_path, app, mom, SOCKET=socket, PORT=str(port))
    assert arrived(mom) == sent


def test_a_password_that_was_changed(own_server: EmbeddedServer, app: Dsn, tmp_path: Path) -> None:
    store = own_server.create_database("mom")
    migrate(store)
    folder = prepared(tmp_path, app, store)
    file = folder / "saf.toml"
    file.write_text(file.read_text().replace(json.dumps(store.conninfo), '"${MOM_DSN}"'))
    hba = own_server.data_dir / "pg_hba.conf"
    hba.write_text(f"local all keeper scram-sha-256\n{hba.read_text()}")
    with connect(store) as connection:
        connection.execute("CREATE ROLE keeper LOGIN PASSWORD 'old'")
        grant(connection, "keeper", [Kind.FORWARDER])
        connection.execute("SELECT pg_reload_conf()")
    old, new = (
        Dsn(make_conninfo(store.conninfo, user="keeper", password=word)) for word in ("old", "new")
    )
    sent = send(app, 3)
    forward(folder, 0, MOM_DSN=old.conninfo)
    with connect(store) as connection:
        connection.execute("ALTER ROLE keeper PASSWORD 'new'")
    sent += send(app, 2, "later")
    seen("password", forward(folder, OPERATOR, MOM_DSN=old.conninfo))
    follow("password", folder, app, new)
    assert arrived(store) == sent
