"""Streams in rounds: the driver of `tests.crash.streaming`, and what it has to have written.

Each message of the outbox, whose truth is the application's own table, is once in a table of Delta
Lake, and once in the outbox of another database; and so is each row of the MOM store's inbox in a
table. A key is in its order.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq

from saf.database import Dsn
from saf.log import stream
from tests.crash.checker import Verdict
from tests.crash.past import Message, life, message
from tests.delta_table import commits
from tests.programs import ROOT, environment

# Until each of the application's streams has begun
MOVED = """
SELECT WHERE 2 = (SELECT count(DISTINCT subscription_id) FROM saf.subscription
                  JOIN saf.cursor USING (subscription_id) WHERE stream AND batch > 0)
"""
ROWS = "SELECT id, convert_from(body, 'UTF8') FROM saf.{log} ORDER BY id"

Row = tuple[int, str]
"""The id of a message, and its body."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The databases of a round's streams, and their folder."""

    app: Dsn
    mom: Dsn
    other: Dsn
    folder: Path

    def prepare(self) -> None:
        """Register the streams, as an operator does it: before anything is purged."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for dsn, log, names in (
            (self.app, "outbox", ("outbox", "copies")),
            (self.mom, "inbox", ("inbox",)),
        ):
            with dsn.connect(role="crash") as connection:
                for name in names:
                    stream.create(connection, dsn.database, log, name, "beginning")


def driver(places: Places) -> None:
    """The driver, started again whenever it ends."""
    env = {
        "PYTHONPATH": str(ROOT),
        **environment(),
        "STREAM_APP": places.app.conninfo,
        "STREAM_MOM": places.mom.conninfo,
        "STREAM_OTHER": places.other.conninfo,
    }
    command = [sys.executable, "-m", "tests.crash.streaming", str(places.folder)]
    while True:
        with (places.folder / "stderr").open("ab") as said:
            subprocess.run(command, env=env, check=False, stdout=subprocess.DEVNULL, stderr=said)


def left(places: Places) -> int:
    """How many messages the streams have not written."""
    sent = _count(places.app, "SELECT count(*) FROM sent")
    stored = _count(places.mom, "SELECT count(*) FROM saf.inbox")
    missing = (
        sent - len(in_table(places.folder / "outbox")),
        sent - _count(places.other, "SELECT count(*) FROM saf.outbox"),
        stored - len(in_table(places.folder / "inbox")),
    )
    return sum(max(0, count) for count in missing)


def check(places: Places, verdict: Verdict) -> None:
    """Add what the streams have written otherwise than once, and in the order of its key."""
    in_lake = [text for _, text in in_table(places.folder / "outbox")]
    copied = [text for _, text in _rows(places.other, "outbox")]
    for name, found in (("in the lake", in_lake), ("copied", copied)):
        compare(name, places.app, found, verdict)
    stored = Counter(_rows(places.mom, "inbox"))
    _compare("of the inbox", stored, in_table(places.folder / "inbox"), verdict)


def said(places: Places) -> list[str]:
    """The last lines of the driver."""
    return (places.folder / "stderr").read_text().splitlines()[-20:]


def compare(name: str, app: Dsn, bodies: Iterable[str], verdict: Verdict) -> None:
    """Add what is otherwise than what an application has sent."""
    found = [message(body) for body in bodies]
    _compare(name, Counter([*life(app.conninfo)]), found, verdict)
    verdict.out_of_order += [(one, name) for one in _out_of_order(found)]


def in_table(folder: Path) -> list[Row]:
    """What a table has, micro-batch by micro-batch."""
    return [row for rows in _micro_batches(folder) for row in rows]


def _micro_batches(folder: Path) -> Iterator[list[Row]]:
    for actions in commits(folder):
        files = [pq.read_table(folder / one["add"]["path"]) for one in actions if "add" in one]
        yield sorted((row["id"], row["text"]) for file in files for row in file.to_pylist())


def _compare(name: str, truth: Counter[Any], found: Iterable[Any], verdict: Verdict) -> None:
    copies = Counter(found)
    verdict.lost += [(one, name) for one in truth if one not in copies]
    verdict.duplicated += [(one, name) for one in truth if copies[one] > truth[one]]
    verdict.unexpected += [(one, name) for one in copies if one not in truth]


def _out_of_order(found: Iterable[Message]) -> Iterator[Message]:
    highest: dict[str, int] = {}
    for one in found:
        account, n, _ = one
        if n < highest.setdefault(account, n):
            yield one
        highest[account] = max(highest[account], n)


def _rows(dsn: Dsn, log: str) -> list[Row]:
    with psycopg.connect(dsn.conninfo) as connection:
        return connection.execute(ROWS.format(log=log).encode()).fetchall()


def _count(dsn: Dsn, query: str) -> int:
    with psycopg.connect(dsn.conninfo) as connection:
        ((count,),) = connection.execute(query.encode()).fetchall()
    return int(count)
