"""Evaluation: Spark evaluates routers' expressions and `[[transforms]]`, beside the delivery.

Each item of work is a job of one task, which uses several Python workers:

    read the messages to evaluate, by id -> expressions, functions -> deliver

Before the last step, Spark sorts by number any results that are out of order: those of a function
that did not keep the order, and results of several functions, or of functions and expressions.
Otherwise, results stream into the delivery.

The delivery always reads the batch itself. When it comes to a message, it takes the results for
this message (`saf.engine.in_step`).

If the job fails, the driver finds the messages, functions and expressions at fault: it evaluates
again without a delivery (`note_faults`, `of_expressions`). Then it runs the item again without
them, from where the job stopped. After `ROUNDS` runs, or if nothing is found to be at fault, the
failure is reported as a problem of the item's broker.

`tried` evaluates a transform for one message, for an operator. Nothing is sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pyarrow as pa

from saf.columns import EXPRESSED
from saf.engine.classifying import as_table
from saf.engine.context import Context
from saf.engine.in_step import ENDED, LAST, InStep
from saf.engine.pulse import Pulse
from saf.engine.set_aside import SetAside
from saf.engine.source import messages, up_to
from saf.engine.source_session import SourceSession
from saf.engine.task import BEATS, Task
from saf.engine.transforming import Evaluated, Transforming
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import ConfigurationError, JobFailed, SafError, Unavailable
from saf.log.cursor import lock_cursors
from saf.spark import session
from saf.spark.answers import Answers, explain
from saf.spark.expressions import Compiled, answers_of, compiled_of, with_problems
from saf.spark.plans import keeps_order
from saf.spark.session import first_line
from saf.spark.transforms import SEEN, Transforms, as_seen, last_at_once, parked_of, transformed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROUNDS = 5
"""Maximum number of runs of one item; after a failure, the item runs again."""
MOST = 20
"""Messages for which a function may raise before the function itself is at fault."""

UNAVAILABLE = f"{Unavailable.__module__}.{Unavailable.__name__}: "
"""Prefix in the traceback of a task when reading raised `Unavailable`."""

SHOWN = ("message_id", "key", "message_type", "headers", "body")


def receipts(
    spark: SparkSession,
    work: Sequence[tuple[int, Work]],
    rules: ForwardingRules,
    group: str,
    meanwhile: Callable[[], list[Receipt]],
) -> list[Receipt]:
    """Forward items that need evaluation; return their receipts and those of ``meanwhile``.

    ``meanwhile`` runs at the same time, and returns the receipts of other items.
    """

    def run(numbered: tuple[int, Work]) -> list[Receipt]:
        number, item = numbered
        spark.sparkContext.setJobGroup(group, "saf forward", interruptOnCancel=True)
        return Evaluation(spark=spark, number=number, item=item, rules=rules).run()

    at_once = min(len(work), max(1, spark.sparkContext.defaultParallelism))
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        evaluated = pool.map(run, work)
        return [*meanwhile(), *(receipt for part in evaluated for receipt in part)]


@dataclass(kw_only=True)
class Evaluation:
    """One item of work that needs evaluation, with its delivery."""

    spark: SparkSession
    number: int
    item: Work
    rules: ForwardingRules
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    """The expressions to evaluate."""

    def run(self) -> list[Receipt]:
        """Run the item; report a failed job as a problem of its broker.

        Raises:
            Py4JNetworkError: Spark has ended.
        """
        try:
            return self._run()
        except (SafError, psycopg.Error) as error:
            kind = type(error) if isinstance(error, SafError) else JobFailed
            text = str(error) if isinstance(error, SafError) else self.item.dsn.reason(error)
            return [
                Receipt(work=self.number, destination=None, error_kind=kind.__name__, error=text)
            ]

    def _run(self) -> list[Receipt]:
        from py4j.protocol import Py4JError, Py4JNetworkError
        from pyspark.errors import PySparkException

        transforms = Transforms(
            spark=self.spark,
            item=self.item,
            rules=self.rules,
            parked=parked_of(self.item, self.rules) if self.rules.transforms else {},
            last=last_at_once(self.item, self.rules) if self.rules.transforms else LAST,
        )
        for attempt in range(ROUNDS):
            try:
                self._compile()
                return self._job(transforms)
            except Py4JNetworkError:
                raise  # Spark has ended
            except (Py4JError, PySparkException) as error:
                if attempt == ROUNDS - 1 or not self._found_fault(transforms):
                    raise JobFailed(first_line(error)) from error
        raise AssertionError

    def _compile(self) -> None:
        """Compile expressions of routers that have no problem; set a problem where this fails."""
        (routes,), self.compiled = compiled_of(self.spark, [self.item.routes])
        self.item = replace(self.item, routes=routes)

    def _job(self, transforms: Transforms) -> list[Receipt]:
        transforms.item = self.item
        usable = transforms.usable()
        evaluated = Evaluated(
            given={service: result.given for service, result in usable.items()},
            problems=transforms.problems,
            faults=transforms.faults,
            parked=frozenset[int]().union(*transforms.parked.values()),
            last=transforms.last,
        )
        frames = [result.frame for result in usable.values()]
        if self.compiled:
            max_bytes, last = self.rules.max_bytes, transforms.last
            frames.append(answers_of(self.spark, self.item, self.compiled, max_bytes, last=last))
        task = deliver(self.number, self.item, self.rules, self.compiled, evaluated)
        (row,) = in_order(self.spark, frames).mapInArrow(task, "said binary").collect()
        receipts, raised = pickle.loads(row.said)  # noqa: S301 - our own bytes  # nosec B301
        explain(self.spark, self.item, raised)
        return list(receipts)

    def _found_fault(self, transforms: Transforms) -> bool:
        """Find the messages for which functions and expressions fail; return whether any do."""
        session = SourceSession(self.item, self.rules.attempts)
        patience = self.item.dsn.bounds.chunk_seconds
        try:
            session(lambda source: source.execute("SELECT"))
            with Pulse(session.beat, self.item.lease_seconds / BEATS, patience):
                found = note_faults(transforms)
                problems = of_expressions(
                    self.spark, self.item, self.compiled, self.rules.max_bytes
                )
            position = session(lambda source: lock_cursors(source, self.item.batch))
        finally:
            session.close()
        # continue after the messages that the failed job has delivered
        self.item = replace(
            self.item,
            batch=replace(self.item.batch, position=position),
            routes=with_problems(self.item.routes, problems),
        )
        return found or bool(problems)


def in_order(spark: SparkSession, frames: Sequence[DataFrame]) -> DataFrame:
    """Return the results as one partition, ordered by number, and end it with the last row.

    The delivery reads messages in this order. If results are out of order, Spark sorts all of them
    before the delivery starts.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    end = spark.range(0, 1, 1, 1).select(
        F.lit(LAST).alias("id"),
        F.lit(True).alias(ENDED),
    )
    whole = reduce(lambda rows, more: rows.unionByName(more, True), [*frames, end]).coalesce(1)
    streams = not frames or (len(frames) == 1 and keeps_order(frames[0]))
    return whole if streams else whole.sortWithinPartitions("id")


def deliver(
    number: int,
    item: Work,
    rules: ForwardingRules,
    compiled: Mapping[str, Compiled],
    evaluated: Evaluated,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for mapInArrow: results in, receipts out."""

    def task(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from saf.forwarding.runner import bounded

        in_step = InStep(unbroken(partition))
        answers = Answers(item.broker, in_step, compiled) if compiled else None
        transforming = Transforming.of(item, rules, evaluated, in_step)
        context = Context(number, item, rules, answers, transforming)
        running = Task(context, partly=evaluated.last < LAST)
        with closing(messages(item, rules.max_bytes)) as rows:
            receipts = bounded(number, item, lambda: running.run(up_to(rows, evaluated.last)))
        data = pickle.dumps((receipts, answers.raised if answers else []))
        yield pa.RecordBatch.from_pydict({"said": [data]})

    return task


def unbroken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches that Spark passes to a task.

    If the stream breaks off because an evaluation failed in Spark, no message is at fault.

    Raises:
        Unavailable: the stream broke off.
    """
    try:
        yield from batches
    except Exception as error:  # of Arrow, of the socket, or of PySpark's own protocol
        raise Unavailable("Spark", f"the stream of rows to a task broke off ({error})") from error


# Faults: halving finds the messages for which a function raises. If the function raises for no
# single message, or for too many, the function itself is at fault, and its service's messages wait.
# An expression can end a job without raising, e.g. a regular expression that overflows the stack.
# Then the messages of its routers wait. If no expression fails on the messages of its own routers,
# the messages of all routers in SQL wait.


def note_faults(transforms: Transforms) -> bool:
    """Note failing functions, and messages for which functions raise; return whether any do."""
    before = len(transforms.problems) + len(transforms.faults)
    for service, usable in transforms.usable().items():
        if raised(usable.frame) is not None:
            _look_at(transforms, service)
    return len(transforms.problems) + len(transforms.faults) > before


def _look_at(transforms: Transforms, service: str) -> None:
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    if why := raised(transforms.of(service, (LAST, LAST)).frame):
        transforms.problems[service] = f"its function fails: {why}"
        return
    ends = transforms.messages(service).select(F.min("id"), F.max("id")).first()
    if ends is None or ends[0] is None:
        return
    found: dict[int, str] = {}
    left = [(int(ends[0]), int(ends[1]))]
    while left and len(found) <= MOST:
        low, high = left.pop()
        why = raised(transforms.of(service, (low, high)).frame)
        if why is None:
            continue
        if low == high:
            found[abs(low)] = f"its function raises {why}"
            continue
        half = (low + high) // 2
        left += [(half + 1, high), (low, half)]
    if len(found) > MOST:
        why = next(iter(found.values()))
        transforms.problems[service] = f"its function fails for more than {MOST} messages: {why}"
    else:
        transforms.faults |= found


def of_expressions(
    spark: SparkSession, item: Work, compiled: Mapping[str, Compiled], max_bytes: int
) -> dict[str, str]:
    """Return the expressions that end a job, with the reasons."""

    def why(only: str | None = None) -> str | None:
        reason = raised(answers_of(spark, item, compiled, max_bytes, only=only))
        return reason and f"Spark fails with its expression: {reason}"

    if not compiled or (of_all := why()) is None:
        return {}
    of_each = {
        expression: reason for expression in compiled if (reason := why(expression)) is not None
    }
    return of_each or dict.fromkeys(compiled, of_all)


def raised(frame: DataFrame) -> str | None:
    """Evaluate a DataFrame; return the error it raises, or None.

    Raises:
        Unavailable: the source does not answer; no expression or function is at fault.
    """
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    columns = [F.max(F.xxhash64(name)) for name in frame.columns]  # forces Spark to compute all
    try:
        frame.select(*columns).collect()
    except Py4JNetworkError:
        raise  # Spark has ended
    except (Py4JError, PySparkException) as error:
        if UNAVAILABLE in str(error):
            raise Unavailable("Spark", first_line(error)) from error
        return first_line(error)
    return None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The result of a transform for one message."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The messages, with the columns `SHOWN`; empty if the transform leaves the message out."""
    dead: str | None = None
    """The reason why the message would become a dead letter, if any."""
    waits: str | None = None
    """The problem of the transform itself, if any."""


def tried(
    service: str,
    function: str,
    message: Mapping[str, Any],
    max_bytes: int,
    *,
    deterministic: bool,
) -> Tried:
    """Start Spark and try a function on a message, given by its columns in the outbox."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    spark = session.start("local[1]", app_name="saf transform")
    try:
        row = [1, *(_plain(message.get(name)) for name in EXPRESSED)]
        schema = ", ".join(f"{name} {kind}" for name, kind in SEEN.items())
        frame = as_seen(spark.createDataFrame([row], schema))
        try:
            usable = transformed(
                frame, f"transform of {service!r}", function, deterministic=deterministic
            )
        except ConfigurationError as error:
            return Tried(waits=str(error))
        try:
            batches = in_order(spark, [usable.frame]).toArrow().to_batches()
        except (PySparkException, Py4JError) as error:
            return Tried(dead=f"its function raises {first_line(error)}")
    finally:
        spark.stop()
    evaluated = Evaluated(given={service: usable.given})
    transforming = Transforming([service], evaluated, InStep(iter(batches)), max_bytes=max_bytes)
    rows = as_table([{**message, "id": 1, "shard": 0}])
    transforming.read_results(rows, None)
    aside = SetAside(work=None)  # type: ignore[arg-type] # nothing is written
    going = transforming.bury_at_fault(rows, aside)
    if aside.dead:
        return Tried(dead=aside.dead[0][3])
    outputs = transforming.outputs(going).select(SHOWN).to_pylist()
    return Tried(
        messages=[{**output, "message_id": UUID(bytes=output["message_id"])} for output in outputs]
    )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, UUID) else value
