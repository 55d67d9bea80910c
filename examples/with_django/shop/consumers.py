"""The worker of the service billing: ``manage.py saf_worker shop.consumers:worker``."""

from django.db import connection

import saf

from .models import Invoice

worker = saf.Worker(connection, "billing")


@worker.handler("OrderPlaced")
def placed(message: saf.Received, _: object) -> None:
    """Write the invoice, in the transaction in which the message is received."""
    order = message.json()
    Invoice.objects.create(order=order["order"], total=order["total"])
