"""What sending costs the application: at the database, and in Python.

The business transaction is one UPDATE and one INSERT, run by pgbench, in turn bare, with the very
INSERT that `Outbox.send` issues, and with an INSERT into a table as one writes it by hand, whose
consumer would read it by SKIP LOCKED.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.stage import Stage, execute, output
from saf import Outbox
from saf.message import Message, encode
from saf.outbox import INSERT

CLIENTS = 8
SECONDS = 5
ROUNDS = 3
MANY = 1000
ACCOUNTS = 100_000

BUSINESS = """\\set account random(1, {accounts})
\\set amount random(1, 100)
BEGIN;
UPDATE account SET balance = balance + :amount WHERE id = :account;
INSERT INTO booking (account, amount) VALUES (:account, :amount);
{send}COMMIT;
"""
TABLES = (
    "DROP TABLE IF EXISTS account, booking, plain",
    "CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL DEFAULT 0)",
    "CREATE TABLE booking (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
    "account int NOT NULL, amount int NOT NULL, booked_at timestamptz NOT NULL DEFAULT now())",
    "CREATE TABLE plain (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
    "to_service text NOT NULL, key text, message_type text, headers jsonb, body bytea NOT NULL, "
    "created_at timestamptz NOT NULL DEFAULT now())",
    f"INSERT INTO account (id) SELECT generate_series(1, {ACCOUNTS})",
    "VACUUM ANALYZE account",
    "CHECKPOINT",
)


def message() -> dict[str, str]:
    """A message's values as the application would bind them, for pgbench."""
    row = encode(Message(service="billing", body={"account": 7, "amount": 100}, key="7"))
    return {
        **dict.fromkeys(row._fields, "NULL"),
        "message_id": f"'{row.message_id}'",  # drawn by the client; no index looks at it
        "to_service": "'billing'",
        "key": ":account::text",
        "headers": f"'{row.headers}'",
        "body": f"'\\x{row.body.hex()}'",
    }


def send_statement() -> str:
    """`Outbox.send`'s INSERT."""
    values = message()
    return re.sub(r"%\((\w+)\)s", lambda match: values[match[1]], INSERT).strip() + ";\n"


def plain_statement() -> str:
    """The INSERT of the same message into a table made by hand."""
    columns = ("to_service", "key", "message_type", "headers", "body")
    values = ", ".join(message()[column] for column in columns)
    return f"INSERT INTO plain ({', '.join(columns)}) VALUES ({values});\n"


class Latency(NamedTuple):
    """Transactions per second, and latencies in milliseconds."""

    tps: float
    p50: float
    p99: float


def pgbench(
    stage: Stage,
    script: Path,
    *,
    rate: int | None = None,
    clients: int = CLIENTS,
    seconds: int = SECONDS,
) -> Latency:
    """Run a script for some seconds: as fast as it goes, or at a rate per second."""
    log = script.with_suffix(".log")
    for old in script.parent.glob(f"{log.name}.*"):
        old.unlink()
    text = output(
        stage.program("pgbench"), "--no-vacuum", "--protocol=prepared", f"--client={clients}",
        f"--jobs={min(clients, 2)}", f"--time={seconds}", f"--file={script}",
        "--log", f"--log-prefix={log}",
        *([f"--rate={rate}"] if rate else []), stage.app.conninfo,
    )  # fmt: skip
    match = re.search(r"tps = ([\d.]+)", text)
    assert match is not None
    microseconds = [
        int(line.split()[2])
        for file in script.parent.glob(f"{log.name}.*")
        for line in file.read_text().splitlines()
    ]
    percentiles = statistics.quantiles(microseconds, n=100)
    return Latency(float(match[1]), percentiles[49] / 1000, percentiles[98] / 1000)


def python_microseconds(stage: Stage) -> list[float]:
    """What `send` adds to a bare psycopg execute of the same statement and values, each round."""
    outbox, batch = Outbox(), 2000
    with stage.app.connect(role="bench") as connection:
        row = encode(Message(service="billing", body={"account": 7}, key="7"))

        def each(action: Callable[[], object]) -> float:
            started = time.perf_counter()
            for _ in range(batch):
                action()
            return (time.perf_counter() - started) / batch * 1e6

        def bare() -> object:
            return connection.execute(INSERT, row._asdict())

        def send() -> object:
            return outbox.send(connection, "billing", {"account": 7}, key="7")

        send()
        added = []
        for _ in range(9):
            added.append(-each(bare) + each(send))
            connection.rollback()
    return added


def run(stage: Stage) -> None:
    """Notes send_tps_kept, send_ratio_to_plain_table, send_added_p50_ms and so on."""
    execute(stage.app, *TABLES)
    folder = stage.server.data_dir.parent
    scripts = {}
    sends = {"bare": "", "send": send_statement(), "plain": plain_statement()}
    for name, send in sends.items():
        scripts[name] = folder / f"{name}.sql"
        scripts[name].write_text(BUSINESS.format(accounts=ACCOUNTS, send=send))
    for clients in (1, CLIENTS):
        measured: dict[str, list[Latency]] = {name: [] for name in scripts}
        for _ in range(ROUNDS):
            for name, script in scripts.items():
                execute(stage.app, "CHECKPOINT")
                measured[name].append(pgbench(stage, script, clients=clients))
        _note(stage, measured, "" if clients == CLIENTS else "_1_client")
    stage.note("send_python_us", python_microseconds(stage), "µs", "<= 60")
    stage.note("send_many_per_second", many_per_second(stage), "1/s", ">= 100,000")


def _note(stage: Stage, measured: dict[str, list[Latency]], where: str) -> None:
    rounds = list(zip(measured["bare"], measured["send"], measured["plain"], strict=True))
    stage.note(f"send_bare_tps{where}", [bare.tps for bare, *_ in rounds], "1/s")
    stage.note(f"send_tps{where}", [send.tps for _, send, _ in rounds], "1/s")
    kept = [send.tps / bare.tps for bare, send, _ in rounds]
    stage.note(f"send_tps_kept{where}", kept, "of the bare tps", "")
    ratios = [send.tps / plain.tps for _, send, plain in rounds]
    stage.note(f"send_ratio_to_plain_table{where}", ratios, "of the plain table's tps", ">= 0.95")
    for percentile in ("p50", "p99"):
        for name, number in (("send", 1), ("plain", 2)):
            added = [
                getattr(one[number], percentile) - getattr(one[0], percentile) for one in rounds
            ]
            stage.note(f"{name}_added_{percentile}_ms{where}", added, "ms")


def many_per_second(stage: Stage) -> list[float]:
    """Messages a second in each round, by `send_many` of a thousand in each transaction."""
    outbox, rates = Outbox(), []
    rows = [Message(service="billing", body=b"x" * 200, key=str(n)) for n in range(MANY)]
    with stage.app.connect(role="bench") as connection:
        for _ in range(20):
            started = time.perf_counter()
            outbox.send_many(connection, rows)
            connection.commit()
            rates.append(MANY / (time.perf_counter() - started))
    return rates
