"""The app's configuration: what runs at each ``manage.py migrate``, and the checks of settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db.models.signals import pre_migrate

from saf.database import REVISION
from saf.django import schema
from saf.errors import SafError
from saf.signals import end_at_interrupt

PROGRAMS = ("saf_worker", "saf_tasks")
"""Commands that are processes of their own, and end as `saf worker` does."""

if sys.argv[1:2] and sys.argv[1] in PROGRAMS:
    # the project's modules, and those of the command, are imported after this one
    end_at_interrupt()


class SafConfig(AppConfig):
    """The app ``saf``."""

    name = "saf.django"
    label = "saf"
    verbose_name = "saf"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Have Django call this app."""
        pre_migrate.connect(_bring_schema, sender=self)
        checks.register(_check_settings)


def _bring_schema(*, using: str, verbosity: int = 0, stdout: Any = None, **_: object) -> None:
    """Bring the schema of a database that is about to be migrated; say so if that changed it."""
    from saf.django import tasks

    try:
        if not schema.lives_in(using):
            return
        changed = schema.bring(using)
        if tasks.TASKS_EXIST:
            tasks.prepare(using)
    except SafError as error:
        raise CommandError(str(error)) from None
    if changed and verbosity >= 1 and stdout is not None:
        stdout.write(f"  saf: schema {REVISION} is in place")


def _check_settings(app_configs: Sequence[AppConfig] | None, **_: object) -> list[checks.Error]:
    """Report errors in the setting SAF."""
    from saf.django.settings import shown_parts  # imports pydantic

    del app_configs
    try:
        shown_parts()
    except (ImproperlyConfigured, SafError) as error:
        return [checks.Error(str(error), id="saf.E001")]
    return []
