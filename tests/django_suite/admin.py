"""The admin, as a user in a browser has it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import connection, transaction
from django.test import Client

from saf.django.models import DeadLetter, InboxMessage, OutboxMessage, ParkedMessage
from saf.testing import Drain
from shop.models import outbox
from work import worker

MODELS: dict[str, Any] = {
    "outboxmessage": OutboxMessage,
    "inboxmessage": InboxMessage,
    "parkedmessage": ParkedMessage,
    "deadletter": DeadLetter,
}
SECRET = "of-nobody-else"


@pytest.fixture
def messages(transactional_db: None, saf_drain: Drain, settings: Any) -> None:
    """A message in each place: A-1 is a dead letter, A-2 is parked."""
    del settings.SAF
    with transaction.atomic():
        headers = {"authorization": SECRET, "tenant": "acme"}
        for key, total in (("A-1", 0), ("A-2", -1)):
            body = {"order": key, "total": total, "card": SECRET}
            more: Any = {"message_type": "OrderPlaced", "headers": headers}
            outbox.send(connection, "billing", body, key=key, **more)
    saf_drain(worker, errors="park")


def page(client: Client, path: str, status: int = 200) -> str:
    answer = client.get(f"/admin/saf/{path}")
    assert answer.status_code == status, path
    return answer.content.decode()


def test_each_table_is_listed_and_its_messages_are_shown(
    admin_client: Client, messages: None
) -> None:
    for name, model in MODELS.items():
        one = model.objects.latest("pk")
        listed = page(admin_client, f"{name}/")
        assert one.key in listed
        shown = page(admin_client, f"{name}/{one.pk}/change/")
        assert str(one.message_id) in shown
        assert "acme" in shown
        assert "hidden: SAF =" in shown
        assert SECRET not in shown + listed


def test_nothing_can_be_added_changed_or_deleted(admin_client: Client, messages: None) -> None:
    for name, model in MODELS.items():
        one = model.objects.latest("pk")
        page(admin_client, f"{name}/add/", status=403)
        page(admin_client, f"{name}/{one.pk}/delete/", status=403)
        shown = page(admin_client, f"{name}/{one.pk}/change/")
        assert not re.search(r'<(input|textarea|select)[^>]* name="(?!csrf)', shown)
        answer = admin_client.post(f"/admin/saf/{name}/{one.pk}/change/", {"key": "B-1"})
        assert answer.status_code == 403
        assert "delete_selected" not in page(admin_client, f"{name}/")
        assert model.objects.get(pk=one.pk).key == one.key


def test_bodies_are_shown_only_if_the_setting_says_so_and_are_redacted(
    admin_client: Client, messages: None, settings: Any
) -> None:
    one = OutboxMessage.objects.get(key="A-1")
    settings.SAF = {"bodies": True, "redact_paths": ["$.card"]}
    shown = page(admin_client, f"outboxmessage/{one.pk}/change/")
    assert "&quot;total&quot;: 0" in shown
    assert SECRET not in shown


def test_the_outbox_shows_what_became_of_a_message(admin_client: Client, messages: None) -> None:
    one = OutboxMessage.objects.get(key="A-1")
    assert "forwarded" in page(admin_client, f"outboxmessage/{one.pk}/change/")
    with transaction.atomic():
        outbox.send(connection, "billing", b"x", key="A-3")
    one = OutboxMessage.objects.get(key="A-3")
    assert "pending" in page(admin_client, f"outboxmessage/{one.pk}/change/")


def test_a_key_or_an_id_is_found(admin_client: Client, messages: None) -> None:
    one = OutboxMessage.objects.get(key="A-1")
    for term in ("A-1", str(one.message_id)):
        found = page(admin_client, f"outboxmessage/?q={term}")
        assert "1 outbox" in found or "1 message" in found
        assert "A-2" not in found


def test_a_dead_letter_shows_its_reason(admin_client: Client, messages: None) -> None:
    shown = page(admin_client, "deadletter/")
    assert "a total of nothing" in shown


def test_a_user_without_the_permission_sees_nothing(messages: None, django_user_model: Any) -> None:
    user = django_user_model.objects.create_user("clerk", password="x", is_staff=True)
    client = Client()
    client.force_login(user)
    page(client, "outboxmessage/", status=403)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"body": True}, "Did you mean 'bodies'"),
        ({"bodies": "perhaps"}, "bodies"),
        ({"redact_paths": ["$["]}, "not a JSON path"),
        (["bodies"], "expected a dict"),
    ],
)
def test_a_wrong_setting_is_found_by_the_checks(settings: Any, given: Any, why: str) -> None:
    settings.SAF = given
    (found,) = [one for one in run_checks() if one.id == "saf.E001"]
    assert why in str(found)
