"""``manage.py flush``: Django's own command, which here also empties saf's messages.

Each ``TransactionTestCase`` ends with this command, in all its variants. Services, routes and other
rows that set saf up stay; see `saf.django.schema`.
"""

from __future__ import annotations

from typing import Any

from django.core.management.commands import flush
from django.db import connections

from saf.django import schema

QUESTION = """You have requested a flush of the database.
This will IRREVERSIBLY DESTROY all data currently in the "{name}" database,
and return each table to an empty state. This includes all messages of saf.
Are you sure you want to do this?

    Type 'yes' to continue, or 'no' to cancel: """


class Command(flush.Command):
    """Delete all data, and with it saf's messages."""

    def handle(self, **options: Any) -> None:
        """Ask, empty saf's tables, and flush."""
        using = options["database"]
        if options["interactive"]:
            name = connections[using].settings_dict["NAME"]
            if input(QUESTION.format(name=name)) != "yes":
                self.stdout.write("Flush cancelled.")
                return
        # first, because flush calls functions of the project, which may send
        if schema.lives_in(using):
            schema.empty(using)
        super().handle(**{**options, "interactive": False})
