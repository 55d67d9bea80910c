"""Connections to a database: a `Dsn` opens them, hides its password, and knows about poolers.

A `Dsn` is a string that libpq accepts (``postgresql://…`` or ``host=… dbname=…``), or such a URL in
SQLAlchemy's form (``postgresql+psycopg://…``). Its ``repr`` and ``str`` never show the password, so
it may appear in logs, plans and exceptions. Only `Dsn.conninfo`, and the texts made from it for the
drivers (`Dsn.parts`, `Dsn.for_role`), contain the password. `Dsn.redact` removes it from a driver's
errors.

Between a client and a server may be a pooler, such as PgBouncer. A pooler in transaction mode gives
each transaction any of the server's sessions. So a client must leave nothing behind in a session:
no setting, no lock, no LISTEN, and no prepared statement with a name, which the next client would
run in place of its own. A pooler in session mode keeps a client's session, but a client cannot tell
which mode a pooler is in. So a pooler is detected (`is_pooled`), then tolerated or refused:

- Sending and receiving leave nothing behind, and prepare nothing if there is a pooler
  (`unprepared`).
- Everything else needs its own session and refuses any pooler: a forwarder, processors, a listener,
  and the commands, whose `saf.database.bounds` are set for a session (`Dsn.connect`,
  `refuse_pooler`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import tuple_row

from saf.database.bounds import CONNECT_TIMEOUT_SECONDS, Bounds, answer_within, network, shut
from saf.database.queries import NoAnswer, fetch
from saf.database.sqlstates import Meaning, meaning, reason_of, to_mend
from saf.errors import ConfigurationError, Refused, Unavailable

if TYPE_CHECKING:
    import sqlalchemy as sa

if TYPE_CHECKING:
    Raw = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

T = TypeVar("T")

SECRETS = (
    "password",
    "sslpassword",
    "oauth_client_secret",
    "scram_client_key",
    "scram_server_key",
)
"""Connection parameters that must stay secret."""

PLACE = ("service", "host", "hostaddr", "port", "dbname")
"""Connection parameters that say where a database is."""

LONGEST_NAME = 63
"""Bytes of an application_name that PostgreSQL keeps."""

ANYWHERE = frozenset({"doctor", "metrics", "ui"})
"""Roles that may also read a standby; all other roles need the rows of a primary."""

ESCAPES = (
    "in a URL, a password's '@' is written %40, and ':', '/', '?', '#', '%' as %3A, %2F, %3F, %23, "
    "%25; or give host=… user=… password=…"
)
"""The cure for a dsn; the wrong part is not shown, because it may be part of the password."""

PORTS = re.compile(r"[0-9,]*")
DRIVER = re.compile(r"^\s*(postgres(?:ql)?)\+\w+://")
"""The beginning of a URL that names a driver of SQLAlchemy."""

WHO_ANSWERS = "SELECT pg_backend_pid()"


@dataclass(frozen=True)
class Dsn:
    """Where a database is, and how to log in there.

    Raises:
        ConfigurationError: libpq does not accept the text.
    """

    conninfo: str = field(repr=False)
    bounds: Bounds = Bounds()  # noqa: RUF009 - frozen
    """How long saf's own sessions wait there."""
    origin: str = field(default="the dsn given to this program", compare=False)
    """Where an operator can fix it, e.g. the dsn in saf.toml, or an environment variable."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "conninfo", without_driver(self.conninfo))
        if "\0" in self.conninfo:
            raise ConfigurationError("a dsn contains a NUL, after which libpq reads nothing")
        refuse_unescaped(self.conninfo)
        try:
            parts = conninfo_to_dict(self.conninfo)
        except (psycopg.ProgrammingError, ValueError):  # e.g. a password's % is not UTF-8
            # libpq's own message quotes the text, password and all
            raise ConfigurationError(
                "a dsn is not a PostgreSQL connection string; "
                "expected postgresql://user@host:5432/database or 'host=… dbname=…'"
            ) from None
        if "@" in str(parts.get("host") or "")[1:]:  # an abstract socket's name begins with one
            raise ConfigurationError(f"a dsn's host contains an '@': {ESCAPES}")
        if not PORTS.fullmatch(str(parts.get("port") or "")):
            raise ConfigurationError(f"a dsn's port is not a number: {ESCAPES}")
        name = str(parts.get("dbname") or "")
        if "://" in name and "@" in name:  # it may contain a password, and would be shown
            raise ConfigurationError("a dsn names a URL as its database: give the URL alone")
        if not any(parts.get(name) for name in ("dbname", "service")):
            raise ConfigurationError(f"a dsn names no database: {self}")

    @cached_property
    def parts(self) -> dict[str, Any]:
        """The connection parameters by name, with the password."""
        return dict(conninfo_to_dict(self.conninfo))

    @property
    def database(self) -> str:
        """The name of the database, for messages to operators."""
        return str(self.parts.get("dbname") or self.parts.get("service"))

    @property
    def place(self) -> tuple[str, ...]:
        """What identifies the database, without the login and its options.

        >>> Dsn("postgresql://app:x@db/shop").place
        ('', 'db', '', '5432', 'shop')
        """
        defaults = {} if self.parts.get("service") else {"port": "5432"}
        parts = {**defaults, **self.parts}
        return tuple(str(parts.get(name) or "") for name in PLACE)

    def __str__(self) -> str:
        try:
            public = {k: v for k, v in conninfo_to_dict(self.conninfo).items() if v is not None}
        except (psycopg.ProgrammingError, ValueError):  # e.g. a password's % is not UTF-8
            return "<invalid dsn>"
        for secret in (*SECRETS, "options"):
            public.pop(secret, None)
        return make_conninfo("", **public)

    def __repr__(self) -> str:
        return f"Dsn({str(self)!r})"

    def connect(
        self, *, role: str, autocommit: bool = False, subject: str = ""
    ) -> psycopg.Connection[Any]:
        """Open a psycopg connection, which pg_stat_activity shows as ``saf ROLE SUBJECT``.

        saf's own sessions have `saf.database.bounds`. A pooler would not keep these settings.

        Raises:
            Unavailable: the server does not answer.
            Refused: the server refuses this login until an operator repairs something.
            ConfigurationError: a pooler answers.
        """
        limits = self.bounds.of(role)
        try:
            if limits is None:
                connection = psycopg.connect(self.for_role(role, subject), autocommit=True)
                try:
                    # psycopg reads times in ISO style only; poolers keep this setting
                    style = connection.info.parameter_status("DateStyle")
                    if style and not style.startswith("ISO"):
                        connection.execute("SET datestyle = 'ISO'")
                    connection.autocommit = autocommit
                except BaseException:
                    connection.close()
                    raise
                return connection
            connection = _Bounded.connect(self.for_role(role, subject), autocommit=True)
            connection.answer_seconds = limits.answer
            setting = limits.setting(of_process=connection.info.backend_pid)
            try:
                direct = bool(fetch(connection, setting.encode()))
                connection.autocommit = autocommit
            except BaseException:
                connection.close()
                raise
        except psycopg.OperationalError as error:
            what, reason = f"database {self}", self.reason(error)
            is_hanging = meaning(error.sqlstate) is Meaning.HANGS
            answers = not (is_hanging or isinstance(error, psycopg.errors.ConnectionTimeout))
            if answers and (cure := to_mend(self.for_role(role), self.origin)):
                raise Refused(what, reason, cure) from None
            raise Unavailable(what, reason, hangs=is_hanging) from None
        if not direct:
            connection.close()
            raise pooled(f"database {self}")
        return connection

    def for_role(self, role: str, subject: str = "") -> str:
        """Return the full connection string for a driver; it contains the password."""
        defaults = {
            "application_name": application_name(role, subject),
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            **network(self.bounds.network_seconds),
        }
        # whatever the server, the role or the environment sets: texts are sent and received as
        # UTF-8
        parts = {**defaults, **self.parts, "client_encoding": "UTF8"}
        any_server = role in ANYWHERE or self.bounds.of(role) is None
        if not any_server and parts.get("target_session_attrs") != "read-write":
            # of several hosts, one may be a standby, where rows may silently be missing
            parts["target_session_attrs"] = "primary"
        return make_conninfo("", **parts)

    def engine(self, *, role: str = "engine", **options: Any) -> sa.Engine:
        """Return a SQLAlchemy engine for this database."""
        import sqlalchemy as sa  # not needed by applications that pass their own connection

        return sa.create_engine(
            "postgresql+psycopg://", creator=lambda: self.connect(role=role), **options
        )

    def reason(self, error: BaseException) -> str:
        """Return the message of an error at this database, without SQL and secrets."""
        return self.redact(reason_of(error))

    def redact(self, text: str) -> str:
        """Return ``text`` without this DSN's secrets, which a driver may have quoted.

        A driver may also quote the DSN as it was written, with unnecessary escapes.
        """
        text = text.replace(self.conninfo, str(self))
        for name in SECRETS:
            if secret := str(self.parts.get(name) or ""):
                _, _, escaped = make_conninfo("", **{name: secret}).partition("=")
                for form in (escaped, quote(secret, safe=""), secret):
                    text = text.replace(form, "***")
        return " ".join(text.split())


def application_name(role: str, subject: str = "") -> str:
    """Return the name of saf's own session as pg_stat_activity shows it: in ASCII, and cut.

    >>> application_name("mark"), application_name("receive", "billing")
    ('saf mark', 'saf receive billing')
    """
    name = f"saf {role} {subject}".rstrip().encode("ascii", "backslashreplace").decode()
    return name[:LONGEST_NAME]


Place: TypeAlias = tuple[str | None, int | str | None, str | None]
"""Host, port and name of a database."""


def grant_command(duty: str, user: str | None, place: Place) -> str:
    """Return the command by which the owner of a schema saf gives a role the rights of a duty.

    >>> grant_command("writer", "shop_app", ("db", 5432, "shop"))
    "saf grant --role writer shop_app --dsn 'host=db port=5432 dbname=shop'"
    """
    return owners_command("grant", "--role", duty, user or "ROLE", place=place)


def owners_command(*words: str, place: Place) -> str:
    """Return a command of saf, as typed in a shell, that the owner of a schema saf runs."""
    host, port, name = place
    dsn = make_conninfo("", host=host, port=port, dbname=name)
    return shlex.join(("saf", *words, "--dsn", dsn))


def place_of(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> Place:
    """Return the place of a connection's database."""
    info = connection.info
    return (info.host, info.port, info.dbname)


def without_driver(text: str) -> str:
    """Return a DSN as libpq takes it, without the name of SQLAlchemy's driver.

    >>> without_driver("postgresql+psycopg://me@db/app"), without_driver("dbname=app")
    ('postgresql://me@db/app', 'dbname=app')
    """
    return DRIVER.sub(r"\1://", text, count=1)


def refuse_unescaped(text: str) -> None:
    """Raise for a URL in which a password ends too soon, so that its rest looks like a name.

    libpq takes everything before the first '/' for the host, so the rest would be the database.

    Raises:
        ConfigurationError: the URL has such a password.
    """
    scheme, _, rest = text.strip().partition("://")
    path = rest.partition("?")[0].partition("/")[2]
    if scheme in ("postgresql", "postgres") and ("@" in path or "/" in path):
        raise ConfigurationError(f"a dsn has more than a database's name after a '/': {ESCAPES}")


class _Bounded(psycopg.Connection[Any]):
    """A connection that is cut when its server sends nothing for too long."""

    answer_seconds: float | None = None

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        descriptor = self.pgconn.socket
        with answer_within(self.answer_seconds, lambda: shut([descriptor])) as waiting:
            try:
                return super().wait(gen, *args, **kwargs)
            except psycopg.OperationalError as error:
                if waiting is None or not waiting.given_up:
                    raise
                raise NoAnswer(str(waiting)) from error


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Return whether a pooler is in between: an unannounced process answers.

    A pooler that lends sessions invents the process number that it gives a client when connecting,
    which the client needs to cancel a query.
    """
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        row = cursor.execute(WHO_ANSWERS, prepare=False).fetchone()
    return row is not None and row[0] != connection.info.backend_pid


def refuse_pooler(connection: psycopg.Connection[Any]) -> None:
    """Raise unless the connection leads to the server itself.

    Raises:
        ConfigurationError: the connection leads to a pooler.
    """
    if is_pooled(connection):
        raise pooled(f"database {connection.info.dbname!r}")


def pooled(what: str) -> ConfigurationError:
    """Return the error for a pooler in front of ``what``, which needs a session."""
    return ConfigurationError(
        f"{what} is reached through a connection pooler: forwarders, processors, listeners and "
        "commands need sessions of their own, so name the server itself. Only sending and "
        "receiving go through a pooler"
    )


@contextmanager
def unprepared(connection: Raw) -> Iterator[None]:
    """Create no named prepared statements during a block."""
    before, connection.prepare_threshold = connection.prepare_threshold, None
    try:
        yield
    finally:
        connection.prepare_threshold = before
