"""A broker behind a URL keeps what every kind of destination has to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pydantic import SecretStr

from saf.columns import COLUMNS
from saf.database import Dsn, fetch
from saf.destinations.https import Https
from saf.testing.conformance import DestinationConformance, Read, Row, WhileUnavailable
from tests.broker_server import BrokerServer, broker_server
from tests.destinations import know
from tests.pipeline import connect

pytestmark = pytest.mark.slow

CAST = {"headers": "headers::text"}
THERE = f"SELECT {', '.join(CAST.get(name, name) for name in COLUMNS)} FROM saf.inbox ORDER BY id"


class TestHttps(DestinationConformance):
    @pytest.fixture
    def partner(self, mom: Dsn) -> Iterator[BrokerServer]:
        with broker_server(mom) as server:
            yield server

    @pytest.fixture
    def settings(self, partner: BrokerServer) -> Https:
        return partner.at()

    @pytest.fixture
    def stored(self, mom: Dsn) -> Read:
        def read() -> list[Row]:
            with connect(mom) as connection:
                rows = fetch(connection, THERE)
            return [dict(zip(COLUMNS, row, strict=True)) for row in rows]

        return read

    @pytest.fixture
    def unavailable(self, partner: BrokerServer) -> WhileUnavailable:
        return partner.down

    @pytest.fixture
    def refused(self, partner: BrokerServer) -> Https:
        return partner.at(secret=SecretStr("whsec_" + "eHh4" * 8))

    @pytest.fixture
    def know(self, mom: Dsn) -> Callable[[str], None]:
        return lambda service: know(mom, service)

    @pytest.fixture
    def rejected(self, mom: Dsn) -> Row:
        with connect(mom) as connection:
            connection.execute("ALTER TABLE saf.inbox ADD CHECK (body <> 'reject me')")
        return {"body": b"reject me"}
