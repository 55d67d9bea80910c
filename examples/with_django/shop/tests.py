"""Tests of the project: ``manage.py test``."""

from django.db import IntegrityError
from django.test import TestCase, TransactionTestCase

from saf.testing import Drain, Sent, django_database

from .consumers import worker
from .models import Invoice, place


class Sending(TestCase):
    """In a transaction that is rolled back after each test."""

    def test_an_order_is_announced_to_billing(self) -> None:
        place("A-1", 90)
        message = Sent(django_database()).one(to_service="billing")
        self.assertEqual(message.json(), {"order": "A-1", "total": 90})

    def test_an_order_that_fails_is_not_announced(self) -> None:
        place("A-1", 90)
        with self.assertRaises(IntegrityError):
            place("A-1", 91)
        Sent(django_database()).one(key="A-1", body={"order": "A-1", "total": 90})


class Receiving(TransactionTestCase):
    """With commits: the tables are emptied after each test."""

    def test_an_order_gets_its_invoice(self) -> None:
        place("A-1", 90)
        drained = Drain(django_database())(worker)
        self.assertEqual(drained.handled, 1)
        self.assertEqual(Invoice.objects.get().total, 90)

    def test_it_gets_one_again_after_the_tables_were_emptied(self) -> None:
        Sent(django_database()).none(include_forwarded=True)
        self.test_an_order_gets_its_invoice()
