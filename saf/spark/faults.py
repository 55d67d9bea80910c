"""Faults: find out why a job failed by evaluating again without a delivery.

Halving finds the messages for which a function raises. If the function raises for no single
message, or for too many, the function itself is at fault, and its service's messages wait. An
expression can end a job without raising, e.g. a regular expression that overflows the stack. Then
the messages of its routers wait. If no expression fails on the messages of its own routers, the
messages of all routers in SQL wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from saf.engine.in_step import LAST
from saf.engine.work import Work
from saf.errors import Unavailable
from saf.spark.expressions import Compiled, answers_of
from saf.spark.session import first_line
from saf.spark.transforms import Transforms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UNAVAILABLE = f"{Unavailable.__module__}.{Unavailable.__name__}: "
"""Prefix in the traceback of a task when reading raised `Unavailable`."""
MOST = 20
"""Messages for which a function may raise before the function itself is at fault."""


def note_faults(transforms: Transforms) -> bool:
    """Note failing functions, and messages for which functions raise; return whether any do."""
    before = len(transforms.problems) + len(transforms.faults)
    for service, usable in transforms.usable().items():
        if raised(usable.frame) is not None:
            _look_at(transforms, service)
    return len(transforms.problems) + len(transforms.faults) > before


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
