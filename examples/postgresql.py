"""A PostgreSQL to try things with, where there is none: from a wheel, without root, until Ctrl-C.

    python postgresql.py .try shop store > try.env &     # its data is in the folder .try
    until [ -s try.env ]; do sleep 1; done               # it takes connections now
    . ./try.env                                          # SHOP_DSN, SHOP_URL, STORE_DSN, STORE_URL

For each database that it is told it prints how to connect, for psycopg and for SQLAlchemy, as a
shell reads it. It puts psql into the PATH too. Everything is there again at the next start.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

from saf.broker.embedded import DEFAULT_VERSION, EmbeddedServer, programs
from saf.database import Dsn


def url(database: Dsn) -> str:
    """The same for SQLAlchemy."""
    parts = database.parts
    return f"postgresql+psycopg://{parts['user']}@/{parts['dbname']}?host={parts['host']}"


def main(folder: str, *databases: str) -> None:
    """Run it, with these databases."""
    with EmbeddedServer(Path(folder) / "data") as server:
        lines = [f'export PATH="{programs(DEFAULT_VERSION)}:$PATH"']
        for name in databases:
            database = server.create_database(name)
            lines.append(f"export {name.upper()}_DSN={shlex.quote(database.conninfo)}")
            lines.append(f"export {name.upper()}_URL={shlex.quote(url(database))}")
        print("\n".join(lines), flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    # before the server starts, so that a signal meanwhile does not end this without it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main(*sys.argv[1:])
