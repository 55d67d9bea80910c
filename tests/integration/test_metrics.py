"""Metrics of real databases and processes: right, complete, and there while something is down."""

from __future__ import annotations

import http.server
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from saf import create_service
from saf.broker.grants import Kind, grant
from saf.config import Broker, Settings, load
from saf.database import Dsn
from saf.operating.figures import asker
from saf.operating.watch import Watch
from saf.receiving.dispatch.condition import Book
from saf.routing.routes import add_route
from saf.telemetry.metrics import OVERDUE
from saf_demo.servers import free_port
from tests.endpoints import Partner, listening, serving
from tests.pipeline import connect, forward, new_member, send
from tests.programs import BIN, configuration, environment, saf
from tests.programs import send as send_many
from tests.receivers import prepare, put
from tests.scraping import scrape, series, served, value
from tests.silence import mute
from tests.waits import until

WORKER = """
import saf
from saf.database import Dsn

worker = saf.Worker(Dsn({dsn!r}), "billing", policy=saf.Policy(max_attempts=1))

@worker.handler()
def handle(message, connection):
    if message.body == b"bad":
        raise ValueError("it is bad")
"""


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    with connect(mom) as connection:
        create_service(connection, "billing")
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


@contextmanager
def running(*command: object, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A program, until the block ends; then it is told to stop."""
    with subprocess.Popen(
        [str(one) for one in (BIN / "saf", *command)],
        env=environment(),
        cwd=cwd,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said


def figures(config: Path) -> str:
    done = saf("metrics", "--config", config)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What the databases say


def test_what_is_pending_is_shown_by_where_it_goes_and_by_service(app: Dsn, config: Path) -> None:
    with connect(app) as connection:
        add_route(connection, "erp", service="billing")
        for service, count in (("billing", 3), ("other", 2)):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, body, created_at) "
                "SELECT %s, '', now() - interval '90 s' FROM generate_series(1, %s)",
                (service, count),
            )
    page = figures(config)
    erp = {"broker": "shop", "destination": "erp", "service": "billing"}
    assert value(page, "saf_pending_messages", **erp) == 3
    assert 90 <= (value(page, "saf_oldest_pending_seconds", **erp) or 0) < 300
    other = {"broker": "shop", "destination": "mom", "service": "other"}
    assert value(page, "saf_pending_messages", **other) == 2
    forwarder = {"broker": "shop", "log": "outbox", "subscription": "forwarder"}
    assert 90 <= (value(page, "saf_subscription_lag_seconds", **forwarder) or 0) < 300
    assert value(page, "saf_unowned_shards", **forwarder) == 64
    assert value(page, "saf_members", **forwarder) == 0
    assert value(page, "saf_up", broker="shop") == value(page, "saf_up", broker="mom") == 1
    assert value(page, "saf_destination_state", broker="shop", destination="mom", state="up") == 1


def test_held_messages_are_counted_and_how_long_they_are_overdue(app: Dsn, config: Path) -> None:
    names = ("saf_held_messages", "saf_held_overdue_seconds", "saf_refused_messages")
    page = figures(config)
    assert [value(page, name, broker="shop") for name in names] == [0, 0, 0]
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.held (to_service, body, due, sender, refused) SELECT 'billing', '', "
            "now() + n * interval '1 min', 'x', CASE WHEN n = -9 THEN 'no' END "
            "FROM unnest(ARRAY[-9, -5, -1, 3]) AS n"
        )
        connection.execute(
            "INSERT INTO saf.held (to_service, body, name, once_for, forget_at, sender) "
            "VALUES ('billing', '', 'sent', '1 d', now(), 'x')"
        )
    page = figures(config)
    assert [value(page, name, broker="shop") for name in (names[0], names[2])] == [3, 1]
    assert 300 <= (value(page, names[1], broker="shop") or 0) < 400


def test_a_message_becomes_overdue_while_nothing_is_committed(app: Dsn) -> None:
    settings = Settings(brokers={"shop": Broker(dsn=app)})
    ask = asker(settings)
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.held (to_service, body, due, sender) "
            "VALUES ('billing', '', now() + interval '0.2 s', 'x')"
        )

        def overdue() -> float:
            samples = ask(connection, "shop")
            (found,) = [one.value for one in samples if one.metric is OVERDUE]
            return float(found)  # type: ignore[arg-type]

        assert overdue() < 0.2
        until(lambda: overdue() > 0)


def test_what_is_set_aside_and_by_whom_is_shown(app: Dsn, mom: Dsn, config: Path) -> None:
    gone = Dsn("host=/nonexistent dbname=gone")
    with connect(app) as source, connect(mom) as store:
        add_route(source, "erp", service="billing")
        for _ in range(3):
            send(source, "x")
        source.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('other', '')")
        forward(app, mom=mom, erp=gone)
        new_member(source).balance(source)
        source.execute(
            "INSERT INTO saf.dead_letter (subscription_id, shard, id, to_service, body, reason, "
            "error) VALUES (1, 1, 1, 'x', '', 'rejected', 'no')"
        )
        store.execute(
            "INSERT INTO saf.dropped (subscription_id, shard, reason, messages, last_message_id) "
            "SELECT subscription_id, 1, 'repeat', 5, gen_random_uuid() FROM saf.subscription "
            "WHERE name = 'billing'"
        )
        ((number,),) = store.execute(
            "SELECT subscription_id FROM saf.subscription WHERE name = 'billing'"
        ).fetchall()
        Book(subscription_id=number, endpoint="partner").down(store, "no answer", wait=4)
        store.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('billing', '')")
        page = figures(config)
    of = {"broker": "shop", "subscription": "forwarder"}
    lane = {**of, "destination": "erp", "kind": "main"}
    assert value(page, "saf_parked_messages", **lane) == 3
    assert (value(page, "saf_parked_lane_seconds", **lane) or 0) > 0
    assert value(page, "saf_most_attempts", **lane) == 1
    assert value(page, "saf_dead_letters", **of, reason="rejected") == 1
    assert value(page, "saf_members", **of, log="outbox") == 1
    assert value(page, "saf_unowned_shards", **of, log="outbox") == 0
    down = {"broker": "shop", "destination": "erp"}
    assert value(page, "saf_destination_state", **down, state="down") == 1
    assert value(page, "saf_destination_state", **down, state="up") == 0
    there = {"broker": "mom", "subscription": "billing"}
    assert value(page, "saf_dropped_messages_total", **there, reason="repeat") == 5
    assert value(page, "saf_unread_messages", **there) == 1
    endpoint = {"broker": "mom", "endpoint": "partner"}
    assert value(page, "saf_endpoint_state", **endpoint, state="open") == 1
    assert value(page, "saf_endpoint_state", **endpoint, state="closed") == 0
    assert value(page, "saf_ring_used_slots", broker="shop", log="outbox") == 1
    assert value(page, "saf_ring_used_slots", broker="shop", log="inbox") == 0


def test_the_oldest_transaction_of_a_broker_is_shown(app: Dsn, config: Path) -> None:
    with connect(app) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT pg_sleep(1.1)")
        page = figures(config)
        connection.execute("ROLLBACK")
    assert (value(page, "saf_oldest_transaction_seconds", broker="shop") or 0) > 1
    assert (value(page, "saf_oldest_transaction_seconds", broker="mom") or 0) < 1


def test_the_services_beyond_the_busiest_are_other(app: Dsn, config: Path) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, body) SELECT 'service ' || n, '' "
            "FROM generate_series(1, 300) AS n, generate_series(1, 1 + (n <= 20)::int)"
        )
    page = figures(config)
    pending = {
        dict(labels)["service"]: count
        for (name, labels), count in series(page).items()
        if name == "saf_pending_messages"
    }
    assert len(pending) == 52  # fifty, the others, and the destination's own outbox
    assert pending["other"] == 250
    assert all(pending[f"service {n}"] == 2 for n in range(1, 21))


def test_a_broker_that_is_down_is_shown_as_down_and_the_others_are_there(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    gone = Dsn("host=/nonexistent dbname=gone")
    config = configuration(tmp_path / "saf.toml", {"shop": app, "gone": gone}, {"mom": mom})
    done = saf("metrics", "--config", config)
    assert done.returncode == 75
    assert "saf: broker 'gone'" in done.stderr
    assert value(done.stdout, "saf_up", broker="gone") == 0
    assert value(done.stdout, "saf_up", broker="shop") == 1
    assert not [1 for _, labels in series(done.stdout) if ("broker", "gone") in labels][1:]


def test_a_broker_that_hangs_holds_up_no_other_and_is_back_when_it_answers(
    app: Dsn, mom: Dsn, config: Path
) -> None:
    settings = load(config)
    places = {"shop": Broker(dsn=app), "mom": Broker(dsn=mom)}
    watch = Watch(lambda: places, asker(settings), patience_seconds=1)

    def up() -> dict[str, float | Any]:
        watch._taken_at = float("-inf")
        return {one.labels[0]: one.value for one in watch.take() if one.metric.name == "saf_up"}

    try:
        assert up() == {"shop": 1, "mom": 1}
        with connect(app) as connection:
            connection.execute("BEGIN; LOCK TABLE saf.cursor IN ACCESS EXCLUSIVE MODE")
            assert up() == {"shop": 0, "mom": 1}
            assert "has not answered for 1 s" in watch.down["shop"]
            until(lambda: "lock" in watch.down.get("shop", "") or not up())
            connection.execute("ROLLBACK")
        until(lambda: up() == {"shop": 1, "mom": 1})
        assert watch.down == {}
    finally:
        watch.close()


@pytest.mark.full
def test_brokers_whose_host_drops_packets_hide_none_that_is_healthy(app: Dsn, config: Path) -> None:
    with mute() as gone:
        places = {f"gone {n}": Broker(dsn=gone) for n in range(40)}
        places["shop"] = Broker(dsn=app)
        watch = Watch(lambda: places, asker(load(config)), patience_seconds=4)
        try:
            for _ in range(2):
                watch._taken_at = float("-inf")
                page = watch.take()
                up = {one.labels[0] for one in page if one.metric.name == "saf_up" and one.value}
                assert up == {"shop"}
                assert len(watch.down) == 40
        finally:
            watch.close()


def test_a_broker_that_has_vanished_from_a_fleet_is_not_down_for_ever(
    app: Dsn, config: Path
) -> None:
    gone = Dsn("host=/nonexistent dbname=gone")
    places = {"shop": Broker(dsn=app), "gone": Broker(dsn=gone)}
    watch = Watch(lambda: places, asker(load(config)))
    try:
        watch.take()
        assert watch.down.keys() == {"gone"}
        del places["gone"]
        watch._taken_at = float("-inf")
        assert {one.labels[0] for one in watch.take()} == {"shop"}
        assert watch.down == {}
    finally:
        watch.close()


def test_an_operator_sees_all_figures_and_who_may_not_is_told_the_command(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    role = f"watcher_{app.database}"
    with connect(app) as owner:
        owner.execute(f"CREATE ROLE {role} LOGIN")
        try:
            config = configuration(
                tmp_path / "saf.toml", {"shop": Dsn(f"{app.conninfo} user={role}")}, {"mom": mom}
            )
            grant(owner, role, [Kind.OPERATOR])
            page = figures(config)
            assert value(page, "saf_up", broker="shop") == 1
            grant(owner, role, [Kind.WRITER])
            done = saf("metrics", "--config", config)
            assert value(done.stdout, "saf_up", broker="shop") == 0
            assert "permission denied" in done.stderr
            assert "saf grant" in done.stderr
        finally:
            owner.execute(f"DROP OWNED BY {role}")
            owner.execute(f"DROP ROLE {role}")


def test_an_exporter_serves_what_is_true_at_each_scrape(app: Dsn, mom: Dsn, config: Path) -> None:
    port = free_port()
    forwarder = {"broker": "shop", "log": "outbox", "subscription": "forwarder"}
    with running("metrics", "--listen", f"127.0.0.1:{port}", "--config", config):
        until(lambda: value(scrape(port), "saf_up", broker="shop") == 1)
        send_many(app, 5)
        until(lambda: (value(scrape(port), "saf_subscription_lag_seconds", **forwarder) or 0) > 0)
        forward(app, mom=mom)
        until(lambda: value(scrape(port), "saf_subscription_lag_seconds", **forwarder) == 0)
        with connect(app) as connection:
            kept = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'saf metrics' "
                "AND datname = current_database()"
            ).fetchone()
        assert kept == (1,)


def test_a_port_that_is_taken_is_one_sentence(config: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as taken:
        listen = f"127.0.0.1:{taken.server_port}"
        done = saf("metrics", "--listen", listen, "--config", config)
    assert done.returncode == 2
    assert f"metrics cannot be served at {listen}" in done.stderr
    assert "name another port" in done.stderr


# What a process did


def test_a_loop_serves_what_it_has_forwarded(app: Dsn, config: Path) -> None:
    port = free_port()
    to = {"broker": "shop", "destination": "mom"}
    send_many(app, 30)
    with running(
        *("forward", "--loop", "--metrics", f"127.0.0.1:{port}", "--interval", "0.1"),
        *("--config", config),
    ):
        until(lambda: value(scrape(port), "saf_forwarded_messages_total", **to) == 30)
        send_many(app, 5)
        until(lambda: value(scrape(port), "saf_forwarded_messages_total", **to) == 35)
        page = scrape(port)
    assert value(page, "saf_chunk_messages_sum", destination="mom") == 35
    assert value(page, "saf_chunk_messages_count", destination="mom") == value(
        page, "saf_chunk_seconds_count", destination="mom"
    )
    assert value(page, "saf_cycle_messages_sum") == 35
    assert (value(page, "saf_cycle_seconds_sum") or 0) > 0
    assert value(page, "saf_delivered_messages_total", **to, service="billing") == 35
    assert value(page, "saf_repeated_messages_total", **to) == 0
    assert value(page, "saf_retried_messages_total", **to) == 0


def test_a_run_writes_what_it_did_to_a_file(app: Dsn, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "forward.prom"
    with connect(app) as connection:
        add_route(connection, "erp", service="billing")
        send(connection, "x")
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('nobody', '')")
    done = saf("forward", "--metrics-textfile", file, "--config", config)
    assert done.returncode == 0, done.stderr
    page = file.read_text()
    assert value(page, "saf_set_aside_messages_total", broker="shop", state="parked") == 2
    with connect(app) as connection:
        connection.execute("UPDATE saf.route SET destination = 'mom'")
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    done = saf("forward", "--metrics-textfile", file, "--config", config)
    to = {"broker": "shop", "destination": "mom"}
    page = file.read_text()
    assert value(page, "saf_forwarded_messages_total", **to) == 1
    assert value(page, "saf_retried_messages_total", **to) == 1
    assert "saf_set_aside" not in page, "a run counts from 0"


def test_a_run_that_meets_a_problem_counts_it(mom: Dsn, tmp_path: Path) -> None:
    gone = Dsn("host=/nonexistent dbname=gone")
    config = configuration(tmp_path / "saf.toml", {"shop": gone}, {"mom": mom})
    file = tmp_path / "forward.prom"
    assert saf("forward", "--metrics-textfile", file, "--config", config).returncode == 75
    assert value(file.read_text(), "saf_problems_total", broker="shop", kind="Unavailable") == 1


def test_metrics_are_served_by_what_stays_only(config: Path) -> None:
    done = saf("forward", "--metrics", ":9464", "--config", config)
    assert done.returncode == 2
    assert "--metrics-textfile" in done.stderr


class Gateway(http.server.BaseHTTPRequestHandler):
    """A pushgateway, as far as a push goes."""

    pushed: dict[str, str] = {}  # noqa: RUF012 - the class is the server's memory

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        self.pushed[self.path] = self.rfile.read(size).decode()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_what_a_run_did_is_pushed_and_a_gateway_that_is_gone_fails_no_run(
    app: Dsn, config: Path
) -> None:
    send_many(app, 3)
    with http.server.HTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert saf("forward", "--metrics-push", url, "--config", config).returncode == 0
        assert saf("metrics", "--push", url, "--config", config).returncode == 0
        server.shutdown()
        thread.join()
    ran, state = Gateway.pushed["/metrics/job/saf-forward"], Gateway.pushed["/metrics/job/saf"]
    to = {"broker": "shop", "destination": "mom"}
    assert value(ran, "saf_forwarded_messages_total", **to) == 3
    assert value(state, "saf_up", broker="mom") == 1
    done = saf("forward", "--metrics-push", url, "--config", config)
    assert done.returncode == 0
    assert "metrics_not_published" in done.stderr


def test_a_push_to_what_is_no_gateway_is_said_in_one_line(config: Path) -> None:
    for wrong in (
        "http://",
        "ftp://x",
        "localhost:port",
        "http://ü.example.com",
        "a b",
        "a..b:9091",
    ):
        for command in (("forward", "--metrics-push", wrong), ("metrics", "--push", wrong)):
            done = saf(*command, "--config", config)
            assert done.returncode == 2, command
            assert done.stderr == (
                f"saf: metrics to {wrong!r}: expected HOST:PORT or a URL, such as "
                "http://pushgateway.example.com:9091\n"
            )

    def talk_nonsense(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"220 mail.example.com ESMTP\r\n")

    with listening(talk_nonsense) as url:
        done = saf("forward", "--metrics-push", url, "--config", config)
    assert (done.returncode, "metrics_not_published" in done.stderr) == (0, True)


def test_workers_serve_what_they_have_handled_each_at_a_port_of_its_own(
    mom: Dsn, tmp_path: Path
) -> None:
    prepare(mom)
    (tmp_path / "shop.py").write_text(WORKER.format(dsn=mom.conninfo))
    put(mom, "good", "good", "bad")
    port = free_port(2)
    of = {"subscription": "billing"}
    with running(
        *("worker", "shop:worker", "--processes", "2", "--metrics", f"127.0.0.1:{port}"),
        cwd=tmp_path,
    ):

        def both(name: str, **labels: str) -> float:
            pages = (scrape(port), scrape(port + 1))
            return sum(value(page, name, **of, **labels) or 0 for page in pages)

        until(lambda: both("saf_received_messages_total", outcome="handled") == 2)
        until(lambda: both("saf_received_messages_total", outcome="dead") == 1)
        assert both("saf_failed_attempts_total", last="true") == 1
        assert both("saf_handler_seconds_count") >= 3
        assert both("saf_receive_seconds_count") >= 1
        until(lambda: served(port) and served(port + 1))


def test_a_dispatcher_counts_answers_by_what_they_mean(
    mom: Dsn, config: Path, tmp_path: Path
) -> None:
    prepare(mom)
    with serving(Partner()) as partner:
        config.write_text(config.read_text() + f'[endpoints.billing]\nurl = "{partner.url}"\n')
        put(mom, "1", "2")
        file = tmp_path / "dispatch.prom"
        done = saf("dispatch", "--metrics-textfile", file, "--config", config)
        assert done.returncode == 0, done.stderr
        page = file.read_text()
        of = {"endpoint": "billing"}
        assert value(page, "saf_dispatch_answers_total", **of, outcome="done") == 2
        assert value(page, "saf_dispatch_seconds_count", **of) == 2
        assert value(page, "saf_dispatch_in_flight", **of) == 0
        partner.always(422)
        put(mom, "3")
        saf("dispatch", "--metrics-textfile", file, "--config", config)
    assert value(file.read_text(), "saf_dispatch_answers_total", **of, outcome="rejected") == 1
