"""What `saf_worker` and `saf_tasks` have in common: options, processes, signals, exit codes.

They are `saf worker` in a Django project, and use its code: see `saf.cli.worker`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from saf.errors import SafError
from saf.receiving.loop import Loop
from saf.signals import INTERRUPTED, end_at_interrupt, raise_at_interrupt


class WorkerCommand(BaseCommand):
    """Runs a worker until SIGTERM or Ctrl-C."""

    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options of `saf worker`."""
        parser.add_argument(
            "--processes",
            type=_at_least_one,
            default=1,
            help="Number of processes; one that dies is replaced.",
        )
        parser.add_argument(
            "--drain", action="store_true", help="Handle pending messages, and exit."
        )
        parser.add_argument(
            "--stop-timeout",
            type=float,
            metavar="SECONDS",
            help="Seconds that the message in hand may take after SIGTERM. Default: the "
            "worker's, 25.",
        )
        parser.add_argument(
            "--metrics",
            metavar="[HOST]:PORT",
            help="Serve metrics there, at /metrics. With several processes, each uses the next "
            "port.",
        )
        parser.add_argument(
            "--metrics-textfile",
            type=Path,
            metavar="FILE",
            help="Write metrics to this file, for the node exporter: name it ….prom.",
        )
        parser.add_argument(
            "--metrics-push", metavar="URL", help="Push metrics to this pushgateway at the end."
        )

    def worker(self, options: dict[str, Any]) -> Loop:
        """Return the worker to run."""
        raise NotImplementedError

    def again(self, options: dict[str, Any]) -> list[str]:
        """Return the arguments that name the worker, for a process of its own."""
        raise NotImplementedError

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the worker."""
        del args
        import typer

        from saf.cli import worker as cli
        from saf.cli.console import log_to_stderr
        from saf.cli.metrics import published

        raise_at_interrupt()
        log_to_stderr()
        try:
            worker = self.worker(options)
            if options["processes"] > 1 and not options["drain"]:
                cli.supervise(self._commands(options))
                return
            name = " ".join(self.again(options))
            with published(
                listen=options["metrics"],
                textfile=options["metrics_textfile"],
                push=options["metrics_push"],
                job=f"saf-worker-{name}",
            ):
                cli.run(
                    f"manage.py {name}",
                    worker,
                    drain=options["drain"],
                    stop_timeout=options["stop_timeout"],
                )
        except SafError as error:
            raise CommandError(str(error), returncode=error.exit_code) from None
        except typer.Exit as end:
            sys.exit(end.exit_code)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        finally:
            end_at_interrupt()

    def _commands(self, options: dict[str, Any]) -> list[list[str]]:
        """Return a command line for each process."""
        from saf.cli import worker as cli

        if options["metrics_textfile"] or options["metrics_push"]:
            raise CommandError(
                "each of several processes serves its own metrics: use --metrics :PORT"
            )
        name = type(self).__module__.rpartition(".")[2]
        common = [sys.executable, sys.argv[0], name, *self.again(options)]
        for option in ("stop_timeout", "settings", "pythonpath"):
            if options.get(option) is not None:
                common += [f"--{option.replace('_', '-')}", str(options[option])]
        return [
            [*common, *cli.listening(options["metrics"], number)]
            for number in range(options["processes"])
        ]


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number
