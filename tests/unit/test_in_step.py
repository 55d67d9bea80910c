"""The stream of what Spark evaluates: each consumer gets its own, and little is held."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from saf.engine.in_step import LAST, InStep
from saf.errors import Unavailable

Row = tuple[int, bool | None]


def given(*some: Row, of_each: int = 3) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(some), of_each):
        ids, ended = zip(*some[first : first + of_each], strict=True)
        yield pa.RecordBatch.from_pydict(
            {"id": pa.array(ids, pa.int64()), "ended": pa.array(ended, pa.bool_())}
        )


def chunk(*ids: int, parked: bool = False) -> pa.Table:
    return pa.table({"parked_id" if parked else "id": pa.array(ids, pa.int64())})


def numbers(found: pa.Table | None) -> list[int]:
    return [] if found is None else list(found["id"].to_pylist())


ANSWER, RESULT, END = None, False, (LAST, True)


def test_answers_and_results_are_told_apart_whatever_batches_they_come_in() -> None:
    rows = [(n, RESULT if n % 3 else ANSWER) for n in range(1, 21)]
    for of_each in range(1, 22):
        one = InStep(given(*rows, END, of_each=of_each))
        for first in range(1, 20, 5):
            some = chunk(*range(first, first + 5))
            answers, results = numbers(one.answers(some)), numbers(one.results(some))
            assert answers == [n for n in range(first, first + 5) if n % 3 == 0]
            assert sorted(answers + results) == [*range(first, first + 5)]


def test_what_is_about_parked_messages_comes_first_by_the_ids_that_these_have() -> None:
    one = InStep(given((-9, ANSWER), (-4, RESULT), (-4, RESULT), (-2, ANSWER), (1, RESULT), END))
    parked = chunk(4, parked=True)
    assert sorted(numbers(one.answers(parked))) == [2, 9]
    assert numbers(one.results(parked)) == [4, 4]
    assert numbers(one.answers(parked)) == [9, 2], "also when it is asked for again"
    assert numbers(one.results(chunk(1))) == [1]


def test_the_first_message_that_was_ever_parked_has_its_answer() -> None:
    one = InStep(given((-1, ANSWER), (1, ANSWER), END))
    assert numbers(one.answers(chunk(1, parked=True))) == [1]


def test_no_more_is_held_for_a_consumer_than_up_to_the_messages_in_hand() -> None:
    read: list[int] = []

    def counted() -> Iterator[pa.RecordBatch]:
        for batch in given(*((n, ANSWER) for n in range(1, 1000)), END, of_each=10):
            read.append(batch.num_rows)
            yield batch

    one = InStep(counted())
    one.results(chunk(5, parked=True))
    assert sum(read) <= 10, "nothing is parked, and it has not looked for it in the batch"
    one.results(chunk(1, 2, 3))
    assert sum(read) <= 10
    assert numbers(one.answers(chunk(*range(500, 510)))) == [*range(500, 510)]
    assert len(one._answers) <= 2
    one.answers(chunk(600))
    assert len(one._answers) <= 2


@pytest.mark.parametrize(
    "rows",
    [
        [(1, ANSWER)],
        [(3, RESULT), (2, ANSWER), END],
        [(1, RESULT), (2, RESULT), (3, RESULT), (2, ANSWER), END],
        [(1, ANSWER), END, END, (3, ANSWER)],
    ],
)
def test_what_ends_early_or_is_not_in_its_order_leaves_nothing_out(rows: list[Row]) -> None:
    one = InStep(given(*rows))
    with pytest.raises(Unavailable):
        one.answers(chunk(1, 2, 3, 4))
