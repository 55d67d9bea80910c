"""What Spark does with transforms, without Spark: in plain Python, and so in milliseconds.

Results come to the task in step with its messages, as from Spark: first those of parked messages,
then those of the batch. What `tests.crash.made` says to Spark is said here once more.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa

from saf.database import fetch
from saf.engine.context import Context
from saf.engine.in_step import ENDED, LAST, InStep
from saf.engine.source import messages
from saf.engine.task import Task
from saf.engine.transforming import RESULT, Evaluated, Transforming
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import JobFailed, SafError
from saf.spark.transforms import parked_of
from tests.crash.transforms import FUNCTIONS, NOT_DRAWN, TWICE_FROM

PARKED = """
SELECT DISTINCT ON (id) -id, to_service, body FROM saf.parked
WHERE subscription_id = %(subscription_id)s AND id = ANY (%(ids)s)
"""
GIVEN = frozenset({"body"})

Result = dict[str, Any]


def transforming_rules(rules: ForwardingRules, services: Iterable[str]) -> ForwardingRules:
    """Rules by which some services are transformed."""
    functions = {service: FUNCTIONS[service] for service in services}
    drawn = frozenset(service for service, name in functions.items() if name == "drawn")
    return replace(rules, transforms=functions, not_deterministic=drawn)


def run_transforming(number: int, item: Work, rules: ForwardingRules) -> list[Receipt]:
    """Run one item of work; a source that is lost meanwhile is a problem of its broker."""
    try:
        return _run(number, item, rules)
    except (SafError, psycopg.Error) as error:
        kind = JobFailed.__name__
        return [Receipt(work=number, destination=None, error_kind=kind, error=str(error))]


def _run(number: int, item: Work, rules: ForwardingRules) -> list[Receipt]:
    batches = [*messages(item, rules.max_bytes)]
    parked = parked_of(item, rules)
    found = _results(_parked(item, parked), rules)
    for batch in batches:
        rows = batch.select(["id", "to_service", "body"]).to_pylist()
        found += _results((tuple(row.values()) for row in rows), rules)
    given = [*sorted(found, key=lambda row: (row["id"], row["part"])), {"id": LAST, ENDED: True}]
    evaluated = Evaluated(
        given=dict.fromkeys(rules.transforms, GIVEN),
        parked=frozenset[int]().union(*parked.values()),
    )
    in_step = InStep(iter([pa.RecordBatch.from_pylist(given, RESULT)]))
    transforming = Transforming.of(item, rules, evaluated, in_step)
    return Task(Context(number, item, rules, None, transforming)).run(iter(batches))


def _parked(item: Work, parked: Mapping[str, frozenset[int]]) -> list[tuple[Any, ...]]:
    ids = sorted(id_ for some in parked.values() for id_ in some)
    if not ids:
        return []
    with item.dsn.connect(role="forward", autocommit=True) as source:
        return fetch(source, PARKED, {"subscription_id": item.batch.subscription_id, "ids": ids})


def _results(rows: Iterable[tuple[Any, ...]], rules: ForwardingRules) -> list[Result]:
    return [
        {"id": id_, "part": part, "body": made.encode(), ENDED: False}
        for id_, service, body in rows
        if service in rules.transforms
        for part, made in enumerate(made_of(bytes(body).decode(), FUNCTIONS[service]))
    ]


def made_of(text: str, function: str) -> Iterator[str]:
    """What a function makes of a message.

    >>> [*made_of("orders-0 5 t ...", "computed")]
    ['orders-0 5 t 0 2 - ...', 'orders-0 5 t 1 2 - ...']
    >>> [*made_of("orders-0 7 t ...", "computed")]
    []
    """
    account, n, token, rest = text.split(" ", 3)
    if int(n) % 7 == 0 and "poison" not in text:
        return
    drawn = function == "drawn"
    draw = str(uuid.uuid4()) if drawn else NOT_DRAWN
    rows = 1 + (draw >= TWICE_FROM if drawn else int(n) % 5 == 0)
    for part in range(rows):
        yield f"{account} {n} {token} {part} {rows} {draw} {rest}"
