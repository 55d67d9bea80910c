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

import typer

from saf.cli import (
    adopt,
    apply,
    asyncapi,
    broker,
    capture,
    dialog,
    doctor,
    endpoint,
    forward,
    held,
    init,
    messages,
    metrics,
    purge,
    repair,
    route,
    router,
    schedule,
    schema,
    service,
    set_aside,
    source,
    status,
    ui,
    worker,
)
from saf.cli.brokers import DECIDE, LOOK, REPAIR, RUN, SET_UP, Commands
from saf.cli.console import (
    complain,
    echo,
    give_up_output,
    in_words,
    is_of_output,
    log_to_stderr,
    open_standard_streams,
    write_any_character,
)
from saf.database import REVISION
from saf.errors import SafError, UsageError
from saf.signals import INTERRUPTED, end_at_interrupt, raise_at_interrupt
from saf.telemetry import carried

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


app.command("init", rich_help_panel=SET_UP)(init.command)
app.command("migrate", rich_help_panel=SET_UP)(schema.migrate)
app.command("grant", rich_help_panel=SET_UP)(schema.grant)
app.add_typer(service.app, name="service", rich_help_panel=SET_UP)
app.add_typer(service.subscriptions, name="subscription", rich_help_panel=SET_UP)
app.add_typer(route.app, name="route", rich_help_panel=SET_UP)
app.add_typer(route.topics, name="topic", rich_help_panel=SET_UP)
app.add_typer(router.app, name="router", rich_help_panel=SET_UP)
app.add_typer(router.transforms, name="transform", rich_help_panel=SET_UP)
app.add_typer(endpoint.app, name="endpoint", rich_help_panel=SET_UP)
app.add_typer(schedule.app, name="schedule", rich_help_panel=SET_UP)
app.add_typer(capture.app, name="capture", rich_help_panel=SET_UP)
app.command("adopt", rich_help_panel=SET_UP)(adopt.command)
app.add_typer(dialog.agreements, name="contract", rich_help_panel=SET_UP)
app.add_typer(schema.sending, name="sender", rich_help_panel=SET_UP)
app.command("apply", rich_help_panel=SET_UP)(apply.command)
app.command("export", rich_help_panel=SET_UP)(apply.export)
app.add_typer(asyncapi.app, name="asyncapi", rich_help_panel=SET_UP)

app.command("forward", epilog=in_words(), rich_help_panel=RUN)(forward.command)
app.command("worker", rich_help_panel=RUN)(worker.command)
app.command("dispatch", rich_help_panel=RUN)(endpoint.command)
app.command("ui", rich_help_panel=RUN)(ui.command)
app.command("metrics", rich_help_panel=RUN)(metrics.command)
app.command("purge", rich_help_panel=RUN)(purge.command)
app.add_typer(capture.backfills, name="backfill", rich_help_panel=RUN)
app.add_typer(doctor.lakes, name="lake", rich_help_panel=RUN)
if (demo := _demo()) is _no_demo:
    app.command("demo", context_settings=ANY_OPTIONS, rich_help_panel=RUN)(demo)
else:
    app.command("demo", rich_help_panel=RUN)(demo)

app.command("status", rich_help_panel=LOOK)(status.status)
app.command("members", rich_help_panel=LOOK)(status.members)
app.command("message", rich_help_panel=LOOK)(messages.message)
app.add_typer(messages.outboxes, name="outbox", rich_help_panel=LOOK)
app.add_typer(messages.inboxes, name="inbox", rich_help_panel=LOOK)
app.add_typer(dialog.app, name="dialog", rich_help_panel=LOOK)
app.add_typer(broker.app, name="broker", rich_help_panel=LOOK)
app.add_typer(broker.fleets, name="fleet", rich_help_panel=LOOK)
app.add_typer(doctor.destinations, name="destination", rich_help_panel=LOOK)
app.add_typer(source.app, name="source", rich_help_panel=LOOK)

app.add_typer(held.app, name="held", rich_help_panel=DECIDE)
app.add_typer(set_aside.parking, name="parked", rich_help_panel=DECIDE)
app.add_typer(set_aside.letters, name="dead", rich_help_panel=DECIDE)

app.command("doctor", rich_help_panel=REPAIR)(doctor.doctor)
app.command("reconcile", rich_help_panel=REPAIR)(repair.reconcile_)
app.command("replay", rich_help_panel=REPAIR)(repair.replay)
app.command("rebase", rich_help_panel=REPAIR)(repair.rebase_)


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
    finally:
        end_at_interrupt()


@cache
def commands() -> Callable[..., None]:
    """Return all commands, ready to call; cached, because building them takes 0.1 s."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    raise_at_interrupt()
    open_standard_streams()
    write_any_character()
    log_to_stderr()
    try:
        commands()(list(arguments) if arguments is not None else None)
    except SafError as error:
        complain(str(error), lines=True)
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
        complain(f"the output cannot be written: {error.strerror}; the command's changes are done")
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
