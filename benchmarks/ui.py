"""The dashboard beside much that is pending: what each page takes, and what it costs idle.

    python -m benchmarks.ui [--messages 10000000] [--brokers 100] [--idle SECONDS]

One broker has so many pending messages, 100,000 parked ones and 100,000 dead letters; the others
are empty databases of the same server, on a disk and without fsync. Each page is fetched by HTTP,
of one broker and of all, 20 times after a first one. Then `saf ui`, which nobody looks at, and
`saf metrics --listen`, which is scraped every 15 s, run for a while: what they, and the server's
processes for them, use of a core. docs/ui.md says what follows from the figures.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from urllib.parse import urlencode

import httpx

from benchmarks.stage import cpu_seconds
from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.database import Dsn
from saf.testing.databases import Databases

TOKEN = "a-token-for-a-benchmark"  # noqa: S105 - of this process's own dashboard
SERVER = {"fsync": "off", "max_connections": 400, "max_wal_size": "8GB", "shared_buffers": "256MB"}
ROUNDS = 20
SET_ASIDE = 100_000
TRANSACTION = 1000
"""How many messages a transaction sends: the outbox is listed by transactions."""
SCRAPE_SECONDS = 15.0
EXPORTER_PORT = 18464

SEND = """
INSERT INTO saf.outbox (from_service, to_service, key, message_type, body)
SELECT 'shop', 'service ' || n % 20, 'k' || n % 100000, 'order.placed', '{"order": 1}'
FROM generate_series(%s::int, %s) AS n
"""
PARK = """
INSERT INTO saf.parked (subscription_id, destination, kind, subject, shard, id, batch, position,
                        to_service, key, body)
SELECT subscription_id, CASE WHEN n %% 2 = 0 THEN 'mom' ELSE '' END,
       CASE WHEN n %% 2 = 0 THEN 'main' ELSE 'route' END,
       CASE WHEN n %% 2 = 0 THEN '' ELSE 'nobody ' || n %% 1000 END,
       n %% 64, n, 1, n, 'service ' || n %% 20, 'k' || n, ''
FROM saf.subscription, generate_series(1, %s) AS n WHERE name = 'forwarder'
"""
WAIT = """
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, error)
SELECT DISTINCT subscription_id, destination, kind, subject, 'it waits' FROM saf.parked
"""
BURY = """
INSERT INTO saf.dead_letter (subscription_id, destination, shard, id, reason, error, to_service,
                             key, body)
SELECT subscription_id, 'mom', n %% 64, n, 'rejected', 'violates a constraint',
       'service ' || n %% 20, 'k' || n, ''
FROM saf.subscription, generate_series(1, %s) AS n WHERE name = 'forwarder'
"""
ONE = "SELECT message_id::text, created_at FROM saf.outbox WHERE shard = 7 ORDER BY txid LIMIT 1"

PAGES = (
    *("/", "/charts", "/pending", "/parked", "/parked/messages", "/dead", "/outbox", "/routes"),
    *("/members", "/dialogs", "/doctor", "/jobs", "/audit"),
)
DEEP = (
    *("/parked?broker=deep", "/parked/messages?broker=deep", "/dead?broker=deep"),
    *("/dead?broker=deep&key=k77777", "/outbox?broker=deep", "/outbox?broker=deep&state=pending"),
    *("/outbox?broker=deep&service=service+7", "/outbox?broker=deep&exact=yes&key=k77777"),
    *("/outbox?broker=deep&key=k77777", "/outbox?broker=deep&newest=yes"),
    *("/members?broker=deep", "/dialogs?broker=deep", "/routes?broker=deep&service=service+7"),
)


def fill(deep: Dsn, messages: int) -> None:
    """Fill a broker, as much traffic would have while nobody forwarded."""
    with deep.connect(role="test", autocommit=True) as connection:
        for first in range(1, messages + 1, TRANSACTION):
            until = min(first + TRANSACTION - 1, messages)
            connection.execute(SEND.replace(" % ", " %% "), [first, until])
        for statement in (PARK, BURY):
            connection.execute(statement, [SET_ASIDE])
        connection.execute(WAIT)
        connection.execute("VACUUM ANALYZE")


def brokers(server: EmbeddedServer, count: int) -> Iterator[tuple[str, Dsn]]:
    """Give the deep broker, and as many empty ones as are wanted with it."""
    with closing(Databases(server.create_database("template_of_brokers"))) as databases:
        template = databases.create("template")
        migrate(template.dsn)
        for number in range(count):
            name = "deep" if number == 0 else f"broker{number}"
            yield name, databases.create_broker(name, template).dsn


def configuration(folder: Path, there: Mapping[str, Dsn]) -> Path:
    """Write a saf.toml of these brokers, and a destination."""
    lines = ["[forwarder]", 'default_destination = "mom"', "[ui]", f'operate_token = "{TOKEN}"']
    for name, dsn in there.items():
        lines += [f"[brokers.{name}]", f'dsn = "{dsn.conninfo}"']
    lines += ["[destinations.mom]", f'dsn = "{[*there.values()][-1].conninfo}"']
    file = folder / "saf.toml"
    file.write_text("\n".join(lines))
    return file


@contextmanager
def program(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command ``saf`` for a while."""
    command = [Path(sys.executable).parent / "saf", *arguments]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def visitor(process: subprocess.Popen[str]) -> httpx.Client:
    """Log in at the dashboard that a process serves."""
    assert process.stderr is not None
    found = re.search(r"http://\S+/", process.stderr.readline())
    assert found is not None
    client = httpx.Client(base_url=found[0], timeout=60)
    for _ in range(100):
        try:
            client.post("/login", data={"token": TOKEN, "name": "bench"})
        except httpx.ConnectError:
            time.sleep(0.1)
        else:
            return client
    raise RuntimeError("the dashboard does not answer")


def page_seconds(client: httpx.Client, path: str) -> dict[str, object]:
    """Time a page; what it was not shown of is said."""
    client.get(path)
    taken: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        answer = client.get(path)
        taken.append(time.perf_counter() - began)
    missing = answer.text.count("is not shown:")
    return {
        "page": path,
        "status": answer.status_code,
        "p50_ms": round(median(taken) * 1000),
        "max_ms": round(max(taken) * 1000),
        "not_shown": missing,
    }


def idle(file: Path, server: int, seconds: float) -> dict[str, float]:
    """What a dashboard and an exporter use of a core while nothing happens, in percent."""
    before = cpu_seconds(server, children=True)
    time.sleep(seconds)
    alone = cpu_seconds(server, children=True) - before
    listen = f":{EXPORTER_PORT}"
    with (
        program("ui", "--port", "0", "--config", file) as ui,
        program("metrics", "--listen", listen, "--config", file) as exporter,
    ):
        client = visitor(ui)
        client.get("/")
        time.sleep(90)  # until it has noticed that nobody looks any more
        began = [cpu_seconds(ui.pid, children=False), cpu_seconds(exporter.pid, children=False)]
        before = cpu_seconds(server, children=True)
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            urllib.request.urlopen(f"http://127.0.0.1:{EXPORTER_PORT}/metrics", timeout=60).read()
            time.sleep(SCRAPE_SECONDS)
        elapsed = time.monotonic() - started
        used = [
            cpu_seconds(one.pid, children=False) - was
            for one, was in zip((ui, exporter), began, strict=True)
        ]
        both = cpu_seconds(server, children=True) - before
    return {
        "ui_percent": round(100 * used[0] / elapsed, 2),
        "exporter_percent": round(100 * used[1] / elapsed, 2),
        "server_for_both_percent": round(100 * (both / elapsed - alone / seconds), 2),
    }


def main() -> None:
    """Run; see above."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ui", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--brokers", type=int, default=100)
    parser.add_argument("--idle", type=float, default=120.0, help="seconds; 0: do not measure it")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="saf-bench-ui-") as folder,
        EmbeddedServer(Path(folder) / "postgres", settings=SERVER) as server,
    ):
        there = dict(brokers(server, given.brokers))
        began = time.monotonic()
        fill(there["deep"], given.messages)
        print(json.dumps({"filled_seconds": round(time.monotonic() - began)}), flush=True)
        file = configuration(Path(folder), there)
        with program("ui", "--port", "0", "--write", "--config", file) as ui:
            client = visitor(ui)
            client.get("/")
            time.sleep(5)  # the first figures
            with there["deep"].connect(role="test") as connection:
                ((number, sent),) = connection.execute(ONE).fetchall()
            one = (f"/message?id={number}", f"/message?{urlencode({'id': number, 'at': sent})}")
            for path in (*PAGES, *DEEP, *one):
                print(json.dumps(page_seconds(client, path)), flush=True)
        if given.idle:
            pid = int((Path(folder) / "postgres" / "postmaster.pid").read_text().split()[0])
            print(json.dumps(idle(file, pid, given.idle)), flush=True)


if __name__ == "__main__":
    main()
