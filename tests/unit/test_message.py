"""Messages: what `encode` accepts, every broker can store; what it refuses, it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saf.errors import InvalidMessage, UsageError
from saf.message import MAX_KEY, MAX_NAME, Message, Row, encode, encode_body
from tests.timezones import Nowhere

NAIVE = datetime(2026, 1, 2, 3, 4)
LATE = datetime(9999, 12, 31, tzinfo=UTC)
EARLY = datetime.min.replace(tzinfo=timezone(timedelta(minutes=1)))
ZURICH = datetime(2126, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=1)))

# Text that PostgreSQL can store: no NUL, no lone surrogate
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=10,
)


class Order(IntEnum):
    FIRST = 1


def names_differ(given_headers: Mapping[str, object]) -> bool:
    """Whether no two names are the same but for the case of their letters."""
    return len({name.lower() for name in given_headers}) == len(given_headers)


def encoded(**fields: Any) -> Row:
    return encode(Message(**{"service": "billing", "body": b"", **fields}))


def headers(row: Row) -> dict[str, Any]:
    found = json.loads(row.headers)
    assert isinstance(found, dict)
    return found


def test_bytes_are_stored_as_they_are() -> None:
    row = encoded(body=b"\x00\xff")
    assert row.body == b"\x00\xff"
    assert headers(row) == {"content-type": "application/octet-stream"}


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_whatever_holds_bytes_is_stored_as_bytes(kind: type) -> None:
    body = encoded(body=kind(b"abc")).body
    assert type(body) is bytes
    assert body == b"abc"


def test_text_is_stored_as_utf8() -> None:
    row = encoded(body="Zürich")
    assert row.body == b"Z\xc3\xbcrich"
    assert headers(row) == {"content-type": "text/plain; charset=utf-8"}


@given(JSON.filter(lambda value: not isinstance(value, str)))
def test_anything_else_is_stored_as_json(body: object) -> None:
    data, content_type = encode_body(body)
    assert json.loads(data) == body
    assert content_type == "application/json"


@given(TEXT)
def test_any_text_is_a_body(body: str) -> None:
    assert encode_body(body)[0].decode() == body


def test_the_caller_may_say_what_the_content_is() -> None:
    row = encoded(body=b"<a/>", headers={"content-type": "application/xml", "trace": "7"})
    assert headers(row) == {"content-type": "application/xml", "trace": "7"}


@given(st.dictionaries(TEXT, JSON).filter(names_differ))
def test_headers_are_stored_beside_the_content_type(given_headers: dict[str, Any]) -> None:
    stored = headers(encoded(headers=given_headers))
    given_headers = {
        name.lower() if name.lower() == "content-type" else name: value
        for name, value in given_headers.items()
    }
    assert stored == {"content-type": "application/octet-stream", **given_headers}


def test_each_message_has_an_id_of_its_own() -> None:
    message = Message(service="billing", body=b"")
    assert encode(message).message_id != encode(message).message_id


def test_the_fields_arrive_in_their_columns() -> None:
    broker = UUID(int=7)
    row = encoded(
        key="7",
        message_type="paid",
        deliver_at=ZURICH - timedelta(hours=1),
        expires_at=ZURICH,
        to_broker=broker,
        from_service="shop",
    )
    assert row._replace(message_id=broker, headers="") == Row(
        *(broker, "shop", "billing", broker, "7", "paid", "", b""),
        *(ZURICH - timedelta(hours=1), ZURICH),
    )


@pytest.mark.parametrize(
    ("key", "stored"),
    [
        ("A-1", "A-1"),
        (7, "7"),
        (-7, "-7"),
        (0, "0"),
        (2**63, "9223372036854775808"),
        (10**1023, "1" + "0" * 1023),
        (Order.FIRST, "1"),
        (UUID("12345678-1234-5678-1234-567812345678"), "12345678-1234-5678-1234-567812345678"),
        (None, None),
    ],
)
def test_a_key_is_text_an_integer_or_a_uuid_and_is_stored_as_its_text(
    key: Any, stored: str | None
) -> None:
    assert encoded(key=key).key == stored


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        (True, "expected str, int or UUID, got bool True"),
        (7.0, "expected str, int or UUID, got float 7.0"),
        (Decimal("7"), "expected str, int or UUID, got Decimal Decimal('7')"),
        (b"A-1", "expected str, int or UUID, got bytes b'A-1'"),
        ((1, 2), "expected str, int or UUID, got tuple (1, 2)"),
        (10**1024, "1,025 bytes are more than 1,024"),
        pytest.param(10**5000, "its digits are more than 1,024 bytes", id="huge"),
    ],
)
def test_a_key_of_another_type_is_refused_with_its_value(key: Any, problem: str) -> None:
    with pytest.raises(InvalidMessage) as error:
        encoded(key=key)
    assert (error.value.field, error.value.problem) == ("key", problem)


def test_the_longest_names_and_keys_are_accepted() -> None:
    row = encoded(service="s" * MAX_NAME, key="ü" * (MAX_KEY // 2), message_type="t" * MAX_NAME)
    assert len(row.to_service) == 255
    assert len(row.key or "") == 512


def test_a_body_of_exactly_max_bytes_is_accepted() -> None:
    assert len(encode(Message(service="s", body=b"x" * 10), max_bytes=10).body) == 10


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({"service": ""}, "service", "is empty"),
        ({"service": "s" * 256}, "service", "256 bytes are more than 255"),
        ({"service": "a\0b"}, "service", "NUL"),
        ({"service": "a\ud800"}, "service", "surrogate"),
        ({"service": None}, "service", "expected str, got NoneType"),
        ({"service": b"billing"}, "service", "expected str, got bytes"),
        ({"key": ""}, "key", "is empty; if it does not exist, pass None"),
        ({"key": "k" * 1025}, "key", "1,025 bytes are more than 1,024"),
        ({"key": "a\0b"}, "key", "NUL"),
        ({"key": "\udfff"}, "key", "surrogate"),
        ({"key": b"7"}, "key", "expected str, int or UUID, got bytes"),
        ({"message_type": ""}, "message_type", "is empty; if it does not exist, pass None"),
        ({"message_type": "t" * 256}, "message_type", "256 bytes"),
        ({"message_type": "\0"}, "message_type", "NUL"),
        ({"from_service": ""}, "from_service", "is empty; if it does not exist, pass None"),
        ({"from_service": "f" * 256}, "from_service", "256 bytes"),
        ({"to_broker": "not-a-uuid"}, "to_broker", "not a uuid.UUID"),
        ({"deliver_at": NAIVE}, "deliver_at", "2026-01-02T03:04:00 has no time zone"),
        ({"expires_at": NAIVE}, "expires_at", "2026-01-02T03:04:00 has no time zone"),
        ({"deliver_at": NAIVE.replace(tzinfo=Nowhere())}, "deliver_at", "has no time zone"),
        ({"deliver_at": date(2026, 1, 2)}, "deliver_at", "expected datetime, got date"),
        ({"deliver_at": LATE}, "deliver_at", "9999-12-31T00:00:00+00:00 is before 0001-01-01 or"),
        ({"deliver_at": EARLY}, "deliver_at", "is before 0001-01-01 or after 9999-12-30, in UTC"),
        ({"expires_at": EARLY}, "expires_at", "is before 0001-01-01 or after 9999-12-30, in UTC"),
        ({"expires_at": LATE}, "expires_at", "leave it out for a message that never expires"),
        (
            {"expires_at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=14)))},
            "expires_at",
            "leave it out for a message that never expires",
        ),
        ({"expires_at": 600}, "expires_at", "expected datetime, got int"),
        ({"body": object()}, "body", "neither bytes, str nor JSON"),
        ({"expires_at": datetime.now(UTC)}, "expires_at", "is over: nobody would get the message"),
        ({"body": {"at": {1}}}, "body", "neither bytes, str nor JSON at body.at"),
        ({"body": float("nan")}, "body", "neither bytes, str nor JSON"),
        ({"body": "\ud800"}, "body", "not encodable as UTF-8"),
        ({"body": ["\ud800"]}, "body", "not encodable as UTF-8"),
        ({"headers": ["trace"]}, "headers", "expected a mapping"),
        ({"headers": {7: "x"}}, "headers", "expected a mapping"),
        ({"headers": {"x": object()}}, "headers", "not JSON"),
        ({"headers": {"x": float("inf")}}, "headers", "not JSON"),
        ({"headers": {"x": "a\0b"}}, "headers", "NUL"),
        ({"headers": {"a\0b": "x"}}, "headers", "NUL"),
        ({"headers": {"x": [{"y": "\0"}]}}, "headers", "NUL"),
        ({"headers": {"x": "\ud800"}}, "headers", "surrogate"),
        ({"headers": {"content-type": "a\0"}}, "headers", "NUL"),
        ({"headers": {"Content-Type": ["\0"]}}, "headers", "NUL"),
        ({"headers": {"content-type": "\udfff"}}, "headers", "surrogate"),
    ],
)
def test_bad_input_is_refused_by_the_name_of_its_field(
    fields: Mapping[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(InvalidMessage) as refused:
        encoded(**fields)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")
    assert problem in str(refused.value)


def test_a_cyclic_body_or_header_is_refused() -> None:
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(InvalidMessage, match=r"^body: "):
        encoded(body=circle)
    with pytest.raises(InvalidMessage, match=r"^headers: "):
        encoded(headers={"x": circle})


def test_a_body_over_max_bytes_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidMessage, match=r"^body: 11 bytes are more than max_bytes \(10\)"):
        encode(Message(service="s", body="ü" * 5 + "x"), max_bytes=10)


def test_a_refused_message_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(InvalidMessage, UsageError)
    assert issubclass(InvalidMessage, ValueError)


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3).filter(names_differ))
def test_headers_are_refused_exactly_if_postgresql_could_not_store_them(
    given_headers: dict[str, str],
) -> None:
    text = "".join([*given_headers, *given_headers.values()])
    storable = "\0" not in text and not any("\ud800" <= sign <= "\udfff" for sign in text)
    if storable:
        encoded(headers=given_headers)
    else:
        with pytest.raises(InvalidMessage, match=r"^headers: "):
            encoded(headers=given_headers)


def test_headers_larger_than_a_mebibyte_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="headers: 1,"):
        encode(Message(service="billing", body="", headers={"a": "x" * 1024 * 1024}))
