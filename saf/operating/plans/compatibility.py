"""Compatibility of message types: whether a new JSON Schema accepts all bodies of the old one.

`breaks` compares two schemas and returns each difference after which an old body may be invalid,
with the path of the field. It also reports a keyword that it cannot compare, unless both schemas
have the same value. Titles, descriptions and defaults do not matter.

An event's upcasters turn old bodies into new ones: a type with an upcaster is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from saf.typed.event import NOTES

ANY: Mapping[str, Any] = {}
COMPARED = frozenset(
    {
        *("type", "enum", "const", "anyOf", "oneOf", "properties", "required"),
        *("additionalProperties", "items", "$ref"),
    }
)
LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
"""Keywords that reject values below theirs."""
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
"""Keywords that reject values above theirs."""
SILENT = NOTES | {"default", "$defs", "definitions", "$schema", "$id", "$comment", "readOnly"}
"""Keywords that reject no value."""

Break = tuple[str, str]
"""Path of a field, and the difference."""


def breaks(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> list[Break]:
    """Return the differences after which a body of the old schema may be invalid.

    Without a schema there is nothing to compare.

    >>> breaks({"type": "object"}, {"type": "object", "required": ["currency"]})
    [('currency', 'is required now')]
    >>> breaks({"required": ["currency"]}, {"properties": {"note": {"type": "string"}}})
    []
    """
    if old is None or new is None:
        return []
    return list(dict.fromkeys(_Comparison(old, new).breaks(old, new, ())))


def changed(old: Any, new: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Return the fields whose schemas differ.

    >>> old, new = {"a": {}, "b": {}}, {"a": {"type": "null"}, "c": {}}
    >>> changed({"properties": old}, {"properties": new})
    ['a', 'b', 'c']
    """
    found: list[str] = []
    for word in ("properties", "$defs"):
        before, after = (
            schema.get(word, {}) if isinstance(schema, Mapping) else {} for schema in (old, new)
        )
        for name in sorted(before.keys() | after.keys()):
            if name in before and name in after:
                found += changed(before[name], after[name], (*path, name))
            else:
                found.append(_said((*path, name)))
    return found if found or old == new else [_said(path)]


@dataclass
class _Comparison:
    """Two schemas, which contain what their references name."""

    old: Mapping[str, Any]
    new: Mapping[str, Any]
    seen: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of references that have been compared: a schema may contain itself."""

    def breaks(self, old: Any, new: Any, path: tuple[str, ...]) -> Iterator[Break]:
        pair = (_reference(old), _reference(new))
        if all(pair):
            if pair in self.seen:
                return
            self.seen.add(pair)
        old, new = _resolved(old, self.old), _resolved(new, self.new)
        if old == new and "$ref" not in str(old):
            return
        choices = _choices(old)
        if len(choices) > 1:
            for choice in choices:
                yield from self.breaks(choice, new, path)
            return
        choices = _choices(new)
        if len(choices) > 1:
            if all([*self._apart().breaks(old, choice, path)] for choice in choices):
                yield _said(path), f"{_kind(old)} is not valid any more, only {_kind(new)}"
            return
        yield from self._of_one(old, new, path)

    def _apart(self) -> _Comparison:
        """Return a comparison whose results do not count for this one."""
        return _Comparison(self.old, self.new, set(self.seen))

    def _of_one(
        self, old: Mapping[str, Any], new: Mapping[str, Any], path: tuple[str, ...]
    ) -> Iterator[Break]:
        here = _said(path)
        kinds = _types(new)
        if kinds is not None and not all(_within(kind, kinds) for kind in _types(old) or ["any"]):
            yield here, f"is {_kind(new)} now, was {_kind(old)}"
            return
        yield from self._values(old, new, here)
        yield from self._bounds(old, new, here)
        yield from self._members(old, new, path)
        if "items" in new:
            yield from self.breaks(old.get("items", ANY), new["items"], (*path, "[]"))
        for word in sorted(new.keys() - COMPARED - SILENT - {*LOWER, *UPPER}):
            if old.get(word) != new[word]:
                yield here, f"{word} is {new[word]!r} now, was {old.get(word, 'not set')!r}"

    def _values(self, old: Mapping[str, Any], new: Mapping[str, Any], here: str) -> Iterator[Break]:
        before, after = _listed(old), _listed(new)
        if after is None:
            return
        if before is None:
            yield here, f"is one of {after} now, was any {_kind(old)}"
        elif gone := [value for value in before if value not in after]:
            yield here, f"{', '.join(map(repr, gone))} is not valid any more"

    def _bounds(self, old: Mapping[str, Any], new: Mapping[str, Any], here: str) -> Iterator[Break]:
        for word in (*LOWER, *UPPER):
            before, after = old.get(word), new.get(word)
            if after is None or before == after:
                continue
            if before is None or (after > before if word in LOWER else after < before):
                yield here, f"{word} is {after} now, was {'not set' if before is None else before}"

    def _members(
        self, old: Mapping[str, Any], new: Mapping[str, Any], path: tuple[str, ...]
    ) -> Iterator[Break]:
        before, after = old.get("properties", {}), new.get("properties", {})
        for name in new.get("required", ()):
            if name not in old.get("required", ()):
                change = "may have been missing, and is required now" if name in before else None
                yield _said((*path, name)), change or "is required now"
        others, allowed = old.get("additionalProperties", True), new.get("additionalProperties")
        for name, schema in after.items():
            if name in before:
                yield from self.breaks(before[name], schema, (*path, name))
            elif isinstance(others, Mapping):
                yield from self.breaks(others, schema, (*path, name))
        if allowed is None or allowed is True:
            return
        for name in before:
            if name not in after:
                if allowed is False:
                    yield _said((*path, name)), "is not allowed any more"
                else:
                    yield from self.breaks(before[name], allowed, (*path, name))
        if allowed is False and others is not False:
            yield _said(path), "further fields are not allowed any more"
        elif isinstance(allowed, Mapping) and others is not False:
            yield from self.breaks(ANY if others is True else others, allowed, (*path, "{}"))


def _reference(schema: Any) -> str:
    return str(schema.get("$ref", "")) if isinstance(schema, Mapping) else ""


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with its reference into the root replaced; True is a schema without words."""
    if schema is True:
        return ANY
    if schema is False:
        return {"enum": []}
    steps = 0
    while (reference := _reference(schema)).startswith("#"):
        found: Any = root
        for part in filter(None, reference[1:].split("/")):
            found = found.get(part.replace("~1", "/").replace("~0", "~"), ANY)
        schema = {**found, **{word: value for word, value in schema.items() if word != "$ref"}}
        if (steps := steps + 1) > len(str(root)):
            return ANY  # references in a circle, without a schema
    result: Mapping[str, Any] = schema
    return result


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    """Return the alternatives of a schema, each with the words that all share."""
    for word in ("anyOf", "oneOf"):
        if word in schema:
            shared = {name: value for name, value in schema.items() if name != word}
            return [
                {**shared, **(item if isinstance(item, Mapping) else {})} for item in schema[word]
            ]
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def _types(schema: Mapping[str, Any]) -> list[str] | None:
    kinds = schema.get("type")
    return [kinds] if isinstance(kinds, str) else kinds


def _within(kind: str, kinds: list[str]) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kind(schema: Mapping[str, Any]) -> str:
    """Name the type of a schema.

    >>> _kind({"anyOf": [{"type": "number"}, {"$ref": "#/$defs/Price"}]}), _kind({})
    ('number or Price', 'any')
    """
    kinds = [
        str(choice.get("type") or str(choice.get("$ref", "any")).rpartition("/")[2])
        for choice in _choices(schema)
    ]
    return " or ".join(dict.fromkeys(kinds))


def _said(path: tuple[str, ...]) -> str:
    """Return a path as text.

    >>> _said(()), _said(("lines", "[]", "price"))
    ('body', 'lines[].price')
    """
    return ".".join(path).replace(".[]", "[]").replace(".{}", "{}") or "body"
