"""``manage.py saf_tasks``: run the tasks of a queue; see `saf.django.tasks`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from saf.django import tasks
from saf.django.management.running import WorkerCommand
from saf.receiving.loop import Loop


class Command(WorkerCommand):
    """Run tasks."""

    help = (
        "Run the tasks of a queue until SIGTERM or Ctrl-C. After a stop request it finishes the "
        "task in hand, and puts the rest back."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the queue and its backend."""
        parser.add_argument(
            "--backend", default="default", metavar="ALIAS", help="Backend in the setting TASKS."
        )
        parser.add_argument(
            "--queue", help='Queue of that backend. Default: its only one, or else "default".'
        )
        parser.add_argument(
            "--threads", type=int, default=1, help="Number of tasks that run at the same time."
        )
        super().add_arguments(parser)

    def worker(self, options: dict[str, Any]) -> Loop:
        """Return the queue's worker."""
        if not tasks.TASKS_EXIST:
            raise CommandError("Django has tasks since 6.0; before, pip install django-tasks")
        return tasks.worker(options["backend"], options["queue"], threads=options["threads"])

    def again(self, options: dict[str, Any]) -> list[str]:
        """Return the arguments that name the worker."""
        queue = [] if options["queue"] is None else ["--queue", options["queue"]]
        return ["--backend", options["backend"], "--threads", str(options["threads"]), *queue]
