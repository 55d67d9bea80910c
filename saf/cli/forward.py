"""Forwarding: ``saf forward`` runs the forwarder, once or in a loop.

`run` starts Spark only for much work, unless the settings require it. If Spark hangs after the
work, it is abandoned. If a summary cannot be printed, a loop logs this and continues.

A bar on a terminal, or events in the log, show the progress. The bar never mixes with other output.
Standard output stays standard output, even while the bar is on a terminal: the bar is removed
before such output, and returns with the next progress. Events logged during that time appear above
the bar.

With ``--explain``, `explain` shows what a run would do now, and nothing is forwarded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext
from datetime import UTC, datetime
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import rich.progress
import typer
from rich.console import Console

from saf.cli import set_aside
from saf.cli.alive import LOG_SECONDS, Alive, listed
from saf.cli.brokers import Config, Round
from saf.cli.console import Table, complain, echo, is_of_output, plain_console, results_of
from saf.cli.metrics import Listen, Push, Textfile, published
from saf.config import Settings, load, with_options
from saf.errors import UsageError
from saf.operating.forecast import Forecast, Going, forecast
from saf.operating.places import chosen
from saf.operating.wording import at, counted
from saf.setaside.parking import BLOCKED
from saf.signals import stop_on_signals
from saf.telemetry.logger import Log

if TYPE_CHECKING:
    from saf.forwarding.summary import Progress, Summary
    from saf.spark.remote import ConnectRunner
    from saf.spark.runner import SparkRunner

log = Log("saf.forward")

STOP_SECONDS = 30.0
"""Maximum time for Spark to end after the work, in seconds."""


def command(
    *,
    config: Config = None,
    loop: Annotated[
        bool, typer.Option("--loop", help="Keep running until SIGTERM or Ctrl-C.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option(min=0.01, help="With --loop: the longest pause, in seconds."),
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="Spark master. Default: forwarder.master, or local[*].")
    ] = None,
    spark: Annotated[
        Literal["auto", "always"] | None,
        typer.Option(
            help="auto: start Spark only for large amounts of work, or classifiers. Default: auto."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON, per cycle with --loop.")
    ] = False,
    explained: Annotated[
        bool,
        typer.Option("--explain", help="Show where messages would go, by which route, and exit."),
    ] = False,
    progress_every: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="Log the progress at this interval, instead of showing a bar.",
        ),
    ] = None,
    metrics: Listen = None,
    metrics_textfile: Textfile = None,
    metrics_push: Push = None,
    remote: Annotated[
        str | None,
        typer.Option(help="Server of Spark Connect, sc://host:15002. Default: $SPARK_REMOTE."),
    ] = None,
) -> None:
    """Forward the pending messages of all outboxes.

    One run forwards everything that was committed before the run, in all configured brokers, and
    exits. Run it from cron or Airflow; overlapping runs share the work. SIGTERM and Ctrl-C finish
    the chunk in hand.
    """
    settings = load(config)
    if explained:
        explain(settings, as_json=as_json)
        return
    if metrics is not None and not loop:
        raise UsageError(
            "--metrics needs a program that keeps running: add --loop, or use "
            "--metrics-textfile or --metrics-push for a run that ends"
        )
    if remote:
        os.environ["SPARK_REMOTE"] = remote  # as spark-submit does
    options = with_options(
        settings.forwarder, interval_seconds=interval, master=master, use_spark=spark
    )
    settings = settings.model_copy(update={"forwarder": options})
    with published(listen=metrics, textfile=metrics_textfile, push=metrics_push, job="saf-forward"):
        code = run(settings, loop=loop, as_json=as_json, progress_every=progress_every)
    raise typer.Exit(code)


def explain(settings: Settings, *, as_json: bool) -> None:
    """Print what a run would do at each source."""
    default, declared = settings.forwarder.default_destination, settings.declared
    round_ = Round(chosen(settings, None), settings)
    found = round_.visit("forecast", lambda connection: forecast(connection, default, declared))

    def show() -> None:
        GOING.show(
            {name: [(result, group) for group in result.going] for name, result in found.items()}
        )
        BY_ROUTE.show_any({name: [*result.by_route().items()] for name, result in found.items()})
        set_aside.BY_LANE.show_any({name: result.waiting for name, result in found.items()})
        for name, result in found.items():
            due = sum(lane.due for lane in result.lanes)
            if result.waiting.lanes:
                echo(
                    f"{name}: {counted(result.waiting.messages, 'message')} parked in "
                    f"{counted(result.waiting.lanes, 'lane')}, {due} to be tried first"
                )

    round_.report({"brokers": results_of(found)}, show, as_json=as_json)


GOING = Table[tuple[Forecast, Going]](
    *("messages", "service", "to broker", "goes to", "oldest"),
    things="pending messages",
    below="how",
    cells=lambda row: (
        f"{'' if row[0].exact else 'about '}{row[1].messages:,}", row[1].service,
        row[1].to_broker or "", ", ".join(row[1].way.destinations) or "no route",
        at(row[1].oldest) if row[1].oldest else "", row[1].way.how,
    ),
)  # fmt: skip
BY_ROUTE = Table[tuple[str, int]](
    "messages", "route", things="routes", cells=lambda row: (f"{row[1]:,}", row[0])
)


def run(
    settings: Settings, *, loop: bool, as_json: bool, progress_every: float | None = None
) -> int:
    """Forward, with Spark if there is much work; return the exit code."""
    from saf.forwarding.forwarder import Forwarder
    from saf.forwarding.runner import LittleHere
    from saf.spark import java, session
    from saf.spark.master import remote
    from saf.spark.remote import ConnectRunner
    from saf.spark.runner import SparkRunner

    session.require_packages()
    options = settings.forwarder
    server = remote(options.master, options.spark)
    is_single = len(settings.brokers) == 1 and not settings.fleets
    master = options.master if is_single else session.with_room(options.master)
    console = plain_console(stderr=True)

    def start() -> Any:
        people = console.is_terminal
        with console.status(f"starting {java.find()}") if people else nullcontext():
            return session.start(master, conf=options.spark)

    bar = ProgressBar(console)

    def report(summary: Summary) -> None:
        bar.clear()
        try:
            show(summary, as_json=as_json)
        except BrokenPipeError:
            raise
        except OSError as error:
            if not (loop and is_of_output(error)):
                raise
            log.warning("not_reported", error=error.strerror)

    spark = ConnectRunner(server, options.spark) if server else SparkRunner(start)
    always = options.use_spark == "always" or settings.transforms
    runner = spark if always else LittleHere(spark)
    progress, sources = bar.watching, bar.sources
    if progress_every is not None:
        progress = ProgressLog(progress_every).show
    if progress_every is not None or not console.is_terminal:
        sources = ProgressLog(progress_every or LOG_SECONDS).show_sources
    forwarder = Forwarder(settings, runner, progress=progress, sources=sources)
    if loop:
        forwarder.beat = Alive("saf forward --loop", _does(settings)).beat
    try:
        with stop_on_signals(forwarder.stop):
            summary = forwarder.loop(report) if loop else forwarder.drain()
    finally:
        bar.clear()
    report(summary)
    end(spark)
    return summary.exit_code


def _does(settings: Settings) -> str:
    """Return what a loop does, for its first line."""
    fleets = [f"fleet {name}" for name in settings.fleets]
    sources = listed([*settings.brokers, *fleets, *settings.sources], "source")
    return f"forwards from {sources} to {listed(settings.destinations, 'destination')}"


def end(spark: SparkRunner | ConnectRunner) -> None:
    """End Spark, but do not wait if it hangs: its work is done."""
    from saf.database.background import Background

    stopping = Background(1, "saf-stop").submit(spark.stop)
    if wait([stopping], timeout=STOP_SECONDS).not_done:
        spark.abandon()
        log.warning("spark_hangs", detail=f"it had not ended {STOP_SECONDS:g} s after the work")
        return
    stopping.result()


def _attempt(moment: datetime) -> str:
    """Return when something is tried next, to follow a name."""
    if moment >= BLOCKED:
        return ""
    return f", {'due since' if moment <= datetime.now(UTC) else 'next attempt'} {at(moment)}"


def show(summary: Summary, *, as_json: bool) -> None:
    """Print a summary on stdout, as text or as one line of JSON; problems also on stderr."""
    if as_json:
        echo(json.dumps(summary.as_dict()))
        return
    if line := _in_words(summary):
        echo(line)
    for name, early in summary.early.items():
        complain(
            f"{counted(early, 'message')} for destination {name!r} went before deliver_at: "
            "only an inbox holds a message until then"
        )
    errors = {problem["error"] for problem in summary.problems}
    waiting = [lane for lane in summary.waiting if lane["error"] not in errors]
    for lane in waiting:
        when = _attempt(datetime.fromisoformat(lane["next_attempt_at"]))
        complain(f"messages wait for {lane['lane']}{when}; last error: {lane['error']}")
    if waiting:
        complain("to try again now: `saf parked retry-now`, then `saf forward`")
    if more := summary.waiting_lanes - len(summary.waiting):
        complain(f"{counted(more, 'lane')} more; see `saf parked list`")
    for problem in summary.problems:
        complain(problem["error"])


def _in_words(summary: Summary) -> str:
    """Return what a run did; empty if it only failed, which its problems say."""
    where = ", ".join(f"{name}: {count:,}" for name, count in summary.by_destination.items())
    by_source = ", ".join(f"{name}: {count:,}" for name, count in summary.by_source.items())
    forwarded = f"forwarded {counted(summary.forwarded, 'message')} in {summary.seconds:.1f} s"
    parts = [
        forwarded + (f" ({where})" if where else ""),
        f"received {counted(summary.received, 'message')} ({by_source})" if by_source else "",
        f"{summary.dropped:,} dropped as delivered before" if summary.dropped else "",
        f"{summary.left_out:,} left out by transforms" if summary.left_out else "",
        f"{summary.parked:,} parked" if summary.parked else "",
        f"{summary.dead:,} dead (see `saf dead list`)" if summary.dead else "",
        f"{summary.refused:,} refused (see `saf held list --refused`)" if summary.refused else "",
        f"{summary.locked:,} due, but locked (see `saf doctor`)" if summary.locked else "",
        "stopped on request" if summary.stopped else "",
    ]
    if (summary.exit_code or summary.received) and not summary.forwarded:
        parts[0] = ""
    elif summary.idle and not (summary.problems or summary.received):
        parts[:-1] = ["nothing to do: other forwarders hold all shards"]
    return ", ".join(filter(None, parts))


class ProgressLog:
    """Logs an event at an interval, where no terminal could show a bar."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = monotonic() + seconds

    def show(self, progress: Progress) -> None:
        """Log the progress, unless it was logged just now."""
        if monotonic() >= self._next:
            self._next = monotonic() + self._seconds
            log.info("progress", done=progress.done, total=progress.total)

    def show_sources(self, done: int, total: int) -> None:
        """Log how many sources were visited, unless there is one or it was logged just now."""
        if total > 1 and monotonic() >= self._next:
            self._next = monotonic() + self._seconds
            log.info("visiting", sources=done, total=total)


class ProgressBar:
    """A bar on a terminal; nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: rich.progress.Progress | None = None
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._turn = Lock()

    @property
    def watching(self) -> Callable[[Progress], None] | None:
        """The function that shows progress; None without a terminal."""
        return self._show if self._console.is_terminal else None

    def sources(self, done: int, total: int) -> None:
        """Show how many sources were visited, if there are several."""
        if total > 1 and self._console.is_terminal:
            self._update("visiting sources", done, total)

    def _show(self, progress: Progress) -> None:
        self._update("forwarding", progress.done, progress.total)

    def _update(self, what: str, done: int, total: int) -> None:
        with self._turn:
            if self._bar is None:
                columns = (
                    *rich.progress.Progress.get_default_columns(),
                    rich.progress.MofNCompleteColumn(),
                )
                self._bar = rich.progress.Progress(
                    *columns, console=self._console, transient=True, redirect_stdout=False
                )
                self._bar.start()
                self._tasks = {}
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(what, total=None)
            self._bar.update(self._tasks[what], completed=done, total=total)

    def clear(self) -> None:
        """Remove the bar until there is new progress."""
        with self._turn:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
