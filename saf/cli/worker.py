"""``saf worker``: run a worker or processors of an application, in one process or several."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from saf.cli.alive import Alive, handled, place, waiting
from saf.cli.console import echo
from saf.cli.metrics import Push, Textfile, nth, published
from saf.errors import StopTimeout as StopTimedOut
from saf.errors import UsageError
from saf.operating.wording import counted
from saf.receiving.loop import Loop
from saf.signals import stop_on_signals

AGAIN_SECONDS = 1.0
"""Delay before a process that died is replaced."""

StopTimeout = Annotated[
    float | None,
    typer.Option(
        min=0,
        envvar="SAF_STOP_TIMEOUT",
        metavar="SECONDS",
        help="Seconds that the message in hand may take after SIGTERM. Default: the worker's, 25.",
    ),
]

WorkersListen = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST]:PORT",
        help="Serve metrics there, at /metrics. With several processes, each uses the next port.",
    ),
]


def command(
    which: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:WORKER",
            help="Name of the saf.Worker or saf.Processors to import and run.",
        ),
    ],
    *,
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes; one that dies is replaced.")
    ] = 1,
    drain: Annotated[
        bool, typer.Option("--drain", help="Handle pending messages, and exit.")
    ] = False,
    stop_timeout: StopTimeout = None,
    metrics: WorkersListen = None,
    metrics_textfile: Textfile = None,
    metrics_push: Push = None,
) -> None:
    """Handle messages until SIGTERM or Ctrl-C.

    After a stop request it finishes the message in hand, commits finished work, and puts the rest
    back. At its end it shows how many messages it has handled, parked and turned into dead letters.
    Exit codes: 0 after a stop request; 75 if the message in hand took longer than the stop timeout.
    With --drain: 1 if there are new dead letters, or messages that no handler takes; 75 if messages
    wait for another attempt; otherwise 0.
    """
    worker = find(which)
    if processes > 1 and not drain:
        arguments = [] if stop_timeout is None else ["--stop-timeout", str(stop_timeout)]
        if metrics_textfile or metrics_push:
            raise UsageError(
                "each of several processes serves its own metrics: use --metrics :PORT"
            )
        commands = [
            [sys.executable, "-m", "saf", "worker", which, *arguments, *listening(metrics, number)]
            for number in range(processes)
        ]
        supervise(commands, f"saf worker {which}")
        return
    with published(
        listen=metrics, textfile=metrics_textfile, push=metrics_push, job=f"saf-worker-{which}"
    ):
        run(f"saf worker {which}", worker, drain=drain, stop_timeout=stop_timeout)


def run(program: str, worker: Loop, *, drain: bool, stop_timeout: float | None) -> None:
    """Run a worker until it is told to stop, or has no more work; print its summary."""
    if stop_timeout is not None:
        worker.stop_timeout = stop_timeout
    try:
        with alive(program, worker, drain=drain):
            worker.run(drain=drain)
    except StopTimedOut:
        echo(str(worker.summary))
        raise
    echo(str(worker.summary))
    if drain and worker.summary.exit_code:
        raise typer.Exit(worker.summary.exit_code)


def alive(program: str, worker: Loop, *, drain: bool) -> AbstractContextManager[None]:
    """Show that a worker lives, while a block runs it; of a drain, only its progress."""
    if drain:
        return waiting(lambda: f"{program}: {worker.summary} so far")
    where = f"receives for {worker.subscription} at {place(worker.engine)}"
    worker.beat = Alive(program, f"{where}, {handled(worker.handled_types())}").beat
    return nullcontext()


def find(which: str) -> Loop:
    """Return the worker that ``module:name`` names.

    Raises:
        UsageError: the module or name does not exist, or is not a worker.
    """
    module, _, name = which.partition(":")
    if not module or not name:
        raise UsageError(f"{which!r}: expected MODULE:WORKER, such as shop.consumers:worker")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise
        raise UsageError(f"{which}: no module {error.name!r} here") from None
    if not isinstance(found, Loop):
        raise UsageError(
            f"{which}: {name!r} in {module} is neither saf.Worker nor saf.Processors, but {found!r}"
        )
    return found


def listening(metrics: str | None, number: int) -> list[str]:
    """Return the metrics option of one of several processes, if they serve metrics."""
    where = nth(metrics, number)
    return [] if where is None else ["--metrics", where]


def supervise(commands: list[list[str]], program: str = "saf worker") -> None:
    """Keep a process of each command running until told to stop; then wait until all end."""
    Alive(program, f"keeps {counted(len(commands), 'process', 'processes')} running")
    stopping = threading.Event()
    running: dict[int, subprocess.Popen[bytes]] = {}

    with stop_on_signals(stopping.set):
        while not stopping.is_set():
            ended = [code for child in running.values() if (code := child.poll()) is not None]
            if UsageError.exit_code in ended:
                break  # it has printed the reason; the next process would print the same
            for number, command_ in enumerate(commands):
                is_running = number in running and running[number].poll() is None
                if not is_running and not stopping.is_set():
                    running[number] = subprocess.Popen(command_)  # noqa: S603 - this command itself
            stopping.wait(AGAIN_SECONDS)
        # terminate here, when all started processes are known: a signal may arrive during a start
        for process in running.values():
            process.terminate()
        codes = [process.wait() for process in running.values()]
    for code in (UsageError.exit_code, StopTimedOut.exit_code):
        if code in codes:
            raise typer.Exit(code)
