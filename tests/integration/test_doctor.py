"""`saf doctor`: each thing that is wrong is provoked, found, and named with its cure."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from saf import Worker, create_service, receive
from saf.broker.embedded import EmbeddedServer
from saf.broker.grants import Kind, grant
from saf.broker.migrate import migrate
from saf.broker.senders import add_senders
from saf.broker.services import set_fairness, subscription
from saf.config import Broker, Settings, Waits, load
from saf.database import Dsn, fetch
from saf.destinations.postgresql import Postgresql
from saf.errors import Braked
from saf.log import stream
from saf.operating.doctor import BROKER, Finding, Limits, examine
from saf.receiving.dispatch.condition import Book
from saf.setaside.backoff import postpone
from saf.setaside.lane import Lane
from tests.destinations import subscription as number_of
from tests.needed import absent
from tests.pipeline import Cycle, connect, forward, forwarding_rules, send
from tests.poolers import PgBouncer
from tests.programs import configuration, saf

FINE, FOUND, TRY_AGAIN = 0, 1, 75
NOWHERE = Dsn("host=/nonexistent dbname=mom")
AT_ONCE = Limits(long_seconds=0, stuck_seconds=0, many_attempts=1)

_number = itertools.count(1)
every_postgresql = pytest.mark.every_postgresql


def examined(
    app: Dsn,
    mom: Dsn | None = None,
    limits: Limits = AT_ONCE,
    bounds: Waits = Waits(),  # noqa: B008 - frozen
    **options: Any,
) -> list[Finding]:
    settings = Settings(
        brokers={"app": Broker(dsn=app)},
        destinations={"mom": Postgresql(dsn=mom or app)},
        bounds=bounds,
    )
    return examine(settings, limits=limits, **options)


def diagnosis(check: str, app: Dsn, mom: Dsn | None = None, **options: Any) -> list[Finding]:
    """What a check has found at the broker; it was made."""
    found = [one for one in examined(app, mom, **options) if one.check == check]
    here = [one for one in found if one.where == "broker 'app'"]
    assert here, "the check was not made"
    return [one for one in here if one.severity != "ok"]


def the(findings: list[Finding]) -> tuple[str, str, str]:
    (one,) = findings
    return one.severity, one.what, one.cure


def execute(dsn: Dsn, statement: str) -> None:
    with connect(dsn) as connection:
        connection.execute(statement)


@pytest.fixture
def new_role() -> Iterator[Callable[..., Dsn]]:
    """Logins with the rights of their kinds, which go with the test."""
    made: list[tuple[str, Dsn]] = []

    def create(dsn: Dsn, *kinds: Kind) -> Dsn:
        name = f"doctor_{next(_number)}"
        execute(dsn, f"CREATE ROLE {name} LOGIN")
        made.append((name, dsn))
        with connect(dsn) as connection:
            grant(connection, name, kinds)
        return Dsn(make_conninfo(dsn.conninfo, user=name))

    yield create
    for name, dsn in made:
        execute(dsn, f"DROP OWNED BY {name}")
        execute(dsn, f"DROP ROLE {name}")


# Reaching it


def test_a_database_that_does_not_answer_is_found_and_the_others_are_examined(app: Dsn) -> None:
    found = examined(app, NOWHERE)
    (error,) = [one for one in found if one.where == "destination 'mom'"]
    assert (error.check, error.severity) == ("reachable", "error")
    assert "No such file" in error.what
    assert {one.check for one in found if one.where == "broker 'app'"} > {"schema", "restored"}


def test_a_database_without_the_schema_is_found_with_the_command_that_mends_it(
    new_database: Callable[[str], Dsn], app: Dsn
) -> None:
    severity, what, cure = the(diagnosis("schema", new_database("empty")))
    assert (severity, "no saf schema" in what, "saf migrate" in cure) == ("error", True, True)
    execute(app, "UPDATE saf.alembic_version SET version_num = '0001'")
    found = examined(app)
    assert "has saf schema 0001" in next(one.what for one in found if one.check == "schema")
    asked_of_the_schema = {check.__name__ for check in BROKER}
    assert not asked_of_the_schema & {one.check for one in found}


def test_clocks_that_differ_are_found(app: Dsn, mom: Dsn) -> None:
    assert diagnosis("clock_skew", app) == []
    late = the(diagnosis("clock_skew", app, clock=lambda: time.time() - 3600))
    assert late[0] == "warning"
    assert "its clock is 3600 s ahead of this machine's" in late[1]
    assert not [one for one in examined(app, mom) if one.check == "clocks_agree"]
    any_at_all = examined(app, mom, limits=Limits(skew_seconds=-1))
    (between,) = [one for one in any_at_all if one.check == "clocks_agree"]
    assert between.where == "broker 'app' and destination 'mom'"


# The server


def test_a_healthy_pair_has_nothing_to_be_said_of(
    tmp_path: Path, own_server: EmbeddedServer
) -> None:
    app, mom = (own_server.create_database(name) for name in ("app", "mom"))
    migrate(app)
    migrate(mom)
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    with connect(app) as connection:
        send(connection, "fresh")
    done = saf("doctor", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (FINE, ""), done.stdout
    assert "0 errors, 0 warnings" in done.stdout

    execute(app, "ALTER DATABASE app SET synchronous_commit = off")
    execute(app, "ALTER ROLE postgres IN DATABASE mom SET synchronous_commit = off")
    _, here, _ = the(diagnosis("synchronous_commit", app, mom))
    assert "off by default for database app:" in here
    _, there, cure = the(diagnosis("synchronous_commit", mom))
    assert "off by default for role postgres in database mom:" in there
    assert "set it to on for role postgres in database mom" in cure


def test_settings_that_break_promises_are_found(own_server: EmbeddedServer) -> None:
    app = own_server.create_database("app")
    migrate(app)
    own_server.stop()
    own_server.settings |= {
        "fsync": False,
        "full_page_writes": False,
        "autovacuum": False,
        "synchronous_commit": "off",
        "max_connections": 12,
        "superuser_reserved_connections": 3,
    }
    own_server.start()
    found = diagnosis("settings", app)
    assert [(one.severity, one.what.split(":")[0]) for one in found] == [
        ("warning", "autovacuum = off"),
        ("error", "fsync = off"),
        ("error", "full_page_writes = off"),
    ]
    assert found[1].cure == "ALTER SYSTEM SET fsync = on, then reload"
    assert "for the server:" in the(diagnosis("synchronous_commit", app))[1]
    assert "max_connections = 12 are free" in the(diagnosis("connections", app))[1]


def test_a_standby_is_found(own_server: EmbeddedServer) -> None:
    app = own_server.create_database("app")
    migrate(app)
    own_server.stop()
    (own_server.data_dir / "standby.signal").touch()
    own_server.start()
    severity, what, cure = the(diagnosis("primary", app))
    assert (severity, what) == ("error", "the server is a standby")
    assert "primary" in cure


def test_clear_text_over_a_network_is_found(own_server: EmbeddedServer) -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            address = probe.getsockname()[0]
    except OSError:
        absent("a network interface", "connect this machine to a network")
    with socket.socket() as listener:
        listener.bind((address, 0))
        port = listener.getsockname()[1]
    app = own_server.create_database("app")
    migrate(app)
    for name, value in {"listen_addresses": f"{address},127.0.0.1", "port": port}.items():
        execute(app, f"ALTER SYSTEM SET {name} = '{value}'")
    with (own_server.data_dir / "pg_hba.conf").open("a") as rules:
        rules.write("host all all all trust\n")
    own_server.stop()
    own_server.start()

    def by(host: str) -> Dsn:
        return Dsn(make_conninfo(app.conninfo, host=host, port=port))

    severity, what, cure = the(diagnosis("encryption", by(address)))
    assert (severity, what) == ("warning", f"the connection to {address} is not encrypted")
    assert "sslmode=verify-full" in cure
    assert diagnosis("encryption", by("127.0.0.1")) == []


# Who holds things up


@every_postgresql
def test_who_has_sent_and_not_committed_is_named_without_what_the_query_holds(app: Dsn) -> None:
    with app.connect(role="slow report") as slow:
        slow.execute(
            "INSERT INTO saf.outbox (to_service, body) VALUES ('secret-service', 'secret-body')"
        )
        severity, what, cure = the(diagnosis("long_transactions", app))
        assert severity == "warning"
        assert what.startswith(
            f"pid {slow.info.backend_pid} (saf slow report, user postgres) has had a transaction "
            "open for "
        )
        assert "; idle in an open transaction since 20" in what
        assert what.endswith("; last statement: INSERT INTO saf.outbox (to_service, body) VALUES (")
        assert "holds up the messages it has sent, the purge of the outbox, vacuum" in what
        assert f"pg_terminate_backend({slow.info.backend_pid})" in cure
        assert "secret" not in str(examined(app))
        assert diagnosis("long_transactions", app, limits=Limits()) == []
    assert diagnosis("long_transactions", app) == []


def test_who_has_only_read_holds_up_the_purge_and_not_the_messages(app: Dsn) -> None:
    with app.connect(role="reader") as reader:
        reader.execute("SELECT count(*) FROM saf.inbox")
        _, what, _ = the(diagnosis("long_transactions", app))
    assert "it holds up the purge of the inbox, vacuum" in what


@every_postgresql
def test_a_prepared_transaction_is_named(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        connection.tpc_begin("it's prepared")
        send(connection, "in doubt")
        connection.tpc_prepare()
        connection.close()
    severity, what, cure = the(diagnosis("prepared_transactions", app))
    assert severity == "error"
    assert "prepared" in what
    assert "holds up the messages it has sent, the purge of the outbox, vacuum" in what
    statement = cure.split(" or ")[1].split(", as ")[0]
    execute(app, statement)
    assert diagnosis("prepared_transactions", app) == []


@every_postgresql
def test_a_role_without_pg_read_all_stats_says_what_it_could_not_see(
    app: Dsn, new_role: Callable[..., Dsn]
) -> None:
    role = new_role(app, Kind.FORWARDER, Kind.OPERATOR)
    with app.connect(role="hidden") as other:
        send(other, "in progress")
        severity, what, cure = the(diagnosis("sight", role))
        assert (severity, "are hidden from this role" in what) == ("warning", True)
        execute(app, cure)
        assert diagnosis("sight", role) == []
        assert "(saf hidden, user" in the(diagnosis("long_transactions", role))[1]


# The broker


def test_rights_that_a_forwarder_lacks_are_named_with_the_command_that_gives_them(
    app: Dsn, new_role: Callable[..., Dsn]
) -> None:
    role = new_role(app, Kind.RECEIVER)
    severity, what, cure = the(diagnosis("rights", role))
    assert severity == "error"
    assert "INSERT on saf.watermark" in what
    assert "SELECT on saf.outbox," in what
    assert "saf.cursor" not in what, "a receiver has those"
    name = str(role.parts["user"])
    assert f"saf grant --role forwarder {name} --dsn 'host=" in cure
    with connect(app) as connection:
        grant(connection, name, [Kind.FORWARDER])
    assert diagnosis("rights", role) == []


def test_what_the_role_may_not_look_at_is_said_and_the_rest_is_examined(
    app: Dsn, new_role: Callable[..., Dsn]
) -> None:
    role = new_role(app, Kind.FORWARDER)
    severity, what, cure = the(diagnosis("not_checked", role))
    assert severity == "warning"
    assert what.startswith("not checked because of missing rights: ")
    assert "dead_letters" in what
    assert what.count("permission denied for table dead_letter") == 1
    assert "saf grant --role operator" in cure
    assert diagnosis("parked", role) == []


def test_a_role_without_any_right_is_told_so_once(app: Dsn, new_role: Callable[..., Dsn]) -> None:
    found = [one for one in examined(new_role(app)) if one.where == "broker 'app'"]
    (denied,) = (one for one in found if one.check == "not_checked")
    assert denied.what.endswith("(permission denied for schema saf)")
    assert [one.what for one in found if "permission denied" in one.what] == [denied.what]


def test_a_constraint_that_older_rows_may_violate_is_found_with_the_command_that_validates_it(
    app: Dsn,
) -> None:
    assert diagnosis("constraints", app) == []
    execute(
        app,
        "ALTER TABLE saf.inbox DROP CONSTRAINT inbox_bounded, "
        "ADD CONSTRAINT inbox_bounded CHECK (octet_length(to_service) <= 255) NOT VALID",
    )
    severity, what, cure = the(diagnosis("constraints", app))
    assert severity == "warning"
    assert "'inbox_bounded' of saf.inbox" in what
    command = cure.removeprefix("as the owner, ").partition(":")[0]
    assert command == 'ALTER TABLE "saf"."inbox" VALIDATE CONSTRAINT "inbox_bounded"'
    execute(app, command)
    assert diagnosis("constraints", app) == []


def test_a_database_of_another_cluster_is_found(app: Dsn) -> None:
    assert diagnosis("restored", app) == []
    execute(app, "UPDATE saf.broker SET system_identifier = 1")
    severity, _, cure = the(diagnosis("restored", app))
    assert (severity, cure) == ("error", "saf rebase")


def test_a_subscription_that_nobody_reads_for_is_found(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "waits")
        send(connection, "waits")
    severity, what, cure = the(diagnosis("outbox_left_lying", app))
    assert severity == "error"
    assert re.fullmatch("nobody reads the outbox: 2 messages, waiting for up to .* s", what)
    assert "saf forward" in cure
    execute(
        app,
        "INSERT INTO saf.member (member_id, subscription_id, name, lease_until) "
        "SELECT gen_random_uuid(), subscription_id, 'alive', now() + interval '1 hour' "
        "FROM saf.subscription",
    )
    severity, what, _ = the(diagnosis("outbox_left_lying", app))
    assert (severity, "slow or stuck" in what) == ("warning", True)
    assert diagnosis("outbox_left_lying", app, limits=Limits()) == []
    forward(app, mom=mom)
    assert diagnosis("outbox_left_lying", app) == []


def test_a_consumer_that_is_gone_is_found(mom: Dsn) -> None:
    execute(mom, "INSERT INTO saf.inbox (to_service, body) VALUES ('billing', '')")
    assert diagnosis("inbox_left_lying", mom) == [], "nobody has subscribed"
    execute(mom, "INSERT INTO saf.subscription (name, log) VALUES ('billing', 'inbox')")
    execute(
        mom,
        "INSERT INTO saf.cursor (subscription_id, shard) SELECT subscription_id, "
        "generate_series(0, 63) FROM saf.subscription WHERE log = 'inbox'",
    )
    severity, what, cure = the(diagnosis("inbox_left_lying", mom))
    assert (severity, cure) == ("error", "start its worker")
    assert re.fullmatch("nobody reads 'billing': 1 message, waiting for up to .* s", what)


def test_a_stream_that_nobody_runs_is_found_and_what_frees_its_slots_is_named(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        stream.create(connection, "app", "outbox", "lake", "beginning")
        assert diagnosis("outbox_left_lying", app) == []
        send(connection, "waits")
    forward(app, mom=mom)
    severity, what, cure = the(diagnosis("outbox_left_lying", app))
    assert severity == "error"
    assert "the stream 'lake' of the outbox has not committed 1 message" in what
    assert "has never taken any" in what
    assert "saf subscription drop lake" in cure
    assert diagnosis("outbox_left_lying", app, limits=Limits()) == []
    with connect(app) as connection:
        stream.drop(connection, "outbox", "lake")
    assert diagnosis("outbox_left_lying", app) == []


def test_a_cure_drops_the_abandoned_stream_and_no_other_of_its_name(
    app: Dsn, mom: Dsn, other: Dsn, tmp_path: Path
) -> None:
    names = {"one": app, "two": other}
    configuration(tmp_path / "saf.toml", names, {"mom": mom})
    for dsn in names.values():
        with connect(dsn) as connection:
            for log in ("outbox", "inbox"):
                stream.create(connection, "it", log, "my lake", "beginning")
    execute(app, "INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '')")
    forward(app, mom=mom)
    found = examine(load(tmp_path / "saf.toml"), limits=AT_ONCE)
    _, _, cure = the([one for one in found if "stream" in one.what])
    assert cure.endswith("saf subscription drop 'my lake' --stream outbox --broker one"), cure
    done = saf(*shlex.split(cure[cure.index("saf sub") :])[1:], "--yes", cwd=tmp_path)
    assert done.stdout == "one: stream my lake of the outbox dropped\n", done.stderr
    left = {}
    for name, dsn in names.items():
        with connect(dsn) as connection:
            left[name] = stream.logs(connection, "my lake")
    assert left == {"one": ["inbox"], "two": ["outbox", "inbox"]}


def test_no_cure_acts_at_a_broker_where_nothing_was_found(
    app: Dsn, mom: Dsn, other: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app, "other": other}, {"mom": mom})
    for statement in (
        "INSERT INTO saf.route (service, destination) VALUES ('a b', 'gone')",
        "INSERT INTO saf.route (destination, broker) VALUES ('mom', gen_random_uuid())",
        "INSERT INTO saf.route (service, destination, local) VALUES ('news', 'mom', true)",
        "INSERT INTO saf.topic (name) VALUES ('news'), ('orders')",
        "INSERT INTO saf.router (service, kind, expression) VALUES ('orders', 'python', 'no:no')",
        "INSERT INTO saf.service (name) VALUES ('unheard')",
        "INSERT INTO saf.inbox (to_service, body) VALUES ('elsewhere', '')",
        "INSERT INTO saf.outbox (to_service, body, expires_at) VALUES ('x', '', '2020-01-01')",
    ):
        execute(app, statement)
    forward(app, mom=mom)
    with connect(app) as connection:
        connection.execute(SPEAK, {"expires": None})
    found = [one for one in examine(load(config), limits=Limits(stuck_seconds=0)) if one.cure]
    there = [one for one in found if one.where == "broker 'app'"]
    commands = re.findall(
        r"saf (?!outbox|dead list --key)[a-z]+ [a-z]+[^;,:]*", "; ".join(one.cure for one in there)
    )
    assert len(commands) >= 12, commands
    assert all("--broker app" in command for command in commands), commands
    named = {" ".join(command.split()[1:3]) for command in commands}
    assert named >= {
        *("route remove", "route disable", "topic remove", "router remove", "service remove"),
        *("subscription create", "service create", "dead groups", "dialog list", "dialog end"),
    }
    assert "saf route remove gone --service 'a b' --broker app" in " ".join(
        one.cure for one in there
    )


def test_messages_of_another_service_are_no_backlog_of_a_subscription(mom: Dsn) -> None:
    with connect(mom) as connection:
        for service in ("billing", "shipping"):
            create_service(connection, service)
    execute(
        mom,
        "INSERT INTO saf.inbox (to_service, key, body) "
        "SELECT 'shipping', n::text, '' FROM generate_series(1, 100) AS n",
    )
    found = {one.what.split("'")[1]: one for one in diagnosis("inbox_left_lying", mom)}
    assert found["shipping"].severity == "error"
    assert "nobody reads 'shipping': 100 messages, " in found["shipping"].what
    assert found["billing"].severity == "warning", "which is no reason to exit with 1"
    assert "has not passed 100 messages of other services" in found["billing"].what
    worker = Worker(mom, "billing")
    worker.handler()(lambda _, __: None)
    worker.drain()
    assert [one.what.split("'")[1] for one in diagnosis("inbox_left_lying", mom)] == ["shipping"]


def test_a_reader_that_is_connected_or_has_read_lately_is_slow_and_not_absent(mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, "audit")
        for key in ("a", "b"):
            connection.execute(
                "INSERT INTO saf.inbox (to_service, key, body, received_at) "
                "VALUES ('audit', %s, '', now() - interval '1 hour')",
                [key],
            )
    late = Limits(stuck_seconds=600)
    assert diagnosis("inbox_left_lying", mom, limits=late) == [], "the subscription is new"
    execute(mom, "UPDATE saf.subscription SET created_at = now() - interval '2 hours'")
    severity, what, _ = the(diagnosis("inbox_left_lying", mom, limits=late))
    assert (severity, what.startswith("nobody reads 'audit': 2 messages, ")) == ("error", True)
    with receive(mom, "audit", max_messages=1):
        severity, what, _ = the(diagnosis("inbox_left_lying", mom, limits=late))
        assert severity == "warning"
        assert re.match(r"the reader of 'audit' \(pid \d+\) is slow or stuck: 2 messages, ", what)
    severity, what, _ = the(diagnosis("inbox_left_lying", mom, limits=late))
    assert (severity, "'audit' is slow or stuck: 1 message, " in what) == ("warning", True)


def test_what_waits_for_a_handler_is_found(mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, "billing")
    execute(
        mom,
        "INSERT INTO saf.inbox (to_service, body, message_type) VALUES ('billing', '', 'New')",
    )
    worker = Worker(mom, "billing")
    worker.handler("Old")(lambda _, __: None)
    worker.drain()
    severity, what, cure = the(diagnosis("no_handler", mom))
    assert severity == "warning"
    assert "subscription 'billing': 1 message of type 'New' waits for a handler" in what
    assert "deploy a worker that handles the type" in cure


def test_endpoints_that_nothing_is_sent_to_are_found(mom: Dsn) -> None:
    with connect(mom) as connection:
        for name in ("billing", "orders", "stock"):
            create_service(connection, name, refuse_others=True)
        for name in ("billing", "orders", "stock"):
            number = subscription(connection, name).subscription_id
            book = Book(subscription_id=number, endpoint=f"to-{name}")
            if name == "billing":
                book.disable(connection, "HTTP 410: moved away")
            elif name == "orders":
                book.down(connection, "no answer within 15 s", wait=4)
            else:
                book.pause(connection)
    found = diagnosis("endpoints", mom)
    assert [one.severity for one in found] == ["error", "warning", "warning"]
    disabled, down, paused = found
    assert "endpoint 'to-billing' of subscription 'billing' is disabled" in disabled.what
    assert "HTTP 410: moved away" in disabled.what
    assert disabled.cure.endswith("saf endpoint resume to-billing")
    assert "is down since" in down.what
    assert "no answer within 15 s" in down.what
    assert "was paused by postgres at" in paused.what


def test_an_endpoint_of_a_fair_subscription_is_found(mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, "billing")
        connection.execute(
            "INSERT INTO saf.endpoint (name, subscription_id, url, settings) "
            "SELECT 'partner', subscription_id, 'https://partner.example', '{}' "
            "FROM saf.subscription WHERE name = 'billing'"
        )
        assert diagnosis("fair", mom) == []
        set_fairness(connection, "billing", priority={"Alarm": 3})
    _, what, cure = the(diagnosis("fair", mom))
    assert "endpoint 'partner' reads subscription 'billing', which is fair" in what
    assert "saf subscription set billing --unfair" in cure


def at_first(app: Dsn, mom: Dsn) -> tuple[str, str, str]:
    """What the doctor says of the one lane that waits, by the limits that it has by itself."""
    return the(diagnosis("parked", app, mom, limits=Limits()))


def test_a_service_that_the_store_does_not_know_is_found_at_the_first_attempt(
    app: Dsn, mom: Dsn
) -> None:
    execute(mom, "INSERT INTO saf.service VALUES ('billing'), ('shipping')")
    execute(app, "INSERT INTO saf.outbox (to_service, body) VALUES ('biling', '')")
    forward(app, mom=mom)
    severity, what, cure = at_first(app, mom)
    assert severity == "error"
    assert "has no service 'biling'" in what
    create, _, otherwise = cure.partition("; or, ")
    assert create == "saf service create biling --broker mom"
    assert "(did you mean 'billing'?)" in otherwise
    assert "saf parked discard --destination mom --waits-for service --subject biling" in otherwise


def test_a_message_without_a_route_is_found_at_the_first_attempt(app: Dsn, mom: Dsn) -> None:
    execute(app, "INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '')")
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.default = None
        cycle.run()
    severity, what, cure = at_first(app, mom)
    assert severity == "error"
    assert "no route for service 'billing'" in what
    assert cure == "saf route add DESTINATION --service billing --broker app"


def test_a_full_disk_of_a_store_is_found_at_the_first_attempt(app: Dsn, mom: Dsn) -> None:
    execute(
        mom,
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE "
        "'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$; "
        "CREATE TRIGGER full_disk BEFORE INSERT ON saf.inbox FOR EACH ROW "
        "EXECUTE FUNCTION full_disk()",
    )
    execute(app, "INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '')")
    (receipt,) = [one for one in forward(app, mom=mom) if one.error_kind]
    assert receipt.error_kind == "DiskFull"
    severity, what, cure = at_first(app, mom)
    assert severity == "error"
    assert "the disk of destination 'mom' is full: " in what
    assert cure.endswith("then saf parked retry-now --destination mom --broker app")


def test_a_destination_that_is_stopped_by_its_rejections_is_found_with_what_lifts_it(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        error = Braked("mom", 10, "it is bad")
        postpone(connection, number_of(connection), {Lane(destination="mom"): error})
    severity, what, cure = at_first(app, mom)
    assert severity == "error"
    assert "has rejected 10 messages in a row" in what
    assert "not tried again until an operator retries them" in what
    assert cure.endswith("saf parked retry-now --destination mom --broker app")


def test_what_may_pass_by_itself_is_no_finding_at_the_first_attempt(app: Dsn, mom: Dsn) -> None:
    execute(app, "INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '')")
    forward(app, mom=NOWHERE)
    assert diagnosis("parked", app, mom, limits=Limits()) == []


def test_lanes_that_fail_and_dead_letters_are_found_with_their_errors(app: Dsn, mom: Dsn) -> None:
    execute(app, "INSERT INTO saf.route (service, destination) VALUES ('billing', 'other')")
    execute(
        app,
        "INSERT INTO saf.outbox (to_service, body, expires_at) "
        "VALUES ('billing', '', NULL), ('billing', '', now() - interval '1 s')",
    )
    forward(app, mom=mom, other=NOWHERE)
    severity, what, _ = the(diagnosis("parked", app))
    assert severity == "error"
    assert "1 message waits for destination 'other', 1 failed attempt, next attempt 2" in what
    assert "No such file" in what
    assert diagnosis("parked", app, limits=Limits()) == []
    severity, what, cure = the(diagnosis("dead_letters", app))
    assert (severity, what) == (
        "warning",
        "1 dead letter (expired), for example: expires_at has passed",
    )
    assert re.fullmatch(
        r"fix the cause, then saf dead retry --group [0-9a-f]{12} --broker app, or discard them; "
        r"all causes: saf dead groups --reason expired --broker app",
        cure,
    )


# The command


def test_the_exit_code_says_errors_or_unreachable(
    tmp_path: Path, own_server: EmbeddedServer
) -> None:
    app = own_server.create_database("app")
    migrate(app)
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": NOWHERE})
    done = saf("doctor", cwd=tmp_path)
    assert done.returncode == TRY_AGAIN
    assert "error: destination 'mom': " in done.stdout
    assert " [reachable]\n  fix: start the server" in done.stdout

    execute(app, "UPDATE saf.broker SET system_identifier = 1")
    done = saf("doctor", "--json", cwd=tmp_path)
    assert done.returncode == FOUND
    found = json.loads(done.stdout)["findings"]
    assert {one["check"] for one in found if one["severity"] == "error"} == {
        "restored",
        "reachable",
    }


# Who holds others up

HELD_AT_ONCE = Limits(held_seconds=0, waited_seconds=0)


@contextmanager
def holding(dsn: Dsn, statement: str) -> Iterator[int]:
    """Somebody has done something in a transaction, and stands still."""
    with closing(dsn.connect(role="test")) as connection:
        connection.execute(statement)
        yield connection.info.backend_pid
        connection.rollback()


def test_a_locked_table_hangs_no_examination_and_its_holder_is_named(app: Dsn) -> None:
    began = time.monotonic()
    with holding(app, "LOCK TABLE saf.cursor IN ACCESS EXCLUSIVE MODE") as pid:
        found = examined(app, limits=HELD_AT_ONCE, bounds=Waits(lock_seconds=0.5))
    assert time.monotonic() - began < 60
    here = [one for one in found if one.severity != "ok" and one.where == "broker 'app'"]
    (who,) = (one for one in here if one.check == "locks")
    assert re.fullmatch(
        rf"pid {pid} \(saf test, user postgres\) has locked saf.cursor for \d+ s; "
        r"idle in an open transaction since 20\S+ \S+; "
        r"last statement: LOCK TABLE saf.cursor IN ACCESS EXCLUSIVE MODE",
        who.what,
    )
    assert f"pg_terminate_backend({pid})" in who.cure


def test_checks_that_a_lock_blocks_are_one_finding_beside_its_holder_of_whatever_age(
    app: Dsn,
) -> None:
    began = time.monotonic()
    with holding(app, "LOCK TABLE saf.outbox IN ACCESS EXCLUSIVE MODE") as pid:
        found = examined(app, limits=Limits(), bounds=Waits(lock_seconds=0.5))
    assert time.monotonic() - began < 60
    here = [one for one in found if one.where == "broker 'app'"]
    (who,) = (one for one in here if one.check == "locks")
    (rest,) = (one for one in here if one.check == "not_checked")
    assert not any("lock timeout" in one.what for one in here)
    assert who.what.startswith(f"pid {pid} (saf test, user postgres) has locked saf.outbox for ")
    assert "saf.outbox_" not in who.what
    assert f"SELECT pg_terminate_backend({pid})" in who.cure
    assert rest.what.startswith("not checked because of a lock: restored, forged, ")


@every_postgresql
def test_who_waits_for_rows_is_named_with_whom_it_waits_for(app: Dsn) -> None:
    rename = "UPDATE saf.subscription SET name = name"
    with (
        holding(app, rename) as pid,
        connect(app) as waiter,
        connect(app) as watcher,
        ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(waiter.execute, rename)
        at = {"pid": waiter.info.backend_pid}
        while fetch(watcher, "SELECT pg_blocking_pids(%(pid)s)", at) == [([],)]:
            time.sleep(0.01)
        try:
            found = diagnosis("locks", app, limits=HELD_AT_ONCE)
        finally:
            fetch(watcher, "SELECT pg_cancel_backend(%(pid)s)", at)
        assert isinstance(waiting.exception(), psycopg.errors.QueryCanceled)
    severity, what, _ = the(found)
    assert severity == "error"
    assert what.startswith(f"pid {pid} ")
    assert what.endswith(f"; pid {at['pid']} (saf test) waits for it")


def test_no_value_of_a_query_is_shown_of_who_holds_others_up(app: Dsn) -> None:
    lock = "LOCK TABLE saf.cursor"  # short, so that the value would be shown, too
    for value in ("'secret'", "$$secret$$", "E'it''s secret'"):
        with holding(app, f"{lock}; SELECT {value}"):
            found = examined(app, limits=HELD_AT_ONCE, bounds=Waits(lock_seconds=0.2))
        assert any(f"last statement: {lock}; SELECT" in one.what for one in found)
        assert "secret" not in str(found)


def test_what_is_missing_is_an_error_and_the_rest_is_examined(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    execute(app, "DROP TABLE saf.breaker")
    execute(mom, "UPDATE saf.broker SET system_identifier = 1")
    found = examined(app, mom)
    (error,) = (one for one in found if (one.check, one.where) == ("endpoints", "broker 'app'"))
    assert error.severity == "error"
    assert error.what == 'could not check: relation "saf.breaker" does not exist'
    assert "from a backup" in error.cure
    assert {one.check for one in found if one.where == "broker 'app'"} > {"misaddressed", "routes"}
    assert [one.where for one in found if one.check == "restored" and one.what] == [
        "destination 'mom'"
    ]
    done = saf("doctor", "--config", config)
    assert (done.returncode, done.stderr) == (FOUND, "")


def test_status_and_doctor_end_with_a_sentence_while_cursors_are_locked(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    config.write_text(config.read_text() + "[bounds]\nlock_seconds = 0.5\n")
    with holding(app, "LOCK TABLE saf.cursor IN ACCESS EXCLUSIVE MODE") as pid:
        status = saf("status", "--config", config)
        assert status.returncode == TRY_AGAIN
        assert status.stderr == (
            "saf: broker 'app' does not answer: canceling statement due to lock timeout; "
            "`saf doctor` shows who holds the lock\n"
        )
        doctor = saf("doctor", "--config", config)
        assert doctor.returncode == FOUND
        said = " ".join(doctor.stdout.split())
        assert f"error: broker 'app': pid {pid} (" in said
        assert "error: broker 'app': not checked because of a lock: " in said


def test_a_pooler_where_the_server_should_be_is_an_error(app: Dsn, mom: Dsn) -> None:
    with PgBouncer(app, "transaction") as pooler:
        found = examined(pooler(app), mom)
    (one,) = (one for one in found if one.check == "direct")
    assert (one.severity, one.where) == ("error", "broker 'app'")
    assert "connection pooler" in one.what


# What grows old

SPEAK = """
WITH g AS (INSERT INTO saf.conversation_group DEFAULT VALUES RETURNING group_id)
INSERT INTO saf.conversation (conversation_id, is_initiator, service, far_service, group_id,
    send_sequence, changed_at, expires_at)
SELECT gen_random_uuid(), true, 'orders', 'stock', group_id, 1, now() - interval '40 days',
       %(expires)s::timestamptz FROM g
"""


def test_dialogs_that_nobody_ends_are_found(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(SPEAK, {"expires": None})
    severity, what, cure = the(diagnosis("dialogs_open_for_long", app, limits=Limits()))
    assert severity == "warning"
    assert "1 dialog of service 'orders' are open and silent, the longest for 40 d" in what
    assert "saf dialog list --service orders" in cure
    assert diagnosis("dialogs_expired", app) == []
    execute(app, "UPDATE saf.conversation SET ended_here = true, ended_there = true")
    assert diagnosis("dialogs_open_for_long", app, limits=Limits()) == []


def test_dialogs_that_have_expired_without_a_receiver_are_found(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(SPEAK, {"expires": "2026-01-01T00:00:00Z"})
    severity, what, cure = the(diagnosis("dialogs_expired", app, limits=Limits()))
    assert severity == "error"
    assert "the lifetime of 1 dialog of service 'orders' is over" in what
    assert "start the worker of 'orders'" in cure
    assert diagnosis("dialogs_open_for_long", app, limits=Limits()) == []


def test_messages_that_wait_for_an_earlier_one_of_their_dialog_are_found(mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, "stock")
        connection.execute(
            "INSERT INTO saf.parked (subscription_id, kind, subject, shard, id, to_service, body, "
            "batch, position, conversation_id, parked_at) SELECT subscription_id, 'ahead', "
            "c::text, 1, 1, 'stock', '', 1, 1, c, now() - interval '2 h' FROM saf.subscription, "
            "gen_random_uuid() AS c WHERE name = 'stock'"
        )
    severity, what, cure = the(diagnosis("dialogs_blocked", mom, limits=Limits()))
    assert severity == "error"
    assert "subscription 'stock' has 1 message of 1 dialog that wait for an earlier one" in what
    assert "for 2 h" in what
    assert "saf dialog compare" in cure


def test_what_a_broker_has_dropped_lately_is_found_by_reason(mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, "stock")
        connection.execute(
            "INSERT INTO saf.dropped (subscription_id, shard, reason, messages, last_message_id, "
            "last_at) SELECT subscription_id, 1, r, 3, gen_random_uuid(), t FROM saf.subscription, "
            "(VALUES ('ended', now()), ('repeat', now()), ('expired', now() - interval '3 d')) "
            "AS v (r, t) WHERE name = 'stock'"
        )
    severity, what, _ = the(diagnosis("dropped", mom))
    assert severity == "warning"
    assert "subscription 'stock' has dropped 3 messages since counting began, ended" in what


def test_messages_for_another_broker_or_a_service_that_lives_elsewhere_are_found(mom: Dsn) -> None:
    execute(mom, "INSERT INTO saf.inbox (to_service, body) VALUES ('elsewhere', '')")
    execute(mom, "INSERT INTO saf.inbox (to_service, body) VALUES ('saf/init', '')")
    assert diagnosis("misaddressed", mom) == [], "any service lives here"
    with connect(mom) as connection:
        create_service(connection, "stock", refuse_others=True)
        connection.execute(
            "INSERT INTO saf.inbox (to_service, to_broker, body) "
            "VALUES ('stock', gen_random_uuid(), ''), ('stock', NULL, '')"
        )
    service, broker = diagnosis("misaddressed", mom)
    assert "1 message in the inbox for 'elsewhere', which does not exist here" in service.what
    assert "1 message in the inbox for 'stock', at broker" in broker.what
    assert "unless a removed service of this name has handled them" in service.what
    assert "saf service create elsewhere --from-start" in service.cure


HOLD = """
INSERT INTO saf.held (from_service, to_service, body, due, sender, refused)
VALUES ('shop', 'billing', 'secret', now() - make_interval(secs => %s), %s, %s)
"""


def hold(app: Dsn, seconds: float, sender: str = "postgres", refused: str | None = None) -> None:
    with connect(app) as connection:
        connection.execute(HOLD, [seconds, sender, refused])


def test_held_messages_that_nobody_moves_are_found_after_minutes(app: Dsn) -> None:
    hold(app, -60)
    hold(app, 200)
    assert not diagnosis("held", app)
    hold(app, 3700)
    hold(app, 7300, refused="no")
    severity, what, cure = the(diagnosis("held", app))
    assert severity == "error"
    assert what.startswith("1 held message should have been sent up to 1 h 1 min ago")
    assert "run `saf forward`" in cure
    assert "saf held list --overdue --broker app" in cure
    forward(app, mom=app)
    assert not diagnosis("held", app)


def test_an_overdue_message_that_a_session_has_locked_names_the_session(app: Dsn) -> None:
    hold(app, 3700)
    with connect(app) as other, other.transaction():
        other.execute("SELECT FROM saf.held FOR UPDATE")
        hold(app, 3700)
        nobody, locked = (one for one in diagnosis("held", app))
        pid = other.info.backend_pid
        assert "no forwarder moves them" in nobody.what
        assert f"1 h 1 min ago, locked by pid {pid} (" in locked.what
        since = r"in a transaction that has been open for \d+ s; idle in an open transaction since"
        assert re.search(since, locked.what)
        assert "no forwarder" not in locked.what
        assert f"pg_terminate_backend({pid})" in locked.cure


def test_refused_messages_are_found_by_role_with_the_rule_that_is_missing(
    app: Dsn, new_role: Callable[..., Dsn]
) -> None:
    logins = new_role(app, Kind.WRITER), new_role(app, Kind.WRITER)
    role, other = (str(conninfo_to_dict(login.conninfo)["user"]) for login in logins)
    assert not diagnosis("refused", app)
    with connect(app) as connection:
        add_senders(connection, role, "another", refuse_others=True)
        add_senders(connection, other, "shop")
    for sender in (role, role, other):
        hold(app, 60, sender, "role may not")
    hold(app, 60, "gone", "role may not")
    found = {re.findall(r"role '(\w+)'", one.what)[0]: one for one in diagnosis("refused", app)}
    of_role, of_other = found[role], found[other]
    assert {one.severity for one in found.values()} == {"error"}
    assert of_role.what == (
        f"2 held messages of role {role!r} for service 'billing' were refused when "
        "due: role may not"
    )
    assert "saf held cancel --service billing --refused --broker app" in of_role.cure
    assert "sender add" not in of_other.cure
    assert "saf held retry --service billing --broker app" in of_other.cure
    assert "create the role again" in found["gone"].cure
    rule = re.findall(r"saf sender add .*? --dsn '[^']*'", of_role.cure)[0]
    assert f"{role} --from shop --to billing" in rule
    done = saf(*shlex.split(rule)[1:], env={"PGUSER": "postgres"})
    assert done.returncode == 0, done.stderr
    assert not diagnosis("refused", app)
