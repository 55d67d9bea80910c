"""AsyncAPI documents are valid by the schema of AsyncAPI 3, and show what modules receive and send.

The schema is that of the AsyncAPI Initiative (Apache-2.0), in one file, compressed.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jsonschema.validators import validator_for

import saf
from saf.errors import UsageError
from saf.operating.asyncapi import document

SCHEMA = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "asyncapi-3.0.0.json.gz").read_bytes())
)


@dataclass(frozen=True)
class Line:
    """A line of an order."""

    article: str
    price: Decimal
    parts: tuple[Line, ...] = ()


@saf.event("//example.com/OrderPlaced", key="number", version=2)
@dataclass(frozen=True)
class OrderPlaced:
    """An order was placed.

    It has lines.
    """

    number: str
    lines: list[Line]


@saf.event("Paid")
@dataclass(frozen=True)
class Paid:
    line: Line


def module(**more: Any) -> ModuleType:
    found = ModuleType("shop.events")
    vars(found).update({"OrderPlaced": OrderPlaced, "Paid": Paid, **more})
    return found


def nothing(_: object, __: object) -> None: ...


def worker(subscription: str, *handled: type | str) -> saf.Worker:
    made = saf.Worker("postgresql://nowhere", subscription)
    for one in handled:
        made.handler(one)(nothing)
    return made


def valid(found: dict[str, Any]) -> dict[str, Any]:
    errors = [*validator_for(SCHEMA)(SCHEMA).iter_errors(found)]
    assert [error.message[:200] for error in errors] == []
    for reference in references(found):
        target: Any = found
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
    return found


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [one for inner in value.values() for one in references(inner)]
    return [one for inner in value for one in references(inner)] if isinstance(value, list) else []


def test_the_schema_finds_what_is_wrong() -> None:
    found = document(module(), title=None, version="1")
    found["operations"]["x"] = {"action": "write"}
    assert not validator_for(SCHEMA)(SCHEMA).is_valid(found)


def test_a_document_says_what_is_received_and_sent() -> None:
    billing = worker("billing", OrderPlaced, "Paid", "Untyped")
    found = valid(
        document(module(w=billing), title="The shop", version="2.1", send_to=["billing", "a b"])
    )
    assert found["info"] == {"title": "The shop", "version": "2.1"}
    assert {name: one["address"] for name, one in found["channels"].items()} == {
        "billing": "billing",
        "a_b": "a b",
    }
    placed = "__example.com_OrderPlaced.v2"
    assert {name: len(one["messages"]) for name, one in found["operations"].items()} == {
        "receive-billing": 2,
        "send-billing": 2,
        "send-a_b": 2,
    }
    message = found["components"]["messages"][placed]
    assert (message["name"], message["summary"], message["x-saf-key"]) == (
        *("//example.com/OrderPlaced", "An order was placed.", "number"),
    )
    assert message["headers"]["properties"] == {"saf-type-version": {"type": "integer", "const": 2}}
    assert "headers" not in found["components"]["messages"]["Paid"]
    assert set(found["components"]["schemas"]) == {"Line", "OrderPlaced", "Paid"}
    line = found["components"]["schemas"]["Line"]["properties"]
    assert line["parts"]["items"] == {"$ref": "#/components/schemas/Line"}


def test_a_module_without_workers_has_only_messages() -> None:
    found = valid(document(module(w=worker("billing", "Other")), title=None, version="1"))
    assert (found["channels"], found["info"]["title"]) == ({}, "shop.events")


def test_two_services_with_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="'a b' and 'a_b' would both be channel a_b"):
        document(module(), title=None, version="1", send_to=["a_b", "a b"])
