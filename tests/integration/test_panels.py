"""Each panel of the Grafana dashboard has data while every program runs and everything happens."""

from __future__ import annotations

import http.server
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from saf import create_service
from saf.database import Dsn, fetch
from saf.receiving.dispatch.condition import Book
from saf.routing.routes import add_route
from saf_demo.servers import free_port
from tests import manifests
from tests.endpoints import Partner, partner
from tests.pipeline import connect
from tests.programs import ROOT, saf
from tests.prometheus_server import prometheus, query, started
from tests.waits import until

__all__ = ["partner"]

DASHBOARD = ROOT / "ops" / "grafana" / "saf.json"

OWNED = "SELECT count(*) FROM saf.cursor WHERE owner IS NOT NULL"

SCRAPE_SECONDS = 4
INTERVAL = "30s"
"""What Grafana puts for $__rate_interval: several scrapes."""

WORKER = """
import saf

worker = saf.Worker({dsn!r}, "billing", policy=saf.Policy(max_attempts=1))

@worker.handler()
def handle(message, connection):
    if message.body == b"bad":
        raise ValueError("it is bad")
"""

SEND = "INSERT INTO saf.outbox (to_service, key, body) VALUES (%s, %s, %s)"

SCALED = {
    "autoscaling": {"prometheus": "http://prometheus:9090"},
    "forwarder": {"autoscaling": {"enabled": True, "brokers": ["nobody"]}},
    "dispatcher": {
        "enabled": True,
        "autoscaling": {"enabled": True, "broker": "mom", "subscriptions": ["partner"]},
    },
}
"""Values of the chart: also a broker without a figure counts as 0."""

FENCED = "saf_fenced_total"
"""Appears only when a forwarder sleeps past its lease; contract/test_5_fenced.py has this."""
SOURCE = "saf_source_"
"""Metrics of sources, for which no other broker runs here; contract/test_sources.py has them."""


def panels() -> Iterator[tuple[str, str]]:
    """The title and each expression of each panel, as Grafana asks."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", INTERVAL)
            yield panel["title"], text.replace("$broker", ".*")


def empty(at: str, expression: str) -> bool:
    """Whether an expression has no number at all."""
    values = [float(one["value"][1]) for one in query(at, expression)]
    return all(math.isnan(value) for value in values)


@contextmanager
def files(folder: Path) -> Iterator[int]:
    """Serve the files of a folder, as the node exporter serves its textfiles."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        extensions_map = {".prom": "text/plain", "": "text/plain"}  # noqa: RUF012 - the base's

        def log_message(self, *_: object) -> None:
            return

    handler = partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@contextmanager
def sending(app: Dsn) -> Iterator[None]:
    """Send messages of all kinds until the block ends."""
    over = threading.Event()

    def send() -> None:
        with connect(app) as connection:
            number = 0
            while not over.wait(0.25):
                number += 1
                body = b"bad" if number % 8 == 0 else b"good"
                for service in ("billing", "partner"):
                    connection.execute(SEND, (service, f"key {number % 5}", body))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_each_panel_has_data_while_everything_runs(
    new_broker: Callable[[str], Dsn], app: Dsn, mom: Dsn, partner: Partner, tmp_path: Path
) -> None:
    quiet, tenant = new_broker("quiet"), new_broker("tenant")
    with connect(app) as source, connect(mom) as store:
        for service in ("billing", "partner"):
            create_service(store, service)
            add_route(source, "mom", service=service)
        add_route(source, "erp", service="erp")
        for service in ("erp", "nowhere"):  # a destination that is down; no route
            source.execute(SEND, (service, "a", b""))
        source.execute(
            "INSERT INTO saf.dead_letter (subscription_id, shard, id, to_service, body, reason, "
            "error) VALUES (1, 1, 1, 'billing', '', 'rejected', 'no')"
        )
        ((number,),) = fetch(
            store, "SELECT subscription_id FROM saf.subscription WHERE name = 'partner'"
        )
        store.execute(
            "INSERT INTO saf.dropped (subscription_id, shard, reason, messages, last_message_id) "
            "VALUES (%s, 1, 'repeat', 5, gen_random_uuid())",
            [number],
        )
        Book(subscription_id=number, endpoint="other").down(store, "no answer", wait=4)
    with connect(quiet) as source:
        source.execute(SEND, ("billing", "a", b""))
    programs = Programs(tmp_path, partner.url, app=app, mom=mom, quiet=quiet, tenant=tenant)
    programs.kill_a_forwarder()
    written = ("--metrics-textfile", tmp_path / "metrics")
    purged = saf("purge", "--broker", "shop", *written, "--config", programs.config)
    assert purged.returncode == 0, purged.stderr
    with ExitStack() as running:
        for arguments in programs.started:
            running.enter_context(started(*arguments, cwd=tmp_path))
        targets = [*programs.ports, running.enter_context(files(tmp_path))]
        at = running.enter_context(prometheus(tmp_path, *targets, seconds=SCRAPE_SECONDS))
        held = running.enter_context(app.connect(role="test"))
        held.execute("SELECT pg_current_xact_id()")
        running.enter_context(sending(app))
        missing = dict.fromkeys(
            one for one in panels() if FENCED not in one[1] and SOURCE not in one[1]
        )
        keda = [
            one["spec"]["triggers"][0]["metadata"]["query"]
            for one in manifests.named(manifests.chart(SCALED), "ScaledObject").values()
        ]
        assert len(keda) == 2

        def complete() -> bool:
            for panel in [*missing]:
                if not empty(at, panel[1]):
                    del missing[panel]
            return not missing

        try:
            until(complete, seconds=180)
        except AssertionError:
            raise AssertionError(f"panels without data: {[*missing]}") from None
        for expression in keda:
            assert len(query(at, expression)) == 1, expression


class Programs:
    """The programs of saf that are scraped, each with its port."""

    def __init__(self, folder: Path, url: str, **brokers: Dsn) -> None:
        app, mom, quiet, tenant = (brokers[name] for name in ("app", "mom", "quiet", "tenant"))
        self._app = app
        self.config = folder / "saf.toml"
        seen = folder / "all.toml"
        maintenance = json.dumps(make_conninfo(mom.conninfo, dbname="postgres"))
        text = (
            f"[brokers.shop]\ndsn = {json.dumps(app.conninfo)}\n"
            f'[brokers.gone]\ndsn = "host=/nonexistent dbname=gone"\n'
            f"[fleets.tenants]\ndsn = {maintenance}\ndatabases = {json.dumps(tenant.database)}\n"
            f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
            f'[destinations.erp]\ndsn = "host=/nonexistent dbname=erp"\n'
            f"[endpoints.partner]\nurl = {json.dumps(url)}\nbroker = 'mom'\n"
            "[forwarder]\nlease_seconds = 3\n"
        )
        self.config.write_text(text)
        seen.write_text(f"[brokers.quiet]\ndsn = {json.dumps(quiet.conninfo)}\n{text}")
        (folder / "shop.py").write_text(WORKER.format(dsn=mom.conninfo))
        self.ports = [free_port() for _ in range(4)]
        exporter, forwarder, worker, dispatcher = (f"127.0.0.1:{one}" for one in self.ports)
        loop: list[object] = ["forward", "--loop", "--metrics", forwarder, "--config", self.config]
        self.started: list[list[object]] = [
            ["metrics", "--listen", exporter, "--config", seen],
            loop,
            ["worker", "shop:worker", "--metrics", worker],
            ["dispatch", "--loop", "--metrics", dispatcher, "--config", self.config],
        ]
        self._loop = loop

    def kill_a_forwarder(self) -> None:
        """Leave the shards of a forwarder for the next one to take over."""
        with started(*self._loop) as process:
            with connect(self._app) as source:
                until(lambda: fetch(source, OWNED) == [(64,)])
            process.kill()
            process.wait()
