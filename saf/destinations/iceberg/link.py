"""A table in pyiceberg: its catalog, its identity and marks, and its files on this machine.

Besides its rows, saf's table has:

    saf.destination     a property: the destination's identity, which stays if the table is moved
    saf.marks.…         properties: the marks; see `saf.destinations.iceberg.marks`

`Link` reads them, and creates the catalog's own tables if they do not exist. It does not create the
table (`saf.destinations.iceberg.table`). Calls to the catalog and to an object store wait within
saf's bounds. `Link.errors` translates errors, and keeps secrets out of their texts.

pyiceberg reads and writes files on this machine through `LocalFiles`. A file is durable when its
stream is closed: its content and its name. So everything that a commit refers to is durable before
the commit. Folders are created only inside a table's own folder: if a disk is no longer mounted,
nothing is written.

This module does not use Arrow, because a forwarder's driver asks for the identity, and reads a
table's metadata.

Commits meet in the catalog. So a table only needs the store to keep files: `Link.probe` writes a
file beside a table's own, reads it, and deletes it. On this machine, or if only a REST catalog
knows the address, nothing is probed. `Link.guarantee` returns the promise, and findings about the
table's state and the parts that saf does not test; it writes nothing. A loss always takes the marks
back with the messages. The loss is noticed at the next contact, and `saf rebase` sends the lost
messages again.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

from psycopg.conninfo import make_conninfo
from pydantic import ValidationError
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import IcebergNamespaceProperties, IcebergTables, SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    ForbiddenError,
    NoSuchTableError,
    OAuthError,
    RESTError,
    UnauthorizedError,
    ValidationException,
)
from pyiceberg.io import (
    S3_CONNECT_TIMEOUT,
    S3_REQUEST_TIMEOUT,
    FileIO,
    InputFile,
    InputStream,
    OutputFile,
    OutputStream,
    load_file_io,
)
from sqlalchemy import URL, inspect, make_url
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from saf.database import pinned
from saf.database.sqlstates import to_mend
from saf.destinations.iceberg.marks import MarksDamaged, MarksExpired, state_of
from saf.destinations.lake import DESTINATION, State, compactable, said, untested
from saf.destinations.marks import Known
from saf.destinations.settings import Guarantee, unusable
from saf.errors import Refused, Unavailable
from saf.log import disk
from saf.log.disk import unavailable_if_lost

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from saf.destinations.iceberg import Iceberg

NAME = f"{__name__}.LocalFiles"
"""Name by which pyiceberg finds `LocalFiles`."""
FILE = re.compile(r"^file:(//(localhost)?(?=/))?")
DENIED = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")
"""Words in pyarrow's error texts for an object store's refused login; it has no error codes."""
ATTEMPTS, PAUSE_SECONDS = 5, 0.1
"""Attempts to create the catalog's tables, and the pause for another process that creates them."""
PROBE = "_saf_probe"
"""Beginning of the name of a probe's file."""
CONTENT = b"a probe by saf destination check"
MANY_SNAPSHOTS = 1_000
"""Above this number, each commit is slow, because it writes all snapshots."""


class Link:
    """One table and its catalog. The user must close it."""

    def __init__(self, name: str, settings: Iceberg) -> None:
        self.name = name
        self.what = f"destination {name!r}"
        self.settings = settings
        self._catalog: Catalog | None = None

    @property
    def table(self) -> tuple[str, ...]:
        """Parts of the table's name."""
        return tuple(self.settings.table.split("."))

    def load(self) -> Table | None:
        """Load the newest version of the table; None if it does not exist yet. Write nothing.

        Raises:
            Unavailable: the catalog does not answer, or files are missing.
        """
        with self.errors():
            if self.settings.folder:
                next(self.settings.folder.iterdir(), None)  # raises if the folder is missing
            catalog = self._there()
            try:
                return catalog.load_table(self.table) if catalog else None
            except NoSuchTableError:
                return None

    def catalog(self) -> Catalog:
        """Return the catalog; create its tables if they do not exist."""
        attempts = ATTEMPTS
        while (catalog := self._there()) is None:
            attempts -= 1
            try:
                self._catalog = self._open(make=True)
            except DatabaseError:  # another task may be creating them
                if not attempts:
                    raise
                time.sleep(PAUSE_SECONDS)
        return catalog

    def close(self) -> None:
        """Close the connection."""
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    def identity(self) -> UUID:
        """Return the identity of the table, or its future one; write nothing.

        A future identity is computed from the address. So a table that is gone is not taken for a
        new one: it is the same one, without its acknowledged data.
        """
        return self.identity_of(self.load())

    def identity_of(self, table: Table | None) -> UUID:
        """Return the identity of a loaded table."""
        identity = table.properties.get(DESTINATION) if table else None
        return UUID(identity) if identity else self.first_identity()

    def first_identity(self) -> UUID:
        """Return the identity of a table that is created here."""
        settings = self.settings
        address = f"{settings.catalog_place}#{settings.catalog_name}.{settings.table}"
        return uuid5(NAMESPACE_URL, address)

    def known(self, source: UUID) -> Known:
        """Return how far the table has got with a source."""
        return self.known_of(self.load(), source)

    def known_of(self, table: Table | None, source: UUID) -> Known:
        """Return how far a loaded table has got with a source."""
        state = self.state(table, source) if table else State()
        return state.known(self.identity_of(table))

    def state(self, table: Table, source: UUID) -> State:
        """Return the knowledge of a source in a version of the table."""
        with self.errors():
            return state_of(source, table.metadata)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate the errors of pyiceberg, of databases and of the file system."""
        try:
            yield
        except MarksExpired as error:
            raise unusable(
                self.what,
                "its table was rolled back, and how far it had got by then has expired",
                f"set its branch main to snapshot {error.snapshot} again, or one after it; or "
                f"remove its property {error.name}, and saf rebase sends missing messages",
            ) from None
        except MarksDamaged as error:
            raise unusable(
                self.what,
                f"the property {error.name} of its table cannot be read",
                "restore its value; or remove it, and saf rebase sends missing messages",
            ) from None
        except (ForbiddenError, OAuthError, UnauthorizedError) as error:
            cure = "fix properties.token or properties.credential in saf.toml"
            raise Refused(self.what, self.said(error), cure) from None
        except SQLAlchemyError as error:
            raise self._of_database(error) from None
        except OSError as error:
            if error.errno is None:  # from an object store, or HTTP
                if any(word in str(error) for word in DENIED):
                    cure = "let its login list, read, write and delete below the table's address"
                    raise Refused(self.what, self.said(error), cure) from None
                raise Unavailable(self.what, self.said(error)) from None
            with unavailable_if_lost(self.what):
                raise
        except (CommitFailedException, RESTError, ValidationError, ValidationException) as error:
            raise Unavailable(self.what, self.said(error)) from None

    def said(self, error: Exception) -> str:
        """Return an error's text on one line, without secrets."""
        return self.settings.redact(str(error)) or type(error).__name__

    def _of_database(self, error: SQLAlchemyError) -> Unavailable:
        cause = getattr(error, "orig", None) or error
        # the client does not tell why a database denies access, so the database is asked again
        if self.settings.catalog.startswith("postgresql") and not getattr(cause, "sqlstate", None):
            cure = to_mend(make_conninfo(**self._libpq()), "the catalog in saf.toml")
            if cure:
                return Refused(self.what, self.said(cause), cure)
        return Unavailable(self.what, self.said(cause))

    def _there(self) -> Catalog | None:
        """Return the catalog; None if it has no tables of its own yet."""
        if self._catalog is None:
            file = self.settings.catalog_file
            if file and not file.exists():
                next(file.parent.iterdir(), None)  # raises if the folder is missing
                return None
            catalog = self._open(make=False)
            complete = not isinstance(catalog, SqlCatalog) or all(
                inspect(catalog.engine).has_table(model.__tablename__)
                for model in (IcebergTables, IcebergNamespaceProperties)
            )
            if not complete:
                catalog.close()
                return None
            self._catalog = catalog
        return self._catalog

    def properties(self) -> dict[str, str]:
        """Return properties for pyiceberg; it waits for an object store within saf's bounds."""
        settings, bounds = self.settings, self.settings.bounds
        properties = {
            S3_CONNECT_TIMEOUT: f"{bounds.network_seconds:g}",
            S3_REQUEST_TIMEOUT: f"{bounds.statement_seconds:g}",
            **said(settings.properties),
        }
        if settings.warehouse is not None:
            folder = settings.folder
            properties["warehouse"] = f"file://{folder}" if folder else settings.warehouse
        return properties

    def _open(self, *, make: bool) -> Catalog:
        settings, properties = self.settings, self.properties()
        if not settings.in_database:
            return _rest(settings, properties)
        if settings.folder:
            properties["py-io-impl"] = NAME
        return SqlCatalog(
            settings.catalog_name,
            **properties,
            uri=self._url().render_as_string(hide_password=False),
            init_catalog_tables=str(make),
            pool_pre_ping="true",
        )

    def _url(self) -> URL:
        settings = self.settings
        if file := settings.catalog_file:
            waits = {"timeout": f"{settings.bounds.lock_seconds:g}"}
            return URL.create("sqlite", database=str(file), query=waits)
        return make_url("postgresql+psycopg://").update_query_dict(self._libpq())

    def _libpq(self) -> dict[str, str]:
        """Return libpq's parameters; each commit is durable, and waits within saf's bounds."""
        settings, bounds = self.settings, self.settings.bounds
        limits = {
            "lock_timeout": bounds.lock_seconds,
            "statement_timeout": bounds.statement_seconds,
        }
        options = "".join(f" -c {name}={round(1000 * seconds)}" for name, seconds in limits.items())
        waits = {
            "connect_timeout": f"{max(2, round(bounds.network_seconds))}",
            "tcp_user_timeout": f"{round(1000 * bounds.network_seconds)}",
            "application_name": "saf deliver",
            "options": f"-c synchronous_commit=on{options}",
        }
        login = {}
        if settings.username is not None:
            login["user"] = settings.username
        if settings.password is not None:
            login["password"] = settings.password.get_secret_value()
        return waits | settings.catalog_parameters | login

    def probe(self) -> Iterator[tuple[str, str]]:
        """Yield each problem of the table's object store, with its cure.

        Raises:
            Refused: the login has no right to write there.
            Unavailable: the store does not answer, or returns other bytes than were written.
        """
        table = self.load()
        warehouse = self._place_of(table)
        if not warehouse or self.settings.folder:
            return
        address = f"{warehouse}/{PROBE}-{uuid4()}"
        with self.errors():
            io = table.io if table else load_file_io(self.properties(), address)
            with io.new_output(address).create() as file:
                file.write(CONTENT)
            with io.new_input(address).open() as stored:
                if stored.read() != CONTENT:
                    raise Unavailable(self.what, f"{address} returns other bytes than were written")
            try:
                io.delete(address)
            except OSError:
                yield (
                    f"its login may not delete: a probe stays at {address}",
                    "let its login delete files of the table, which expiring snapshots needs, too",
                )

    def guarantee(self) -> Guarantee:
        """Return the table's promise where it is now."""
        settings, table = self.settings, self.load()
        findings: list[tuple[str, str]] = []
        server = f"no Iceberg table yet, {settings.table}"
        if table is not None:
            snapshot = table.current_snapshot()
            summary = snapshot.summary if snapshot else None
            totals = summary.additional_properties if summary else {}
            files, size = (
                int(totals.get("total-data-files", 0)),
                int(totals.get("total-files-size", 0)),
            )
            kept = len(table.snapshots())
            server = f"Iceberg table of {files:,} files, {kept:,} snapshots, {settings.table}"
            cure = "rewrite_data_files of Spark, or what your engine has for it"
            findings += compactable(files, size, cure)
            if kept > MANY_SNAPSHOTS:
                findings.append(
                    (
                        f"its {kept:,} snapshots are rewritten by each commit",
                        "expire_snapshots of Spark or pyiceberg; saf's marks stay",
                    )
                )
        kept_by = "a crash of the process or of the machine loses nothing that was acknowledged"
        if not settings.folder:
            kept_by = "acknowledged messages are as safe as the object store"
            findings += untested(self._place_of(table))
        if not settings.in_database:
            findings.append(
                ("no product with a REST catalog is tested by saf", "your own test of yours")
            )
            catalog = "a REST catalog"
        else:
            catalog = f"a catalog in {'SQLite' if settings.catalog_file else 'PostgreSQL'}"
        return Guarantee(
            server=f"{server}, by {catalog}",
            promise=f"{settings.quality.replace('_', ' ')}; {kept_by}; a loss is detected, and "
            "saf rebase sends the lost messages again",
            more=tuple(findings),
        )

    def _place_of(self, table: Table | None) -> str:
        """Return where a table's files are, or will be; empty if only a REST catalog knows."""
        if table is not None:
            return table.location()
        warehouse = self.settings.warehouse or ""
        return warehouse if "://" in warehouse else ""


def _rest(settings: Iceberg, properties: dict[str, str]) -> Catalog:
    bounds = settings.bounds
    kind = pinned.rest_catalog(bounds.network_seconds, bounds.statement_seconds)
    catalog: Catalog = kind(settings.catalog_name, **properties, uri=settings.catalog)
    return catalog


class LocalFiles(FileIO):
    """Files of this machine."""

    def new_input(self, location: str) -> InputFile:
        """Return a file for reading."""
        return LocalFile(location)

    def new_output(self, location: str) -> OutputFile:
        """Return a file for writing."""
        return LocalFile(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Remove a file."""
        path_of(location if isinstance(location, str) else location.location).unlink()


class LocalFile(InputFile, OutputFile):
    """One file."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._path = path_of(location)

    def __len__(self) -> int:
        return self._path.stat().st_size

    def exists(self) -> bool:
        """Return True if the file exists."""
        return self._path.exists()

    def open(self, seekable: bool = True) -> InputStream:  # noqa: ARG002 - it always is
        """Open the file for reading."""
        return self._path.open("rb")

    def to_input_file(self) -> InputFile:
        """Return the file for reading."""
        return self

    def create(self, overwrite: bool = False) -> OutputStream:
        """Create the file and open it for writing.

        Raises:
            FileNotFoundError: the table's folder does not exist.
        """
        if overwrite:
            self._path.unlink(missing_ok=True)
        folder = self._path.parent
        if not folder.exists():
            folder.mkdir(exist_ok=True)  # fails without the table's folder
            disk.sync(folder.parent)
        return Synced(self._path)


class Synced(io.BufferedWriter):
    """A stream into a new file, which is durable once closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(io.FileIO(path, "xb"))

    def close(self) -> None:
        """Sync the file and its folder to the disk."""
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
            super().close()
            disk.sync(self._path.parent)


def path_of(location: str) -> Path:
    """Return the path of a file that a table refers to.

    >>> [str(path_of(one)) for one in ("file:///lake/a", "file:/lake/a", "/lake/a")]
    ['/lake/a', '/lake/a', '/lake/a']
    """
    return Path(FILE.sub("", location))
