"""Roles, for tests that log in as one; folders for servers."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg import sql

from saf.broker.embedded import EmbeddedServer
from saf.broker.grants import Kind, grant
from saf.database import Dsn
from tests.pipeline import connect
from tests.roles import as_user

_number = itertools.count(1)


@pytest.fixture
def new_role(server: EmbeddedServer) -> Iterator[Callable[..., str]]:
    """Creates roles; they go after the databases in which they have rights."""
    roles = []

    def create(name: str = "") -> str:
        role = name or f"role_{next(_number)}"
        with connect(server.dsn("postgres")) as connection:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        roles.append(role)
        return role

    yield create
    with connect(server.dsn("postgres")) as connection:
        for role in roles:
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


@pytest.fixture
def granted(new_role: Callable[..., str]) -> Callable[..., Dsn]:
    """Logs in to a broker as a new role that has the rights of some kinds."""

    def login(dsn: Dsn, *kinds: str) -> Dsn:
        role = new_role()
        with connect(dsn) as connection:
            grant(connection, role, map(Kind, kinds))
        return as_user(dsn, role)

    return login


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Not pytest's: its name is too long for a server's socket."""
    folder = Path(tempfile.mkdtemp(prefix="saf-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
