"""What the benchmarks run on: a durable server with two brokers, and a log of results."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from saf.broker.embedded import EmbeddedServer, programs
from saf.broker.migrate import migrate
from saf.database import Dsn

VERSION = 18
SETTINGS = {
    # durable: fsync and synchronous_commit stay on, as they come
    "max_connections": 200,
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "autovacuum": False,
}
RESULTS = Path(__file__).parent / "results" / "bench.jsonl"

FILL = """
INSERT INTO saf.outbox (to_service, key, message_type, headers, body)
SELECT 'billing', 'order ' || i %% 5000, 'OrderPlaced', '{"content-type": "application/json"}',
       convert_to(rpad('{"order": ' || i, %s, 'x'), 'UTF8')
FROM generate_series(%s::bigint, %s::bigint) AS i
"""
TRANSACTION = 1_000_000
READ_AGAIN = """
UPDATE saf.cursor SET done = '1:1:', open = NULL, position = 0, attempted = 0
"""

_TICKS = os.sysconf("SC_CLK_TCK")

# what the source remembers of a destination that has forgotten everything
FORGET = "TRUNCATE saf.acknowledged, saf.backoff, saf.parked"


class Stage:
    """Two brokers on one server: ``app`` with an outbox to read, ``mom`` to fill."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.server = EmbeddedServer(folder / "postgres", VERSION, {**SETTINGS, **settings})
        self.server.start()
        self.app = self.server.create_database("app")
        self.mom = self.server.create_database("mom")
        migrate(self.app)
        migrate(self.mom)
        self.console = Console(stderr=True)
        self.results: list[dict[str, object]] = []

    def fill(self, messages: int, size: int = 200) -> None:
        """An outbox with so many pending messages of so many bytes."""
        execute(self.app, "TRUNCATE saf.outbox", READ_AGAIN)
        with self.app.connect(role="bench") as connection:
            for first in range(1, messages + 1, TRANSACTION):
                last = min(first + TRANSACTION - 1, messages)
                connection.execute(FILL, [size, first, last])
                connection.commit()
        execute(self.app, "ANALYZE saf.outbox", "CHECKPOINT")

    def rewind(self) -> None:
        """The same messages pending again, and an empty inbox."""
        execute(self.mom, "TRUNCATE saf.inbox, saf.watermark")
        execute(self.app, READ_AGAIN, FORGET, "VACUUM saf.cursor", "CHECKPOINT")

    def stored(self) -> int:
        """How many messages are in the inbox."""
        with self.mom.connect(role="bench") as connection:
            row = connection.execute("SELECT count(*) FROM saf.inbox").fetchone()
        assert row is not None
        return int(row[0])

    @property
    def process(self) -> int:
        """The id of the server's first process, which has all others as children."""
        return int((self.server.data_dir / "postmaster.pid").read_text().split()[0])

    def program(self, name: str) -> Path:
        """One of PostgreSQL's own programs."""
        return programs(VERSION) / name

    def tenants(self, count: int) -> dict[str, Dsn]:
        """Copies of ``app``, each a broker of its own."""
        made = {}
        for number in range(count):
            dsn = self.server.dsn(f"tenant_{number}")
            with self.server.dsn("postgres").connect(role="bench", autocommit=True) as connection:
                query = "SELECT count(*) FROM pg_database WHERE datname = %s"
                row = connection.execute(query, [dsn.database]).fetchone()
                if row == (0,):
                    connection.execute(f'CREATE DATABASE "{dsn.database}" TEMPLATE app')
                    # no destination knows the new broker, so none has acknowledged anything
                    execute(dsn, "UPDATE saf.broker SET broker_id = gen_random_uuid()")
                    execute(dsn, "TRUNCATE saf.acknowledged")
            made[f"t{number}"] = dsn
        return made

    def settings_file(
        self,
        path: Path,
        *,
        mom: Dsn | None = None,
        tenants: Mapping[str, Dsn] | None = None,
        **options: object,
    ) -> Path:
        """A saf.toml for the two brokers, or with another MOM store, or with tenants instead."""
        more = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
        brokers = "".join(
            f"[brokers.{name}]\ndsn = {json.dumps(dsn.conninfo)}\n"
            for name, dsn in (tenants or {"app": self.app}).items()
        )
        path.write_text(
            f"{brokers}"
            f"[destinations.mom]\ndsn = {json.dumps((mom or self.mom).conninfo)}\n"
            f'[forwarder]\ndefault_destination = "mom"\n{more}\n'
        )
        return path

    def note(self, name: str, values: float | Iterable[float], unit: str, reach: str = "") -> None:
        """One result: of several rounds the median, with the least and the most beside it.

        ``reach`` is what was set out to be reached, for the table.
        """
        rounds = sorted(values) if isinstance(values, Iterable) else [values]
        result: dict[str, object] = {"name": name, "value": round(median(rounds), 4), "unit": unit}
        if len(rounds) > 1:
            result |= {"least": round(rounds[0], 4), "most": round(rounds[-1], 4)}
        self.results.append(result | {"reach": reach})
        self.console.print(f"  {name}: {spread(result)} {unit}", highlight=False)

    def report(self, results: Path = RESULTS) -> None:
        """A table for people, JSON lines for programs, on stdout and in a file.

        The file keeps what other parts have said in an earlier run.
        """
        table = Table("name", "median (least to most)", "unit", "to reach")
        lines = []
        for result in self.results:
            reach = result.pop("reach")
            table.add_row(str(result["name"]), spread(result), str(result["unit"]), str(reach))
            lines.append(json.dumps(result))
        Console().print(table)
        results.parent.mkdir(exist_ok=True)
        kept = results.read_text().splitlines() if results.exists() else []
        latest = {json.loads(line)["name"]: line for line in [*kept, *lines]}
        results.write_text("\n".join(latest.values()) + "\n")
        print("\n".join(lines))


def execute(dsn: Dsn, *statements: str) -> None:
    """Each statement in a transaction of its own."""
    with dsn.connect(role="bench", autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def spread(result: Mapping[str, object]) -> str:
    """A result's median, and where there were several rounds the least and the most of them."""
    if "least" not in result:
        return f"{result['value']:,.5g}"
    return f"{result['value']:,.5g} ({result['least']:,.4g} to {result['most']:,.4g})"


def cpu_seconds(pid: int, *, children: bool) -> float:
    """What a process has used so far; with ``children``, those that have ended and those alive."""
    total = 0.0
    alive = [pid]
    if children:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                alive.append(int(stat.parent.name))
    for one in alive:
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11 : 15 if one == pid and children else 13])) / _TICKS
    return total


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def per_second(count: int, seconds: Iterable[float]) -> list[float]:
    """The rate of each round in which so many were done."""
    return [count / one for one in seconds]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so many are not above."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def output(*command: str | Path) -> str:
    """What a program prints; it must succeed."""
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    ).stdout
