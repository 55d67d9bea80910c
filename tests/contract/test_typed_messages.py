"""Events in a database: sent in each way, handled, and set aside where they cannot be read."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.dialogs.contracts import message_types
from saf.errors import ConfigurationError, SchemaViolation, UsageError
from saf.operating.plans.difference import apply, difference
from saf.operating.plans.file import BrokerPlan
from saf.typed.event import VERSION, the_event
from tests.pipeline import connect, forward
from tests.receivers import prepare, put

SECRET = "no-log-quotes-this"


@saf.event("OrderPlaced", key="number", version=2)
@dataclass(frozen=True)
class OrderPlaced:
    number: str
    total: Decimal
    currency: str


@saf.upcaster(OrderPlaced, 1)
def with_currency(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "currency": "CHF"}


ORDERS = [OrderPlaced(f"A-{number}", Decimal(number), "EUR") for number in range(3)]
V2 = json.dumps({VERSION: 2})


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare(mom)
    return mom


def test_an_event_is_sent_in_every_way_with_its_type_key_and_version(app: Dsn) -> None:
    outbox = saf.Outbox()
    with connect(app) as connection, connection.transaction():
        outbox.send(connection, "billing", ORDERS[0])
        outbox.send_many(connection, [saf.Message(service="billing", body=ORDERS[1])])

    async def later() -> None:
        async with await psycopg.AsyncConnection.connect(app.conninfo) as there:
            await outbox.asend(there, "billing", ORDERS[2])
            await outbox.asend_many(there, [saf.Message(service="billing", body=ORDERS[0])])

    asyncio.run(later())
    with connect(app) as connection:
        found = fetch(
            connection,
            "SELECT message_type, key, (headers ->> 'saf-type-version')::int FROM saf.outbox "
            "ORDER BY id",
        )
    assert found == [("OrderPlaced", f"A-{number}", 2) for number in (0, 1, 2, 0)]


@pytest.mark.parametrize("batch", [False, True])
def test_a_worker_gets_events_of_both_versions_through_the_forwarder(
    app: Dsn, mom: Dsn, batch: bool
) -> None:
    with connect(mom) as store:
        create_service(store, "billing")
    outbox = saf.Outbox()
    with connect(app) as connection, connection.transaction():
        outbox.send_many(connection, [saf.Message(service="billing", body=ORDERS[0])])
        old = {"number": "A-9", "total": "9"}
        outbox.send(connection, "billing", old, key="A-9", message_type="OrderPlaced")
    forward(app, mom=mom)
    worker, found = saf.Worker(mom.conninfo, "billing"), list[OrderPlaced]()
    if batch:
        worker.batch_handler(OrderPlaced)(lambda orders, _: found.extend(orders))
    else:
        worker.handler(OrderPlaced)(lambda order, _: found.append(order))
    assert worker.drain() == 2
    assert sorted(found, key=lambda one: one.number) == [
        ORDERS[0],
        OrderPlaced("A-9", Decimal(9), "CHF"),
    ]


def test_async_handlers_and_processors_get_events(inbox: Dsn) -> None:
    body = '{"number": "A-1", "total": 1, "currency": "EUR"}'
    columns = {"message_type": "OrderPlaced", "headers": V2}
    worker, found = saf.Worker(inbox.conninfo, "billing", concurrency=2), list[object]()

    @worker.handler(OrderPlaced)
    async def placed(order: OrderPlaced, connection: Any, message: saf.Received) -> None:
        await connection.execute("SELECT 1")
        found.append((order.number, message.key))

    class Orders(saf.Processor):
        @saf.handles(OrderPlaced)
        def placed(self, order: OrderPlaced, connection: psycopg.Connection[Any]) -> None:
            connection.execute("SELECT 1")
            found.append((order.number, self.key))

    put(inbox, body, key="k", **columns)
    assert worker.drain() == 1
    put(inbox, body, key="l", **columns)
    assert saf.Processors(inbox.conninfo, "billing", Orders).drain() == 1
    assert found == [("A-1", "k"), ("A-1", "l")]


def handled(inbox: Dsn, *, batch: bool = False) -> tuple[saf.Worker, list[OrderPlaced]]:
    worker, found = saf.Worker(inbox.conninfo, "billing"), list[OrderPlaced]()
    if batch:
        worker.batch_handler(OrderPlaced)(lambda orders, _: found.extend(orders))
    else:
        worker.handler(OrderPlaced)(lambda order, _: found.append(order))
    return worker, found


@pytest.mark.parametrize("batch", [False, True])
def test_a_body_that_does_not_match_is_a_dead_letter_after_one_attempt_and_names_its_field(
    inbox: Dsn, batch: bool
) -> None:
    wrong = json.dumps({"number": "A-1", "total": SECRET, "currency": "EUR"})
    right = json.dumps({"number": "A-2", "total": "1", "currency": "EUR"})
    put(inbox, wrong, right, key="k", message_type="OrderPlaced", headers=V2)
    worker, found = handled(inbox, batch=batch)
    with capture_logs() as logs:
        assert worker.drain() == 1
    assert [order.number for order in found] == ["A-2"]
    with connect(inbox) as connection:
        ((error,),) = fetch(connection, "SELECT error FROM saf.dead_letter")
    assert "body.total: Input should be a valid decimal" in error
    assert SECRET not in error + repr(logs)
    (dead,) = [entry for entry in logs if entry["event"] == "dead_letter"]
    assert dead["attempt"] == "1 of 5"
    assert dead["next_attempt"] == "none: it is a dead letter, because no further attempt helps"


def test_a_newer_version_waits_for_another_attempt(inbox: Dsn) -> None:
    put(inbox, "{}", key="k", message_type="OrderPlaced", headers=json.dumps({VERSION: 3}))
    worker, found = handled(inbox)
    assert worker.drain() == 0
    with connect(inbox) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.dead_letter") == [(0,)]
        ((error,),) = fetch(connection, "SELECT error FROM saf.backoff")
    assert "version 3, newer than version 2 here: deploy receivers before senders" in error
    assert found == []


# Message types and contracts


def test_a_contract_checks_events_by_their_stored_schema(app: Dsn) -> None:
    with connect(app) as connection:
        create_service(connection, "shop")
        assert saf.create_message_type(connection, OrderPlaced)
        assert not saf.create_message_type(connection, OrderPlaced)
        (stored,) = message_types(connection)
        assert (stored.version, stored.schema) == (2, the_event(OrderPlaced).schema)
        with pytest.raises(UsageError, match="pass only the class"):
            saf.create_message_type(connection, OrderPlaced, version=3)
        saf.create_contract(connection, "ordering", {"OrderPlaced": "initiator"})
        with connection.transaction():
            dialog = saf.begin_dialog(
                connection, from_service="shop", to_service="billing", contract="ordering"
            )
            dialog.send(connection, ORDERS[0])
            with pytest.raises(SchemaViolation, match=r"at \$\.currency"):
                dialog.send(
                    connection,
                    {"number": "A-1", "total": 1, "currency": 7},
                    message_type="OrderPlaced",
                )
        sent = fetch(
            connection,
            "SELECT message_type, (headers ->> 'saf-type-version')::int, "
            "key = conversation_id::text FROM saf.outbox",
        )
    assert sent == [("OrderPlaced", 2, True)]


def plan(*versions: tuple[int, Any]) -> dict[str, Any]:
    """A plan's entries: versions of the type order, each with its schema."""
    rows = [
        {"name": "order", "version": version, "validation": "json_schema", "schema": schema}
        for version, schema in versions
    ]
    return BrokerPlan.model_validate({"message_types": rows}).entries()


OLD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WIDER = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
OTHER = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    ("stored", "wanted", "breaking"),
    [
        ([(1, OLD)], [(1, OLD), (2, WIDER)], ()),
        ([], [(1, OLD), (2, OTHER)], ("a is string now, was integer", "b is required now")),
        ([(1, OTHER), (2, OLD)], [(3, OTHER)], ("a is string now, was integer", "b is required")),
        ([(2, OTHER)], [(1, OLD)], ()),
    ],
)
def test_a_new_version_is_compared_with_the_one_before_it(
    app: Dsn, stored: list[Any], wanted: list[Any], breaking: tuple[str, ...]
) -> None:
    with connect(app) as connection:
        for version in stored:
            entries = plan(version)
            apply(
                connection,
                entries,
                difference(connection, entries, prune=False),
                prune=False,
                discard=False,
            )
        found = difference(connection, plan(*wanted), prune=False).breaking
    assert len(found) == len(breaking)
    assert all(problem in one for problem, one in zip(breaking, sorted(found), strict=True))


@pytest.mark.parametrize(("upcasts", "breaks"), [([1], True), ([2], False), ([1, 2], False)])
def test_an_upcaster_counts_only_from_the_stored_version_on(
    app: Dsn, upcasts: list[int], breaks: bool
) -> None:
    with connect(app) as connection:
        stored = plan((2, OLD))
        shown = difference(connection, stored, prune=False)
        apply(connection, stored, shown, prune=False, discard=False)
        wanted = plan((3, OTHER))
        wanted["message_types"]["order", 3]["upcasts"] = upcasts
        assert bool(difference(connection, wanted, prune=False).breaking) is breaks


def test_a_stored_version_with_another_schema_is_refused_by_its_fields(app: Dsn) -> None:
    with connect(app) as connection:
        wanted = plan((1, OLD))
        shown = difference(connection, wanted, prune=False)
        apply(connection, wanted, shown, prune=False, discard=False)
        with pytest.raises(
            ConfigurationError, match=r"rely on it: a differ\. Give the new form of order version 2"
        ):
            difference(connection, plan((1, WIDER)), prune=False)


def entries(**given: Any) -> Any:
    return BrokerPlan(**given).entries()


def test_events_of_modules_are_message_types_of_a_plan() -> None:
    assert entries(events=[__name__])["message_types"] == {
        ("OrderPlaced", 2): {
            "validation": "json_schema",
            "schema": the_event(OrderPlaced).schema,
            "upcasts": [1],
        }
    }
    with pytest.raises(ConfigurationError, match="version 2 appears twice"):
        entries(events=[__name__], message_types=[{"name": "OrderPlaced", "version": 2}])
    with pytest.raises(ConfigurationError, match="events: no module 'nowhere' here"):
        entries(events=["nowhere"])
