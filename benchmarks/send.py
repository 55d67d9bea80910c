"""What sending costs the application: at the database, and in Python.

The business transaction is one UPDATE and one INSERT, run by pgbench with 8 clients, bare and
with the very INSERT that `Outbox.send` issues, in turn.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.stage import Stage, execute, median, output
from saf import Outbox
from saf.message import Message, encode
from saf.outbox import PSYCOPG_INSERT

CLIENTS = 8
SECONDS = 6
ROUNDS = 4
ACCOUNTS = 100_000

BUSINESS = """\\set account random(1, {accounts})
\\set amount random(1, 100)
BEGIN;
UPDATE account SET balance = balance + :amount WHERE id = :account;
INSERT INTO booking (account, amount) VALUES (:account, :amount);
{send}COMMIT;
"""
TABLES = (
    "DROP TABLE IF EXISTS account, booking",
    "CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL DEFAULT 0)",
    "CREATE TABLE booking (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
    "account int NOT NULL, amount int NOT NULL, booked_at timestamptz NOT NULL DEFAULT now())",
    f"INSERT INTO account (id) SELECT generate_series(1, {ACCOUNTS})",
    "VACUUM ANALYZE account",
    "CHECKPOINT",
)


def send_statement() -> str:
    """`Outbox.send`'s INSERT with the values that the application would bind, for pgbench."""
    row = encode(Message(service="billing", body={"account": 7, "amount": 100}, key="7"))
    values = {
        **dict.fromkeys(row._fields, "NULL"),
        "message_id": "gen_random_uuid()",
        "to_service": "'billing'",
        "key": ":account::text",
        "headers": f"'{row.headers}'",
        "body": f"'\\x{row.body.hex()}'",
    }
    return PSYCOPG_INSERT.replace("%s", "{}").format(*(values[n] for n in row._fields)) + ";\n"


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


def python_microseconds(stage: Stage) -> float:
    """What `send` adds to a bare psycopg execute of the same statement and values."""
    outbox, batch = Outbox(), 2000
    with stage.app.connect(role="bench") as connection:
        row = encode(Message(service="billing", body={"account": 7}, key="7"))

        def each(action: Callable[[], object]) -> float:
            started = time.perf_counter()
            for _ in range(batch):
                action()
            return (time.perf_counter() - started) / batch * 1e6

        def bare() -> object:
            return connection.execute(PSYCOPG_INSERT, row)

        def send() -> object:
            return outbox.send(connection, "billing", {"account": 7}, key="7")

        send()
        added = []
        for _ in range(9):
            added.append(-each(bare) + each(send))
            connection.rollback()
    return median(added)


def run(stage: Stage) -> None:
    """Notes send_tps_kept, send_added_p50_ms and send_python_us."""
    execute(stage.app, *TABLES)
    folder = stage.server.data_dir.parent
    scripts = {}
    for name, send in (("bare", ""), ("send", send_statement())):
        scripts[name] = folder / f"{name}.sql"
        scripts[name].write_text(BUSINESS.format(accounts=ACCOUNTS, send=send))
    measured: dict[str, list[Latency]] = {"bare": [], "send": []}
    for _ in range(ROUNDS):
        for name, script in scripts.items():
            execute(stage.app, "CHECKPOINT")
            measured[name].append(pgbench(stage, script))
    pairs = list(zip(measured["bare"], measured["send"], strict=True))
    stage.note("send_bare_tps", median(bare.tps for bare, _ in pairs), "1/s")
    stage.note("send_tps", median(send.tps for _, send in pairs), "1/s")
    kept = median(send.tps / bare.tps for bare, send in pairs)
    stage.note("send_tps_kept", kept, "of the bare tps", ">= 0.80")
    added = median(send.p50 - bare.p50 for bare, send in pairs)
    stage.note("send_added_p50_ms", added, "ms")
    stage.note("send_python_us", python_microseconds(stage), "µs", "<= 60")
