"""The conformance suite fails for a kind that does not keep what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saf.destinations import Chunk, Destination, Reading, Refusal, Stored
from saf.destinations.jsonl import Jsonl
from saf.destinations.jsonl.folder import Folder
from saf.errors import CannotReadBack, Fenced, SafError
from saf.testing.conformance import DestinationConformance, Forwarder
from saf.testing.forwarder import all_stored
from tests.json_lines import lines

Store = Callable[[Folder, Chunk, bool], Stored | Refusal]


class Broken(Folder):
    """A folder with a defect."""

    defect: Store

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        return type(self).defect(self, chunk, exactly_once)


def well(folder: Folder, chunk: Chunk, exactly_once: bool) -> Stored | Refusal:
    return Folder.store(folder, chunk, exactly_once=exactly_once)


def repeats(folder: Folder, chunk: Chunk, exactly_once: bool) -> Stored | Refusal:  # noqa: ARG001
    return well(folder, chunk, False)


def forgets_the_first_row(folder: Folder, chunk: Chunk, exactly_once: bool) -> Stored | Refusal:
    done = all_stored(well(folder, replace(chunk, rows=chunk.rows.slice(1)), exactly_once))
    return replace(done, messages=chunk.rows.num_rows)


def takes_any_epoch(folder: Folder, chunk: Chunk, exactly_once: bool) -> Stored | Refusal:
    try:
        return well(folder, chunk, exactly_once)
    except Fenced:
        return Stored(messages=0)


def turns_round(folder: Folder, chunk: Chunk, exactly_once: bool) -> Stored | Refusal:
    rows = chunk.rows.sort_by([("id", "descending")])
    return well(folder, replace(chunk, rows=rows), exactly_once)


def takes_services_that_wait(folder: Folder, chunk: Chunk, exactly_once: bool) -> Stored | Refusal:
    return well(folder, replace(chunk, behind=frozenset()), exactly_once)


def stores_half_of_what_it_refuses(
    folder: Folder, chunk: Chunk, exactly_once: bool
) -> Stored | Refusal:
    answer = well(folder, chunk, exactly_once)
    if isinstance(answer, Refusal):
        half = replace(chunk, rows=chunk.rows.slice(0, 1), behind=frozenset())
        well(folder, half, exactly_once)
    return answer


def knows_no_set_back(folder: Folder, chunk: Chunk, exactly_once: bool) -> Stored | Refusal:
    return well(folder, replace(chunk, known={}), exactly_once)


SERVICES = "test_a_service_that_is_not_known_is_named_and_nothing_stored"
DEFECTS: Sequence[tuple[Store, str]] = [
    (repeats, "test_of_a_chunk_that_was_given_in_part_the_rest_is_stored"),
    (repeats, "test_each_lane_has_a_mark_of_its_own"),
    (forgets_the_first_row, "test_a_chunk_is_stored_as_a_whole"),
    (takes_any_epoch, "test_an_older_epoch_stores_nothing"),
    (turns_round, "test_each_key_arrives_in_its_order"),
    (takes_services_that_wait, SERVICES),
    (
        stores_half_of_what_it_refuses,
        "test_a_service_that_is_not_known_is_named_and_nothing_stored",
    ),
    (knows_no_set_back, "test_who_was_set_back_is_named"),
]


@pytest.mark.parametrize(
    ("defect", "test"), DEFECTS, ids=[f"{defect.__name__}-{test}" for defect, test in DEFECTS]
)
def test_a_defect_is_noticed(
    tmp_path: Path, request: pytest.FixtureRequest, defect: Store, test: str
) -> None:
    promise = getattr(DestinationConformance(), test)
    for number, how in enumerate((well, defect)):
        settings = kind(how)(folder=tmp_path / str(number))
        settings.folder.mkdir()
        fixtures: Mapping[str, Any] = {
            "settings": settings,
            "forwarder": Forwarder(),
            "stored": lambda folder=settings.folder: lines(folder),
            "request": request,
        }
        given = {name: one for name, one in fixtures.items() if name in names(promise)}
        if how is well:
            promise(**given)
        else:
            with pytest.raises((AssertionError, pytest.fail.Exception, SafError)):
                promise(**given)


def test_what_a_kind_says_that_it_can_and_cannot_is_noticed(tmp_path: Path) -> None:
    class Boastful(Jsonl):
        def reading(self, name: str) -> AbstractContextManager[Reading]:
            raise CannotReadBack(name, "it is full")

    with pytest.raises(CannotReadBack):
        DestinationConformance().test_what_it_holds_can_be_compared(
            Boastful(folder=tmp_path), Forwarder()
        )


def test_a_secret_that_is_shown_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps("no folder"))
    DestinationConformance().test_a_login_that_is_refused_says_so_without_its_secrets(
        Jsonl(folder=tmp_path / "file")
    )
    with pytest.raises(pytest.fail.Exception):
        DestinationConformance().test_a_login_that_is_refused_says_so_without_its_secrets(
            Jsonl(folder=tmp_path)
        )


def kind(defect: Store) -> type[Jsonl]:
    class Kind(Jsonl):
        def open(self, name: str, *, keep: bool = False) -> Destination:  # noqa: ARG002
            broken: type[Broken] = type("Defect", (Broken,), {"defect": staticmethod(defect)})
            return broken(name, self)

    return Kind


def names(promise: Callable[..., object]) -> tuple[str, ...]:
    return promise.__code__.co_varnames[: promise.__code__.co_argcount]
