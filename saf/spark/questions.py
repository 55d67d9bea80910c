"""Questions: the messages for routers, as the expressions of routers in SQL see them.

A Spark task reads them, beside the one that delivers: first the parked messages that may go on now,
then those of the batch in the order of their ids. It reads no more columns than the expressions
refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.columns import EXPRESSED
from saf.engine.source import read
from saf.engine.work import Work
from saf.errors import Unavailable
from saf.log.arrow import OF_SPARK
from saf.log.columns import bounded
from saf.setaside import parking
from saf.spark import items

PLACE = {"id": "long", "parked_id": "long", "asked": "int"}
"""Which message a question is about, and the number of the expression of the message's router."""
OF_NONE = -1


def questions(
    numbers: Mapping[str, int], kinds: Mapping[str, str], max_bytes: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for mapInArrow: an item of work in (`saf.spark.items`), questions out.

    The first row is about no message: it hands the item on.

    Args:
        numbers: the number of each expression.
        kinds: the columns that come out besides the item: `PLACE` and some of `EXPRESSED`.
        max_bytes: larger bodies are left out.
    """
    schema = pa.schema([(name, OF_SPARK[kind]) for name, kind in kinds.items()])

    def task(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        handed, _ = items.taken(partition)
        yield _first(handed, schema)
        _, item = items.opened(handed)
        asked = {
            router.service: numbers.get(router.expression, OF_NONE)
            for router in item.routes.routers
        }
        if not set(asked.values()) - {OF_NONE}:
            return
        columns = {"to_service", *kinds} - PLACE.keys()
        try:
            for query in _queries(item, list(asked), columns, max_bytes):
                for rows in read(item, query):
                    yield _with_item(_shaped(rows, asked, schema), pa.nulls(len(rows), pa.binary()))
        except Unavailable:
            return  # the delivery meets the error too, and reports it

    return task


def _queries(
    item: Work, services: list[str], columns: Iterable[str], max_bytes: int
) -> Iterator[str]:
    """Give the queries for the parked messages that may go on now, and for the batch by id."""
    more = [as_text(name, max_bytes) for name in columns]
    some = f"to_service = ANY ({sql.Literal(services).as_string(None)})"
    lanes = [lane for lane in item.waiting if lane.due and not lane.destination]
    if lanes:
        place = sql.SQL("NULL::bigint AS id")
        rows = parking.in_lanes(item.batch, "", lanes, [place, "parked_id", *more])
        yield f"SELECT * FROM ({rows}) AS parked WHERE {some}"
    rows = item.batch.rows(["id", sql.SQL("NULL::bigint AS parked_id"), *more])
    yield f"SELECT * FROM ({rows}) AS batch WHERE {some} ORDER BY id"


def as_text(name: str, max_bytes: int) -> str | sql.Composable:
    """Return a column as Spark sees it: a large body is NULL, ids and JSON are text."""
    if (column := bounded(name, max_bytes)) != name:
        return column
    if EXPRESSED[name] == "string":
        return sql.SQL("{0}::text AS {0}").format(sql.Identifier(name))
    return name


def _first(handed: bytes, schema: pa.Schema) -> pa.RecordBatch:
    none = [pa.array([OF_NONE if f.name == "asked" else None], f.type) for f in schema]
    return _with_item(pa.RecordBatch.from_arrays(none, schema=schema), pa.array([handed]))


def _with_item(rows: pa.RecordBatch, handed: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([handed, *rows.columns], [items.ITEM, *rows.schema.names])


def _shaped(rows: pa.RecordBatch, asked: Mapping[str, int], schema: pa.Schema) -> pa.RecordBatch:
    which = pc.index_in(rows["to_service"], value_set=pa.array(asked, pa.string()))
    numbers = pa.array(asked.values(), pa.int32()).take(which)
    columns = {**dict(zip(rows.schema.names, rows.columns, strict=True)), "asked": numbers}
    return pa.RecordBatch.from_arrays([columns[f.name].cast(f.type) for f in schema], schema=schema)
