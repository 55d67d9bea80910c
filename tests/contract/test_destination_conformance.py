"""saf's own kinds of destinations keep what every kind has to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from saf.broker.embedded import EmbeddedServer
from saf.columns import COLUMNS
from saf.database import Dsn, fetch
from saf.destinations.jsonl import Jsonl
from saf.destinations.postgresql import Postgresql
from saf.destinations.settings import DestinationSettings
from saf.testing.conformance import DestinationConformance, Read, Row, WhileUnavailable
from tests.destinations import know
from tests.json_lines import lines
from tests.pipeline import connect

pytestmark = pytest.mark.slow

CANARY = "hunter2-canary"
CAST = {"headers": "headers::text"}
THERE = f"SELECT {', '.join(CAST.get(name, name) for name in COLUMNS)} FROM saf.inbox ORDER BY id"


class TestPostgresql(DestinationConformance):
    @pytest.fixture
    def settings(self, mom: Dsn) -> DestinationSettings:
        return Postgresql(dsn=mom)

    @pytest.fixture
    def stored(self, mom: Dsn) -> Read:
        def read() -> list[Row]:
            with connect(mom) as connection:
                rows = fetch(connection, THERE)
            return [dict(zip(COLUMNS, row, strict=True)) for row in rows]

        return read

    @pytest.fixture
    def unavailable(self, mom: Dsn, server: EmbeddedServer) -> WhileUnavailable:
        name = sql.Identifier(mom.database)
        allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")

        @contextmanager
        def down() -> Iterator[None]:
            with server.dsn("postgres").connect(role="test", autocommit=True) as connection:
                connection.execute(allow.format(name, sql.SQL("false")))
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                    [mom.database],
                )
                try:
                    yield
                finally:
                    connection.execute(allow.format(name, sql.SQL("true")))

        return down

    @pytest.fixture
    def refused(self, mom: Dsn) -> DestinationSettings:
        return Postgresql(dsn=Dsn(make_conninfo(mom.conninfo, user="nobody", password=CANARY)))

    @pytest.fixture
    def know(self, mom: Dsn) -> Callable[[str], None]:
        return lambda service: know(mom, service)

    @pytest.fixture
    def rejected(self, mom: Dsn) -> Row:
        with connect(mom) as connection:
            connection.execute("ALTER TABLE saf.inbox ADD CHECK (body <> 'reject me')")
        return {"body": b"reject me"}


class TestJsonl(DestinationConformance):
    @pytest.fixture
    def settings(self, tmp_path: Path) -> DestinationSettings:
        (tmp_path / "folder").mkdir()
        return Jsonl(folder=tmp_path / "folder")

    @pytest.fixture
    def stored(self, settings: Jsonl) -> Read:
        return lambda: lines(settings.folder)

    @pytest.fixture
    def unavailable(self, settings: Jsonl) -> WhileUnavailable:
        @contextmanager
        def down() -> Iterator[None]:
            """As if it were not mounted."""
            away = settings.folder.rename(settings.folder.with_name("away"))
            try:
                yield
            finally:
                away.rename(settings.folder)

        return down

    @pytest.fixture
    def refused(self, tmp_path: Path) -> DestinationSettings:
        (tmp_path / "file").write_text("no folder")
        return Jsonl(folder=tmp_path / "file")


@pytest.mark.full
class TestJsonlWithShortLines(TestJsonl):
    """The same where a line may be too long."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> DestinationSettings:
        (tmp_path / "folder").mkdir()
        return Jsonl(folder=tmp_path / "folder", max_line_bytes=100 << 20)

    @pytest.fixture
    def rejected(self) -> Row:
        return {"body": b"\x01" * (20 << 20)}  # six characters each
