"""Events without a database: their form when sent, and the errors of classes and bodies."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pydantic
import pytest

import saf
from saf.errors import InvalidMessage, NewerEvent, UndecodableEvent, UsageError
from saf.message import STRICT, Exact, Message, encode
from saf.received import READ, Received
from saf.typed.event import VERSION, the_event
from saf.typed.modules import events, imported

SECRET = "no-error-quotes-this"
Connection = psycopg.Connection[Any]


def nothing(_: object, __: object) -> None: ...


class Kind(Enum):
    WEB = "web"
    SHOP = "shop"


@dataclass(frozen=True)
class Line:
    article: str
    price: Decimal


@saf.event("OrderPlaced", key="number", version=3)
@dataclass(frozen=True, kw_only=True, slots=True)
class OrderPlaced:
    """An order was placed."""

    number: str
    lines: list[Line]
    at: datetime
    currency: str
    kind: Kind = Kind.WEB
    due: date | None = None
    ids: tuple[UUID, ...] = ()
    notes: Mapping[str, int] = field(default_factory=dict)


@saf.upcaster(OrderPlaced, 1)
def with_lines(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "number": body["order"],
        "lines": [{"article": "?", "price": body["total"]}],
        "at": "2026-01-01T00:00:00Z",
    }


@saf.upcaster(OrderPlaced, 2)
def with_currency(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "currency": "CHF"}


@saf.event("Paid", key="order")
class Paid(pydantic.BaseModel):
    order: int
    amount: Decimal = pydantic.Field(gt=0)


ORDER = OrderPlaced(
    number="A-1",
    lines=[Line("tea", Decimal("19.90"))],
    at=datetime(2026, 1, 31, 12, 0, 0, 1, tzinfo=UTC),
    currency="EUR",
    kind=Kind.SHOP,
    due=date(2026, 2, 28),
    ids=(UUID(int=7),),
    notes={"a": 1},
)


def received(body: Any, headers: Any = None, message_type: str | None = "OrderPlaced") -> Received:
    given = {
        "message_id": UUID(int=1).bytes,
        "message_type": message_type,
        "body": body if isinstance(body, bytes) else json.dumps(body).encode(),
        "headers": None if headers is None else json.dumps(headers),
    }
    return Received(tuple(given.get(column) for column in READ))


def back(event: Any) -> Any:
    """What a receiver gets of an event that is sent."""
    row = encode(Message(service="billing", body=event))
    got = {"message_id": row.message_id.bytes, "message_type": row.message_type, "body": row.body}
    message = Received(tuple({**got, "headers": row.headers}.get(column) for column in READ))
    return message.decode(type(event))


@pytest.mark.parametrize("event", [ORDER, Paid(order=7, amount=Decimal("0.10"))])
def test_what_is_sent_is_what_is_received(event: Any) -> None:
    assert back(event) == event


def test_an_event_gives_its_type_its_key_and_its_version() -> None:
    row = encode(Message(service="billing", body=ORDER, headers={"Trace": 1}))
    assert (row.message_type, row.key) == ("OrderPlaced", "A-1")
    headers = {"content-type": "application/json", "Trace": 1, VERSION: 3}
    assert json.loads(row.headers) == headers
    first = encode(Message(service="billing", body=Paid(order=7, amount=Decimal(1))))
    assert (first.message_type, first.key) == ("Paid", "7")
    assert json.loads(first.headers) == {"content-type": "application/json"}


def test_a_key_that_is_given_counts_and_another_type_is_refused() -> None:
    row = encode(Message(service="billing", body=ORDER, key="customer-7"))
    assert row.key == "customer-7"
    assert encode(Message(service="billing", body=ORDER, message_type="OrderPlaced")).key == "A-1"
    with pytest.raises(InvalidMessage, match="'Paid', and the body is event 'OrderPlaced'"):
        encode(Message(service="billing", body=ORDER, message_type="Paid"))


def test_headers_of_another_message_do_not_bring_their_version() -> None:
    paid = Paid(order=7, amount=Decimal(1))
    text = '{"saf-type-version": 3, "total": 1.50}'
    exact = Exact(STRICT.decode(text))
    row = encode(Message(service="billing", body=paid, headers=exact))
    assert row.headers == '{"content-type": "application/json", "total": 1.50}'
    row = encode(Message(service="billing", body=ORDER, headers=exact))
    assert '"total": 1.50' in row.headers
    assert json.loads(row.headers)[VERSION] == 3


@pytest.mark.parametrize(
    ("value", "key"),
    [("A", "A"), (7, "7"), (UUID(int=7), str(UUID(int=7))), (Kind.WEB, "web"), (None, None)],
)
def test_a_key_may_be_text_a_number_or_a_uuid(value: object, key: str | None) -> None:
    @saf.event("Keyed", key="key")
    @dataclass
    class Keyed:
        key: Any

    assert encode(Message(service="billing", body=Keyed(value))).key == key


@pytest.mark.parametrize("value", [1.5, True, ("a",)])
def test_any_other_key_is_refused_by_its_field(value: object) -> None:
    @saf.event("Keyed", key="key")
    @dataclass
    class Keyed:
        key: Any

    with pytest.raises(InvalidMessage, match=r"key: .*Keyed\.key is a \w+: a key is a str, an int"):
        encode(Message(service="billing", body=Keyed(value)))


# Decoding

V3 = {VERSION: 3}
BODY = {
    "number": "A-1",
    "lines": [{"article": "tea", "price": "19.90"}],
    "at": "2026-01-31T12:00:00Z",
    "currency": "EUR",
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lines": [{"article": "tea", "price": SECRET}]}, "body.lines[0].price: Input should be"),
        ({"number": None}, "body.number: Input should be a valid string"),
        ({"kind": SECRET}, "body.kind: Input should be 'web' or 'shop'"),
        ({"lines": [{}]}, "body.lines[0].article: Field required (and 1 more)"),
        ({"notes": {"a b": SECRET}}, "body.notes['a b']: Input should be a valid integer"),
    ],
)
def test_a_body_that_does_not_match_names_the_field_and_shows_no_value(
    change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UndecodableEvent) as error:
        received({**BODY, **change}, V3).decode(OrderPlaced)
    assert problem in str(error.value)
    assert SECRET not in repr(error.value) + str(error.value.__cause__)
    assert (error.value.version, error.value.event) == (3, "OrderPlaced")
    assert problem.startswith(error.value.path)


@pytest.mark.parametrize("headers", [V3, None])
@pytest.mark.parametrize("body", [b"", b"\xff", b"{", b"[1]", b"7"])
def test_what_is_no_object_of_json_cannot_be_decoded(headers: Any, body: bytes) -> None:
    with pytest.raises(UndecodableEvent, match=r"version \d: body: "):
        received(body, headers).decode(OrderPlaced)


@pytest.mark.parametrize("version", [0, -1, "3", 1.5, True, None])
def test_a_version_that_is_none_is_named(version: Any) -> None:
    with pytest.raises(UndecodableEvent, match=r"header saf-type-version: .* is not a version"):
        received(BODY, {VERSION: version}).decode(OrderPlaced)


def test_further_members_of_a_body_are_ignored() -> None:
    assert received({**BODY, "colour": "red"}, V3).decode(OrderPlaced).number == "A-1"


def test_an_older_body_passes_each_upcaster_after_its_version() -> None:
    first = received({"order": "A-1", "total": "19.90"}).decode(OrderPlaced)
    assert (first.lines, first.currency) == ([Line("?", Decimal("19.90"))], "CHF")
    second = {name: value for name, value in BODY.items() if name != "currency"}
    assert received(second, {VERSION: 2}).decode(OrderPlaced).currency == "CHF"
    assert received(BODY, V3).decode(OrderPlaced).currency == "EUR"


def test_a_version_without_an_upcaster_is_taken_as_it_is() -> None:
    @saf.event("Moved", version=2)
    @dataclass
    class Moved:
        to: str
        note: str = "none"

    message = received({"to": "here"}, message_type="Moved")
    assert message.decode(Moved) == Moved("here")


def test_an_upcaster_that_raises_is_named() -> None:
    with pytest.raises(UndecodableEvent, match=r"with_lines, from version 1, raised KeyError: 'o"):
        received({"total": 1}).decode(OrderPlaced)


def test_what_an_upcaster_returns_has_a_form_in_json() -> None:
    @saf.event("Moved", version=2)
    @dataclass
    class Moved:
        to: str

    saf.upcaster(Moved, 1)(lambda body: {**body, "to": object()})
    with pytest.raises(UndecodableEvent, match="an upcaster returned a value that has no form"):
        received({}, message_type="Moved").decode(Moved)


def test_a_newer_body_is_not_decoded_and_is_no_fault_of_the_message() -> None:
    with pytest.raises(NewerEvent, match="version 4, newer than version 3 here: deploy receivers"):
        received(BODY, {VERSION: 4}).decode(OrderPlaced)
    policy = saf.Policy(permanent=(KeyError,))
    newer = NewerEvent(UUID(int=1), "OrderPlaced", 4, 3)
    wrong = UndecodableEvent(UUID(int=1), "OrderPlaced", 3, "body", "no")
    assert [policy.gives_up(1, error) for error in (newer, wrong, KeyError(), ValueError())] == [
        *(False, True, True, False)
    ]


def test_a_message_of_another_type_is_not_decoded() -> None:
    with pytest.raises(UsageError, match="has type 'Paid', and OrderPlaced is event 'OrderPlaced'"):
        received(BODY, message_type="Paid").decode(OrderPlaced)
    with pytest.raises(UsageError, match="Line is not an event"):
        received(BODY).decode(Line)


# Classes that are not events


def test_what_cannot_be_an_event_is_refused_when_it_is_defined() -> None:
    with pytest.raises(UsageError, match="neither a dataclass nor a pydantic model; write @saf"):

        @dataclass
        @saf.event("Below")
        class Below:
            key: str

    with pytest.raises(UsageError, match="has no field 'numer' to be the key, only article, price"):
        saf.event("Line", key="numer")(Line)
    with pytest.raises(UsageError, match="with the name of the message type"):
        saf.event(Line)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="version 0 is not a number from 1"):
        saf.event("Line", version=0)

    class Derived(OrderPlaced):
        pass

    with pytest.raises(UsageError, match="Derived is not an event"):
        the_event(Derived)


def test_an_upcaster_that_nobody_would_call_is_refused() -> None:
    for version in (0, 3, 4):
        with pytest.raises(UsageError, match=f"version 3: an upcaster from version {version}"):
            saf.upcaster(OrderPlaced, version)
    with pytest.raises(UsageError, match="has an upcaster from version 1 already"):
        saf.upcaster(OrderPlaced, 1)
    with pytest.raises(UsageError, match="Line is not an event"):
        saf.upcaster(Line, 1)


def test_a_class_that_cannot_be_decoded_is_refused_when_its_handler_is_registered() -> None:
    class Opaque:
        pass

    @saf.event("Odd")
    @dataclass
    class Odd:
        what: Opaque

    worker = saf.Worker("postgresql://nowhere", "billing")
    with pytest.raises(UsageError, match="event 'Odd' cannot be decoded: "):
        worker.handler(Odd)(nothing)


# Handlers

worker = saf.Worker("postgresql://nowhere", "billing")
seen: list[object] = []


@worker.handler(OrderPlaced)
def placed(order: OrderPlaced, connection: Connection, message: Received) -> None:
    seen.append((order.number, connection, message.message_type))


@worker.batch_handler(Paid)
def paid(payments: list[Paid], connection: Connection) -> None:
    seen.append(([payment.order for payment in payments], connection))


class Totals(saf.Processor):
    @saf.handles(OrderPlaced)
    def placed(self, order: OrderPlaced, connection: Connection) -> None:
        seen.append((order.number, connection))

    @saf.handles(Paid)
    def paid(self, payment: Paid, connection: Connection, message: Received) -> None:
        seen.append((payment.order, connection, message.message_type))


def call(of: saf.Worker, message: Received) -> object:
    handler = of._handlers.of(message)
    assert handler is not None
    return handler.call_for(message, "connection")()


def test_a_handler_of_a_class_gets_the_event_and_if_it_wants_the_message() -> None:
    seen.clear()
    call(worker, received(BODY, V3))
    call(worker, received({"order": 7, "amount": 1}, message_type="Paid"))
    assert seen == [("A-1", "connection", "OrderPlaced"), ([7], "connection")]
    assert worker.message_types == ("OrderPlaced", "Paid")
    placed(ORDER, "c", received(BODY))  # type: ignore[arg-type] # it stays a function of its own


def test_a_processors_method_of_a_class_gets_the_event() -> None:
    seen.clear()
    totals, handlers = Totals(), Totals.handlers
    handlers["OrderPlaced"](totals, received(BODY, V3), 1)
    handlers["Paid"](totals, received({"order": 7, "amount": 1}, message_type="Paid"), 2)
    assert seen == [("A-1", 1), (7, 2, "Paid")]
    assert saf.Processors("postgresql://nowhere", "b", Totals).message_types == (
        *("OrderPlaced", "Paid"),
    )


def test_types_of_handlers_are_checked_by_mypy() -> None:
    """`make check` fails where one of these comments is not needed."""

    def of_paid(event: Paid, connection: Connection) -> None: ...
    def of_many(events: list[OrderPlaced], connection: Connection) -> None: ...

    other = saf.Worker("postgresql://nowhere", "billing")
    other.handler(OrderPlaced)(of_paid)  # type: ignore[arg-type]
    other.batch_handler(Paid)(of_many)  # type: ignore[arg-type]
    assert received(BODY, V3).decode(OrderPlaced).number.upper() == "A-1"
    with pytest.raises(AttributeError):
        received(BODY, V3).decode(OrderPlaced).numer  # type: ignore[attr-defined] # noqa: B018


def test_a_handler_of_the_wrong_form_is_refused_by_name() -> None:
    def short(event: OrderPlaced) -> None: ...

    other = saf.Worker("postgresql://nowhere", "billing")
    with pytest.raises(
        UsageError, match=r"short for message type 'OrderPlaced' takes .*\(event, c"
    ):
        other.handler(OrderPlaced)(short)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Line is not an event"):
        other.handler(Line)(nothing)
    other.handler("OrderPlaced")(nothing)
    with pytest.raises(UsageError, match="message type 'OrderPlaced' has a handler already"):
        other.handler(OrderPlaced)(nothing)
    with pytest.raises(UsageError, match="Line is not an event"):
        saf.handles(Line)


def test_an_async_handler_of_a_class_is_awaited() -> None:
    other = saf.Worker("postgresql://nowhere", "billing")
    found = []

    @other.handler(OrderPlaced)
    async def later(order: OrderPlaced, connection: object) -> None:
        found.append((order.number, connection))

    assert other._handlers.are_async
    waiting: Any = call(other, received(BODY, V3))
    with pytest.raises(StopIteration):
        waiting.send(None)
    assert found == [("A-1", "connection")]


# Modules


def test_a_module_has_events_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    here = imported(__name__)
    assert [(event.name, event.version) for event in events(here)] == [
        *(("OrderPlaced", 3), ("Paid", 1)),
    ]

    @saf.event("Paid")
    @dataclass
    class Other:
        order: int

    monkeypatch.setattr(here, "Other", Other, raising=False)
    with pytest.raises(UsageError, match=r"Paid and .*Other are both event 'Paid' version 1"):
        events(here)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("nowhere.events", "no module 'nowhere' here"), ("..", "is not the name of a module")],
)
def test_a_module_that_cannot_be_found_is_named(name: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        imported(name)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            'import os\n\nos.environ["SAF_NOT_SET"]\n',
            "shop_at_fault.py, line 3: KeyError: 'SAF_NOT_SET'. Is the environment variable set?",
        ),
        ("{}[7]\n", "line 1: KeyError: 7. `python -c 'import shop_at_fault'` shows the traceback"),
        ("import json\njson.loads('{')\n", "line 2: JSONDecodeError: Expecting property name"),
        ("\ndef f(:\n", "shop_at_fault.py, line 2: SyntaxError: invalid syntax"),
        ("import nowhere\n", "line 1: ModuleNotFoundError: No module named 'nowhere'"),
        ("raise ValueError\n", "line 1: ValueError. `python"),
    ],
)
def test_a_module_that_raises_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    (tmp_path / "shop_at_fault.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UsageError) as refused:
        imported("shop_at_fault")
    assert str(refused.value).startswith("shop_at_fault.py, line ")
    assert said in str(refused.value)


def test_a_module_without_events_is_refused() -> None:
    with pytest.raises(UsageError, match="module json has no event"):
        events(imported("json"))


def test_a_schema_does_not_change_with_its_descriptions() -> None:
    schema = the_event(OrderPlaced).schema
    assert schema["required"] == ["number", "lines", "at", "currency"]
    assert "description" not in json.dumps(schema)
    assert "title" not in json.dumps(schema)
