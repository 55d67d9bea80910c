"""A Django application in one file that places orders.

    pip install django
    export SHOP_DB=shop SHOP_HOST=localhost SHOP_USER=me  # `saf migrate` was run on that database
    python with_django.py migrate_orders
    python with_django.py place A-1 90

In a real application, only `place` matters: `transaction.atomic()` is the transaction.
"""

from __future__ import annotations

import os
import sys

import django
from django.conf import settings
from django.db import connection, models, transaction

import saf

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": os.environ["SHOP_DB"],
            "HOST": os.environ.get("SHOP_HOST", ""),
            "PORT": os.environ.get("SHOP_PORT", ""),
            "USER": os.environ.get("SHOP_USER", ""),
        }
    },
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()

outbox = saf.Outbox()


class Order(models.Model):  # type: ignore[misc] # Django has no types
    """An order."""

    number = models.TextField(primary_key=True)
    total = models.IntegerField()

    class Meta:
        """Table of the model."""

        app_label = "shop"
        db_table = "orders"


def place(number: str, total: int) -> None:
    """Place an order, with a message to the service billing."""
    with transaction.atomic():
        Order.objects.create(number=number, total=total)
        body = {"order": number, "total": total}
        outbox.send(connection, "billing", body, key=number, message_type="OrderPlaced")


if __name__ == "__main__":
    if sys.argv[1] == "migrate_orders":
        with connection.schema_editor() as editor:
            editor.create_model(Order)
    else:
        place(sys.argv[2], int(sys.argv[3]))
    connection.close()
