"""JSON Schemas of message types.

A schema may refer only to itself and to the drafts of JSON Schema: nothing is fetched. Any error
that a schema raises for a value counts as a violation, because a body that cannot be checked must
not block other messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from saf.errors import MissingExtra, UsageError
from saf.setaside.isolation import said

if TYPE_CHECKING:
    from jsonschema.protocols import Validator
    from referencing import Resource

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

# The library's modules import each other in a circle: a second thread could see a partial one
_IMPORTING = Lock()


@lru_cache(maxsize=256)
def compiled(schema: str) -> Validator:
    """Return the validator of a JSON Schema.

    Raises:
        UsageError: the text is not a JSON Schema.
        MissingExtra: jsonschema is not installed.
    """
    try:
        with _IMPORTING:
            from jsonschema.exceptions import SchemaError
            from jsonschema.validators import validator_for
            from jsonschema_specifications import REGISTRY
    except ModuleNotFoundError:
        raise MissingExtra("schema", "a message type with a JSON Schema") from None
    value = json.loads(schema)
    kind = validator_for(value)
    try:
        kind.check_schema(value)
    except SchemaError as error:
        raise UsageError(f"no JSON Schema: at {error.json_path}: {error.message}") from None
    return kind(value, registry=REGISTRY)


def violation(schema: str, value: Any) -> tuple[str, str] | None:
    """Return the worst violation of a JSON Schema in a value, and its place; None if valid."""
    validator = compiled(schema)
    from jsonschema.exceptions import best_match

    try:
        worst = best_match(validator.iter_errors(value))
    except RecursionError as error:
        return "$", f"too deep: {error}"
    except Exception as error:
        return "$", f"cannot be checked: {said(error)}"
    return None if worst is None else (worst.json_path, worst.message)


def refuse_dead_references(schema: str) -> None:
    """Raise a `UsageError` if a JSON Schema contains a reference without a target."""
    validator = compiled(schema)
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    draft = specification_with(validator.META_SCHEMA["$schema"])
    root = draft.create_resource(validator.schema)
    for reference, resolver in _references(root, REGISTRY.resolver_with_root(root)):
        try:
            resolver.lookup(reference)
        except (Unresolvable, LookupError, TypeError, ValueError):
            raise UsageError(
                f"no JSON Schema: it refers to {reference!r}, which is not there: put it into the "
                "schema itself, below $defs"
            ) from None


def _references(resource: Resource[Any], resolver: Any) -> Iterator[tuple[str, Any]]:
    """Yield each reference of a schema and its subschemas, with the resolver for that place."""
    contents = resource.contents
    if isinstance(contents, Mapping):
        for name in REFERENCES:
            if isinstance(contents.get(name), str):
                yield contents[name], resolver
    for inner in resource.subresources():
        yield from _references(inner, resolver.in_subresource(inner))
