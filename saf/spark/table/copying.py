"""Staging by COPY: a task writes its rows, as Arrow, in one transaction."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import adbc_driver_manager.dbapi as adbc
import pyarrow as pa

from saf.database import Dsn, bulk, check_schema, connections, translated, unavailable_if_lost
from saf.sending import staging
from saf.spark.table import outgoing

ROLE = "sink"


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
        if self.attempt is None:
            self._begin()
        assert self.attempt is not None  # noqa: S101 - begun
        ready = outgoing.staged(rows, self.attempt, self.messages, may_be_late=self._stream)
        try:
            assert self._connection is not None  # noqa: S101 - begun
            with self._connection.cursor() as cursor:
                cursor.adbc_ingest("staged", ready, mode="append", db_schema_name="saf")
        except (adbc.Error, OSError) as error:
            raise self._translated(error) from None
        self.messages += rows.num_rows

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if kind is None:
                connection.commit()
        except (adbc.Error, OSError) as lost:
            raise self._translated(lost) from None
        finally:
            connections.drop(connection)

    def _begin(self) -> None:
        with (
            unavailable_if_lost(self._what),
            self._dsn.connect(role=ROLE, autocommit=True) as connection,
        ):
            check_schema(connection)
            self.attempt = staging.begin(connection)
        try:
            self._connection = bulk.connect(self._dsn, ROLE, self._what)
        except (adbc.Error, OSError) as error:
            raise self._translated(error) from None

    def _translated(self, error: BaseException) -> Exception:
        state = getattr(error, "sqlstate", None)
        return translated(self._what, state, self._dsn.redact(str(error)))
