"""Contracts: the message types of a dialog, their senders, and the forms of their bodies.

    saf.create_message_type(connection, "order", validation="json_schema", schema={…})
    saf.create_message_type(connection, OrderPlaced)          # the class of a saf.event
    saf.create_contract(connection, "ordering", {"order": "initiator", "delivery": "target"})

Message types and contracts are immutable and versioned: a changed definition is another version,
and a dialog keeps the version that it began with. Create the same version at both ends. Every
message is checked again on arrival, which detects a difference between the ends. A dialog without a
contract takes messages of any type from both ends.

A JSON Schema may refer only to itself and to the drafts of JSON Schema: nothing is fetched. Any
error that a schema raises for a value counts as a violation, because a body that cannot be checked
must not block other messages.

Functions take a psycopg connection and write in a transaction of their own, or in the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import psycopg

from saf.database import fetch, records
from saf.errors import (
    ConfigurationError,
    MissingExtra,
    SchemaViolation,
    TypeNotInContract,
    UsageError,
    WrongDirection,
)
from saf.message import MAX_NAME, RESERVED_TYPE, fits
from saf.setaside.isolation import said
from saf.typed.event import the_event

if TYPE_CHECKING:
    from jsonschema.protocols import Validator
    from referencing import Resource

Validation = Literal["none", "empty", "json", "json_schema"]
Sender = Literal["initiator", "target", "any"]

VALIDATIONS, SENDERS = ("none", "empty", "json", "json_schema"), ("initiator", "target", "any")

RESERVED = RESERVED_TYPE

NEWEST: Mapping[str, int] = MappingProxyType({})
"""Use the newest version of each type of a contract."""

CREATE_TYPE = """
INSERT INTO saf.message_type (name, version, validation, schema)
VALUES (%(name)s, %(version)s, %(validation)s, %(schema)s) ON CONFLICT DO NOTHING RETURNING name
"""
SAME_TYPE = """
SELECT FROM saf.message_type
WHERE name = %(name)s AND version = %(version)s AND validation = %(validation)s
  AND schema IS NOT DISTINCT FROM %(schema)s::jsonb
"""
TYPES = "SELECT name, version, validation, schema FROM saf.message_type ORDER BY name, version"

CREATE_CONTRACT = """
INSERT INTO saf.contract (name, version) VALUES (%(name)s, %(version)s)
ON CONFLICT DO NOTHING RETURNING name
"""
NEWEST_TYPES = """
SELECT name, max(version) FROM saf.message_type WHERE name = ANY (%(names)s) GROUP BY name
"""
KNOWS_TYPE = "SELECT FROM saf.message_type WHERE name = %(name)s AND version = %(version)s"
CREATE_MESSAGE = """
INSERT INTO saf.contract_message
    (contract, contract_version, message_type, message_type_version, sent_by)
SELECT %(name)s, %(version)s, message_type, message_type_version, sent_by
FROM unnest(%(types)s::text[], %(versions)s::int[], %(senders)s::text[])
     AS m (message_type, message_type_version, sent_by)
"""

# Puts a whole contract into one value, which is selected with the row of a conversation
DEFINITION = """
SELECT jsonb_object_agg(m.message_type, jsonb_build_object(
           'sent_by', m.sent_by, 'version', t.version,
           'validation', t.validation, 'schema', t.schema))
FROM saf.contract_message m
JOIN saf.message_type t ON (t.name, t.version) = (m.message_type, m.message_type_version)
WHERE m.contract = {contract} AND m.contract_version = {version}
"""
CONTRACTS = f"""
SELECT k.name, k.version,
       coalesce(({DEFINITION.format(contract="k.name", version="k.version")}), '{{}}')
FROM saf.contract k
WHERE %(names)s::text[] IS NULL OR (k.name, k.version) IN (
    SELECT * FROM unnest(%(names)s::text[], %(versions)s::int[]))
ORDER BY k.name, k.version
"""

# Keywords of JSON Schema that refer to another schema
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

# Modules of jsonschema import each other in a circle: a second thread could see a partial module
_IMPORTING = Lock()


@dataclass(frozen=True, kw_only=True)
class Defined:
    """A version of a message type, as stored."""

    name: str
    version: int
    validation: str
    schema: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class MessageType:
    """A message type in a contract."""

    name: str
    version: int
    sent_by: Sender
    validation: Validation
    schema: str | None
    """JSON Schema as JSON text."""

    @property
    def reads(self) -> bool:
        """True if `check` reads the body, which must then be in memory."""
        return self.validation != "none"

    def check(self, body: bytes) -> None:
        """Raise a `SchemaViolation` unless a body matches its message type."""
        if self.validation == "empty" and body:
            raise SchemaViolation(self.name, "$", f"expected no body, got {len(body):,} bytes")
        if self.validation not in ("json", "json_schema"):
            return
        try:
            value = json.loads(body)
        except ValueError as error:
            raise SchemaViolation(self.name, "$", f"not JSON: {error}") from None
        except RecursionError as error:
            raise SchemaViolation(self.name, "$", f"too deep: {error}") from None
        worst = None if self.schema is None else violation(self.schema, value)
        if worst is not None:
            raise SchemaViolation(self.name, *worst)


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A version of a contract."""

    name: str
    version: int
    types: Mapping[str, MessageType]

    def __str__(self) -> str:
        return f"{self.name!r} version {self.version}"

    @classmethod
    def from_row(cls, name: str, version: int, definition: Mapping[str, Any] | str) -> Contract:
        """Make a contract from its stored form."""
        types = json.loads(definition) if isinstance(definition, str) else definition
        return cls(
            name=name,
            version=version,
            types={
                type_: MessageType(
                    name=type_,
                    **{
                        **fields,
                        "schema": json.dumps(fields["schema"])
                        if fields["schema"] is not None
                        else None,
                    },
                )
                for type_, fields in types.items()
            },
        )

    def allowed(self, message_type: str | None, *, from_initiator: bool) -> MessageType:
        """Return the type if this end may send such messages; else raise a `ContractViolation`."""
        known = self.types.get(message_type or "")
        if known is None:
            raise TypeNotInContract(message_type, str(self), sorted(self.types))
        if known.sent_by not in ("any", "initiator" if from_initiator else "target"):
            raise WrongDirection(known.name, str(self), known.sent_by)
        return known


def create_message_type(
    connection: psycopg.Connection[Any],
    name: str | type[Any],
    *,
    version: int = 1,
    validation: Validation = "none",
    schema: Mapping[str, Any] | None = None,
) -> bool:
    """Define the bodies of a message type; False if that version already has this definition.

    Args:
        connection: to the broker that gets the type.
        name: the type's name; or an event's class, which has all that follows: see `saf.event`.
        version: the version of the definition.
        validation: "none"; "empty" for no body; "json" for any JSON; or "json_schema".
        schema: the JSON Schema, if the validation is "json_schema".

    Raises:
        ConfigurationError: that version has another definition.
        UsageError: the definition is invalid.
        MissingExtra: jsonschema is not installed.
    """
    if isinstance(name, type):
        if (version, validation, schema) != (1, "none", None):
            raise UsageError(f"{name.__qualname__} has a version and a schema: pass only the class")
        event = the_event(name)
        name, version, validation, schema = event.name, event.version, "json_schema", event.schema
    _check_name("message type", name, version)
    if name.startswith(RESERVED):
        raise UsageError(f"message type {name!r}: {RESERVED}… is for saf's own")
    if validation not in VALIDATIONS:
        raise UsageError(f"validation {validation!r}: one of {', '.join(VALIDATIONS)}")
    if (schema is not None) != (validation == "json_schema"):
        raise UsageError("a schema belongs to validation 'json_schema', and only to that")
    params = {
        "name": name,
        "version": version,
        "validation": validation,
        "schema": None if schema is None else json.dumps(schema),
    }
    if schema is not None:
        refuse_dead_references(json.dumps(schema))
    with connection.transaction():
        if fetch(connection, CREATE_TYPE, params):
            return True
        if not fetch(connection, SAME_TYPE, params):
            raise _changed("message type", name, version)
    return False


def create_contract(
    connection: psycopg.Connection[Any],
    name: str,
    types: Mapping[str, Sender],
    *,
    version: int = 1,
    type_versions: Mapping[str, int] = NEWEST,
) -> bool:
    """Define a contract; False if that version already has this definition.

    Args:
        connection: to the broker that gets the contract.
        name: the contract's name.
        types: the sender of each type: "initiator", "target" or "any". An unknown type is created
            without validation.
        version: the version of the contract.
        type_versions: the version of each type; by default, the newest version, or the contract's
            own version if it exists.

    Raises:
        ConfigurationError: that version has another definition.
        UsageError: the definition is invalid.
    """
    _check_name("contract", name, version)
    for type_, sender in types.items():
        if sender not in SENDERS:
            raise UsageError(f"{type_!r} is sent by {sender!r}: one of {', '.join(SENDERS)}")
    with connection.transaction():
        created = bool(fetch(connection, CREATE_CONTRACT, {"name": name, "version": version}))
        if not created:
            (existing,) = contracts(connection, [(name, version)])
            if {type_.name: type_.sent_by for type_ in existing.types.values()} != types or any(
                type_.version != type_versions.get(type_.name, type_.version)
                for type_ in existing.types.values()
            ):
                raise _changed("contract", name, version)
            return False
        newest = dict(fetch(connection, NEWEST_TYPES, {"names": list(types)}))
        for type_, wanted in type_versions.items():
            if not fetch(connection, KNOWS_TYPE, {"name": type_, "version": wanted}):
                raise ConfigurationError(
                    f"contract {name!r}: no message type {type_!r} version {wanted} here"
                )
        newest |= {type_: wanted for type_, wanted in type_versions.items() if type_ in types}
        for type_ in types:
            if type_ not in newest:
                create_message_type(connection, type_)
        connection.execute(
            CREATE_MESSAGE,
            {
                "name": name,
                "version": version,
                "types": list(types),
                "versions": [newest.get(type_, 1) for type_ in types],
                "senders": list(types.values()),
            },
        )
    return True


def _check_name(kind: str, name: str, version: int) -> None:
    if not name or not fits(name, MAX_NAME) or not name.isprintable():
        raise UsageError(
            f"{kind} {name!r}: a name has 1 to {MAX_NAME} bytes of printable characters"
        )
    if version < 1:
        raise UsageError(f"{kind} {name!r}: version {version} is less than 1")


def _changed(kind: str, name: str, version: int) -> ConfigurationError:
    return ConfigurationError(
        f"{kind} {name!r} version {version} exists with another content: dialogs "
        f"rely on it. Create version {version + 1} instead"
    )


def message_types(connection: psycopg.Connection[Any]) -> list[Defined]:
    """Return all message types of a broker, by name and version."""
    return records(connection, Defined, TYPES)


def contracts(
    connection: psycopg.Connection[Any], which: list[tuple[str, int]] | None = None
) -> list[Contract]:
    """Return a broker's contracts, or only those with these names and versions, in that order."""
    params = {
        "names": None if which is None else [name for name, _ in which],
        "versions": None if which is None else [version for _, version in which],
    }
    return [Contract.from_row(*row) for row in fetch(connection, CONTRACTS, params)]


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
