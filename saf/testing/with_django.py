"""The database of pytest-django, for the fixtures of a test that uses it.

A test that asks for pytest-django's database (``django_db``, ``db``, ``transactional_db``) gets
that database from `saf_database`, with the schema that ``manage.py migrate`` brings: see
`saf.django`.

Unless it is transactional, Django runs the test in a transaction that is rolled back at the end. So
`saf_outbox` looks through Django's own connection, which sees the messages. Nothing else does: a
drain and the clock need a transactional test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from saf.errors import UsageError
from saf.testing.databases import Database

FIXTURES = frozenset({"_django_db_helper", "db", "transactional_db"})
MARKER = "django_db"
COMMITS_NOTHING = (
    "this test's transaction is never committed, so {what} would see none of its messages: use "
    "@pytest.mark.django_db(transaction=True), or the fixture transactional_db"
)


@dataclass(frozen=True, kw_only=True)
class DjangoDatabase(Database):
    """A database of Django's test runner."""

    alias: str

    @contextmanager
    def looking(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend Django's own connection, which sees what the test's transaction has written."""
        from django.db import connections

        from saf.transaction import below_django

        yield below_django(connections[self.alias])

    def require_commits(self, what: str) -> None:
        """Raise if the test's transaction is never committed.

        Raises:
            UsageError: names the way out.
        """
        from django.db import connections

        if connections[self.alias].in_atomic_block:
            raise UsageError(COMMITS_NOTHING.format(what=what))


def uses_django(request: pytest.FixtureRequest) -> bool:
    """Return whether a test uses pytest-django's database."""
    if not request.config.pluginmanager.hasplugin("django"):
        return False
    is_marked = request.node.get_closest_marker(MARKER) is not None
    return is_marked or not FIXTURES.isdisjoint(request.fixturenames)


def django_database(alias: str | None = None) -> DjangoDatabase:
    """Return the database of an alias; by default, the database of saf's tables.

    In a TestCase of Django, `Sent`, `Drain` and `Clock` take it:

        sent = Sent(django_database())
    """
    from django.db import router

    from saf.django import schema

    if alias is None:
        from saf.django.models import OutboxMessage

        alias = router.db_for_write(OutboxMessage)
    return DjangoDatabase(dsn=schema.dsn(alias), alias=alias)
