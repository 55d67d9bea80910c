"""What a task does with the results of transforms: whose they are, and that none is missed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from saf.destinations.jsonl.folder import lines
from saf.engine.classifying import as_table
from saf.engine.in_step import LAST, InStep
from saf.engine.kept_results import RESULT as KEPT
from saf.engine.set_aside import SetAside
from saf.engine.storing import vouched
from saf.engine.transforming import RESULT, Evaluated, Transforming
from saf.errors import Unavailable
from saf.message import MAX_HEADERS
from saf.spark.evaluation import unbroken

END = {"id": LAST, "ended": True}


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


def transforming(
    given: Iterator[pa.RecordBatch],
    *,
    not_deterministic: Sequence[str] = (),
    routers: Sequence[str] = (),
    gives: Sequence[str] = ("body",),
    **more: Any,
) -> Transforming:
    evaluated = Evaluated(given={"billing": frozenset(gives)}, **more)
    return Transforming(
        ["billing"],
        evaluated,
        InStep(given),
        max_bytes=10,
        not_deterministic=not_deterministic,
        routers=routers,
    )


def sent(one: Transforming, some: pa.Table) -> list[tuple[int, bytes]]:
    one.read_results(some, None)
    out = one.outputs(some)
    return list(zip(out["id"].to_pylist(), out["body"].to_pylist(), strict=True))


def test_results_meet_their_messages_whatever_chunks_and_batches_they_come_in() -> None:
    made = [{"id": n // 2, "part": n % 2, "body": b"%d" % n} for n in range(4, 14)]
    one = transforming(results(*made, END, of_each=3))
    assert sent(one, rows(2, 3)) == [(2, b"4"), (2, b"5"), (3, b"6"), (3, b"7")]
    assert sent(one, rows(4)) == [(4, b"8"), (4, b"9")]
    assert sent(one, rows(5, 6, 7)) == [(5, b"10"), (5, b"11"), (6, b"12"), (6, b"13")]


def test_a_chunk_whose_messages_are_all_unfit_reads_no_results() -> None:
    one = transforming(results({"id": 1, "body": b"1"}, END))
    assert sent(one, rows(1).slice(0, 0)) == []
    assert sent(one, rows(1)) == [(1, b"1")]


def test_messages_of_other_services_are_as_they_were_sent() -> None:
    one = transforming(results({"id": 2, "body": b"2"}, END))
    mixed = pa.concat_tables([rows(1, service="audit"), rows(2), rows(3, service="audit")])
    assert sent(one, mixed) == [(1, b"as it was sent"), (2, b"2"), (3, b"as it was sent")]


def test_a_chunk_of_which_no_message_is_left_needs_no_results() -> None:
    one = transforming(results({"id": 2, "body": b"2"}, END))
    assert sent(one, rows(1).slice(0, 0)) == []
    assert sent(one, rows(2)) == [(2, b"2")]


def test_results_that_are_not_in_their_order_leave_nothing_out() -> None:
    made: list[Any] = [{"id": n, "body": b"1"} for n in (1, 3, 2)]
    for given in ([*made, END], [made[0], END, made[1]]):
        one = transforming(results(*given, of_each=1))
        with pytest.raises(Unavailable, match=r"order|after the last"):
            one.read_results(rows(1, 2, 3), None)


@pytest.mark.parametrize("broken", [True, False])
def test_results_that_end_too_early_leave_nothing_out(broken: bool) -> None:
    """They may break off, or just end; a message without a result might be in what is missing."""

    def given() -> Iterator[pa.RecordBatch]:
        yield from results({"id": 1, "body": b"1"})
        if broken:
            raise pa.ArrowInvalid("Tried reading schema message, was null or length 0")

    one = transforming(unbroken(given()))
    with pytest.raises(Unavailable):
        one.read_results(rows(1, 2), None)


UNFIT_HEADERS = (
    *("", "text", "null", "[]", '"a"', "7", "{'a': 1}", '{"a": 1} {}', '{"a": NaN}'),
    *('{"a": "\\u0000"}', '{"\\ud800": 1}', '{"a": "line\nline"}', "[" * 100_000),
    f'{{"a": "{"x" * MAX_HEADERS}"}}',
)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ([{"part": 0, "body": None}], "no body"),
        ([{"body": b"more than ten"}], "more than 10 bytes"),
        *(
            ([{"body": b"a", "headers": headers}], "headers that are not a JSON object")
            for headers in UNFIT_HEADERS
        ),
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
    one.read_results(some, None)
    left = one.bury_at_fault(some, aside)
    assert one.outputs(left)["body"].to_pylist() == [b"1", b"3"]
    ((buried, _, reason, error),) = aside.dead
    assert (buried["id"].to_pylist(), reason) == ([2], "rejected")
    assert why in error


def test_headers_of_any_form_are_sent_on_one_line_and_say_nothing_of_who_was_verified() -> None:
    texts = {
        '{\n  "a": 1.50,\r\n\t"ü": []\n}': '{"a": 1.50, "ü": []}',
        '{"a":"x\\u000ay"}': '{"a": "x\\ny"}',
        '{"saf-verified-from" : {}}': '{"saf-claimed-from": {}}',
        '{"\\u0073af-verified-from":{}}': '{"saf-claimed-from": {}}',
        '{"a": 1, "a": 2}': '{"a": 2}',
        None: None,
    }
    made = [{"id": n, "body": b"1", "headers": one} for n, one in enumerate(texts, 1)]
    one = transforming(results(*made, END), gives=["body", "headers"])
    some = rows(*range(1, len(made) + 1))
    one.read_results(some, None)
    going = vouched(one.outputs(some), UUID(int=7), None)
    assert going["headers"].to_pylist() == [*texts.values()]
    written = lines(going, UUID(int=7)).to_pylist()
    assert [json.loads(line).get("headers") for line in written] == [
        said and json.loads(said) for said in texts.values()
    ]
    assert "".join(written).count("\n") == len(made)


class Source:
    """What a source keeps, and what its outbox says."""

    def __init__(self) -> None:
        self.kept: dict[int, list[tuple[Any, ...]]] = {}
        self.sent: dict[int, str] = {}

    def kept_results(self, messages: Any) -> list[tuple[Any, ...]]:
        return [row for id_ in sorted(messages["ids"]) for row in self.kept.get(id_, ())]

    def keep_results(self, results: Any) -> list[tuple[Any, ...]]:
        new: dict[int, list[tuple[Any, ...]]] = {}
        for id_, *row in zip(results["id"], *(results[name] for name in KEPT), strict=True):
            new.setdefault(id_, []).append((id_, *row))
        self.kept = new | self.kept
        return self.kept_results({"ids": new})

    def sent_to(self, messages: Any, services: Any) -> dict[int, str]:
        return {n: self.sent[n] for n in messages["ids"] if self.sent.get(n) in services}


def test_what_is_kept_counts_and_what_is_new_is_kept_with_what_is_left_out() -> None:
    source = Source()
    source.kept = {
        1: [(1, 0, "k", None, None, b"first"), (1, 1, "k", None, None, b"second")],
        2: [(2, None, None, None, None, None)],
    }
    made = [{"id": n, "body": b"%d" % n} for n in (1, 2, 4)]
    one = transforming(results(*made, END), not_deterministic=["billing"])
    some = rows(1, 2, 3, 4)
    one.read_results(some, source)
    one.keep(some, source)
    out = one.outputs(some)
    assert list(zip(*(out[name].to_pylist() for name in ("id", "key", "body")), strict=True)) == [
        (1, "k", b"first"),
        (1, "k", b"second"),
        (4, None, b"4"),
    ]
    assert source.kept[3] == [(3, None, None, None, None, None)]
    assert [row[-1] for row in source.kept[4]] == [b"4"]


def test_a_message_with_kept_results_is_no_dead_letter_whatever_a_transform_makes_of_it_now() -> (
    None
):
    source = Source()
    source.kept = {1: [(1, None, None, None, None, b"kept")]}
    one = transforming(results({"id": 1, "body": None}, END), not_deterministic=["billing"])
    some, aside = rows(1), SetAside(work=None)  # type: ignore[arg-type] # nothing is written
    one.read_results(some, source)
    assert one.outputs(one.bury_at_fault(some, aside))["body"].to_pylist() == [b"kept"]
    assert aside.dead == []


def test_a_parked_message_that_its_router_has_led_on_needs_the_result_of_the_router() -> None:
    """Of what is kept, or of what the outbox says; where it has neither, it goes as it is."""
    source = Source()
    source.kept = {7: [(7, None, None, None, None, b"kept")]}
    source.sent = {8: "billing", 9: "billing"}
    one = transforming(
        results({"id": -8, "body": b"8"}, END), parked=frozenset({8}), routers=["billing"]
    )
    parked = rows(6, 7, 8, 9, 6, service="audit")
    for name in ("parked_id", "log_id"):
        parked = parked.append_column(name, parked["id"])
    ready, why = one.ready(parked, source)
    assert (ready["id"].to_pylist(), why) == ([6, 7, 8], "others had their turn")
    one.keep(ready, source)
    assert one.outputs(ready)["body"].to_pylist() == [b"as it was sent", b"kept", b"8"]
    assert [row[-1] for row in source.kept[8]] == [b"8"]


def test_parked_messages_without_a_result_yet_wait_and_those_behind_them_too() -> None:
    """A message that was left out has been asked for; one that was parked since then has not."""
    one = transforming(results({"id": -7, "body": b"7"}, END), parked=frozenset({7, 8}))
    parked = rows(7, 8, 9, 7)
    for name in ("parked_id", "log_id"):
        parked = parked.append_column(name, parked["id"])
    ready, why = one.ready(parked, Source())
    assert (ready["id"].to_pylist(), why) == ([7, 8], "others had their turn")
    assert one.outputs(ready)["body"].to_pylist() == [b"7"]
