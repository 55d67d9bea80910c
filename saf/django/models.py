"""Tables of the schema saf as models, for the admin; docs/reference/schema.md describes them.

Django neither creates nor changes these tables. The models have no columns that only saf reads.
"""

from __future__ import annotations

from django.db import models


def _table(name: str) -> str:
    """Return the name of a table of the schema saf, as Django quotes it."""
    return f'"saf"."{name}"'


class Message(models.Model):
    """Columns of each table of messages."""

    message_id = models.UUIDField()
    to_service = models.TextField()
    from_service = models.TextField(null=True)
    key = models.TextField(null=True)
    message_type = models.TextField(null=True)
    headers = models.TextField(null=True)
    body = models.BinaryField()
    created_at = models.DateTimeField()
    deliver_at = models.DateTimeField(null=True)
    expires_at = models.DateTimeField(null=True)

    class Meta:
        """Common options."""

        abstract = True
        managed = False
        default_permissions = ("view",)
        required_db_vendor = "postgresql"

    def __str__(self) -> str:
        return f"{self.message_id}"


class OutboxMessage(Message):
    """A message sent from this database."""

    id = models.BigIntegerField(primary_key=True)

    class Meta(Message.Meta):
        """Options of the table."""

        db_table = _table("outbox")
        verbose_name = "message in the outbox"
        verbose_name_plural = "outbox"


class InboxMessage(Message):
    """A message stored for the services that live here."""

    id = models.BigIntegerField(primary_key=True)
    received_at = models.DateTimeField()

    class Meta(Message.Meta):
        """Options of the table."""

        db_table = _table("inbox")
        verbose_name = "message in the inbox"
        verbose_name_plural = "inbox"


class ParkedMessage(Message):
    """A message that is set aside, and tried again automatically."""

    parked_id = models.BigIntegerField(primary_key=True)
    destination = models.TextField()
    kind = models.TextField()
    parked_at = models.DateTimeField()

    class Meta(Message.Meta):
        """Options of the table."""

        db_table = _table("parked")
        verbose_name = "parked message"


class DeadLetter(Message):
    """A message that is set aside for an operator."""

    dead_letter_id = models.BigIntegerField(primary_key=True)
    destination = models.TextField()
    reason = models.TextField()
    error = models.TextField()
    dead_letter_at = models.DateTimeField()

    class Meta(Message.Meta):
        """Options of the table."""

        db_table = _table("dead_letter")
        verbose_name = "dead letter"
