"""The schema and the messages in the databases of Django's test runners."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection, transaction

from saf.broker import health
from saf.database import REVISION, fetch
from saf.django import schema
from saf.django.models import InboxMessage, OutboxMessage
from saf.errors import UsageError
from saf.testing import Clock, Drain, Sent
from saf.transaction import below_django
from shop.consumers import worker
from shop.models import Invoice, Order, outbox, place
from work import worker as failing

ROWS = """
SELECT (SELECT broker_id FROM saf.broker), (SELECT count(*) FROM saf.cursor),
       (SELECT array_agg(name ORDER BY name) FROM saf.service),
       (SELECT array_agg(service ORDER BY service) FROM saf.route)
"""
kept: list[Any] = []


# In a transaction that is rolled back


@pytest.mark.django_db
def test_a_message_is_seen_before_any_commit(saf_outbox: Sent) -> None:
    place("A-1", 90)
    assert saf_outbox.one(to_service="billing").json() == {"order": "A-1", "total": 90}


@pytest.mark.django_db
def test_a_message_is_gone_after_the_rollback_of_its_test(saf_outbox: Sent) -> None:
    saf_outbox.none(include_forwarded=True)


def test_the_fixture_db_is_enough(db: None, saf_outbox: Sent) -> None:
    place("A-1", 90)
    saf_outbox.one(key="A-1")


def test_a_message_of_an_inner_block_that_failed_is_not_seen(db: None, saf_outbox: Sent) -> None:
    with pytest.raises(KeyError), transaction.atomic():
        place("A-1", 90)
        raise KeyError
    saf_outbox.none()


@pytest.mark.django_db
def test_what_needs_commits_says_so(saf_drain: Drain, saf_clock: Clock) -> None:
    place("A-1", 90)
    with pytest.raises(UsageError, match=r"saf_drain .*django_db\(transaction=True\)"):
        saf_drain(worker)
    with pytest.raises(UsageError, match="saf_clock"):
        saf_clock.move(hours=1)


# With commits, and tables that are emptied


@pytest.mark.django_db(transaction=True)
def test_an_order_is_forwarded_and_handled(saf_outbox: Sent, saf_drain: Drain) -> None:
    kept.extend(fetch(below_django(connection), ROWS))
    place("A-1", 90)
    saf_outbox.one(to_service="billing")
    assert saf_drain(worker).handled == 1
    assert Invoice.objects.get().total == 90
    assert OutboxMessage.objects.count() == 1
    assert InboxMessage.objects.filter(to_service="billing").count() == 1


@pytest.mark.django_db(transaction=True)
def test_messages_are_gone_and_the_broker_is_whole(saf_outbox: Sent, saf_drain: Drain) -> None:
    assert OutboxMessage.objects.count() + InboxMessage.objects.count() == 0
    saf_outbox.none(include_forwarded=True)
    raw = below_django(connection)
    assert fetch(raw, ROWS) == kept
    for log in ("outbox", "inbox"):
        health.refuse(raw, log)
    place("A-1", 90)
    assert saf_drain(worker).handled == 1


@pytest.mark.django_db(transaction=True, available_apps=["shop", "saf.django"])
def test_a_subset_of_the_apps_is_emptied_too() -> None:
    place("A-1", 90)


@pytest.mark.django_db(transaction=True, reset_sequences=True)
def test_ids_continue_even_if_sequences_are_reset(saf_outbox: Sent) -> None:
    assert OutboxMessage.objects.count() == 0
    place("A-1", 90)
    assert OutboxMessage.objects.get().pk > 1


@pytest.mark.django_db(transaction=True)
def test_a_dead_letter_and_what_is_parked_are_gone_after_a_flush(saf_drain: Drain) -> None:
    with transaction.atomic():
        for total in (-1, 0):
            body = {"order": f"A{total}", "total": total}
            outbox.send(connection, "billing", body, key=f"A{total}", message_type="OrderPlaced")
    saf_drain(failing, errors="park")
    tables = "parked", "dead_letter", "backoff"
    assert [count(table) for table in tables] == [1, 1, 1]
    call_command("flush", interactive=False)
    assert [count(table) for table in tables] == [0, 0, 0]


def count(table: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(f'SELECT count(*) FROM saf."{table}"')
        return int(cursor.fetchone()[0])


@pytest.mark.django_db(transaction=True)
def test_a_flush_that_is_cancelled_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    place("A-1", 90)
    monkeypatch.setattr("builtins.input", lambda _: "no")
    call_command("flush", interactive=True)
    assert OutboxMessage.objects.count() == 1
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    call_command("flush", interactive=True)
    assert OutboxMessage.objects.count() + Order.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_migrating_again_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert not schema.bring("default")
    call_command("migrate", verbosity=1)
    assert "saf: schema" not in capsys.readouterr().out


@pytest.mark.django_db(transaction=True)
def test_a_database_of_a_newer_library_is_refused_with_a_sentence() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE saf.alembic_version SET version_num = '9999'")
        try:
            with pytest.raises(CommandError, match="9999"):
                call_command("migrate", verbosity=0)
        finally:
            cursor.execute("UPDATE saf.alembic_version SET version_num = %s", [REVISION])
