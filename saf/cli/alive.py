"""Signs of life of a process that keeps running: at its start, and while it is idle.

The first line names the process, its place and its task, the log level, and the way to stop it. A
process that finds no work shows this after a minute, after ten, and then each hour, so an operator
can tell it from a process that hangs. `Idle` decides when.

The lines go to standard error: as sentences on a terminal, elsewhere as events of the log. So
standard output has results only. A line that cannot be written is left out, and the process
continues.

While a command that ends takes longer than `SHOW_SECONDS`, `waiting` shows its progress on a
terminal. Elsewhere, it logs the progress every `LOG_SECONDS`.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from saf.cli.console import LOG_LEVEL, plain_console
from saf.database import Dsn
from saf.operating.wording import age, counted, shown
from saf.telemetry.logger import Log

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

IDLE_SECONDS = (60.0, 600.0, 3600.0)
"""Times without work after which a process shows that it is idle; the last time repeats."""

TICK_SECONDS = 5.0
"""Interval at which `Alive.watching` counts."""

SHOW_SECONDS = 2.0
"""Time after which a terminal shows a command's progress."""
LOG_SECONDS = 30.0
"""Interval at which the log shows a command's progress, without a terminal."""

MOST_NAMES = 5
"""Names that a line shows of a longer list."""

log = Log("saf")


class Idle:
    """Decides when to show that nothing has happened. Safe for several threads.

    >>> now = [0.0]
    >>> idle = Idle(clock=lambda: now[0])
    >>> shown = []
    >>> for now[0] in (59, 61, 599, 601, 3601, 7199, 7201, 7300):
    ...     shown += [seconds for seconds in [idle.beat(busy=False)] if seconds]
    >>> shown
    [61.0, 601.0, 3601.0, 7201.0]
    >>> idle.beat(busy=True), idle.beat(busy=False)
    (None, None)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._shown = 0
        self._turn = Lock()

    def beat(self, *, busy: bool) -> float | None:
        """Note whether there was work; return the idle seconds if they should be shown now."""
        with self._turn:
            now = self._clock()
            if busy:
                self._since, self._shown = now, 0
                return None
            last = len(IDLE_SECONDS) - 1
            due = IDLE_SECONDS[min(self._shown, last)] + IDLE_SECONDS[-1] * max(
                0, self._shown - last
            )
            seconds = float(now - self._since)
            if seconds < due:
                return None
            self._shown += 1
            return seconds


class Alive:
    """Shows that a process lives.

    Args:
        program: the command, such as ``saf worker consumers:worker``.
        does: place and task of the process, as a sentence without its subject.
        lacks: the work that is missing while it is idle, such as "no message".
    """

    def __init__(self, program: str, does: str, *, lacks: str = "no message") -> None:
        # What is loaded by now stays. The garbage collector would look through it all from time to
        # time, which takes a tenth of a second
        gc.freeze()
        self._program = program
        self._lacks = lacks
        self._idle = Idle()
        detail = (
            f"{program}: process {os.getpid()} {does}; log level {LOG_LEVEL}; "
            "Ctrl-C or SIGTERM stops it"
        )
        _tell("started", detail)

    def beat(self, busy: bool) -> None:
        """Note whether a search has found work; report a long idle time."""
        seconds = self._idle.beat(busy=busy)
        if seconds is not None:
            detail = f"{self._program}: idle, {self._lacks} for {age(seconds)}"
            _tell("idle", detail, seconds=round(seconds))

    @contextmanager
    def watching(self, count: Callable[[], int]) -> Iterator[None]:
        """Note work whenever a count has changed, while a block runs."""
        with repeatedly(TICK_SECONDS, _Changes(count, self.beat).look):
            yield


class _Changes:
    def __init__(self, count: Callable[[], int], beat: Callable[[bool], object]) -> None:
        self._count = count
        self._beat = beat
        self._last = count()

    def look(self) -> None:
        before, self._last = self._last, self._count()
        self._beat(self._last != before)


def _tell(event: str, detail: str, **fields: object) -> None:
    """Show a sentence on a terminal; elsewhere, log an event with it."""
    console = plain_console(stderr=True)
    with suppress(OSError):
        if console.is_terminal:
            console.paragraph(detail, others="    ")
        else:
            log.info(event, detail=shown(detail), **fields)


def place(engine: Any) -> str:
    """Return where a receiver's engine leads, without secrets.

    >>> place("postgresql://me:secret@db:5433/store"), place("dbname=store")
    ('database store at db:5433', 'database store')
    >>> place(print)
    'the database of its connections'
    """
    if isinstance(engine, str):
        engine = Dsn(engine)
    if isinstance(engine, Dsn):
        return _place(engine.database, engine.parts.get("host"), engine.parts.get("port"))
    url = getattr(engine, "url", None)  # of a SQLAlchemy engine
    if url is not None and url.database:
        query = getattr(url, "query", {})
        return _place(url.database, url.host or query.get("host"), url.port or query.get("port"))
    return "the database of its connections"


def _place(database: object, host: object, port: object) -> str:
    address = f"{host or ''}{f':{port}' if port else ''}"
    return f"database {database}" + (f" at {address}" if address else "")


def listed(given: Iterable[object], thing: str) -> str:
    """Return some names, and the number of the others.

    >>> listed(["a", "b"], "endpoint"), listed([], "endpoint"), listed("abcdefg", "source")
    ('a, b', 'no endpoint', 'a, b, c, d, e and 2 more')
    """
    found = [*map(str, given)]
    text = ", ".join(found[:MOST_NAMES]) or f"no {thing}"
    more = len(found) - MOST_NAMES
    return f"{text} and {more:,} more" if more > 0 else text


def handled(types: Sequence[str | None]) -> str:
    """Return the message types that a worker handles.

    >>> handled(["OrderPlaced", None]), handled([None]), handled([])
    ('handles OrderPlaced, all other types', 'handles all types', 'handles no type')
    """
    if [*types] == [None]:
        return "handles all types"
    return f"handles {listed((one or 'all other types' for one in types), 'type')}"


@contextmanager
def waiting(what: str | Callable[[], str]) -> Iterator[None]:
    """Show a command's progress while a block runs that takes long.

    A function is called each time the text is shown.
    """
    text = what if callable(what) else lambda: what
    console = plain_console(stderr=True)
    with _Line(console, text).shown() if console.is_terminal else _logged(text):
        yield


def announce(what: str) -> None:
    """Show on a terminal that a step begins, which may take some seconds."""
    console = plain_console(stderr=True)
    if console.is_terminal:
        with suppress(OSError):
            console.paragraph(f"{what} …")


def say_spark_starts() -> None:
    """Show that Spark starts now, which takes some seconds."""
    with suppress(OSError):
        plain_console(stderr=True).print("starting Spark …")


@contextmanager
def _logged(text: Callable[[], str]) -> Iterator[None]:
    def tell() -> None:
        with suppress(OSError):
            log.info("progress", detail=shown(text()))

    with repeatedly(LOG_SECONDS, tell):
        yield


class _Line:
    """A line at the end of a terminal, with the time; other output to stderr appears above it."""

    def __init__(self, console: Console, text: Callable[[], str]) -> None:
        self._console = console
        self._text = text
        self._began = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator[None]:
        from rich.live import Live

        live = Live(
            console=self._console,
            transient=True,
            redirect_stdout=False,
            refresh_per_second=4,
            get_renderable=self._render,
        )

        def show(over: Event) -> None:
            if not over.wait(SHOW_SECONDS):
                with live:
                    over.wait()

        with _beside("saf waiting", show):
            yield

    def _render(self) -> RenderableType:
        from rich.text import Text

        seconds = age(time.monotonic() - self._began)
        return Text(f"{shown(self._text())} ({seconds})", no_wrap=True, overflow="ellipsis")


@contextmanager
def repeatedly(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    """Call a function at an interval, in a thread, while a block runs."""

    def run(over: Event) -> None:
        while not over.wait(seconds):
            action()

    with _beside("saf alive", run):
        yield


@contextmanager
def _beside(name: str, run: Callable[[Event], None]) -> Iterator[None]:
    """Run a function in a thread beside a block; at its end, set the event and wait."""
    over = Event()
    thread = Thread(target=run, args=[over], name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def answered(done: int, waiting_for: Sequence[str], thing: str) -> str:
    """Return how many of several places have answered.

    >>> answered(312, ["t7", "t9"], "broker")
    '312 of 314 brokers; waiting for t7, t9'
    >>> answered(0, ["shop"], "broker")
    'waiting for shop'
    """
    total = done + len(waiting_for)
    if not waiting_for:
        return f"{done:,} of {counted(total, thing)}"
    whom = f"waiting for {listed(waiting_for, thing)}"
    return whom if total == 1 else f"{done:,} of {counted(total, thing)}; {whom}"
