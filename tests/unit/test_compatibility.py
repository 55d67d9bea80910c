"""Whether a new schema takes what the old one took: the field is named where it does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema.validators import validator_for
from pydantic import Field, TypeAdapter, create_model

from saf.operating.plans.compatibility import breaks, changed
from saf.typed.event import without_notes


def schema(**fields: Any) -> dict[str, Any]:
    """The schema of a model with these fields."""
    found: dict[str, Any] = without_notes(create_model("Model", **fields).model_json_schema())
    return found


@dataclass
class Line:
    price: int
    parts: list[Line] = field(default_factory=list)


@dataclass
class NewLine:
    price: int
    parts: list[NewLine]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (schema(a=(str, ...)), schema(a=(str, ...))),
        (schema(a=(str, ...)), schema(a=(str, ...), b=(int, 0))),
        (schema(a=(str, ...), b=(int, ...)), schema(a=(str, ...))),
        (schema(a=(str, ...)), schema(a=(str, ""))),
        (schema(a=(str, ...)), schema(a=(str | None, ...))),
        (schema(a=(int, ...)), schema(a=(float, ...))),
        (schema(a=(int, ...)), schema(a=(Decimal, ...))),
        (schema(a=(Literal["x"], ...)), schema(a=(Literal["x", "y"], ...))),
        (schema(a=(Literal["x"], ...)), schema(a=(str, ...))),
        (schema(a=(str, Field(max_length=3))), schema(a=(str, Field(max_length=4)))),
        (schema(a=(list[Line], ...)), schema(a=(list[Line], ...))),
        (schema(a=(dict[str, int], ...)), schema(a=(dict[str, float], ...))),
        (schema(a=(str, ...)), schema(a=(Any, ...))),
        ({"properties": {"a": True}}, {"properties": {"a": {}}}),
        (None, schema(a=(str, ...))),
        (schema(a=(str, ...)), None),
    ],
)
def test_what_takes_all_old_bodies_is_no_break(old: Any, new: Any) -> None:
    assert breaks(old, new) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (schema(a=(str, ...)), schema(a=(str, ...), b=(int, ...)), ("b", "is required now")),
        (schema(a=(str, "")), schema(a=(str, ...)),
         ("a", "may have been missing, and is required now")),
        (schema(a=(float, ...)), schema(a=(int, ...)), ("a", "is integer now, was number")),
        (schema(a=(str | None, ...)), schema(a=(str, ...)), ("a", "is string now, was null")),
        (schema(a=(str, ...)), schema(a=(int | None, ...)),
         ("a", "string is not valid any more, only integer or null")),
        (schema(a=(Literal["x", "y"], ...)), schema(a=(Literal["x"], ...)),
         ("a", "'y' is not valid any more")),
        (schema(a=(str, ...)), schema(a=(Literal["x", "y"], ...)),
         ("a", "is one of ['x', 'y'] now, was any string")),
        (schema(a=(str, ...)), schema(a=(str, Field(max_length=4))),
         ("a", "maxLength is 4 now, was not set")),
        (schema(a=(int, Field(ge=1))), schema(a=(int, Field(ge=2))),
         ("a", "minimum is 2 now, was 1")),
        (schema(a=(str, ...)), schema(a=(str, Field(pattern="^A"))),
         ("a", "pattern is '^A' now, was 'not set'")),
        (schema(a=(list[Line], ...)), schema(a=(list[NewLine], ...)),
         ("a[].parts", "may have been missing, and is required now")),
        (schema(a=(Any, ...)), schema(a=(str, ...)), ("a", "is string now, was any")),
        ({"type": "object"}, {"type": "object", "additionalProperties": False},
         ("body", "further fields are not allowed any more")),
        ({"properties": {"a": {}}}, {"additionalProperties": False},
         ("a", "is not allowed any more")),
        (schema(a=(dict[str, float], ...)), schema(a=(dict[str, int], ...)),
         ("a{}", "is integer now, was number")),
    ],
)  # fmt: skip
def test_a_break_names_the_field(old: Any, new: Any, problem: tuple[str, str]) -> None:
    assert problem in breaks(old, new)


def test_a_definition_that_fits_in_one_place_is_compared_again_in_another() -> None:
    """What does not fit as one choice of several must not be taken as compared elsewhere."""
    old = TypeAdapter(dict[str, Line]).json_schema()
    choice, only = {"anyOf": [{"$ref": "#/$defs/New"}, {}]}, {"$ref": "#/$defs/New"}
    line = {"$ref": "#/$defs/Line"}
    before = {"$defs": old["$defs"], "properties": {"a": line, "b": line}}
    after = {
        "$defs": {"New": {"type": "string"}},
        "properties": {"a": choice, "b": only},
    }
    assert breaks(before, after) == [("b", "is string now, was object")]


KINDS = {
    "text": str, "number": int, "other": float, "list": list[int], "maybe": str | None,
    "one": Literal["x", "y"], "map": dict[str, int], "short": (str, Field(max_length=2)),
}  # fmt: skip
models = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.sampled_from(sorted(KINDS)), st.booleans()), max_size=3
)
values = st.one_of(
    st.none(), st.sampled_from(["x", "y", "long text"]), st.integers(0, 3), st.just(1.5),
    st.lists(st.integers(0, 3), max_size=2), st.dictionaries(st.sampled_from("k"), st.integers()),
)  # fmt: skip


def made(of: dict[str, tuple[str, bool]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, (kind, required) in of.items():
        of_kind: Any = KINDS[kind]
        annotated, info = of_kind if isinstance(of_kind, tuple) else (of_kind, None)
        default: Any = ... if required else None
        if info is not None:
            default = Field(default, max_length=2)
        fields[name] = (annotated, default)
    return schema(**fields)


@given(models, models, st.dictionaries(st.sampled_from("abc"), values, max_size=3))
def test_without_a_break_no_old_body_is_invalid(
    old: dict[str, tuple[str, bool]], new: dict[str, tuple[str, bool]], body: dict[str, Any]
) -> None:
    before, after = made(old), made(new)
    valid = validator_for(before)(before).is_valid(body)
    if valid and not breaks(before, after):
        # a field that the old schema did not know may have had any value
        assert validator_for(after)(after).is_valid(
            {name: value for name, value in body.items() if name in old}
        )


def test_fields_that_differ_are_named() -> None:
    assert changed(schema(a=(str, ...)), schema(a=(str, ...))) == []
    assert changed(schema(a=(str, ...)), schema(a=(int, ...), b=(int, ...))) == ["a", "b"]
    assert changed({"type": "object"}, {"type": "array"}) == ["body"]
    assert changed(schema(a=(Line, ...)), schema(a=(NewLine, ...))) == ["a", "Line", "NewLine"]
