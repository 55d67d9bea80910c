"""A serialized rollback, which Django cannot mix with other transactional tests."""

from __future__ import annotations

import pytest

from saf.django.models import OutboxMessage
from saf.testing import Drain
from shop.consumers import worker
from shop.models import Order, place


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_a_serialized_rollback_begins_without_messages() -> None:
    assert OutboxMessage.objects.count() == 0
    place("A-1", 90)


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_and_ends_without_messages(saf_drain: Drain) -> None:
    assert OutboxMessage.objects.count() + Order.objects.count() == 0
    place("A-1", 90)
    assert saf_drain(worker).handled == 1
