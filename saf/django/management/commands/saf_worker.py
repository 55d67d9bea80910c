"""``manage.py saf_worker``: run a worker of the project, as `saf worker` does."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.db import connections

from saf.cli.worker import find
from saf.django.management.running import WorkerCommand
from saf.receiving.loop import Loop


class Command(WorkerCommand):
    """Run a saf.Worker."""

    help = (
        "Handle messages until SIGTERM or Ctrl-C. After a stop request it finishes the message in "
        "hand, commits finished work, and puts the rest back."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the worker and its database."""
        parser.add_argument(
            "which", metavar="module:worker", help="The saf.Worker to import and run."
        )
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            choices=tuple(connections),
            help="Alias of the database to receive from. Default: the worker's own.",
        )
        super().add_arguments(parser)

    def worker(self, options: dict[str, Any]) -> Loop:
        """Return the worker, which receives from the chosen database."""
        worker = find(options["which"])
        if options["database"] is not None:
            worker.engine = connections[options["database"]]
        return worker

    def again(self, options: dict[str, Any]) -> list[str]:
        """Return the arguments that name the worker."""
        database = [] if options["database"] is None else ["--database", options["database"]]
        return [options["which"], *database]
