"""The classes that Spark calls to send: tasks stage their rows, then the driver sends all of them.

A batch write sends once, however often its tasks are retried. A job that may run again gives the
options ``txnAppId`` and ``txnVersion``, as with Delta: rows already sent with this version, or a
later one, are not sent again. A stream's writer does this automatically: its application is the id
of the query, which its checkpoint keeps, and its version is the number of the epoch.

Messages are sent in the order of the DataFrame: by partition, and by row within a partition. So
messages of a key have the order of ``df.collect()``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from uuid import uuid4

import adbc_driver_manager.dbapi as adbc
import psycopg
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from saf.database import Dsn, bulk, check_schema, connections, translated, unavailable_if_lost
from saf.database.bounds import while_unavailable
from saf.database.dsn import grant_command, place_of
from saf.errors import ConfigurationError, NotThisStream, SafError
from saf.sending import staging
from saf.spark.table import outgoing
from saf.telemetry.logger import Log

ATTEMPTS = 5
"""Attempts to commit while the broker does not answer; its mark makes repeats harmless."""
QUERY = "sql.streaming.queryId"

Messages = list[WriterCommitMessage | None]
"""Spark's argument at the driver: the message of each task, or None for a failed task."""

log = Log("saf.sink")


@dataclass(frozen=True, kw_only=True)
class Written(WriterCommitMessage):
    """A task's report to the driver. It contains no messages."""

    partition: int
    attempt: int | None
    """None if the task had no rows."""
    messages: int
    query: str | None
    """The id of the streaming query."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Outgoing:
    """Where messages go. Spark passes it to the tasks, and never shows it."""

    what: str
    dsn: Dsn

    def stage(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Stage a task's rows: all, or none on failure.

        Raises:
            InvalidMessage: the first row that could not be sent.
            Unavailable: the database does not answer.
        """
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None  # noqa: S101 - Spark calls it in a task only
        query = context.getLocalProperty(QUERY)
        with Copy(self.what, self.dsn, stream=query is not None) as copy:
            for rows in batches:
                copy.add(rows)
        return Written(
            partition=context.partitionId(),
            attempt=copy.attempt,
            messages=copy.messages,
            query=query,
        )

    def send(
        self, application: str, version: int | None, written: Sequence[Written], *, stream: bool
    ) -> bool:
        """Send the rows that tasks staged; return False if they were sent before.

        Raises:
            StagedLost: some staged rows are gone.
            NotThisStream: a stream has sent a later epoch.
            Unavailable: the database does not answer.
            ConfigurationError: the role may not send.
        """
        attempts = [
            staging.Attempt(attempt=message.attempt, messages=message.messages)
            for message in sorted(written, key=lambda message: message.partition)
            if message.attempt is not None
        ]

        def commit() -> bool:
            with self._connected() as connection:
                fresh = staging.send(connection, self.what, application, version, attempts)
                last = None if fresh else staging.sent_version(connection, application)
            if stream and last is not None and version is not None and last > version:
                raise NotThisStream(
                    f"{self.what}: the query {application} has sent its epoch {last:,} already, "
                    f"and comes with {version:,}: its checkpoint was set back. Begin with a new "
                    "checkpoint"
                )
            return fresh

        sent = while_unavailable(ATTEMPTS, commit)
        if not sent:
            log.info("sent_already", broker=self.what, application=application, version=version)
        return sent

    def discard(self, messages: Messages) -> None:
        """Remove the rows that tasks of a failed job staged, as far as known."""
        attempts = [
            message.attempt for message in _written(messages) if message.attempt is not None
        ]
        if not attempts:
            return
        try:
            with self._connected() as connection:
                staging.discard(connection, attempts)
        except SafError as error:
            # `saf purge` removes them
            log.warning("not_discarded", broker=self.what, error=str(error))

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        with (
            unavailable_if_lost(self.what),
            self.dsn.connect(role="sink", autocommit=True) as connection,
        ):
            check_schema(connection)
            try:
                yield connection
            except psycopg.errors.InsufficientPrivilege as error:
                raise ConfigurationError(
                    f"{self.what}: user {connection.info.user!r} may not send this: "
                    f"{error.diag.message_primary}. As the owner, run "
                    f"`{grant_command('sink', connection.info.user, place_of(connection))}`; "
                    "`saf sender list` shows who may send as whom"
                ) from None


class Batch(DataSourceArrowWriter):
    """One batch write."""

    def __init__(self, to: Outgoing, application: str | None, version: int | None) -> None:
        self._to = to
        self._application = application or f"write {uuid4()}"
        self._version = version

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage the rows of a partition, in a task."""
        return self._to.stage(iterator)

    def commit(self, messages: Messages) -> None:
        """Send the rows that all tasks staged."""
        written = _written(messages)
        self._to.send(self._application, self._version, written, stream=False)

    def abort(self, messages: Messages) -> None:
        """Remove the rows that tasks staged."""
        self._to.discard(messages)


class Epochs(DataSourceStreamArrowWriter):
    """The micro-batches of a streaming query."""

    def __init__(self, to: Outgoing, application: str | None) -> None:
        self._to = to
        self._application = application

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage the rows of a partition of a micro-batch, in a task."""
        return self._to.stage(iterator)

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - Spark's
        """Send the rows that all tasks of a micro-batch staged."""
        written = _written(messages)
        application = self._application or next(
            (message.query for message in written if message.query), None
        )
        if application is None:
            if any(message.messages for message in written):
                raise ConfigurationError(
                    "Spark does not identify the query: give it a unique name by the "
                    "option txnAppId"
                )
            return
        self._to.send(application, batchId, written, stream=True)

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - Spark's
        """Remove the rows that tasks staged."""
        del batchId
        self._to.discard(messages)


def _written(messages: Messages) -> list[Written]:
    return [message for message in messages if isinstance(message, Written)]


class Copy:
    """Rows staged by one attempt of a task. Leaving the block commits; an error rolls back."""

    def __init__(self, what: str, dsn: Dsn, *, stream: bool = False) -> None:
        self._what = what
        self._dsn = dsn
        self._stream = stream
        self._connection: bulk.Connection | None = None
        self.attempt: int | None = None
        """None if no rows were added."""
        self.messages = 0

    def __enter__(self) -> Self:
        return self

    def add(self, rows: pa.RecordBatch) -> None:
        """Stage rows after those added before.

        Raises:
            InvalidMessage: the first row that could not be sent.
            Unavailable: the database does not answer.
        """
        if not rows.num_rows:
            return
        connection = self._connection = self._connection or self._begun()
        assert self.attempt is not None  # noqa: S101 - begun
        ready = outgoing.staged(rows, self.attempt, self.messages, may_be_late=self._stream)
        with self._errors(), connection.cursor() as cursor:
            cursor.adbc_ingest("staged", ready, mode="append", db_schema_name="saf")
        self.messages += rows.num_rows

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._connection is None:
            return
        try:
            if kind is None:
                with self._errors():
                    self._connection.commit()
        finally:
            connections.drop(self._connection)

    def _begun(self) -> bulk.Connection:
        with (
            unavailable_if_lost(self._what),
            self._dsn.connect(role="sink", autocommit=True) as connection,
        ):
            check_schema(connection)
            self.attempt = staging.begin(connection)
        with self._errors():
            return bulk.connect(self._dsn, "sink", self._what)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate errors of ADBC."""
        try:
            yield
        except (adbc.Error, OSError) as error:
            state = getattr(error, "sqlstate", None)
            raise translated(self._what, state, self._dsn.reason(error)) from None
