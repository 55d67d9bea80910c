"""Handlers of a worker on Django's connection: the ORM in the delivery's transaction."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.db import connection, connections, transaction

import saf
from saf.database import fetch
from saf.errors import UsageError
from saf.testing import Drain
from saf.transaction import below_django
from shop.models import Invoice, outbox
from work import after_commit, worker

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def nothing_committed() -> None:
    after_commit.clear()


def send(key: str, total: int = 1, message_type: str = "OrderPlaced", **more: Any) -> None:
    with transaction.atomic():
        body = {"order": key, "total": total}
        outbox.send(connection, "billing", body, key=key, message_type=message_type, **more)


def test_a_failed_handler_leaves_no_row_and_no_call_after_the_commit(saf_drain: Drain) -> None:
    send("A-1", 90)
    send("A-2", -1)
    send("A-3", 70)
    drained = saf_drain(worker, errors="park")
    assert (drained.handled, drained.parked) == (2, 1)
    assert sorted(Invoice.objects.values_list("order", flat=True)) == ["A-1", "A-3"]
    assert sorted(after_commit) == ["A-1", "A-3"]  # each once, although they were repeated


def test_a_handler_that_hides_a_failed_block_is_undone_and_does_not_hide_the_others(
    saf_drain: Drain,
) -> None:
    send("A-1", 90)
    send("A-2", message_type="Swallowed")
    send("A-3", 70)
    drained = saf_drain(worker, errors="park")
    assert (drained.handled, drained.parked) == (2, 1)
    assert sorted(Invoice.objects.values_list("order", flat=True)) == ["A-1", "A-3"]


def test_an_inner_block_that_fails_is_a_savepoint(saf_drain: Drain) -> None:
    send("A-1", message_type="Nested")
    assert saf_drain(worker).handled == 1
    assert Invoice.objects.get().total == 3


def test_headers_arrive_whatever_django_makes_of_jsonb(saf_drain: Drain) -> None:
    found: list[object] = []
    reader = saf.Worker(connection, "billing")

    @reader.handler()
    def keep(message: saf.Received, _: object) -> None:
        found.append((message.headers["n"], message.created_at.utcoffset() is not None))

    send("A-1", headers={"n": {"deep": [1, None]}})
    saf_drain(reader)
    assert found == [({"deep": [1, None]}, True)]


def test_a_batch_handler_writes_by_the_orm(saf_drain: Drain) -> None:
    reader = saf.Worker(connections["default"], "billing")

    @reader.batch_handler()
    def keep(messages: list[saf.Received], _: object) -> None:
        Invoice.objects.bulk_create(Invoice(order=one.key, total=1) for one in messages)

    for number in range(5):
        send(f"A-{number}")
    assert saf_drain(reader).handled == 5
    assert Invoice.objects.count() == 5


def test_what_a_handler_sends_is_sent_in_its_transaction(saf_drain: Drain) -> None:
    reader = saf.Worker(connection, "billing")

    @reader.handler("OrderPlaced")
    def on(message: saf.Received, given: Any) -> None:
        outbox.send(given, "billing", message.body, key=message.key, message_type="Nested")

    @reader.handler("Nested")
    def nested(message: saf.Received, _: object) -> None:
        Invoice.objects.create(order=message.key, total=1)

    send("A-1")
    assert saf_drain(reader).handled == 2


def test_receive_lends_djangos_connection_and_commits_at_its_end(saf_drain: Drain) -> None:
    send("A-1")
    saf_drain()
    raw = below_django(connection)
    with saf.receive(connection, "billing") as delivery:
        assert [message.key for message in delivery] == ["A-1"]
        assert delivery.connection is connections["default"]
        Invoice.objects.create(order="A-1", total=1)
    assert Invoice.objects.count() == 1
    assert below_django(connection) is raw, "it was open before, so it stays open"
    assert raw.autocommit
    assert fetch(raw, "SHOW enable_seqscan") == [("on",)]


def test_an_error_in_the_block_of_receive_rolls_the_orm_back(saf_drain: Drain) -> None:
    send("A-1")
    saf_drain()
    with pytest.raises(KeyError), saf.receive(connection, "billing"):
        Invoice.objects.create(order="A-1", total=1)
        raise KeyError
    assert Invoice.objects.count() == 0


def test_receiving_inside_of_a_block_is_refused() -> None:
    with (
        transaction.atomic(),
        pytest.raises(UsageError, match="transaction is open"),
        saf.receive(connection, "billing"),
    ):
        pass


def test_a_worker_opens_a_connection_in_each_thread_and_closes_it(saf_drain: Drain) -> None:
    send("A-1", 90)
    saf_drain()
    worker.run(drain=True)
    assert Invoice.objects.count() == 1
    raw = below_django(connection)
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = %(name)s AND pid <> %(pid)s"
    params = {"name": raw.info.dbname, "pid": raw.info.backend_pid}
    for _ in range(200):  # the server ends a session a moment after its client has
        if fetch(raw, others, params) == [(0,)]:
            break
        time.sleep(0.05)
    assert fetch(raw, others, params) == [(0,)]


def test_async_handlers_are_refused_with_the_way_out() -> None:
    reader = saf.Worker(connection, "billing")

    @reader.handler()
    async def on(message: saf.Received, _: object) -> None:
        del message

    with pytest.raises(UsageError, match="a dsn"):
        reader.run(drain=True)


def test_without_time_zones_django_gets_naive_moments_and_saf_gets_others(
    settings: Any, saf_drain: Drain
) -> None:
    settings.USE_TZ = False
    connection.close()
    send("A-1", 90)
    assert saf_drain(worker).handled == 1
    connection.close()
