"""Who has sent it, on a local route: its sender's transaction says what the forwarder would say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import saf
from saf import Outbox
from saf.broker.grants import Kind, grant
from saf.broker.senders import add_senders, remove_senders
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.received import Received
from saf.routing.routes import add_route
from tests.pipeline import connect, run
from tests.routing import broker_id

every_postgresql = pytest.mark.every_postgresql

FORGED = {"broker": "00000000-0000-4000-8000-000000000000", "service": "bank"}
HEADERS = {"saf-verified-from": FORGED, "a": {"b": 1}}


@pytest.fixture
def shop(app: Dsn) -> Dsn:
    """A broker with the service feeds, whose route is local."""
    with connect(app) as connection:
        create_service(connection, "feeds")
        add_route(connection, "shop", service="feeds", local=True)
    return app


@pytest.fixture
def writer(shop: Dsn) -> Iterator[Dsn]:
    """A login that may send, and nothing else."""
    name = f"writer_{shop.database}"
    with connect(shop) as owner:
        owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        grant(owner, name, [Kind.WRITER])
        yield Dsn(make_conninfo(shop.conninfo, user=name))
        owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def make_rule(shop: Dsn, writer: Dsn) -> None:
    with connect(shop) as owner:
        add_senders(owner, writer.parts["user"], "till", ["feeds"])


def by_outbox(connection: psycopg.Connection[Any], headers: dict[str, Any] | None) -> None:
    Outbox(from_service="till", allow_autocommit=True).send(
        connection, "feeds", b"", headers=headers
    )


def by_insert(connection: psycopg.Connection[Any], headers: Any, service: str = "feeds") -> None:
    connection.execute(
        "INSERT INTO saf.outbox (from_service, to_service, headers, body) "
        "VALUES ('till', %s, CAST(%s AS jsonb), '')",
        (service, None if headers is None else json.dumps(headers)),
    )


def by_copy(connection: psycopg.Connection[Any], headers: dict[str, Any] | None) -> None:
    copy = "COPY saf.outbox (from_service, to_service, headers, body) FROM STDIN"
    with connection.cursor() as cursor, cursor.copy(copy) as rows:
        rows.write_row(("till", "feeds", None if headers is None else json.dumps(headers), b""))


def receive(shop: Dsn) -> list[Received]:
    with saf.receive(shop, "feeds") as delivery:
        return list(delivery)


def verified(shop: Dsn) -> saf.VerifiedFrom:
    return saf.VerifiedFrom(broker=broker_id(shop), service="till")


Send = Callable[[psycopg.Connection[Any], dict[str, Any] | None], None]
ways = pytest.mark.parametrize(
    "send", [by_outbox, by_insert, by_copy], ids=["outbox", "insert", "copy"]
)


@every_postgresql
@ways
def test_a_sender_that_is_made_up_is_no_verified_one(shop: Dsn, writer: Dsn, send: Send) -> None:
    with connect(writer) as connection:
        send(connection, HEADERS)
    (one,) = receive(shop)
    assert one.verified_from is None
    assert one.headers["saf-claimed-from"] == FORGED
    assert one.headers["a"] == {"b": 1}


@every_postgresql
@pytest.mark.parametrize("headers", [HEADERS, {"a": {"b": 1}}, None])
@ways
def test_under_rules_a_receiver_is_told_who_was_checked(
    shop: Dsn, writer: Dsn, send: Send, headers: dict[str, Any] | None
) -> None:
    make_rule(shop, writer)
    # whoever is restricted by row has no COPY
    with connect(shop if send is by_copy else writer) as connection:
        send(connection, headers)
    (one,) = receive(shop)
    assert one.verified_from == verified(shop)
    assert one.headers.get("a") == (headers and {"b": 1})


SAID: list[Any] = [
    None,
    {},
    {"a": 1},
    HEADERS,
    {"saf-claimed-from": 1, "saf-verified-from": 2},
    {"SAF-Verified-From": FORGED, "saf-signature": "s", "saf-hops": 1},
    {"a": '"saf-verified-from": 1', "saf-verified-from": {"saf-verified-from": None}},
    ["saf-verified-from", {"saf-verified-from": 1}],
    "saf-verified-from",
    7,
]


@pytest.mark.parametrize("rules", [False, True])
def test_headers_are_those_that_the_forwarder_would_have_stored(
    shop: Dsn, writer: Dsn, rules: bool
) -> None:
    with connect(shop) as owner:
        create_service(owner, "billing")
        if rules:
            make_rule(shop, writer)
        for said in SAID:
            by_insert(owner, said)
            by_insert(owner, said, "billing")
        owner.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('feeds', '')")
        owner.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '')")
        run(shop, mom=shop)
        stored = "SELECT headers FROM saf.inbox WHERE to_service = %(service)s ORDER BY id"
        by_sender, by_forwarder = (
            fetch(owner, stored, {"service": service}) for service in ("feeds", "billing")
        )
    assert len(by_sender) == len(SAID) + 1
    assert by_sender == by_forwarder


@every_postgresql
def test_an_old_snapshot_does_not_vouch_by_rules_that_are_gone(shop: Dsn, writer: Dsn) -> None:
    make_rule(shop, writer)
    with writer.connect(role="test") as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        by_insert(old, None)  # checked
        old.commit()
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT")  # its snapshot shows the rule
        with connect(shop) as owner:
            remove_senders(owner, writer.parts["user"], allow_others=True)
        with pytest.raises(psycopg.errors.SerializationFailure):
            by_insert(old, None)
    (one,) = receive(shop)
    assert one.verified_from == verified(shop)
