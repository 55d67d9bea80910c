"""Private attributes of libraries: all that saf reads or overrides, because no public name exists.

`PINNED` lists each attribute with the release that saf was tested with; a test fails when a later
release lacks one. Each function states why it needs the attribute. The paragraph that begins with
*Upstream* is the text for an issue of the library's project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg
    import sqlalchemy as sa
    from sqlalchemy.orm import SessionTransaction


@dataclass(frozen=True)
class Pinned:
    """Private attributes of a class, and the release in which they were found."""

    distribution: str
    tested: str
    owner: str
    attributes: Sequence[str]


PINNED = (
    Pinned("psycopg", "3.3.9", "psycopg.Connection", ("_prepared",)),
    Pinned("psycopg", "3.3.9", "psycopg.AsyncConnection", ("_prepared",)),
    Pinned("sqlalchemy", "2.1.9", "sqlalchemy.orm.SessionTransaction", ("_connections",)),
    Pinned("asyncpg", "0.32.0", "asyncpg.Connection", ("_addr", "_params")),
    Pinned("alembic", "1.20.1", "alembic.operations.Operations", ("_install_proxy",)),
    Pinned(
        "alembic",
        "1.20.1",
        "alembic.runtime.environment.EnvironmentContext",
        ("_install_proxy",),
    ),
    Pinned("nats-py", "2.16.0", "nats.aio.client.Client", ("_transport", "_process_msg", "_ps")),
    Pinned("nats-py", "2.16.0", "nats.protocol.parser.Parser", ("buf", "state", "parse")),
    Pinned("nats-py", "2.16.0", "nats.aio.transport.TcpTransport", ("_io_writer",)),
    Pinned("pika", "1.4.4", "pika.SelectConnection", ("_transport",)),
    Pinned("deltalake", "1.6.6", "deltalake.fs.DeltaStorageHandler", ("_handler",)),
    Pinned(
        "pyiceberg",
        "0.12.0",
        "pyiceberg.catalog.rest.RestCatalog",
        ("_create_session", "_create_legacy_oauth2_auth_manager"),
    ),
    Pinned("pyspark", "4.3.0", "pyspark.sql.classic.dataframe.DataFrame", ("_jdf",)),
    Pinned("pyspark", "4.3.0", "pyspark.sql.SparkSession", ("_jsparkSession", "_jvm")),
    Pinned(
        "pyspark",
        "4.3.0",
        "pyspark.SparkContext",
        (
            *("_active_spark_context", "_gateway", "_jsc", "_jvm"),
            *("_ensure_initialized", "_accumulatorServer"),
        ),
    ),
)


def share_prepared(
    owner: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
    other: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
) -> None:
    """Let two connections over one session share its prepared statements.

    psycopg numbers the statements of a connection object. Two objects would use a name twice, and
    a DEALLOCATE ALL of one would remove the statements of the other.

    Upstream: A synchronous and an asyncio connection may be created over the same PGconn, and work
    by turns. Both then prepare statements under the same names. A public way to share the
    statements, or a prefix for their names, would let such connections prepare.
    """
    other._prepared = owner._prepared


def connections_of(transaction: SessionTransaction) -> list[sa.Connection]:
    """Return the connections of a Session's transaction, so that a second one can be rejected.

    Upstream: A Session's transaction over several engines is not atomic without two phases. An
    extension that depends on atomicity has to know which connections have joined a transaction
    before the extension was loaded. `SessionTransaction` could list them publicly.
    """
    return [connection for connection, *_ in transaction._connections.values()]


def login(connection: Any) -> tuple[str, object, str]:
    """Return the role, the server's address and the database of an asyncpg connection.

    Asking the server would take a round trip for each message that is sent.

    Upstream: A connection knows the address, user and database that it was opened with. Libraries
    that are given a connection need them, for error messages and to recognize a database. They
    could be public properties, such as psycopg's ``Connection.info``.
    """
    return str(connection._params.user), connection._addr, connection._params.database


@contextmanager
def another_alembic() -> Iterator[None]:
    """Run Alembic in a block, perhaps inside a migration, which keeps its ``op`` and ``context``.

    Upstream: ``alembic.op`` and ``alembic.context`` are global. A command that runs inside a
    migration removes both at its end, and the migration around it fails. Alembic could restore
    what it has replaced.
    """
    from alembic import context, op

    around = [vars(module).get("_proxy") for module in (context, op)]
    try:
        yield
    finally:
        for proxy in around:
            if proxy is not None:
                proxy._install_proxy()


def abort(connection: Any) -> bool:
    """Drop the socket of a pika connection, if it is open; return whether it was.

    ``close()`` waits for the server's answer, which a server that hangs never sends.

    Upstream: `SelectConnection` has no way to end immediately. ``close()`` waits for Close-Ok, and
    a blocked or hanging server does not answer. A public ``abort()`` would release the socket.
    """
    transport = connection._transport
    if transport is not None:
        transport.abort()
    return transport is not None


def output(store: Any, path: str) -> Any:
    """Open a file of deltalake's object store for writing ``bytes``.

    Upstream: `DeltaStorageHandler.open_output_stream` returns a ``pyarrow.PythonFile``. Its
    ``write`` passes pyarrow's Buffer to the store's stream, which accepts only ``bytes``, so each
    write fails with a TypeError. The stream should accept buffers.
    """
    return store._handler.open_output_stream(path, None)


def rest_catalog(connect_seconds: float, answer_seconds: float) -> type[Any]:
    """Return pyiceberg's REST catalog with time limits for its requests.

    Upstream: The REST catalog calls requests without a timeout, so a catalog that hangs blocks a
    process for ever. A property such as ``rest.timeout`` would set the limits of the catalog's
    session. The session that gets a token needs them too.
    """
    from pyiceberg.catalog.rest import RestCatalog

    class Rest(RestCatalog):
        def _create_session(self) -> Any:
            session: Any = super()._create_session()
            return session if isinstance(session.request, partial) else self._bounded(session)

        def _create_legacy_oauth2_auth_manager(self, session: Any) -> Any:
            # it logs in with this session before any other code has it
            return super()._create_legacy_oauth2_auth_manager(self._bounded(session))

        def _bounded(self, session: Any) -> Any:
            session.request = partial(session.request, timeout=(connect_seconds, answer_seconds))
            return session

    return Rest


def jvm(spark: Any) -> Any:
    """Return the JVM of a SparkContext (or its class) or SparkSession; None without one.

    Spark's parser and its analyzed plans exist only there.

    Upstream: PySpark has no public way to parse an expression, to read an analyzed plan, or to set
    up the JVM's logging. Libraries use ``_jvm``, ``_jdf`` and ``_jsparkSession`` instead. Public
    accessors, for classic PySpark only, would make this dependence explicit.
    """
    return spark._jvm


def jvm_frame(frame: Any) -> Any:
    """Return a DataFrame's object of the JVM, whose plan can be read; see `jvm`."""
    return frame._jdf


def jvm_session(spark: Any) -> Any:
    """Return a SparkSession's object of the JVM, which has the parser; see `jvm`."""
    return spark._jsparkSession


def gateway(kind: Any) -> Any:
    """Return the gateway of class SparkContext to its JVM; None before there is one.

    Upstream: A program that starts the JVM ahead of the first SparkContext has to know whether
    PySpark already has a gateway. It also closes the gateway's sockets when the JVM hangs. A public
    ``SparkContext.gateway`` would serve both.
    """
    return kind._gateway


def active_context(kind: Any) -> Any:
    """Return the active object of class SparkContext; None without one.

    Upstream: ``SparkContext.getOrCreate`` starts a context when none is active. A library that must
    not start one with the wrong settings needs ``SparkContext.getActive``, as SparkSession has it.
    """
    return kind._active_spark_context


def connect_jvm(kind: Any, gateway: Any = None) -> None:
    """Connect class SparkContext to the JVM of a gateway, without starting Spark.

    Without a gateway, connect to the JVM that spark-submit has started.

    Upstream: Under spark-submit, the settings of the master are known only in the JVM. A program
    that checks them first has to connect before it creates a SparkContext. A public function could
    register a gateway of ``pyspark.java_gateway.launch_gateway``.
    """
    kind._ensure_initialized(gateway=gateway)


def forget_jvm(kind: Any) -> None:
    """Have class SparkContext forget its JVM, which has ended.

    Upstream: PySpark keeps one JVM for the whole process, with its context and its session, and
    never asks whether the JVM is alive. Without a Java context, it regards both as stopped.
    ``SparkContext.getOrCreate`` could replace a context whose JVM has ended.
    """
    context = kind._active_spark_context
    if context is not None:
        context._jsc = None
        context.stop()
    kind._gateway = kind._jvm = None


def accumulator_server(context: Any) -> Any:
    """Return the server that a SparkContext's tasks report to.

    Upstream: The server prints a traceback when the JVM ends first. An error handler that expects
    the end would fix this.
    """
    return context._accumulatorServer


def abort_client(client: Any) -> None:
    """Abort the TCP connection of a NATS client, if it has one.

    *Upstream*: `Client.close` closes the transport, and asyncio keeps the socket until the server
    has read all that was written. If the server hangs, the socket stays open until it is collected
    as garbage. A client should abort its transport once the wait for its end is over.
    """
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()


def nats_client(
    take: Callable[[bytes, bytes, bytes], bool], take_all: Callable[[bytearray], bool]
) -> Any:
    """Return a NATS client that offers messages to functions before it handles them.

    ``take`` gets the subject, the headers (empty without any) and the body of a message as
    received, and returns True if the client is not to handle the message. ``take_all`` gets all
    that was received, if it begins with an operation of the protocol. It removes the messages that
    it takes, and returns True if the client is to wait for more before it looks at the rest.

    *Upstream*: The client parses the headers of each message, creates an object for it, and passes
    it on by a queue and a task. That takes most of the time of a program that reads a stream in
    batches. A callback that gets the bytes of a subscription's messages would avoid it.
    """
    from nats.aio.client import Client
    from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

    class Raw(Client):
        def __init__(self) -> None:
            super().__init__()
            self._ps = RawParser(self)

        async def _process_msg(
            self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
        ) -> None:
            if not take(subject, headers or b"", data):
                await super()._process_msg(sid, subject, reply, data, headers)

    class RawParser(Parser):
        async def parse(self, data: bytes = b"") -> None:
            self.buf.extend(data)
            if self.state != AWAITING_CONTROL_LINE or not take_all(self.buf):
                await super().parse()

    return Raw()
