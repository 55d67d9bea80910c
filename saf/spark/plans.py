"""Plans: what Spark's plan of a DataFrame reveals about the function that built it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from saf.spark.reading import READER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CLOCK = re.compile(r"^(Current(Date|Time|Timestamp)|Now|LocalTimestamp)(Like)?$")
IN_ORDER = {READER, "Range", "Project", "Filter", "Generate", "ArrowEvalPython", "BatchEvalPython"}
"""Steps that work row by row."""
HIDING = {"InMemoryRelation", "LogicalRDD"}
"""Steps that hide what they were built from."""


def columns_read(frame: DataFrame) -> frozenset[str] | None:
    """Return the message columns that a result depends on; None if that is hard to tell."""
    found: set[int] = set()
    read: dict[int, str] = {}
    for node in nodes(_of(frame).optimizedPlan()):
        kind = kind_of(node)
        if kind in HIDING or node.subqueries().size():
            return None
        if kind == READER and kind_of(node.child()) == "Range":
            read |= {
                attribute.exprId().id(): str(attribute.name()) for attribute in items(node.output())
            }
        else:
            found |= {attribute.exprId().id() for attribute in items(node.references().toSeq())}
    return frozenset(name for number, name in read.items() if number in found)


def keeps_order(frame: DataFrame) -> bool:
    """Return whether a result is in the order of its messages: all steps work row by row."""
    kinds = [kind_of(node) for node in nodes(_of(frame).optimizedPlan())]
    return kinds.count(READER) == 1 and {*kinds} <= IN_ORDER


def changing(frame: DataFrame) -> str | None:
    """Return the part of a DataFrame that changes with each evaluation; None if nothing does."""
    plan = _of(frame).analyzed()
    if not plan.deterministic():
        return "has a random number, or another value that Spark calls not deterministic"
    left = [plan]
    while left:
        node = left.pop()
        if CLOCK.match(kind := kind_of(node)):
            return f"asks for the time ({kind})"
        left += items(node.children())
        if ".expressions." not in str(node.getClass().getName()):  # a plan
            left += items(node.expressions())
    return None


def nodes(tree: Any) -> Iterator[Any]:
    """Yield a plan, or an expression, and all of its parts."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left += items(node.children())


def items(of_scala: Any) -> Iterator[Any]:
    """Yield the items of a Scala sequence."""
    return (of_scala.apply(place) for place in range(of_scala.size()))


def _of(frame: DataFrame) -> Any:
    jvm: Any = frame._jdf
    return jvm.queryExecution()


def kind_of(node: Any) -> str:
    """Return the class of a part of a plan or an expression, without its package."""
    return str(node.getClass().getName()).rpartition(".")[2]
