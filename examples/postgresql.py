"""A PostgreSQL server for experiments, installed from a wheel, without root, until Ctrl-C.

    rm -f try.env                                        # of an earlier start
    python postgresql.py .try shop mom > try.env &       # its data is in the folder .try
    until [ -s try.env ] || ! kill -0 $!; do sleep 1; done    # until it accepts connections
    . ./try.env                                          # SHOP_DSN, SHOP_URL, MOM_DSN, MOM_URL

For each given database, it prints connection settings for psycopg and for SQLAlchemy as shell
commands. It also adds psql to PATH. The data is kept for the next start. Its state is shown on
standard error.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

from saf.broker.embedded import DEFAULT_VERSION, EmbeddedServer, programs
from saf.database import Dsn


def url(database: Dsn) -> str:
    """Return the URL of a database for SQLAlchemy."""
    parts = database.parts
    return f"postgresql+psycopg://{parts['user']}@/{parts['dbname']}?host={parts['host']}"


def main(folder: str, *databases: str) -> None:
    """Run the server with these databases."""
    print("starting PostgreSQL …", file=sys.stderr)
    with EmbeddedServer(Path(folder) / "data") as server:
        lines = [f'export PATH="{programs(DEFAULT_VERSION)}:$PATH"']
        for name in databases:
            database = server.create_database(name)
            lines.append(f"export {name.upper()}_DSN={shlex.quote(database.conninfo)}")
            lines.append(f"export {name.upper()}_URL={shlex.quote(url(database))}")
        print("\n".join(lines), flush=True)
        print("ready", file=sys.stderr)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    # before the server starts, so that a signal during the start cannot end only this process
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main(*sys.argv[1:])
