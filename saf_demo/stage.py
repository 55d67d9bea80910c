"""What demos share: where they run, the application's writers, and the outcome that they show."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.progress
from psycopg import sql
from rich.console import Console

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.cli.alive import repeatedly
from saf.cli.console import Listing, echo
from saf.database import Dsn
from saf.errors import SafError
from saf.operating.wording import age
from saf.spark import java
from saf_demo.flights import FLIGHTS, Base

WRITERS = 2
TELL_SECONDS = 5.0
"""Interval at which a step says that it goes on, without a terminal."""
LOOK = "SELECT current_setting('server_version'), (SELECT count(*) FROM flight)"
DROP = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a demo."""

    right: bool
    title: str
    """What is true if the outcome is right."""
    result: dict[str, Any]
    """For programs: the line of JSON."""
    listing: Listing
    """For users."""

    def show(self, *, as_json: bool) -> None:
        """Print the outcome."""
        if as_json:
            echo(json.dumps(self.result))
        else:
            echo(self.title if self.right else "something is wrong")
            self.listing.show()


@contextmanager
def step(
    console: Console, what: str, progress: Callable[[], str] = str, *, spins: bool = True
) -> Iterator[None]:
    """Show that a step goes on while a block runs: by a spinner, or by a line every few seconds.

    Args:
        console: a terminal, or not.
        what: the step, as a participle and its object.
        progress: returns how far the step has got; empty by default.
        spins: false if the block has a progress bar of its own on a terminal.
    """
    if console.is_terminal and spins:
        with console.status(f"{what} …"):
            yield
        return
    console.print(f"{what} …", soft_wrap=True)
    if console.is_terminal:
        yield
        return
    began = time.monotonic()

    def tell() -> None:
        seconds = age(time.monotonic() - began)
        console.print(f"{what} … ({seconds}) {progress()}".rstrip(), soft_wrap=True)

    with repeatedly(TELL_SECONDS, tell):
        yield


def counts(rows: Mapping[str, float]) -> Listing:
    """Return a listing of numbers of messages, by what is counted."""
    listing = Listing("messages", "count")
    for counted, number in rows.items():
        listing.add(counted, f"{number:,.0f}")
    return listing


@dataclass(kw_only=True)
class Written:
    """Counts of the writers in this run."""

    flights: int = 0
    transactions: int = 0
    rolled_back: int = 0
    """Number of transactions that rolled back."""

    def __str__(self) -> str:
        if not self.transactions:
            return "recorded nothing: an earlier run has recorded all flights"
        return (
            f"recorded {self.flights:,} flights and sent a message about each, "
            f"in {self.transactions - self.rolled_back:,} transactions; "
            f"{self.rolled_back:,} others rolled back on purpose"
        )


@dataclass(frozen=True, kw_only=True)
class Application:
    """The example application at the start of a run."""

    dsn: Dsn
    postgresql: str
    """The server's version."""
    java: str
    recorded: int
    """Number of flights that an earlier run recorded."""
    total: int
    """Number of flights to record."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where a demo runs: an embedded server, and a folder for everything else."""

    server: EmbeddedServer
    folder: Path
    console: Console
    """Shows progress to users."""
    reset: bool
    """Starts over: removes what earlier runs have left."""
    limit: int | None = None
    """Number of flights to record; None: all."""

    def databases(self, *names: str) -> dict[str, Dsn]:
        """Return brokers of these names, which are created if they are missing."""
        if self.reset:
            with self.server.dsn("postgres").connect(role="demo", autocommit=True) as connection:
                for name in names:
                    connection.execute(DROP.format(sql.Identifier(name)))
        with step(self.console, f"creating the databases {' and '.join(names)}"):
            dsns = {name: self.server.create_database(name) for name in names}
            for dsn in dsns.values():
                migrate(dsn)
        return dsns

    def folder_of(self, name: str) -> Path:
        """Return a folder for a destination."""
        folder = self.folder / name
        if self.reset:
            shutil.rmtree(folder, ignore_errors=True)
        return folder

    def application(self, dsn: Dsn) -> Application:
        """Create the application's table if it is missing, and tell the user where the demo runs.

        Raises:
            ConfigurationError: no Java was found.
        """
        engine = dsn.engine()
        Base.metadata.create_all(engine)
        engine.dispose()
        with dsn.connect(role="demo") as connection:
            ((version, recorded),) = connection.execute(LOOK).fetchall()
        found = str(java.find())
        where = f"PostgreSQL {version}, embedded, in {self.server.data_dir}"
        self.console.print(where, soft_wrap=True)
        self.console.print(found, soft_wrap=True)
        return Application(
            dsn=dsn,
            postgresql=version,
            java=found,
            recorded=recorded,
            total=min(self.limit or FLIGHTS, FLIGHTS),
        )

    def record(
        self, application: Application, watch: Callable[[Written], object] | None = None
    ) -> Written:
        """Run the application until all flights are recorded; ``watch`` sees each transaction.

        Raises:
            SafError: a writer failed, after printing the reason on stderr.
        """
        columns = rich.progress.Progress.get_default_columns()
        written = Written()
        before, total = application.recorded, application.total
        what = "recording flights" if before < total else "checking what is recorded"

        def progress() -> str:
            return f"{before + written.flights:,} of {total:,}"

        with (
            step(self.console, what, progress, spins=False),
            rich.progress.Progress(
                *columns,
                rich.progress.MofNCompleteColumn(),
                console=self.console,
                transient=True,
                disable=not self.console.is_terminal,
            ) as bar,
        ):
            task = bar.add_task(what, total=total, completed=before)
            for recorded in _writers(application.dsn, self.limit):
                written.transactions += 1
                written.flights += recorded
                written.rolled_back += recorded == 0
                bar.update(task, completed=before + written.flights)
                if watch is not None:
                    watch(written)
        self.console.print(str(written), soft_wrap=True)
        return written


def _writers(dsn: Dsn, limit: int | None) -> Iterator[int]:
    """Run the writers; after each of their transactions, yield the number of flights in it."""
    program = [sys.executable, "-P", "-m", "saf_demo.flights", f"--writers={WRITERS}"]
    if limit is not None:
        program.append(f"--limit={limit}")
    # one pipe for all writers: a writer that outlives this process ends at its next line
    reading, writing = os.pipe()
    writers = [
        subprocess.Popen(
            [*program, f"--writer={number}"],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            env={**os.environ, "SAF_DSN": dsn.conninfo},
            process_group=0,  # Ctrl-C goes to this process, which then stops the writers
        )
        for number in range(WRITERS)
    ]
    os.close(writing)
    try:
        with os.fdopen(reading) as lines:
            yield from map(int, lines)
        if any(writer.wait() for writer in writers):
            raise SafError("the example application failed; its output is above")
    finally:
        for writer in writers:
            writer.terminate()
            writer.wait()
