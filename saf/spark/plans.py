"""Plans: what Spark's own plan of a DataFrame says about the function that has made it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from saf.spark.reading import READER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CLOCK = re.compile(r"^(Current(Date|Time|Timestamp)|Now|LocalTimestamp)(Like)?$")
IN_ORDER = {READER, "Range", "Project", "Filter", "Generate", "ArrowEvalPython", "BatchEvalPython"}
"""Steps that go row by row."""
HIDING = {"InMemoryRelation", "LogicalRDD"}
"""Steps that do not say what they were made of."""


def columns_read(frame: DataFrame) -> frozenset[str] | None:
    """Return which columns of messages a result depends on; None if that is hard to tell."""
    found: set[int] = set()
    read: dict[int, str] = {}
    for node in nodes(_of(frame).optimizedPlan()):
        kind = kind_of(node)
        if kind in HIDING or node.subqueries().size():
            return None
        if kind == READER and kind_of(node.child()) == "Range":
            read |= {one.exprId().id(): str(one.name()) for one in items(node.output())}
        else:
            found |= {one.exprId().id() for one in items(node.references().toSeq())}
    return frozenset(name for number, name in read.items() if number in found)


def keeps_order(frame: DataFrame) -> bool:
    """Whether a result is in the order in which its messages are read: all steps are row by row."""
    kinds = [kind_of(node) for node in nodes(_of(frame).optimizedPlan())]
    return kinds.count(READER) == 1 and {*kinds} <= IN_ORDER


def changing(frame: DataFrame) -> str | None:
    """Return what a DataFrame has that is another one whenever it is asked; None if nothing."""
    plan = _of(frame).analyzed()
    if not plan.deterministic():
        return "has a random number, or another value that Spark calls not deterministic"
    left = [plan]
    while left:
        node = left.pop()
        if CLOCK.match(kind := kind_of(node)):
            return f"asks for the time ({kind})"
        left += items(node.children())
        if ".expressions." not in str(node.getClass().getName()):  # it is a plan
            left += items(node.expressions())
    return None


def nodes(tree: Any) -> Iterator[Any]:
    """Give a plan, or an expression, and all that it is made of."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left += items(node.children())


def items(of_scala: Any) -> Iterator[Any]:
    """Give the items of a sequence of Scala's."""
    return (of_scala.apply(place) for place in range(of_scala.size()))


def _of(frame: DataFrame) -> Any:
    jvm: Any = frame._jdf
    return jvm.queryExecution()


def kind_of(node: Any) -> str:
    """Return the class of a part of a plan or expression, without its package."""
    return str(node.getClass().getName()).rpartition(".")[2]
