"""Granted: as a role of each kind, the real code can do its work, and is refused the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from structlog.testing import capture_logs

import saf
from saf import Message, Outbox
from saf.broker import services
from saf.broker.senders import add_senders
from saf.config import load
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.log import cursor, stream
from saf.log.shards import Member
from saf.operating import decide, outbox
from saf.operating.forecast import forecast
from saf.operating.repair.send_again import send_again
from saf.operating.status import broker_status, identity, memberships
from saf.receiving.dispatch import stored
from saf.receiving.dispatch.condition import Book
from saf.receiving.dispatch.dispatcher import Dispatcher
from saf.receiving.dispatch.dispatcher import run as run_dispatchers
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.inbox import inbox_status
from saf.routing.routers import add_router
from saf.routing.routes import (
    NOTHING,
    add_route,
    add_topic,
    current_routes,
    enable_route,
    remove_route,
    remove_topic,
)
from saf.routing_service import RoutingService
from saf.setaside.selection import DeadLetters, ParkedMessages
from saf.spark.table.sink import Copy, Outgoing, Written
from saf.webhooks.event import Event
from saf.webhooks.receiver import _store
from tests import dialogs
from tests.endpoints import Got, Partner, Reply, serving
from tests.hub import DEPARTURES, Hub
from tests.pipeline import (
    Cycle,
    bodies,
    connect,
    forwarding_rules,
    let_time_pass,
    send,
    stores,
)
from tests.programs import configuration
from tests.programs import saf as run_saf
from tests.ring import in_slot, leave_slot
from tests.roles import as_user, denied
from tests.streams import query

every_postgresql = pytest.mark.every_postgresql
pytestmark = pytest.mark.usefixtures("new_role")

ASIDE = """
INSERT INTO saf.{} (subscription_id, shard, id, to_service, body, {}) VALUES (1, 1, 1, 'a', '', {})
"""


@every_postgresql
def test_a_writer_sends_by_psycopg_and_sqlalchemy(app: Dsn, granted: Callable[..., Dsn]) -> None:
    writer = granted(app, "writer")
    outbox = Outbox()
    with writer.connect(role="test") as connection:
        outbox.send(connection, "billing", b"one", key="A", headers={"h": 1})
        outbox.send_many(connection, [Message(service="billing", body=b"two")])
    engine = writer.engine()
    with engine.begin() as alchemy:
        outbox.send(alchemy, "billing", b"three")
        outbox.send_many(alchemy, [Message(service="billing", body=b"four")])
    engine.dispose()
    with connect(writer) as connection:
        send(connection, "by hand", key="A")
    with connect(app) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.outbox") == [(5,)]


@every_postgresql
def test_a_stream_that_an_operator_has_registered_reads_and_commits_and_registers_none(
    app: Dsn, tmp_path: Path, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key="k")
    config = configuration(tmp_path / "saf.toml", {"app": granted(app, "stream")}, {"mom": app})
    read = query(config, maxRowsPerTrigger=4)
    with pytest.raises(ConfigurationError, match="saf subscription create lake --stream outbox"):
        read.step()
    with connect(granted(app, "operator")) as connection:
        assert stream.create(connection, "app", "outbox", "lake", "beginning")
    read.drain()
    assert read.bodies == [str(number) for number in range(10)]
    with connect(granted(app, "operator")) as connection:
        assert stream.drop(connection, "outbox", "lake")


@every_postgresql
def test_a_sink_stages_and_sends_as_the_rules_for_senders_say(
    app: Dsn, granted: Callable[..., Dsn]
) -> None:
    theirs = granted(app, "sink")
    one = pa.RecordBatch.from_pydict({"service": ["billing"], "body": [b"x"]})

    def stage() -> Written:
        with Copy("broker 'app'", theirs) as copy:
            copy.add(one)
        return Written(partition=0, attempt=copy.attempt, messages=copy.messages, query=None)

    to = Outgoing(what="broker 'app'", dsn=theirs)
    assert to.send("scoring", 1, [stage()], stream=False)
    assert not to.send("scoring", 1, [stage()], stream=False)
    to.discard([stage()])
    with connect(app) as connection:
        add_senders(connection, theirs.parts["user"], "shop", refuse_others=True)
    with pytest.raises(ConfigurationError, match=r"may not send this.*saf sender list"):
        to.send("scoring", 2, [stage()], stream=False)
    with connect(app) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.outbox") == [(1,)]
    writer = Outgoing(what="broker 'app'", dsn=granted(app, "writer"))
    with pytest.raises(ConfigurationError, match="saf grant --role sink"):
        writer.send("scoring", 3, [], stream=False)


@every_postgresql
@pytest.mark.parametrize("quality", ["at_most_once", "at_least_once", "exactly_once"])
def test_a_forwarder_forwards_from_source_to_destination(
    quality: str, app: Dsn, mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('x', 'mom')")
        for number in range(10):
            send(connection, str(number), key="k")
    source, destination = granted(app, "forwarder"), granted(mom, "forwarder")
    rules = forwarding_rules(quality, 3, mom=destination)
    with Cycle(source, rules) as one, Cycle(source, rules) as two:
        one.run()
        for cycle in (two, one, two):  # the one gives half of its shards to the other
            cycle.broker._renewed = 0
            cycle.run()
        assert (one.broker.shards, two.broker.shards) == (32, 32)
        with connect(app) as connection:
            send(connection, "10", key="k")
            connection.execute("UPDATE saf.route SET service = 'y'")
        for cycle in (one, two):
            cycle.open()
            cycle.broker.renew()
            cycle.broker.stop()
            cycle.run()
    assert bodies(mom) == [str(number) for number in range(11)]


def test_a_receiver_runs_processors_and_takes_over_from_one_that_is_gone(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    handled: list[str] = []

    class Noting(saf.Processor):
        @saf.handles()
        def note(self, message: saf.Received, _: object) -> None:
            handled.append(f"{self.key} {message.text()}")

        def passivate(self, _: object) -> None:
            handled.append(f"{self.key} goes")

    with connect(mom) as connection, connect(mom) as gone:
        services.create_service(connection, "billing")
        ((subscription,),) = fetch(
            connection, "SELECT subscription_id FROM saf.subscription WHERE name = 'billing'"
        )
        member = Member(subscription_id=subscription, lease_seconds=30)
        member.join(gone)
        assert member.balance(gone) == 64
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'k', 'x')"
        )
    assert saf.Processors(granted(mom, "receiver"), "billing", Noting).drain() == 1
    assert handled == ["k x", "k goes"]


@every_postgresql
def test_a_receiver_dispatches_and_an_operator_looks_after_endpoints(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    operator, login = granted(mom, "operator"), granted(mom, "receiver")
    with serving(Partner()) as partner, connect(operator) as connection:
        services.create_service(connection, "billing")
        stored.add(connection, "partner", partner.url, subscription="billing", settings={})
        number = services.subscription(connection, "billing").subscription_id
        book = Book(subscription_id=number, endpoint="partner")
        book.pause(connection)
        book.resume(connection)

        async def answer(got: Got) -> Reply:
            return {b"1": 204, b"2": 422, b"3": 500}[got.body], {}, b""

        partner.answer = answer
        with connect(mom) as owner:
            for body in ("1", "2", "3"):
                owner.execute(
                    "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', %s, %s)",
                    [body, body.encode()],
                )
        with connect(login) as there:
            networks = ["127.0.0.0/8"]
            (endpoint,) = stored.stored(there, "mom", networks).values()
            assert isinstance(endpoint, Endpoint)
        dispatched = Dispatcher("partner", endpoint, login)
        run_dispatchers([dispatched], drain=True)
        assert dispatched.summary.handled == 1
        assert len(stored.attempts(connection, number, 10)) == 2
        partner.always(410)
        let_time_pass(mom)
        run_dispatchers([dispatched], drain=True)
        assert stored.state(connection, number).state == "disabled"
        assert stored.remove(connection, "partner")


@every_postgresql
def test_an_inbox_behind_a_url_is_a_forwarder(mom: Dsn, granted: Callable[..., Dsn]) -> None:
    event = Event(id="1", source="/", type="t", body=b"", content_type=None, key=None)
    for _ in range(2):
        assert _store(granted(mom, "forwarder"), "billing", event, 60)
    with connect(mom) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.inbox") == [(1,)]


@every_postgresql
def test_a_receiver_reads_the_inbox_as_a_member_of_its_subscription(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(mom) as connection:
        connection.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('billing', 'x')")
        ((subscription,),) = fetch(
            connection,
            "INSERT INTO saf.subscription (name, log) VALUES ('billing', 'inbox') "
            "RETURNING subscription_id",
        )
        connection.execute(
            "INSERT INTO saf.cursor (subscription_id, shard) SELECT %s, generate_series(0, 63)",
            [subscription],
        )
    member = Member(subscription_id=subscription, lease_seconds=30)
    with connect(granted(mom, "receiver")) as connection:
        member.join(connection)
        assert member.balance(connection) == 64
        idle = cursor.owned(connection, "inbox", member).idle
        assert cursor.new_rows(connection, "inbox", idle, most=10) == 1
        cursor.open_batch(connection, "inbox", member)
        (batch,) = cursor.in_hand(connection, "inbox", member)
        ((number, body),) = fetch(connection, batch.select(["id", "body"]))
        with connection.transaction():
            cursor.advance(connection, batch, number)
        cursor.close(connection, [batch])
        member.leave(connection)
    assert body == b"x"


@every_postgresql
def test_a_receiver_receives_parks_and_buries_for_a_service_that_an_operator_created(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    operator, receiver = granted(mom, "operator"), granted(mom, "receiver")
    with connect(operator) as connection:
        services.create_service(connection, "billing")
    later = datetime.now(UTC) + timedelta(hours=1)
    for number, (deliver_at, expires_at) in enumerate(
        [(None, None), (None, None), (None, None), (later, None), (None, datetime.now(UTC))]
    ):
        with connect(mom) as connection:
            connection.execute(
                "INSERT INTO saf.inbox (to_service, key, body, deliver_at, expires_at) "
                "VALUES ('billing', %s, 'x', %s, %s)",
                [str(number), deliver_at, expires_at],
            )
    with saf.receive(receiver, "billing") as delivery:
        assert len(delivery) == 3
        delivery.park(delivery[0], "not now")
        delivery.reject(delivery[1], "never")
    with connect(operator) as connection:
        (status,) = inbox_status(connection)
        assert (status.unread, status.parked, status.dead_letters) == (0, 2, 2)
        decide.retry(connection, DeadLetters(reason="failed"), "mended")
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    for _ in range(2):
        with saf.receive(receiver, "billing") as delivery:
            assert len(delivery) == 1
    with pytest.raises(ZeroDivisionError), failing(receiver):
        pass
    with connect(operator) as connection:
        services.remove_service(connection, "billing", discard=True)


PARKED = """
INSERT INTO saf.parked (subscription_id, destination, kind, subject, shard, id, batch, position,
                        to_service, key, body)
SELECT subscription_id, CASE log WHEN 'inbox' THEN '' ELSE 'mom' END,
       CASE log WHEN 'inbox' THEN 'key' ELSE 'main' END, CASE log WHEN 'inbox' THEN 'k' ELSE '' END,
       n, n, 1, n, 'billing', 'k', ''
FROM saf.subscription, generate_series(1, 2) AS n
"""


def test_an_operator_decides_about_what_forwarders_and_receivers_have_parked(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
        connection.execute(PARKED)
    with connect(granted(mom, "operator")) as connection:
        sent = ParkedMessages(subscription="forwarder")
        assert len(decide.redirect("other")(connection, sent, "", limit=1)) == 1
        assert len(decide.discard(connection, ParkedMessages(), "")) == 4


@contextmanager
def failing(receiver: Dsn) -> Iterator[None]:
    """A delivery that is tried alone, and fails."""
    with connect(receiver) as connection:
        connection.execute("UPDATE saf.cursor SET allowance = 1 WHERE shard = 0")
    with saf.receive(receiver, "billing"):
        yield
        raise ZeroDivisionError


@every_postgresql
def test_a_receiver_replies_only_if_it_is_a_writer_too(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    reply = "INSERT INTO saf.outbox (to_service, body) VALUES ('a', '')"
    read = "SELECT body FROM saf.inbox"
    assert denied(granted(mom, "receiver"), reply)
    both = granted(mom, "receiver", "writer")
    assert not denied(both, reply)
    assert not denied(both, read)
    assert denied(both, "SELECT body FROM saf.outbox")


def test_a_router_that_is_a_receiver_and_a_dialog_too_serves_a_router_that_forwards(
    new_broker: Callable[[str], Dsn], granted: Callable[..., Dsn]
) -> None:
    hub = Hub.at(new_broker)
    dialog = dialogs.begin(hub.app, "EWR", to_service=DEPARTURES)
    failed = dialogs.begin(hub.app, "nobody", to_service=DEPARTURES)
    with connect(hub.app) as connection, connection.transaction():
        Outbox().send(connection, DEPARTURES, "JFK", key="N1")
    serving = RoutingService(granted(hub.hub, "receiver", "dialog", "router"), DEPARTURES)
    hub.forward()
    assert serving.drain() == 2
    dialogs.end(hub.app, dialog)
    hub.forward()
    serving.drain()
    hub.forward()
    assert bodies(hub.jfk) == ["JFK"]
    assert dialogs.said(dialogs.receive(hub.ewr, "EWR")) == ["EWR", dialogs.END]
    (error,) = dialogs.receive(granted(hub.app, "receiver", "dialog"), dialogs.SHOP)
    assert error.dialog == failed


def test_a_forwarder_tells_a_dialog_that_leads_nowhere_and_who_answers_is_learned_by_a_dialog(
    app: Dsn, mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    dialogs.prepare(app, mom)
    with connect(app) as connection:
        add_router(connection, "departures", "python", "tests.classifiers:by_text")
    dialogs.begin(app, "nobody", to_service="departures")
    dialogs.begin(app, dialogs.WAREHOUSE, to_service="departures")
    with Cycle(granted(app, "forwarder"), forwarding_rules(mom=mom)) as cycle:
        cycle.run()

    def answer(connection: psycopg.Connection[Any], message: saf.Received) -> None:
        assert message.dialog is not None
        message.dialog.send(connection, "yes")

    assert len(dialogs.receive(mom, dialogs.WAREHOUSE, answer)) == 1
    dialogs.forward(mom, app)
    shop = granted(app, "receiver", "dialog")
    assert sorted(dialogs.said(dialogs.receive(shop, dialogs.SHOP))) == [dialogs.ERROR, "yes"]
    with connect(app) as connection:
        far = [one.far_service for one in saf.conversations(connection)]
    assert far == ["departures", dialogs.WAREHOUSE]


@every_postgresql
@pytest.mark.parametrize("kind", ["purger", "operator"])
def test_a_purger_and_an_operator_may_empty_a_slot_and_a_forwarder_may_not(
    kind: str, app: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        send(connection, "old")
    slot = ["LOCK TABLE saf.outbox_0 IN ACCESS EXCLUSIVE MODE", "TRUNCATE saf.outbox_0"]
    forwarder = granted(app, "forwarder")
    assert all(denied(forwarder, statement) for statement in slot)
    with connect(granted(app, kind)) as connection, connection.transaction():
        connection.execute(slot[0])
        assert fetch(connection, "SELECT count(*) FROM saf.outbox_0") == [(1,)]
        connection.execute(slot[1])
        connection.execute(
            "SELECT max(nextval('saf.outbox_id_seq')) FROM generate_series(2, 1 << 20)"
        )
    with connect(app) as connection:
        send(connection, "new")
        assert fetch(connection, "SELECT tableoid::regclass::text, body FROM saf.outbox") == [
            ("saf.outbox_1", b"new")
        ]


def test_a_forwarder_that_is_no_purger_does_not_purge_and_warns_of_nothing(
    app: Dsn, mom: Dsn, granted: Callable[..., Dsn], tmp_path: Path
) -> None:
    with connect(app) as connection:
        send(connection, "kept")
        leave_slot(connection)
        source = granted(app, "forwarder")
        config = configuration(tmp_path / "saf.toml", {"app": source}, {"mom": mom})
        config.write_text(config.read_text() + "[purge]\nretention_seconds = 0\n")
        with capture_logs() as lines:
            Forwarder(load(config), InProcess()).drain()
        assert bodies(mom) == ["kept"]
        assert in_slot(connection, "outbox_0") == ["kept"]
    assert {line["log_level"] for line in lines} <= {"debug", "info"}


@every_postgresql
def test_an_operator_sees_the_state_of_things_and_mends_routes_and_what_was_set_aside(
    app: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        send(connection, "pending")
        connection.execute(ASIDE.format("dead_letter", "reason, error", "'expired', ''"))
    with connect(granted(app, "operator")) as connection:
        status = broker_status(connection)
        assert (status.pending, status.parked, status.dead_letters) == (1, 0, 1)
        assert [one.state for one in outbox.messages(connection, outbox.Wanted()).shown] == [
            "pending"
        ]
        assert [one.backlog.messages for one in memberships(connection)] == [1]
        assert forecast(connection, "mom", NOTHING).by_route() == {"the default destination": 1}
        assert str(identity(connection).broker_id)
        connection.execute("SELECT system_identifier FROM pg_control_system()")
        connection.execute("TABLE saf.outbox_status")
        connection.execute("TABLE saf.watermark")
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('a', 'mom')")
        connection.execute("UPDATE saf.route SET enabled = false WHERE service = 'a'")
        connection.execute("DELETE FROM saf.route WHERE service = 'a'")
        assert add_route(connection, "mom", service="a", comment="for a while")
        enable_route(connection, "mom", service="a", enabled=False)
        remove_route(connection, "mom", service="a")
        assert add_topic(connection, "a")
        remove_topic(connection, "a")
        (found,) = DeadLetters().rows(connection)
        assert decide.retry(connection, DeadLetters(), "the cause is mended") == [found.message_id]
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
        connection.execute("DELETE FROM saf.parked")


@every_postgresql
def test_an_operator_repairs_a_store_that_was_set_back(
    app: Dsn, mom: Dsn, backup: Callable[[Dsn], Dsn], granted: Callable[..., Dsn]
) -> None:
    def cycle(store: Dsn) -> None:
        with Cycle(app, forwarding_rules(mom=store)) as one:
            one.run()

    older = backup(mom)
    with connect(app) as connection:
        for number in range(3):
            send(connection, str(number))
    cycle(mom)
    done = send_again(
        "app",
        granted(app, "operator"),
        stores(mom=granted(older, "operator")),
        lambda source: current_routes(source, "mom"),
        retention_seconds=3600,
    )
    assert done is not None
    assert done.set_back == ("mom",)
    let_time_pass(app)
    cycle(older)
    assert sorted(bodies(older)) == ["0", "1", "2"]


@every_postgresql
def test_an_operator_puts_an_endpoint_of_a_plan_and_changes_it(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(granted(mom, "operator")) as connection:
        services.create_service(connection, "billing")
        for url in ("https://one.example.com", "https://two.example.com"):
            stored.put(connection, "partner", url, subscription="billing", settings={})
            assert stored.listed(connection) == [("partner", "billing", url, {})]


# A right that is missing


def test_a_forwarder_without_rights_is_told_the_command_and_gives_no_message_up(
    app: Dsn, mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        send(connection, "kept")
    with (
        Cycle(granted(app, "writer"), forwarding_rules(mom=mom)) as cycle,
        pytest.raises(ConfigurationError, match=r"permission denied for table.*saf grant --role"),
    ):
        cycle.run()
    with Cycle(app, forwarding_rules(mom=granted(mom, "writer"))) as cycle:
        receipts = cycle.run()
    assert {r.error_kind for r in receipts if r.error} == {"ConfigurationError"}
    assert any("saf grant --role" in r.error for r in receipts if r.error)
    let_time_pass(app)
    with Cycle(app, forwarding_rules(mom=granted(mom, "forwarder"))) as cycle:
        cycle.run()
    assert bodies(mom) == ["kept"]


def test_a_forwarder_sees_the_status_of_its_source_without_what_is_in_the_inbox(
    app: Dsn, mom: Dsn, granted: Callable[..., Dsn], tmp_path: Path
) -> None:
    configuration(tmp_path / "saf.toml", {"app": granted(app, "forwarder")}, {"mom": mom})
    with connect(app) as connection:
        send(connection, "pending")
        stream.create(connection, "app", "outbox", "lake", "beginning")
    done = run_saf("status", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(done.stdout)["brokers"]
    assert shown["pending"] == 1
    assert [(one["stream"], one["pending"]) for one in shown["streams"]] == [("lake", 1)]
    with connect(app) as connection:
        stream.create(connection, "app", "inbox", "seen", "beginning")
        everything = broker_status(connection).streams
    assert [(one.stream, one.pending) for one in everything] == [("lake", 1), ("seen", 0)]
    done = run_saf("status", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(done.stdout)["brokers"]
    assert [(one["stream"], one["pending"]) for one in shown["streams"]] == [
        ("lake", 1),
        ("seen", None),
    ]
    assert re.search(r"seen +inbox +no access ", run_saf("status", cwd=tmp_path).stdout)


def test_status_ends_with_2_and_one_sentence_for_a_user_without_rights(
    tmp_path: Path, app: Dsn, new_role: Callable[..., str]
) -> None:
    configuration(tmp_path / "saf.toml", {"app": as_user(app, new_role())}, {"mom": app})
    done = run_saf("status", cwd=tmp_path)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert "permission denied for schema saf" in said
    assert "saf grant --role" in said


@pytest.mark.parametrize("command", ["pause", "resume", "history"])
def test_an_endpoint_is_refused_with_one_sentence_to_a_user_without_rights(
    command: str, mom: Dsn, granted: Callable[..., Dsn], tmp_path: Path
) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
    config = configuration(tmp_path / "saf.toml", {"app": mom}, {"mom": granted(mom, "forwarder")})
    config.write_text(config.read_text() + '[endpoints.billing]\nurl = "https://example.com"\n')
    done = run_saf("endpoint", command, "billing", cwd=tmp_path)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert "the database of endpoint 'billing' refuses this user: permission denied" in said
