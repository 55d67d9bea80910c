"""The demo's lake: a Spark stream writes flights into a Delta table while they are sent.

In the middle, its driver is killed with its JVM and its workers, and restarted. All the time, two
counts are sampled: messages sent, and messages in the table.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from saf.database import Dsn
from saf.demo.flights import FLIGHTS
from saf.demo.proof import Received
from saf.demo.run import Written, write
from saf.errors import MissingExtra, SafError

if TYPE_CHECKING:
    import pyarrow as pa

PACKAGES = {"deltalake": "delta", "matplotlib": "charts"}
"""Further packages that the demo needs, with their extras."""
COLUMNS = (
    *("message_id", "from_service", "to_service", "key", "message_type"),
    *("headers", "body"),
)
"""Columns of a message, in the order of `Received`."""
MICRO_BATCHES = 12
"""Approximate number of micro-batches for all flights, if the stream keeps up with the senders."""
KILLED_AT = 3
"""The driver is killed when one in `KILLED_AT` messages is in the table."""
LOOK_SECONDS, END_SECONDS = 0.2, 60.0
DELAYS = "SELECT coalesce(sum(delay_minutes), 0) FROM flight"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Counts at one moment."""

    seconds: float
    sent: int
    there: int

    @property
    def lag(self) -> int:
        """Number of messages that are sent and not in the table."""
        return max(0, self.sent - self.there)


@dataclass(kw_only=True)
class Course:
    """Course of a run of the stream."""

    samples: list[Sample] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)
    """Seconds from the start to each kill of the driver."""

    @property
    def largest_lag(self) -> int:
        """The largest lag of all samples."""
        return max(sample.lag for sample in self.samples)

    @property
    def streamed(self) -> int:
        """Number of messages that the run has added to the table."""
        return self.samples[-1].there - self.samples[0].there


class Stream:
    """The stream's driver, in a separate process, and the table that it fills."""

    def __init__(self, application: Dsn, folder: Path, at_once: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._env = {**os.environ, "SAF_DSN": application.conninfo}
        self._program = [sys.executable, "-P", "-m", "saf.spark.lake_demo"]
        self._program += [str(folder), str(at_once)]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the driver. It ends with this process at the latest."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                self._program,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )

    def check(self) -> None:
        """Check that the driver runs.

        Raises:
            SafError: the driver has ended.
        """
        if self._process is None or self._process.poll() is not None:
            raise SafError(f"the stream has ended; its output is in {self._folder / 'log'}")

    def kill(self) -> None:
        """Kill the driver and its JVM if they run."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def stop(self) -> None:
        """Stop the driver gracefully; kill it if that takes too long."""
        assert self._process is not None  # noqa: S101 - it was started
        try:
            self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None


def follow(
    application: Dsn,
    folder: Path,
    recorded: int,
    limit: int | None,
    report: Callable[[Written], None],
) -> tuple[Written, Course]:
    """Run writers and the stream until all messages are in the table.

    Raises:
        SafError: the stream or a writer failed, after reporting the reason.
    """
    total = min(limit or FLIGHTS, FLIGHTS)
    stream = Stream(application, folder, max(1, total // MICRO_BATCHES))
    course, start, table = Course(), time.monotonic(), Table(folder)

    def look(written: Written, *, now: bool = False) -> Sample:
        seconds = time.monotonic() - start
        last = course.samples[-1] if course.samples else None
        if last and not now and seconds - last.seconds < LOOK_SECONDS:
            return last
        sample = Sample(seconds=seconds, sent=recorded + written.flights, there=table.count())
        course.samples.append(sample)
        first = course.samples[0].there
        if not course.killed and sample.there - first > (total - first) // KILLED_AT:
            stream.kill()
            course.killed.append(seconds)
            stream.start()
        stream.check()
        return sample

    def reported(written: Written) -> None:
        report(written)
        look(written)

    stream.start()
    try:
        written = write(application, limit, reported)
        while look(written, now=True).lag:
            time.sleep(LOOK_SECONDS)
        stream.stop()
    finally:
        stream.kill()
    return written, course


class Table:
    """The table, as far as it has been read."""

    def __init__(self, folder: Path) -> None:
        from deltalake import DeltaTable

        self._path = place(folder)
        self._table: DeltaTable | None = None

    def count(self) -> int:
        """Return the row count of the newest version, from the table's log."""
        import pyarrow as pa
        import pyarrow.compute as pc
        from deltalake import DeltaTable

        if self._table is None:
            if not DeltaTable.is_deltatable(str(self._path)):
                return 0
            self._table = DeltaTable(self._path)
        self._table.update_incremental()
        files = pa.table(self._table.get_add_actions(flatten=True))
        return int(pc.sum(files["num_records"]).as_py() or 0)


def place(folder: Path) -> Path:
    """Return the path of the table."""
    return folder / "flights"


def remove(folder: Path) -> None:
    """Remove the files of earlier runs."""
    shutil.rmtree(folder, ignore_errors=True)


def received(folder: Path) -> Iterator[Received]:
    """Yield all rows of the table in order of arrival: by commit, then by id."""
    number = 0
    for rows in _commits(place(folder)):
        for batch in rows.sort_by("id").to_batches(max_chunksize=10_000):
            columns = [batch[name].to_pylist() for name in COLUMNS]
            for row in zip(*columns, strict=True):
                number += 1
                yield (number, *row)


def delays(application: Dsn, folder: Path) -> tuple[int, int]:
    """Return the sum of all delays, in the application's rows and in the table."""
    import pyarrow.compute as pc
    from deltalake import DeltaTable

    with application.connect(role="proof") as connection:
        ((sent,),) = connection.execute(DELAYS).fetchall()
    column = DeltaTable(place(folder)).to_pyarrow_table(columns=["delay"])["delay"]
    return int(sent), int(pc.sum(column).as_py() or 0)


def draw(course: Course, file: Path) -> None:
    """Draw the stream's lag over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot(title="Flights that are sent and not in the Delta table yet")
    seconds = [sample.seconds for sample in course.samples]
    lags = [sample.lag for sample in course.samples]
    axes.plot(seconds, lags, color="#2f81f7")
    axes.fill_between(seconds, lags, color="#2f81f7", alpha=0.15)
    for second in course.killed:
        axes.axvline(second, color="#d29922", linestyle="--", label="the driver is killed")
    if course.killed:
        axes.legend(frameon=False)
    axes.set(xlabel="seconds", ylabel="messages")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def require_packages() -> None:
    """Raise MissingExtra unless all needed packages are installed."""
    for package, extra in PACKAGES.items():
        if find_spec(package) is None:
            raise MissingExtra(extra, "saf demo --lake")


def _commits(table: Path) -> Iterator[pa.Table]:
    """Yield the rows of each version, oldest first."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for version in sorted((table / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in version.read_text().splitlines()]
        added = [action["add"]["path"] for action in actions if "add" in action]
        files = [pq.ParquetFile(table / path).read(["id", *COLUMNS]) for path in added]
        if files:
            yield pa.concat_tables(files)
