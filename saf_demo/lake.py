"""``saf demo --lake``: a Spark stream writes flights into a Delta table while they are sent.

    python -m saf_demo.lake FOLDER AT_ONCE       (with SAF_DSN set)

This is the stream's driver, a process of its own: it streams the outbox into the table
FOLDER/flights, AT_ONCE messages at a time, until standard input closes, because the parent process
closed it or died.

In the middle, the demo kills the driver with its JVM and its workers, and starts it again. All the
time, two counts are sampled: messages sent, and messages in the table.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saf.database import Dsn
from saf.errors import MissingExtra, SafError
from saf.spark import register, session, to_delta
from saf_demo.proof import COLUMNS, Received, prove
from saf_demo.stage import Application, Outcome, Stage, Written, counts, step

if TYPE_CHECKING:
    import pyarrow as pa

PACKAGES = {"deltalake": "delta", "matplotlib": "charts"}
"""Further packages that the demo needs, with their extras."""
MASTER = "local[2]"
SCHEMA = (
    "id bigint, message_id string, from_service string, to_service string, key string, "
    "message_type string, headers string, body binary, created_at timestamp"
)
MICRO_BATCHES = 12
"""Approximate number of micro-batches for all flights, if the stream keeps up with the senders."""
KILLED_AT = 3
"""The driver is killed when one in `KILLED_AT` messages is in the table."""
LOOK_SECONDS, END_SECONDS = 0.2, 60.0
DELAYS = "SELECT coalesce(sum(delay_minutes), 0) FROM flight"
WORDS = {
    "sent": "sent by transactions that committed",
    "rolled_back": "rolled back with their transactions",
    "forwarded": "in the table",
    "lost": "lost",
    "duplicated": "duplicated",
    "out_of_order": "out of order",
    "changed": "changed on the way",
    "not_sent": "in the table although never sent",
    "not_atomic": "without their flight, or flights without theirs",
    "streamed_now": "streamed by this run",
    "largest_lag": "behind at most",
    "killed_now": "times that the stream was killed",
}


def run(stage: Stage) -> Outcome:
    """Send flights, and stream them into the table.

    Raises:
        MissingExtra: a package is not installed.
        SafError: the stream or a writer failed.
    """
    for package, extra in PACKAGES.items():
        if find_spec(package) is None:
            raise MissingExtra(extra, "saf demo --lake")
    started = time.monotonic()
    console, folder = stage.console, stage.folder_of("lake")
    (dsn,) = stage.databases("streamed_flights").values()
    application = stage.application(dsn)
    written, course = _follow(stage, application, folder)
    for second in course.killed:
        console.print(f"killed the stream's driver after {second:.1f} s, and started it again")
    chart = folder / "lag.png"
    draw(course, chart)
    console.print(f"how far the stream was behind: {chart}", soft_wrap=True)
    with step(console, "comparing the database with the table"):
        proof = prove(dsn, received(folder))
        sent, arrived = _delays(dsn, folder)
    result: dict[str, Any] = {
        **asdict(proof),
        "delay_minutes": {"sent": sent, "in_the_table": arrived},
        "written_now": written.flights,
        "streamed_now": course.streamed,
        "killed_now": len(course.killed),
        "largest_lag": course.largest_lag,
        "seconds": round(time.monotonic() - started, 1),
        "chart": str(chart),
        "postgresql": application.postgresql,
        "java": application.java,
    }
    return Outcome(
        right=proof.holds and sent == arrived,
        title="every message exactly once, and the sums are equal",
        result=result,
        listing=counts(
            {
                **{explanation: result[name] for name, explanation in WORDS.items()},
                "minutes of delay of all flights, in their rows": sent,
                "minutes of delay of all flights, in the table": arrived,
            }
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Counts at one moment."""

    seconds: float
    sent: int
    stored: int

    @property
    def lag(self) -> int:
        """Number of messages that are sent and not in the table."""
        return max(0, self.sent - self.stored)


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
        return self.samples[-1].stored - self.samples[0].stored


class Stream:
    """The stream's driver, in a separate process, and the table that it fills."""

    def __init__(self, application: Dsn, folder: Path, at_once: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._env = {**os.environ, "SAF_DSN": application.conninfo}
        self._program = [sys.executable, "-P", "-m", "saf_demo.lake"]
        self._program += [str(folder), str(at_once)]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the driver. It ends with this process at the latest."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
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
        assert self._process is not None  # it was started
        try:
            self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None


def _follow(stage: Stage, application: Application, folder: Path) -> tuple[Written, Course]:
    """Run writers and the stream until all messages are in the table."""
    total = application.total
    stream = Stream(application.dsn, folder, max(1, total // MICRO_BATCHES))
    course, start, table = Course(), time.monotonic(), Table(folder)

    def look(written: Written, *, now: bool = False) -> Sample:
        seconds = time.monotonic() - start
        last = course.samples[-1] if course.samples else None
        if last and not now and seconds - last.seconds < LOOK_SECONDS:
            return last
        sent = application.recorded + written.flights
        sample = Sample(seconds=seconds, sent=sent, stored=table.count())
        course.samples.append(sample)
        first = course.samples[0].stored
        if not course.killed and sample.stored - first > (total - first) // KILLED_AT:
            stream.kill()
            course.killed.append(seconds)
            stream.start()
        stream.check()
        return sample

    stream.start()
    try:
        written = stage.record(application, look)
        with stage.console.status("waiting for the stream"):
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


def received(folder: Path) -> Iterator[Received]:
    """Yield all rows of the table in order of arrival: by commit, then by id."""
    for rows in _commits(place(folder)):
        for batch in rows.sort_by("id").to_batches(max_chunksize=10_000):
            yield from zip(*(batch[name].to_pylist() for name in COLUMNS), strict=True)


def _delays(application: Dsn, folder: Path) -> tuple[int, int]:
    """Return the sum of all delays, in the application's rows and in the table."""
    import pyarrow.compute as pc
    from deltalake import DeltaTable

    with application.connect(role="demo") as connection:
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


def main(folder: Path, at_once: str) -> None:
    """Stream until standard input ends."""
    spark = session.start(MASTER, app_name="saf demo --lake")
    from pyspark.sql import functions as f

    register(spark)
    messages = (
        spark.readStream.format("saf")
        .option("dsn_from", "SAF_DSN")
        .option("log", "outbox")
        .option("subscription", "lake")
        .option("maxRowsPerTrigger", at_once)
        .schema(SCHEMA)
        .load()
        .withColumn("delay", f.get_json_object(f.col("body").cast("string"), "$.dep_delay"))
        .withColumn("delay", f.col("delay").cast("bigint"))
    )
    query = (
        messages.writeStream.foreachBatch(to_delta(str(place(folder))))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(processingTime="0 seconds")
        .start()
    )
    while query.isActive and not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        pass
    failed = query.exception()
    query.stop()
    spark.stop()
    if failed is not None:
        raise SafError(f"the stream has failed: {session.first_line(failed)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2])
