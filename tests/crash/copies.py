"""Copies of a server's data, and setting a server back to one.

A copy is what a snapshot of the disk would be: the server crashes, its data directory is copied
with its tablespaces, and it starts again. When the server is set back, what it was is kept aside,
so that one can still ask what it knew. A dump in another cluster has the same content, but
transaction ids of its own; that cluster then takes the server's place.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from saf.broker.embedded import DEFAULT_VERSION, EmbeddedServer, programs
from saf.database import Dsn

SPACES = "pg_tblspc"


class Copies:
    """Those of one server, in a folder of their own.

    Args:
        server: may be stopped and started.
        folder: does not exist yet.
        prepare: makes a new cluster what the server's clusters have in common.
    """

    def __init__(
        self, server: EmbeddedServer, folder: Path, prepare: Callable[[EmbeddedServer], None]
    ) -> None:
        self.server, self.folder, self._prepare = server, folder, prepare
        self.newest: Path | None = None
        self._number = itertools.count(1)
        folder.mkdir()
        folder.chmod(0o755)

    def clear(self) -> None:
        """Forget them."""
        self.newest = None
        for folder in self.folder.iterdir():
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()

    def take(self) -> None:
        """Copy the server as it is."""
        self.newest = self._new("copy")
        self.server.stop_immediately()
        _copy(self.server.data_dir, self.newest)
        self.server.start()

    def set_back(self) -> Path:
        """The server is what it was at its newest copy; return where its data of now is kept."""
        assert self.newest is not None
        copy = self._new("going-back")
        _copy(self.newest, copy)
        return self._put(copy)

    def restore(self, name: str) -> Path:
        """Dump one database of the newest copy; a new cluster with it takes the server's place."""
        assert self.newest is not None
        cluster = EmbeddedServer(self._new("cluster"), settings=self.server.settings)
        with self.running(self.newest) as copy, cluster:
            self._prepare(cluster)
            _load(cluster.create_database(name), _dump(copy.dsn(name)))
        return self._put(cluster.data_dir)

    @contextmanager
    def standby(self) -> Iterator[None]:
        """Have a standby while a block runs; then the server crashes, and it is the newest copy."""
        data, owner = self._new("standby"), self.server.data_dir.stat()
        spaces = {
            space: data.with_name(f"{data.name}-space-{name}")
            for name, space in _spaces(self.server.data_dir).items()
        }
        for folder in (data, *spaces.values()):
            folder.mkdir(mode=0o700)
            os.chown(folder, owner.st_uid, owner.st_gid)
        dsn = self.server.dsn("postgres").conninfo
        program = str(programs(DEFAULT_VERSION) / "pg_basebackup")
        mapped = [f"-T{space}={copy}" for space, copy in spaces.items()]
        options = ["-R", "-c", "fast", "--no-sync", *mapped]
        command = [program, *options, "-d", dsn, "-D", str(data)]
        as_owner: dict[str, Any] = {}
        if os.geteuid() == 0:
            as_owner = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        subprocess.run(command, check=True, cwd=data, capture_output=True, **as_owner)
        for file in data.glob(".s.PGSQL.*"):  # its server's socket is in its folder
            file.unlink()
        with EmbeddedServer(data, settings=self.server.settings) as standby:
            yield
            self.server.stop_immediately()
            with psycopg.connect(standby.dsn("postgres").conninfo, autocommit=True) as connection:
                connection.execute("SELECT pg_promote()")
        self.newest = data

    @contextmanager
    def running(self, data: Path) -> Iterator[EmbeddedServer]:
        """A server on a copy, to ask it."""
        server = EmbeddedServer(data, settings=self.server.settings)
        with server:
            yield server

    def _new(self, what: str) -> Path:
        return self.folder / f"{what}-{next(self._number)}"

    def _put(self, data: Path) -> Path:
        was = self._new("was")
        self.server.stop_immediately()
        spaces = _spaces(self.server.data_dir)
        _copy(self.server.data_dir, was)
        shutil.rmtree(self.server.data_dir)
        for space in spaces.values():
            _empty(space)
        data.rename(self.server.data_dir)
        # a server has one at most, which another cluster has by another number
        for (name, there), space in zip(
            _spaces(self.server.data_dir).items(), spaces.values(), strict=True
        ):
            _fill(space, there)
            _link(self.server.data_dir, name, space)
        self.server.start()
        return was


def _spaces(data: Path) -> dict[str, Path]:
    """The tablespaces of a data directory."""
    return {link.name: link.resolve() for link in (data / SPACES).iterdir()}


def _copy(data: Path, to: Path) -> None:
    subprocess.run(["cp", "-a", data, to], check=True)
    for name, space in _spaces(data).items():
        own = to.with_name(f"{to.name}-space-{name}")
        subprocess.run(["cp", "-a", space, own], check=True)
        _link(to, name, own)


def _link(data: Path, name: str, space: Path) -> None:
    link = data / SPACES / name
    link.unlink()
    link.symlink_to(space)


def _empty(space: Path) -> None:
    for folder in space.iterdir():
        shutil.rmtree(folder)


def _fill(space: Path, of: Path) -> None:
    for folder in of.iterdir():
        subprocess.run(["cp", "-a", folder, space], check=True)


def _dump(dsn: Dsn) -> bytes:
    pg_dump = str(programs(DEFAULT_VERSION) / "pg_dump")
    command = [pg_dump, "--no-owner", dsn.conninfo]
    return subprocess.run(command, capture_output=True, check=True).stdout


def _load(dsn: Dsn, dump: bytes) -> None:
    psql = str(programs(DEFAULT_VERSION) / "psql")
    command = [psql, "-qX", "-v", "ON_ERROR_STOP=1", dsn.conninfo]
    subprocess.run(command, input=dump, stdout=subprocess.DEVNULL, check=True)
