"""What a task does with the results of transforms: whose they are, and that none is missed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from saf.engine.classifying import as_table
from saf.engine.set_aside import SetAside
from saf.engine.transforming import RESULT, Evaluated, Transforming
from saf.errors import Unavailable
from saf.spark.items import unbroken

END = {"id": (1 << 63) - 1, "ended": True}


def results(*some: dict[str, Any], of_each: int = 2) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(some), of_each):
        batch = [{"ended": False, **one} for one in some[first : first + of_each]]
        yield pa.RecordBatch.from_pylist(batch, RESULT)


def rows(*ids: int, service: str = "billing") -> pa.Table:
    return as_table(
        {
            "id": id_,
            "shard": 0,
            "message_id": UUID(int=id_),
            "to_service": service,
            "body": b"as it was sent",
        }
        for id_ in ids
    )


def transforming(given: Iterator[pa.RecordBatch], **more: Any) -> Transforming:
    evaluated = Evaluated(given={"billing": frozenset({"body"})}, **more)
    return Transforming(["billing"], evaluated, given, max_bytes=10)


def sent(one: Transforming, some: pa.Table) -> list[tuple[int, bytes]]:
    one.look(some)
    out = one.outputs(some)
    return list(zip(out["id"].to_pylist(), out["body"].to_pylist(), strict=True))


def test_results_meet_their_messages_whatever_chunks_and_batches_they_come_in() -> None:
    made = [{"id": n // 2, "part": n % 2, "body": b"%d" % n} for n in range(4, 14)]
    one = transforming(results(*made, END, of_each=3))
    assert sent(one, rows(2, 3)) == [(2, b"4"), (2, b"5"), (3, b"6"), (3, b"7")]
    assert sent(one, rows(4)) == [(4, b"8"), (4, b"9")]
    assert sent(one, rows(5, 6, 7)) == [(5, b"10"), (5, b"11"), (6, b"12"), (6, b"13")]


def test_messages_of_other_services_are_as_they_were_sent() -> None:
    one = transforming(results({"id": 2, "body": b"2"}, END))
    mixed = pa.concat_tables([rows(1, service="audit"), rows(2), rows(3, service="audit")])
    assert sent(one, mixed) == [(1, b"as it was sent"), (2, b"2"), (3, b"as it was sent")]


@pytest.mark.parametrize("broken", [True, False])
def test_results_that_end_too_early_leave_nothing_out(broken: bool) -> None:
    """They may break off, or just end; a message without a result might be in what is missing."""

    def given() -> Iterator[pa.RecordBatch]:
        yield from results({"id": 1, "body": b"1"})
        if broken:
            raise pa.ArrowInvalid("Tried reading schema message, was null or length 0")

    one = transforming(unbroken(given()))
    with pytest.raises(Unavailable):
        one.look(rows(1, 2))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ([{"part": 0, "body": None}], "no body"),
        ([{"body": b"more than ten"}], "more than 10 bytes"),
        ([{"part": -1, "body": b"a"}], "below 0"),
        ([{"part": 1, "body": b"a"}, {"part": 1, "body": b"b"}], "in a column part"),
        ([{"body": b"a"}, {"body": b"b"}], "in a column part"),
        ([{"part": 0, "body": b"a"}, {"body": b"b"}], "in a column part"),
    ],
)
def test_a_result_that_cannot_be_sent_makes_a_dead_letter_of_its_message_alone(
    made: list[dict[str, Any]], why: str
) -> None:
    bad = [{"id": 2, **one} for one in made]
    one = transforming(results({"id": 1, "body": b"1"}, *bad, {"id": 3, "body": b"3"}, END))
    some, aside = rows(1, 2, 3), SetAside(work=None)  # type: ignore[arg-type] # nothing is written
    one.look(some)
    left = one.bury_at_fault(some, aside)
    assert one.outputs(left)["body"].to_pylist() == [b"1", b"3"]
    ((buried, _, reason, error),) = aside.dead
    assert (buried["id"].to_pylist(), reason) == ([2], "rejected")
    assert why in error


def test_parked_messages_without_a_result_yet_wait_and_those_behind_them_too() -> None:
    """A message that was left out has been asked for; one that was parked since then has not."""
    one = transforming(results({"id": 7, "body": b"7"}, END), parked=frozenset({7, 8}))
    parked = rows(7, 8, 9, 7)
    for name in ("parked_id", "log_id"):
        parked = parked.append_column(name, parked["id"])
    ready, why = one.ready(parked)
    assert (ready["id"].to_pylist(), why) == ([7, 8], "others had their turn")
    assert one.outputs(ready)["body"].to_pylist() == [b"7"]
