"""The command ``saf``. A file per command or group of commands; logic lives in the library.

`saf.cli.console` defines the exit codes. A user's mistake gets one sentence on stderr and no
traceback.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version as distribution_version
from typing import Annotated

import structlog
import typer

from saf.cli import (
    apply,
    broker,
    dialog,
    doctor,
    endpoint,
    forward,
    init,
    messages,
    metrics,
    purge,
    repair,
    route,
    router,
    schema,
    service,
    set_aside,
    status,
    ui,
    worker,
)
from saf.cli.alive import LOG_LEVEL
from saf.cli.brokers import Commands
from saf.cli.console import (
    INTERRUPTED,
    echo,
    give_up_output,
    in_words,
    is_of_output,
    open_standard_streams,
    plain_console,
    shown_event,
    write_any_character,
)
from saf.database import REVISION
from saf.errors import SafError, UsageError
from saf.telemetry import carried
from saf.telemetry.tracing import trace_ids

DEMO = "saf_demo"
"""Package of the demos. It imports saf, so saf finds it by its name only."""
ANY_OPTIONS = {"ignore_unknown_options": True, "allow_extra_args": True}


def _say_version(wanted: bool) -> None:
    if wanted:
        echo(f"saf {distribution_version('saf-outbox')}, schema {REVISION}")
        raise typer.Exit


def _demo() -> Callable[..., None]:
    """Return the command `saf demo`, which the package `DEMO` beside saf defines.

    If the package is not installed, return a command that says so.
    """
    try:
        command: Callable[..., None] = import_module(f"{DEMO}.command").command
    except ModuleNotFoundError as error:
        if error.name != DEMO:
            raise
        return _no_demo
    return command


def _no_demo() -> None:
    """Forward a message for each flight of New York City (not installed here)."""
    raise UsageError(
        f"saf demo is in the package {DEMO}, which is not installed: install saf-outbox"
    )


app = Commands(
    name="saf",
    epilog=in_words(),
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version, and exit."
        ),
    ] = False,
) -> None:
    """Transactional store-and-forward outbox for PostgreSQL."""


app.command("init")(init.command)
app.command("migrate")(schema.migrate)
app.command("apply")(apply.command)
app.command("export")(apply.export)
app.command("grant")(schema.grant)
app.add_typer(schema.sending, name="sender")
app.command("forward", epilog=in_words())(forward.command)
app.command("status")(status.status)
app.command("members")(status.members)
app.command("metrics")(metrics.command)
app.command("ui")(ui.command)
app.command("worker")(worker.command)
app.command("dispatch")(endpoint.command)
app.add_typer(endpoint.app, name="endpoint")
app.add_typer(broker.app, name="broker")
app.add_typer(broker.fleets, name="fleet")
app.add_typer(route.app, name="route")
app.add_typer(route.topics, name="topic")
app.add_typer(router.app, name="router")
app.add_typer(router.transforms, name="transform")
app.add_typer(service.app, name="service")
app.add_typer(service.subscriptions, name="subscription")
app.command("message")(messages.message)
app.add_typer(messages.outboxes, name="outbox")
app.add_typer(messages.inboxes, name="inbox")
app.add_typer(dialog.app, name="dialog")
app.add_typer(dialog.agreements, name="contract")
app.add_typer(set_aside.parking, name="parked")
app.add_typer(set_aside.letters, name="dead")
app.add_typer(doctor.destinations, name="destination")
app.add_typer(doctor.lakes, name="lake")
app.command("purge")(purge.command)
app.command("reconcile")(repair.reconcile_)
app.command("replay")(repair.replay)
app.command("rebase")(repair.rebase_)
app.command("doctor")(doctor.doctor)
if (demo := _demo()) is _no_demo:
    app.command("demo", context_settings=ANY_OPTIONS)(demo)
else:
    app.command("demo")(demo)


def program() -> None:
    """Run `main` in a process that is nothing but the command ``saf``."""
    ended: list[int] = []
    atexit.register(_end_at_once, ended)
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int):
            ended.append(end.code)
        raise


@cache
def commands() -> Callable[..., None]:
    """Return all commands, ready to call; cached, because building them takes 0.1 s."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    open_standard_streams()
    write_any_character()
    _configure_logging()
    try:
        commands()(list(arguments) if arguments is not None else None)
    except SafError as error:
        plain_console(stderr=True).print(f"saf: {error}", style="red", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # the reader of the output is gone (| head); there is nothing left to print
        give_up_output()
        sys.exit(1)
    except OSError as error:
        if not is_of_output(error):
            raise
        give_up_output()
        plain_console(stderr=True).print(
            f"saf: its output cannot be written: {error.strerror}; what the command did is done",
            style="red",
            soft_wrap=True,
        )
        sys.exit(SafError.exit_code)


def _end_at_once(ended: Sequence[int]) -> None:
    """Skip Python's teardown, object by object, which takes a third of a second after Spark.

    By now, threads have ended and the command's exit handlers have run. Do nothing after a
    traceback, or if OpenTelemetry was set up before the command: it exports its last spans later.
    """
    if not ended or carried.on():
        return
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return  # Python has its own message and exit code for this
    os._exit(ended[0])


def _configure_logging() -> None:
    """Log events to stderr: readable on a terminal, otherwise one JSON object per line."""
    people = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            trace_ids,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(
                (shown_event, structlog.dev.ConsoleRenderer())
                if people
                else (structlog.processors.JSONRenderer(),)
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LOG_LEVEL),
        # the stderr of the moment: while a progress bar is shown, it replaces stderr
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
