"""Local routes: what is sent to a service of the same database is in the inbox at the commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import saf
from saf import Message, Outbox
from saf.broker.grants import Kind, grant
from saf.broker.senders import add_senders
from saf.broker.services import create_service, remove_service
from saf.columns import COLUMNS
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, UsageError
from saf.routing import local
from saf.routing.explain import explain
from saf.routing.routers import add_router
from saf.routing.routes import add_route, add_topic, enable_route, remove_route
from tests.pipeline import bodies, connect, forward, run
from tests.routing import broker_id
from tests.waits import until

every_postgresql = pytest.mark.every_postgresql


@pytest.fixture
def shop(app: Dsn) -> Dsn:
    """A broker with the service feeds, whose route is local."""
    with connect(app) as connection:
        create_service(connection, "feeds")
        add_route(connection, "shop", service="feeds", local=True)
    return app


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who makes a route local does not wait."""
    monkeypatch.setattr(local, "PATIENCE_SECONDS", 0.2)


def sent(dsn: Dsn) -> int:
    """How many messages are in the outbox."""
    with connect(dsn) as connection:
        ((count,),) = fetch(connection, "SELECT count(*) FROM saf.outbox")
    return int(count)


def send(dsn: Dsn, *texts: str, service: str = "feeds", **more: Any) -> None:
    with connect(dsn) as connection, connection.transaction():
        for text in texts:
            Outbox().send(connection, service, text, **more)


@every_postgresql
def test_what_is_sent_is_in_the_inbox_when_the_transaction_commits(shop: Dsn) -> None:
    with connect(shop) as connection:
        with connection.transaction():
            message = Outbox().send(
                connection, "feeds", {"n": 1}, key="k", headers={"a": 1}, message_type="order"
            )
            assert bodies(shop) == []
        with suppress(ZeroDivisionError), connection.transaction():
            Outbox().send(connection, "feeds", b"never", key="k")
            raise ZeroDivisionError
    with saf.receive(shop, "feeds") as delivery:
        (one,) = delivery
    assert (one.message_id, one.key, one.message_type) == (message, "k", "order")
    assert one.headers["a"] == 1
    assert one.json() == {"n": 1}
    assert sent(shop) == 0


@every_postgresql
def test_many_messages_are_in_the_order_in_which_they_are_sent_by_any_statement(
    shop: Dsn,
) -> None:
    with connect(shop) as connection:
        with connection.transaction():
            Outbox().send_many(
                connection,
                [Message(service="feeds", body=str(n), key="k") for n in range(100)],
            )
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) SELECT 'feeds', 'k', n::text::bytea "
            "FROM generate_series(100, 199) AS n ORDER BY n"
        )
        copy = "COPY saf.outbox (to_service, key, body) FROM STDIN"
        with connection.cursor() as cursor, cursor.copy(copy) as rows:
            for n in range(200, 300):
                rows.write_row(("feeds", "k", str(n).encode()))
    assert bodies(shop) == [str(n) for n in range(300)]
    assert sent(shop) == 0


def test_each_column_of_a_message_is_stored(shop: Dsn) -> None:
    columns = ", ".join(COLUMNS)
    later = timedelta(days=1)
    with connect(shop) as connection:
        Outbox(from_service="till", allow_autocommit=True).send(
            connection,
            *("feeds", {"n": 1}),
            key="k",
            headers={"a": 1},
            message_type="order",
            deliver_at=datetime.now(UTC) - later,
            expires_at=datetime.now(UTC) + 2 * later,
        )
        enable_route(connection, "shop", service="feeds", enabled=False)
        copied = f"INSERT INTO saf.outbox ({columns}) SELECT {columns} FROM saf.inbox"
        connection.execute(copied.encode())
        same = f"SELECT {columns} FROM saf.inbox EXCEPT SELECT {columns} FROM saf.outbox"
        assert fetch(connection, same.encode()) == []
        stored = fetch(connection, f"SELECT {columns} FROM saf.inbox".encode())
    empty = {"to_broker", "conversation_id", "from_initiator", "sequence"}
    assert {name for name, value in zip(COLUMNS, stored[0], strict=True) if value is None} == empty


def test_the_inbox_holds_what_is_due_later_unless_it_has_a_name_or_is_for_another(
    shop: Dsn,
) -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    outbox = Outbox(allow_autocommit=True)
    with connect(shop) as connection:
        outbox.send(connection, "feeds", "here", deliver_at=later)
        outbox.send(connection, "feeds", "named", name="n", deliver_at=later)
        outbox.send(connection, "feeds", "other broker", to_broker=UUID(int=7), deliver_at=later)
        outbox.send(connection, "billing", "other service", deliver_at=later)
        assert fetch(connection, "SELECT body, deliver_at FROM saf.inbox") == [(b"here", later)]
        held = "SELECT convert_from(body, 'UTF8') FROM saf.held ORDER BY held_id"
        expected = [("named",), ("other broker",), ("other service",)]
        assert fetch(connection, held) == expected
        enable_route(connection, "shop", service="feeds", enabled=False)
        outbox.send(connection, "feeds", "by the forwarder", deliver_at=later)
        assert fetch(connection, held) == [*expected, ("by the forwarder",)]


def test_messages_for_other_services_and_for_brokers_go_by_the_forwarder(
    shop: Dsn, mom: Dsn
) -> None:
    send(shop, "for billing", service="billing")
    send(shop, "for this broker", to_broker=broker_id(shop))
    assert sent(shop) == 2
    assert bodies(shop) == []
    forward(shop, mom=mom, shop=shop)
    assert bodies(shop) == ["for this broker"]
    assert bodies(mom) == ["for billing"]


@every_postgresql
def test_rules_of_senders_hold(shop: Dsn) -> None:
    name = f"local_{shop.database}"
    stranger = Dsn(make_conninfo(shop.conninfo, user=name))
    with connect(shop) as owner:
        owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        try:
            grant(owner, name, [Kind.WRITER])
            send(stranger, "before any rule")
            add_senders(owner, name, "till", ["feeds"])
            send(stranger, "as the till", from_service="till")
            with pytest.raises(ConfigurationError, match="may not send as service 'other'"):
                send(stranger, "as another", from_service="other")
            with (
                connect(stranger) as connection,
                pytest.raises(psycopg.errors.InsufficientPrivilege, match="inbox"),
            ):
                connection.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('feeds', '')")
            mine = (
                "CREATE TEMP TABLE mine (n int); CREATE TRIGGER t BEFORE INSERT ON mine "
                "FOR EACH ROW EXECUTE FUNCTION saf.store_locally()"
            )
            with (
                connect(stranger) as connection,
                pytest.raises(psycopg.errors.InsufficientPrivilege, match="store_locally"),
            ):
                connection.execute(mine)
            grant(owner, name, [Kind.OPERATOR])
            with (
                connect(stranger) as connection,
                pytest.raises(UsageError, match="only the owner of schema saf"),
            ):
                remove_route(connection, "shop", service="feeds")
        finally:
            owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
            owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))
    assert bodies(shop) == ["before any rule", "as the till"]


# From one way to the other


@pytest.mark.usefixtures("impatient")
def test_a_route_becomes_local_only_when_the_forwarder_has_nothing_left_for_the_service(
    app: Dsn,
) -> None:
    with connect(app) as connection:
        create_service(connection, "feeds")
        send(app, "1", key="k")
        with pytest.raises(UsageError, match="would overtake them"):
            add_route(connection, "shop", service="feeds", local=True)
        send(app, "2", key="k")  # still by the forwarder
        forward(app, mom=app)
        add_route(connection, "shop", service="feeds", local=True)
        send(app, "3", key="k")
    assert bodies(app) == ["1", "2", "3"]


@pytest.mark.usefixtures("impatient")
def test_a_parked_message_is_not_overtaken_either(app: Dsn) -> None:
    with connect(app) as connection:
        send(app, "1")
        create_service(connection, "other")  # and so feeds is unknown here
        forward(app, mom=app)
        create_service(connection, "feeds")
        with pytest.raises(UsageError, match="would overtake them"):
            add_route(connection, "shop", service="feeds", local=True)


@every_postgresql
def test_a_sender_that_is_in_the_middle_ends_before_the_route_is_local(
    app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PATIENCE_SECONDS", 60.0)  # a busy machine is no reason to give up
    with connect(app) as connection:
        create_service(connection, "feeds")
    with app.connect(role="test") as early, app.connect(role="test") as late:
        Outbox().send(early, "feeds", "1", key="k")
        late.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        late.execute("SELECT")  # its snapshot is older than the route
        switching = threading.Thread(target=_switch, args=(app,))
        switching.start()
        with connect(app) as watcher:
            until(lambda: _waiting(watcher, "SHARE ROW EXCLUSIVE"))
            blocked = threading.Thread(target=_send_and_commit, args=(late,))
            blocked.start()
            until(lambda: _waiting(watcher, "INSERT INTO saf.outbox"))
        early.commit()
        forward(app, mom=app)
        switching.join()
        blocked.join()
    assert bodies(app) == ["1", "2"]
    assert sent(app) == 1


@pytest.mark.parametrize("role", ["route", "test"])
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_message_that_is_sent_meanwhile_is_not_overtaken_whatever_the_isolation(
    app: Dsn, monkeypatch: pytest.MonkeyPatch, isolation: str, role: str
) -> None:
    monkeypatch.setattr(local, "PATIENCE_SECONDS", 60.0)  # as above
    with connect(app) as connection:
        create_service(connection, "feeds")
        _isolate(connection, isolation)
    with app.connect(role="test") as early:
        Outbox().send(early, "feeds", "1", key="k")
        switching = threading.Thread(target=_switch, args=(app, role))
        switching.start()
        with connect(app) as watcher:
            until(lambda: _waiting(watcher, "SHARE ROW EXCLUSIVE"))
        early.commit()
        switching.join(0.5)
        assert switching.is_alive(), "the forwarder has not taken the message"
        forward(app, mom=app)
        switching.join()
    send(app, "2", key="k")
    assert bodies(app) == ["1", "2"]
    assert sent(app) == 1


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_in_a_caller_s_transaction_a_route_becomes_local_only_if_it_sees_what_is_sent_meanwhile(
    app: Dsn, isolation: str
) -> None:
    with connect(app) as connection:
        create_service(connection, "feeds")
        _isolate(connection, isolation)
    with connect(app) as connection:
        with connection.transaction():
            add_route(connection, "shop", service="billing")
            with pytest.raises(UsageError, match=f"{isolation.upper()}.* READ COMMITTED"):
                add_route(connection, "shop", service="feeds", local=True)
        assert not _local_routes(app)
        add_route(connection, "shop", service="feeds", local=True)
        enable_route(connection, "shop", service="feeds", enabled=False)
        with connection.transaction(), pytest.raises(UsageError, match=isolation.upper()):
            enable_route(connection, "shop", service="feeds")
        enable_route(connection, "shop", service="feeds")
    send(app, "1")
    assert bodies(app) == ["1"]


def _isolate(connection: psycopg.Connection[Any], isolation: str) -> None:
    """Let this be the isolation of transactions in sessions to come."""
    connection.execute(
        sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = {}").format(
            sql.Identifier(connection.info.dbname), sql.Literal(isolation)
        )
    )


def _send_and_commit(connection: psycopg.Connection[Any]) -> None:
    Outbox().send(connection, "feeds", "2", key="k")
    connection.commit()


def _switch(app: Dsn, role: str = "test") -> None:
    with app.connect(role=role, autocommit=True) as connection:
        add_route(connection, "shop", service="feeds", local=True)


def _waiting(connection: psycopg.Connection[Any], statement: str) -> bool:
    waiting = (
        "SELECT FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock' AND position(%(statement)s IN query) > 0"
    )
    return bool(fetch(connection, waiting, {"statement": statement}))


def test_order_holds_when_a_route_is_disabled_enabled_and_removed(shop: Dsn) -> None:
    def change(number: int) -> None:
        with connect(shop) as connection:
            match number:
                case 0:
                    enable_route(connection, "shop", service="feeds", enabled=False)
                case 1:
                    enable_route(connection, "shop", service="feeds")
                case 2:
                    remove_route(connection, "shop", service="feeds")
                case 3:
                    add_route(connection, "shop", service="feeds", local=True)
                case 4:
                    add_route(connection, "shop", service="feeds")

    for number in range(5):
        send(shop, str(number), key="k")
        run(shop, shop=shop, mom=shop)
        change(number)
    send(shop, "5", key="k")
    run(shop, shop=shop, mom=shop)
    assert bodies(shop) == [str(number) for number in range(6)]
    assert sent(shop) == 3


@pytest.mark.usefixtures("impatient")
def test_nobody_waits_for_a_transaction_that_does_not_end(app: Dsn) -> None:
    with connect(app) as connection, app.connect(role="test") as open_:
        create_service(connection, "feeds")
        Outbox().send(open_, "billing", "1")
        with pytest.raises(UsageError, match=r"transaction .* has not ended"):
            add_route(connection, "shop", service="feeds", local=True)
    assert not _local_routes(app)


def _local_routes(dsn: Dsn) -> list[Any]:
    with connect(dsn) as connection:
        return list(fetch(connection, "SELECT service FROM saf.route WHERE local"))


# What cannot be local


Try = Callable[[psycopg.Connection[Any]], object]


def wrong() -> Iterator[tuple[str, Try, str]]:
    yield (
        "any",
        lambda connection: add_route(connection, "shop", local=True),
        "is for a service",
    )
    yield (
        "quality",
        lambda connection: add_route(
            connection, "shop", service="feeds", quality="at_least_once", local=True
        ),
        "no quality of service",
    )
    yield (
        "elsewhere",
        lambda connection: add_route(connection, "shop", service="billing", local=True),
        "saf service create billing",
    )
    yield (
        "twice",
        lambda connection: add_route(connection, "other", service="feeds", local=True),
        "a local route already exists",
    )
    yield "topic", lambda connection: add_topic(connection, "feeds"), "cannot be a topic"
    yield (
        "router",
        lambda connection: add_router(connection, "feeds", "python", "a:b"),
        "cannot be a router",
    )
    yield "gone", lambda connection: remove_service(connection, "feeds"), "has a local route"


@pytest.mark.parametrize(
    ("attempt", "said"),
    [(attempt, said) for _, attempt, said in wrong()],
    ids=[name for name, _, _ in wrong()],
)
def test_what_makes_no_sense_is_refused(shop: Dsn, attempt: Try, said: str) -> None:
    with connect(shop) as connection, pytest.raises(UsageError, match=said):
        attempt(connection)
    send(shop, "1")
    assert bodies(shop) == ["1"]


def test_a_topic_or_router_has_no_local_route(app: Dsn) -> None:
    with connect(app) as connection:
        for name in ("prices", "departures"):
            create_service(connection, name)
        add_topic(connection, "prices")
        add_router(connection, "departures", "python", "a:b")
        for name, what in (("prices", "topic"), ("departures", "router")):
            with pytest.raises(UsageError, match=f"is a {what}"):
                add_route(connection, "shop", service=name, local=True)


# What is said of it


def test_explaining_says_that_the_local_route_takes_it(shop: Dsn) -> None:
    with connect(shop) as connection:
        add_route(connection, "mom")
        told = explain(connection, "feeds")
        assert told.destinations == ("shop",)
        assert [verdict.why for verdict in told.verdicts] == [
            "local: its sender stores it in this inbox",
            "a local route takes it, service 'feeds' to 'shop'",
        ]
        assert explain(connection, "billing").destinations == ("mom",)


def test_a_receiver_that_listens_is_woken(shop: Dsn) -> None:
    with connect(shop) as connection, connect(shop) as listener:
        connection.execute("ALTER TABLE saf.inbox ENABLE TRIGGER inbox_notify")
        listener.execute("LISTEN saf_inbox")
        send(shop, "1")
        assert list(listener.notifies(timeout=10, stop_after=1))
