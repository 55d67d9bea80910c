"""``saf worker``: run a worker or processors of an application, in one process or several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, NamedTuple

import typer

from saf.cli.alive import Alive, handled, place, waiting
from saf.cli.console import echo
from saf.cli.metrics import Push, Textfile, nth, published
from saf.errors import StopTimeout as StopTimedOut
from saf.errors import UsageError
from saf.operating.wording import counted
from saf.receiving.growth import Growth
from saf.receiving.loop import Loop
from saf.signals import stop_on_signals
from saf.typed.modules import imported

AGAIN_SECONDS = 1.0
"""Delay before a process that died is replaced, and interval at which processes report."""


SILENT_SECONDS = 3.0
"""Time after which the report of a process does not count any more, in seconds."""


class Processes(NamedTuple):
    """How many processes run: at least, and at most."""

    least: int = 1
    most: int = 1

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


def processes_of(text: object) -> Processes:
    """Return a number of processes, or a range.

    >>> processes_of("4"), processes_of("1..8")
    (Processes(least=4, most=4), Processes(least=1, most=8))
    """
    found = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", str(text))
    least = int(found[1]) if found else 0
    most = int(found[2] or least) if found else 0
    if not 1 <= least <= most:
        raise typer.BadParameter(f"{text} is neither a number from 1 nor a range such as 1..8")
    return Processes(least, most)


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
            help="saf.Worker, saf.Saga or saf.Processors to import and run.",
        ),
    ],
    *,
    processes: Annotated[
        Processes,
        typer.Option(
            parser=processes_of,
            metavar="NUMBER",
            help="Number of processes; one that dies is replaced. Or a range such as 1..8: as "
            "many as the messages need. Default: 1.",
            show_default=False,
        ),
    ] = Processes(),  # noqa: B008 - a tuple
    drain: Annotated[
        bool, typer.Option("--drain", help="Handle pending messages, and exit.")
    ] = False,
    stop_timeout: StopTimeout = None,
    metrics: WorkersListen = None,
    metrics_textfile: Textfile = None,
    metrics_push: Push = None,
    report_to: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Handle messages until SIGTERM or Ctrl-C.

    After a stop request it finishes the message in hand, commits finished work, and puts the rest
    back. With a range of processes, another one starts when all have been busy for three seconds,
    and one ends when it has not been needed for half a minute. At its end it shows how many
    messages it has handled, parked and turned into dead letters.
    Exit codes: 0 after a stop request; 75 if the message in hand took longer than the stop timeout.
    With --drain: 1 if there are new dead letters, or messages that no handler takes; 75 if messages
    wait for another attempt; otherwise 0.
    """
    worker = find(which)
    if processes.most > 1 and not drain:
        arguments = [] if stop_timeout is None else ["--stop-timeout", str(stop_timeout)]
        if metrics_textfile or metrics_push:
            raise UsageError(
                "each of several processes serves its own metrics: use --metrics :PORT"
            )
        commands = [
            [sys.executable, "-m", "saf", "worker", which, *arguments, *listening(metrics, number)]
            for number in range(processes.most)
        ]
        supervise(commands, f"saf worker {which}", least=processes.least)
        return
    with published(
        listen=metrics, textfile=metrics_textfile, push=metrics_push, job=f"saf-worker-{which}"
    ):
        if report_to is not None:
            report(worker, report_to)
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
        UsageError: the module or name does not exist, or is not a worker, or the module raises an
            error.
    """
    module, _, name = which.partition(":")
    if not module or not name:
        raise UsageError(f"{which!r}: expected MODULE:WORKER, such as shop.consumers:worker")
    found = getattr(imported(module), name, None)
    if not isinstance(found, Loop):
        raise UsageError(
            f"{which}: {name!r} in {module} is neither saf.Worker nor saf.Processors, but {found!r}"
        )
    return found


def listening(metrics: str | None, number: int) -> list[str]:
    """Return the metrics option of one of several processes, if they serve metrics."""
    where = nth(metrics, number)
    return [] if where is None else ["--metrics", where]


def report(worker: Loop, pipe: int) -> None:
    """Report once a second, in percent, how much of the time a worker was idle; see `Pool`."""

    def keep_reporting() -> None:
        before, at = worker.idle.seconds(), time.monotonic()
        while True:
            time.sleep(AGAIN_SECONDS)
            idle, now = worker.idle.seconds(), time.monotonic()
            share = (idle - before) / ((now - at) * worker.threads)
            before, at = idle, now
            try:
                os.write(pipe, bytes([min(100, round(100 * share))]))
            except OSError:
                return  # the supervisor is gone

    threading.Thread(target=keep_reporting, name="saf report", daemon=True).start()


class Pool:
    """Processes of commands: ``least`` of them at least, all of them at most.

    One that dies is replaced. If there may be more or fewer, each reports to a pipe how idle it is.
    """

    def __init__(self, commands: Sequence[list[str]], least: int) -> None:
        self._commands = commands
        self._growth = Growth(least=least, most=len(commands))
        self._grows = least < len(commands)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ending: list[subprocess.Popen[bytes]] = []
        self._pipes: dict[int, int] = {}
        self._reports: dict[int, tuple[float, float]] = {}
        """By process, the last report, and when it was read."""

    @property
    def codes(self) -> list[int]:
        """Exit codes of processes that have ended and are not replaced yet."""
        return [code for child in self._running.values() if (code := child.poll()) is not None]

    def tend(self, stopping: threading.Event) -> None:
        """Start missing processes, and end those that are not needed. Call it once a second."""
        self._ending = [child for child in self._ending if child.poll() is None]
        wanted = self._growth.wanted
        if self._grows and self._running:
            wanted = self._growth.next([self._idle(number) for number in self._running])
        for number in [*self._running]:
            if number >= wanted:
                child = self._running.pop(number)
                child.terminate()
                self._ending.append(child)
                os.close(self._pipes.pop(number))
                self._reports.pop(number, None)
        for number in range(wanted):
            is_running = number in self._running and self._running[number].poll() is None
            if not is_running and not stopping.is_set():
                self._running[number] = self._started(number)

    def end(self) -> list[int]:
        """End all processes; return their exit codes."""
        for child in self._running.values():
            child.terminate()
        return [child.wait() for child in [*self._running.values(), *self._ending]]

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        command = self._commands[number]
        if not self._grows:
            return subprocess.Popen(command)  # noqa: S603 - this command itself
        if (before := self._pipes.pop(number, None)) is not None:
            os.close(before)
        self._reports.pop(number, None)
        self._pipes[number], pipe = os.pipe()
        os.set_blocking(self._pipes[number], False)
        try:
            return subprocess.Popen(  # noqa: S603 - this command itself
                [*command, "--report-to", str(pipe)], pass_fds=[pipe]
            )
        finally:
            os.close(pipe)

    def _idle(self, number: int) -> float:
        """Return the share of the last second that a process was idle; 1 if it has not reported."""
        try:
            if reports := os.read(self._pipes[number], 1024):
                self._reports[number] = reports[-1] / 100, time.monotonic()
        except BlockingIOError:
            pass  # nothing new
        idle, at = self._reports.get(number, (1.0, 0.0))
        return idle if time.monotonic() - at < SILENT_SECONDS else 1.0


def supervise(
    commands: Sequence[list[str]], program: str = "saf worker", least: int | None = None
) -> None:
    """Keep a process of each command running until told to stop; then wait until all end.

    With ``least``, keep at least so many running, and more of them while they are busy.
    """
    least = len(commands) if least is None else least
    many = counted(len(commands), "process", "processes")
    Alive(program, f"keeps {many if least == len(commands) else f'{least} to {many}'} running")
    stopping = threading.Event()
    pool = Pool(commands, least)

    with stop_on_signals(stopping.set):
        while not stopping.is_set():
            if UsageError.exit_code in pool.codes:
                break  # it has printed the reason; the next process would print the same
            pool.tend(stopping)
            stopping.wait(AGAIN_SECONDS)
        # terminate here, when all started processes are known: a signal may arrive during a start
        codes = pool.end()
    for code in (UsageError.exit_code, StopTimedOut.exit_code):
        if code in codes:
            raise typer.Exit(code)
