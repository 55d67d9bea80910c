"""The fixtures of the test kit, and the server that they use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from saf.database import Dsn
from saf.testing.clock import Clock
from saf.testing.databases import Copies, Database, Databases, embedded_server
from saf.testing.drain import Drain
from saf.testing.sent import Sent
from saf.testing.with_django import django_database, uses_django

VARIABLE = "SAF_TEST_DSN"
SERVER = (
    f"a database of the PostgreSQL server for saf's fixtures; by default {VARIABLE}'s, or else \
an embedded one"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--saf-dsn``, and ``saf_dsn`` in the configuration file."""
    parser.getgroup("saf").addoption("--saf-dsn", metavar="DSN", help=SERVER)
    parser.addini("saf_dsn", SERVER)


@pytest.fixture(scope="session")
def saf_server(pytestconfig: pytest.Config) -> Iterator[Databases]:
    """Creates databases on the server of this run."""
    option = pytestconfig.getoption("--saf-dsn") or os.environ.get(VARIABLE)
    given = option or pytestconfig.getini("saf_dsn")
    with ExitStack() as running:
        server = Dsn(given) if given else running.enter_context(embedded_server()).dsn("postgres")
        yield running.enter_context(closing(Databases(server)))


@pytest.fixture(scope="session")
def saf_template(saf_server: Databases) -> Iterator[Database]:
    """The migrated template of each test's databases; override it to add your own tables."""
    from saf.broker.migrate import migrate  # imports Alembic

    template = saf_server.create("template")
    migrate(template.dsn)
    yield template
    saf_server.drop(template)


@pytest.fixture
def saf_new_database(saf_server: Databases, saf_template: Database) -> Iterator[Copies]:
    """Creates further databases like `saf_database`, by name."""
    copies = Copies(saf_server, saf_template)
    yield copies
    copies.drop()


@pytest.fixture
def saf_database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A fresh database for this test, or pytest-django's if the test uses that."""
    if not uses_django(request):
        copies: Copies = request.getfixturevalue("saf_new_database")
        yield copies("app")
        return
    request.getfixturevalue("_django_db_helper")
    database = django_database()
    yield database
    database.let_go()


@pytest.fixture
def saf_outbox(saf_database: Database) -> Sent:
    """Assertions on the messages that the test has sent."""
    return Sent(saf_database)


@pytest.fixture
def saf_drain(saf_database: Database) -> Drain:
    """Forwards and handles pending messages."""
    return Drain(saf_database)


@pytest.fixture
def saf_clock(request: pytest.FixtureRequest) -> Clock:
    """Lets time pass in the test's databases."""
    if uses_django(request):
        return Clock([request.getfixturevalue("saf_database")])
    copies: Copies = request.getfixturevalue("saf_new_database")
    return Clock(copies.all)
