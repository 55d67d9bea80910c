"""Bodies as JSON: each kind of value in its form, and what has none by its path."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, RootModel

from saf.errors import InvalidMessage
from saf.message import Encoder, Message, encode
from saf.received import READ, Headers, Received


class Colour(Enum):
    RED = "red"


class Size(StrEnum):
    LARGE = "large"


class Rank(IntEnum):
    FIRST = 1


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    price: Decimal


@dataclass
class Order:
    number: UUID
    items: list[Item] = field(default_factory=list)


class Customer(BaseModel):
    name: str
    since: date
    limit: Decimal


class Names(RootModel[list[str]]):
    pass


def as_json(body: object, **options: Any) -> Any:
    return json.loads(Encoder(**options)(body)[0])


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (Decimal("19.90"), "19.90"),
        (Decimal("1E+3"), "1E+3"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (datetime(2026, 1, 2, 3, 4, tzinfo=UTC), "2026-01-02T03:04:00+00:00"),
        (datetime(2026, 1, 2, 3, 4), "2026-01-02T03:04:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (time(3, 4), "03:04:00"),
        (Colour.RED, "red"),
        (Size.LARGE, "large"),
        (Rank.FIRST, 1),
        (Item("nail", Decimal("0.10")), {"name": "nail", "price": "0.10"}),
        (
            Customer(name="Ada", since=date(2026, 1, 2), limit=Decimal("9.5")),
            {"name": "Ada", "since": "2026-01-02", "limit": "9.5"},
        ),
        (Names(["a"]), ["a"]),
    ],
)
def test_each_kind_of_value_has_its_form_alone_and_inside_of_others(
    value: object, stored: object
) -> None:
    if not isinstance(value, str):
        assert as_json(value) == stored
    assert as_json({"a": [value]}) == {"a": [stored]}


def test_forms_are_found_in_each_other() -> None:
    order = Order(UUID(int=7), [Item("nail", Decimal("0.10"))])
    assert as_json({Size.LARGE: order}) == {
        "large": {
            "number": "00000000-0000-0000-0000-000000000007",
            "items": [{"name": "nail", "price": "0.10"}],
        }
    }


@pytest.mark.parametrize(
    ("body", "path", "problem"),
    [
        ({"items": [1, 2, 3, {"price": {1}}]}, "body.items[3].price", "a value of type 'set'"),
        ({"unit price": object()}, "body['unit price']", "a value of type 'object'"),
        ([[], [float("nan")]], "body[1][0]", "nan is not a number in JSON"),
        (
            Order(UUID(int=1), [Item("a", Decimal("NaN"))]),
            "body.items[0].price",
            "NaN has no form",
        ),
        ({"a": {UUID(int=1): 2}}, "body.a", "'uuid.UUID' is the name of a member"),
        ({"a": ["x\ud800"]}, "body.a[0]", "not encodable as UTF-8"),
        ({"a": b"x"}, "body.a", "a value of type 'bytes'"),
        ({"class": Item}, "body.class", "a value of type 'type'"),
    ],
)
def test_what_has_no_form_is_named_by_its_path(body: object, path: str, problem: str) -> None:
    with pytest.raises(InvalidMessage) as refused:
        Encoder()(body)
    assert (refused.value.field, refused.value.path) == ("body", path)
    assert f" at {path}: " in str(refused.value)
    assert problem in str(refused.value)


def test_what_contains_itself_or_is_nested_too_deeply_is_refused_by_name() -> None:
    circle: dict[str, object] = {"a": []}
    circle["a"] = [circle]
    with pytest.raises(InvalidMessage, match=r"at body\.a\[0\]: it contains itself"):
        Encoder()(circle)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidMessage, match="nested too deeply"):
        Encoder()(deep)


def test_an_application_may_add_forms_and_change_ours() -> None:
    def mine(value: object) -> object:
        if isinstance(value, Decimal):
            return float(value)
        if isinstance(value, set):
            return sorted(value)
        raise TypeError

    body = {"price": Decimal("1.5"), "tags": {"b", "a"}, "at": date(2026, 1, 2)}
    expected = {"price": 1.5, "tags": ["a", "b"], "at": "2026-01-02"}
    assert as_json(body, encoder=mine) == expected
    with pytest.raises(InvalidMessage, match=r"at body\.x: a value of type 'object'"):
        as_json({"x": object()}, encoder=mine)


# Headers


def stored(body: object, **headers: object) -> Any:
    return json.loads(encode(Message(service="s", body=body, headers=headers)).headers)


def test_the_content_type_of_a_text_is_what_the_headers_say_however_they_write_it() -> None:
    for name in ("content-type", "Content-Type", "CONTENT-TYPE"):
        assert stored("{}", **{name: "application/json", "Trace": 7}) == {
            "content-type": "application/json",
            "Trace": 7,
        }
    assert stored("{}") == {"content-type": "text/plain; charset=utf-8"}


def test_two_headers_that_differ_in_case_only_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="headers: 'Trace' and 'trace' are the same name"):
        stored("", Trace=1, trace=2)


def test_received_headers_are_found_whatever_their_case() -> None:
    headers = Headers({"Trace-Id": 7, "content-type": "text/plain"})
    assert headers["trace-id"] == headers["Trace-Id"] == headers.get("TRACE-ID") == 7
    assert "Content-Type" in headers
    assert "trace" not in headers
    assert headers.get("trace", 8) == 8
    assert headers == {"Trace-Id": 7, "content-type": "text/plain"}
    assert json.loads(json.dumps(headers)) == headers
    with pytest.raises(KeyError, match="trace"):
        headers["trace"]


def test_the_content_type_of_a_received_message_is_found_whatever_its_case() -> None:
    said = '{"Content-Type": "application/json"}'
    row = tuple(said if column == "headers" else None for column in READ)
    assert Received(row).content_type == "application/json"
