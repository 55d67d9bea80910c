"""Where callers' transactions come in: each database is asked for its schema, and only once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from saf.broker.embedded import EmbeddedServer
from saf.database import Dsn
from saf.errors import SchemaMissing
from saf.transaction import Entrance


def test_a_database_that_was_refused_is_refused_again(new_database: Callable[[str], Dsn]) -> None:
    enter = Entrance()
    with new_database("plain").connect(role="test") as connection:
        for _ in range(2):
            with pytest.raises(SchemaMissing):
                enter(connection)


def test_databases_of_the_same_name_on_two_servers_are_two(
    own_server: EmbeddedServer, app: Dsn
) -> None:
    enter = Entrance()
    with app.connect(role="test") as connection:
        enter(connection)
    plain = own_server.create_database(app.database)
    with plain.connect(role="test") as connection, pytest.raises(SchemaMissing):
        enter(connection)


def test_an_engine_is_not_taken_for_one_that_was_there_before_it(app: Dsn) -> None:
    """Python gives a new object the address of one that is gone: so what is kept goes with it."""
    enter = Entrance()
    engine = app.engine()
    with engine.connect() as connection:
        known = enter(connection).database
        assert known == enter(connection).database
    assert isinstance(known, weakref.ref)
    assert known() is engine
    engine.dispose()
    del connection, engine
    gc.collect()
    assert known() is None
