"""The admin of saf: outbox, inbox, parked messages and dead letters, to look at.

Nobody may add, change or delete anything here: operators decide by `saf parked`, `saf dead` and
`saf ui`, which write an audit. Each model has Django's permission to view.

Bodies are hidden unless ``SAF = {"bodies": True}``, and redaction applies to headers, bodies and
errors, as in `saf ui` (`saf.ui.redaction`).

The logs have no index by id. So the admin shows only the newest slots of outbox and inbox
(`NEWEST`). `saf message` finds any message.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from django.contrib import admin
from django.db import connections, models
from django.http import HttpRequest
from psycopg import sql

from saf.database import fetch
from saf.django.models import DeadLetter, InboxMessage, Message, OutboxMessage, ParkedMessage
from saf.log.ring import SLOT_ROWS, SLOTS, slot_of
from saf.transaction import below_django

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

NEWEST = 2
"""Number of slots of a log that are shown. A slot has about a million ids; see `saf.log.ring`."""

LAST_ID = "SELECT last_value FROM {}"
STATUS = f"""
SELECT status FROM saf.outbox_status
WHERE id = %(id)s AND (id / {SLOT_ROWS} %% {SLOTS}) = %(slot)s
"""

MESSAGE = ("message_id", "to_service", "from_service", "key", "message_type")
TIMES = ("created_at", "deliver_at", "expires_at")
CONTENT = ("shown_headers", "shown_body")


class MessageAdmin(ModelAdmin):
    """What all models have in common."""

    search_fields = ("key",)
    search_help_text = "a key or a message id, complete"
    list_display: Any = ("to_service", "key", "message_type", "created_at")
    list_filter: ClassVar[Any] = ("to_service",)
    list_per_page = 50
    show_full_result_count = False
    actions = None

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Messages are sent by `saf.Outbox`."""
        del request
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Messages do not change."""
        del request, obj
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """`saf purge` deletes messages."""
        del request, obj
        return False

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        """Return the messages without their bodies, the newest first."""
        return super().get_queryset(request).defer("body").order_by("-pk")

    def get_search_results(
        self, request: HttpRequest, queryset: models.QuerySet[Any], search_term: str
    ) -> tuple[models.QuerySet[Any], bool]:
        """Search by index: whole keys and whole ids."""
        del request
        term = search_term.strip()
        if not term:
            return queryset, False
        wanted = models.Q(key=term)
        with suppress(ValueError):
            wanted |= models.Q(message_id=UUID(term))
        return queryset.filter(wanted), False

    @admin.display(description="headers")
    def shown_headers(self, message: Message) -> str:
        """Return the headers, one a line, without hidden values."""
        from saf.django.settings import shown_parts  # imports pydantic

        _, redaction = shown_parts()
        headers = redaction.headers(message.headers)
        return "\n".join(f"{name}: {value}" for name, value in headers.items()) or "-"

    @admin.display(description="body")
    def shown_body(self, message: Message) -> str:
        """Return the body if bodies are shown, without hidden values."""
        from saf.django.settings import shown_parts
        from saf.ui.redaction import LARGEST_BYTES

        bodies, redaction = shown_parts()
        if not bodies:
            return 'hidden: SAF = {"bodies": True} in the settings shows bodies'
        body = bytes(message.body)
        if len(body) > LARGEST_BYTES:
            return f"{len(body):,} bytes: more than are shown"
        return redaction.body(body, message.headers)


class LogAdmin(MessageAdmin):
    """The newest messages of a log."""

    log = ""

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        """Return the newest messages, from the slots that may have them."""
        found = super().get_queryset(request)
        raw = below_django(connections[found.db])
        sequence = sql.Identifier("saf", f"{self.log}_id_seq")
        ((last,),) = fetch(raw, sql.SQL(LAST_ID).format(sequence).as_bytes(raw))
        slot = models.ExpressionWrapper(
            models.F("id") / SLOT_ROWS % SLOTS, output_field=models.BigIntegerField()
        )
        newest = [(slot_of(last) - back) % SLOTS for back in range(NEWEST)]
        return found.alias(slot=slot).filter(slot__in=newest)


@admin.register(OutboxMessage)
class OutboxAdmin(LogAdmin):
    """The outbox."""

    log = "outbox"
    fields = (*MESSAGE, "status", *TIMES, *CONTENT)
    readonly_fields = ("status", *CONTENT)

    @admin.display
    def status(self, message: OutboxMessage) -> str:
        """Return pending, parked, dead or forwarded."""
        raw = below_django(connections[message._state.db or "default"])
        found = fetch(raw, STATUS, {"id": message.id, "slot": slot_of(message.id)})
        return str(found[0][0]) if found else "gone"


@admin.register(InboxMessage)
class InboxAdmin(LogAdmin):
    """The inbox."""

    log = "inbox"
    fields = (*MESSAGE, "received_at", *TIMES, *CONTENT)
    readonly_fields = CONTENT


@admin.register(ParkedMessage)
class ParkedAdmin(MessageAdmin):
    """Parked messages."""

    list_display = ("to_service", "key", "message_type", "kind", "destination", "parked_at")
    fields = (*MESSAGE, "kind", "destination", "parked_at", *TIMES, *CONTENT)
    readonly_fields = CONTENT


@admin.register(DeadLetter)
class DeadLetterAdmin(MessageAdmin):
    """Dead letters."""

    list_display = ("to_service", "key", "message_type", "reason", "shown_error", "dead_letter_at")
    list_filter = ("to_service", "reason")
    fields = (
        *(*MESSAGE, "reason", "shown_error", "destination", "dead_letter_at"),
        *(*TIMES, *CONTENT),
    )
    readonly_fields = ("shown_error", *CONTENT)

    @admin.display(description="error")
    def shown_error(self, letter: DeadLetter) -> str:
        """Return the error, without data that it quotes."""
        from saf.ui.redaction import error

        return error(letter.error)
