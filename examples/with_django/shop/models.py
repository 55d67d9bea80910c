"""Orders, their invoices, and the function that places an order."""

from django.db import connection, models, transaction

import saf

outbox = saf.Outbox()


class Order(models.Model):
    """An order."""

    number = models.TextField(primary_key=True)
    total = models.IntegerField()


class Invoice(models.Model):
    """The invoice of an order, which may be in another database."""

    order = models.TextField(primary_key=True)
    total = models.IntegerField()


def place(number: str, total: int) -> None:
    """Place an order, with a message to the service billing and a task that prints the label."""
    from .tasks import print_label

    with transaction.atomic():
        Order.objects.create(number=number, total=total)
        body = {"order": number, "total": total}
        outbox.send(connection, "billing", body, key=number, message_type="OrderPlaced")
        print_label.enqueue(number)
