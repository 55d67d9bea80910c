"""Shared code of demos with flights: the databases, and the writers' report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import rich.progress
from psycopg import sql
from rich.console import Console

if TYPE_CHECKING:
    from saf.broker.embedded import EmbeddedServer
    from saf.database import Dsn
    from saf.demo.run import Written


def written(done: Written) -> str:
    """Return a sentence about the writers' work."""
    if not done.transactions:
        return "recorded nothing: an earlier run has recorded all flights"
    return (
        f"recorded {done.flights:,} flights and sent a message about each, "
        f"in {done.transactions - done.rolled_back:,} transactions; "
        f"{done.rolled_back:,} others rolled back on purpose"
    )


def databases(
    server: EmbeddedServer, application_name: str, store_names: Sequence[str], *, reset: bool
) -> tuple[Dsn, dict[str, Dsn]]:
    """Create the application's database and those of MOM stores, if missing."""
    from saf.broker.migrate import migrate
    from saf.demo.flights import Base

    if reset:
        with server.dsn("postgres").connect(role="demo", autocommit=True) as connection:
            for name in (application_name, *store_names):
                drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
                connection.execute(drop.format(sql.Identifier(name)))
    application = server.create_database(application_name)
    stores = {name: server.create_database(name) for name in store_names}
    for dsn in (application, *stores.values()):
        migrate(dsn)
    engine = application.engine()
    Base.metadata.create_all(engine)
    engine.dispose()
    return application, stores


def look(application: Dsn) -> tuple[str, int]:
    """Return the server's version, and the number of flights that an earlier run recorded."""
    with application.connect(role="demo") as connection:
        row = connection.execute(
            "SELECT current_setting('server_version'), (SELECT count(*) FROM flight)"
        ).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM gives a row
    return row[0], row[1]


@contextmanager
def flights_bar(
    console: Console, recorded: int, limit: int | None
) -> Iterator[Callable[[Written], None]]:
    """Show the number of recorded flights, as reported."""
    from saf.demo.flights import FLIGHTS

    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        total = min(limit or FLIGHTS, FLIGHTS)
        task = bar.add_task("recording flights", total=total, completed=recorded)
        yield lambda written: bar.update(task, completed=recorded + written.flights)
