"""Encoding: bodies in a schema registry's wire format, as Confluent's clients read it.

    0 · id of the schema in four bytes · [indexes of the message, with Protobuf] · encoded body

A body is JSON. It is encoded with the newest schema of its subject, a template such as
"{topic}-value". This module registers no schema: the owner of the topic does, with the
compatibility that the registry checks. A schema that is registered later is used within
`NEWEST_SECONDS`.

*Avro.* JSON becomes the record of the schema: text becomes a time, a date, a decimal or a UUID
where the schema has that logical type, and base64 becomes bytes. *Protobuf.* JSON as Protobuf's own
mapping defines it; the message has the name of the message type, else it is the first of the
schema. *JSON Schema.* The body stays as it is, and is validated.

A body that does not fit the schema is rejected, by a text that names the field and shows no value.
A field that an Avro or Protobuf schema lacks is rejected, too, because it would be lost. A
subject without a schema concerns the operator: messages wait until it is registered.

*Cost.* The libraries encode one body per call, so this is a loop in Python over the bodies of a
chunk, which is bounded as in every other destination. A body of 180 bytes takes, on one core, about
10 µs in Avro, 35 µs in Protobuf and 55 µs with JSON Schema. Other formats do not import this
module.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from functools import cache, partial
from importlib import import_module
from io import BytesIO
from string import Formatter
from typing import TYPE_CHECKING, Any
from uuid import UUID

import fastavro
import numpy as np
import pyarrow as pa
from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError
from fastavro.validation import ValidationError, validate
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from pydantic_core import from_json
from referencing import Registry
from referencing.exceptions import Unresolvable

from saf.destinations.kafka import topic_name
from saf.destinations.mapping import CONTENT_TYPE, NO_TYPE, Mapped
from saf.destinations.settings import unusable
from saf.destinations.texts import BYTES, TEXT
from saf.errors import Refused, Rejected, SafError, Unavailable

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema

    from saf.destinations.kafka import Kafka

NEWEST_SECONDS = 30
"""How long the newest schema of a subject is remembered."""
CONTENT_TYPES = {
    "avro": "application/avro", "protobuf": "application/x-protobuf",
    "json-schema": "application/json",
}  # fmt: skip
"""Content type of what follows the prefix."""
TYPES = {"avro": "AVRO", "protobuf": "PROTOBUF", "json-schema": "JSON"}
"""Type of a schema, by the registry's name."""
WRITTEN = {"PROTOBUF": "serialized"}
"""How to ask for a schema of a type: the registry parses Protobuf's language."""
WELL_KNOWN = (
    *(f"google.protobuf.{name}_pb2" for name in (
        *("any", "source_context", "type", "api", "descriptor", "duration", "empty"),
        *("field_mask", "struct", "timestamp", "wrappers"),
    )),
    *(f"google.type.{name}_pb2" for name in (
        *("calendar_period", "color", "date", "datetime", "dayofweek", "decimal", "expr"),
        *("fraction", "interval", "latlng", "localized_text", "money", "month", "phone_number"),
        *("postal_address", "quaternion", "timeofday"),
    )),
    *(f"confluent_kafka.schema_registry.confluent.{name}_pb2" for name in (
        *("meta", "type.decimal", "types.decimal"),
    )),
)  # fmt: skip
"""Modules of files that a schema may import without a reference."""
FAILED_FIELD = re.compile(r"Failed to parse (\w+) field")
NO_FIELD = re.compile(r'has no field named "([^"]*)"')
UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 401, 403, 404

ANY = "\n"
"""Stands for the value of a placeholder, which no name contains."""

Encode = Callable[[bytes], bytes]


class Unfit(Exception):
    """A body does not fit its schema; ``path`` leads to the field."""

    def __init__(self, problem: str, *path: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def below(self, *path: str) -> Unfit:
        """Return the same error, seen from outside of a field."""
        return Unfit(self.problem, *path, *self.path)

    def __str__(self) -> str:
        return f"{'.'.join(self.path).replace('.[', '[') or 'body'}: {self.problem}"


class Encoding:
    """Encodes the bodies of one destination."""

    def __init__(self, name: str, settings: Kafka) -> None:
        self.what = f"destination {name!r}"
        self.settings = settings
        self._closing = ExitStack()
        self._registry: SchemaRegistryClient | None = None
        self._encoders: dict[tuple[int, str], Encode] = {}
        """Encoders by the id of the schema, and the message type."""

    def close(self) -> None:
        """Close the connection to the registry."""
        self._registry = None
        self._closing.close()

    def look(self) -> None:
        """Ask the registry for a schema, before a message needs it.

        If the template of subjects has placeholders, some subject must match it.

        Raises:
            Refused, Unavailable: as `encoded`.
        """
        subjects = self.settings.subject.format(
            topic=_any(topic_name, self.settings.topic), message_type=ANY
        )
        if ANY not in subjects:
            self._encoder(topic_name(self.settings.topic), "")
            return
        pattern = ".*".join(map(re.escape, subjects.split(ANY)))
        cure = "register a schema for each topic"
        with self._asking(cure) as registry:
            known = registry.get_subjects()
        if not any(re.fullmatch(pattern, name) for name in known):
            wanted = subjects.replace(ANY, "*")
            raise unusable(self.what, f"{self._where}: no subject matches {wanted!r}", cure)

    def encoded(self, messages: Mapped) -> Mapped:
        """Return messages with encoded bodies.

        Raises:
            Rejected: a body does not fit its schema.
            Refused: a subject has no schema, or the registry refuses the login.
            Unavailable: the registry does not answer.
        """
        types = messages.each("message_type")
        if types is None:
            types = pa.nulls(messages.count, TEXT)
        types = types.fill_null(NO_TYPE).dictionary_encode()
        kinds = types.dictionary.to_pylist()
        width = max(len(kinds), 1)
        pairs = messages.topic * width + types.indices.to_numpy().astype(np.int64)
        encoders = {
            pair: self._encoder(topic_name(messages.topics[pair // width]), kinds[pair % width])
            for pair in np.unique(pairs).tolist()
        }
        bodies = messages.body.to_pylist()
        written = [
            self._written(encoders[pair], body)
            for pair, body in zip(pairs.tolist(), bodies, strict=True)
        ]
        content_type = {CONTENT_TYPE: CONTENT_TYPES[self.settings.format]}
        return replace(
            messages,
            body=pa.array(written, BYTES),
            own=[{**headers, **content_type} for headers in messages.own],
        )

    def _written(self, encode: Encode, body: bytes) -> bytes:
        try:
            return encode(body)
        except Unfit as error:
            raise Rejected(self.what, f"its body does not fit its schema: {error}") from None

    # Schemas

    def _encoder(self, topic: str, message_type: str) -> Encode:
        subject = self.settings.subject.format(topic=topic, message_type=message_type)
        form = self.settings.format
        with self._asking(f"register a schema for subject {subject!r}") as registry:
            newest = registry.get_latest_version(subject, WRITTEN.get(TYPES[form]))
            schema = newest.schema
            number = newest.schema_id or 0
            known = number, message_type
            if known in self._encoders:
                return self._encoders[known]
            references = dict(self._references(registry, schema))
        if (kind := schema.schema_type or "AVRO") != TYPES[form]:
            raise unusable(
                self.what,
                f"subject {subject!r} has a schema of type {kind}",
                f"register one of type {TYPES[form]}, or change format in saf.toml",
            )
        prefix = b"\0" + number.to_bytes(4)
        make = {"avro": avro, "protobuf": protobuf, "json-schema": json_schema}[form]
        try:
            encode = make(prefix, schema.schema_str or "", references, message_type)
        except Exception as error:
            raise unusable(
                self.what,
                f"the newest schema of subject {subject!r} cannot be read "
                f"({type(error).__name__}: {' '.join(str(error).split())})",
                "register a valid one",
            ) from None
        self._encoders[known] = encode
        return encode

    @property
    def _where(self) -> str:
        return f"schema registry {self.settings.schema_registry}"

    def _references(
        self, registry: SchemaRegistryClient, schema: Schema
    ) -> Iterator[tuple[str, str]]:
        """Yield the name and text of each schema that a schema refers to, before that schema."""
        for reference in schema.references or ():
            named = registry.get_version(
                reference.subject or "",
                reference.version or 1,
                fmt=WRITTEN.get(schema.schema_type or ""),
            )
            yield from self._references(registry, named.schema)
            yield reference.name or "", named.schema.schema_str or ""

    @contextmanager
    def _asking(self, cure: str) -> Iterator[SchemaRegistryClient]:
        """Ask the registry in this block, and translate its errors."""
        try:
            if self._registry is None:
                self._registry = self._closing.enter_context(_client(self.settings))
            yield self._registry
        except SafError:
            raise
        except SchemaRegistryError as error:
            reason = f"{self._where}: {self.settings.redact(str(error))}"
            if error.http_status_code in (UNAUTHORIZED, FORBIDDEN):
                login = "fix schema_registry_username and schema_registry_password in saf.toml"
                raise Refused(self.what, reason, login) from None
            if error.http_status_code == NOT_FOUND:
                raise unusable(self.what, reason, cure) from None
            raise Unavailable(self.what, reason) from None
        except Exception as error:
            # whatever its HTTP client raises
            reason = self.settings.redact(f"{type(error).__name__}: {error}")
            raise Unavailable(self.what, f"{self._where}: {reason}") from None


def _any(named: Callable[[str], str], template: str) -> str:
    """Return a template with `ANY` for each placeholder, and the names that its texts become.

    >>> _any(topic_name, "orders/{service}").split(ANY)
    ['orders_', '']
    """
    parts = Formatter().parse(template)
    return "".join(named(text) + ANY * (name is not None) for text, name, *_ in parts)


def _client(settings: Kafka) -> SchemaRegistryClient:
    options: dict[str, Any] = {
        "url": settings.schema_registry,
        "timeout": settings.bounds.network_seconds,
        "max.retries": 0,
        "cache.latest.ttl.sec": NEWEST_SECONDS,
    }
    if settings.schema_registry_password is not None:
        password = settings.schema_registry_password.get_secret_value()
        options["basic.auth.user.info"] = f"{settings.schema_registry_username}:{password}"
    if settings.schema_registry_ca_file is not None:
        options["ssl.ca.location"] = str(settings.schema_registry_ca_file)
    return SchemaRegistryClient(options)


def _json(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError:
        raise Unfit("is not JSON") from None


# JSON Schema


def json_schema(prefix: bytes, text: str, references: Mapping[str, str], _: str) -> Encode:
    """Return an encoder that validates bodies with a JSON Schema."""
    schema = json.loads(text)
    kind = validator_for(schema)
    kind.check_schema(schema)
    registry: Registry[Any] = Registry().with_contents(
        [(name, json.loads(other)) for name, other in references.items()]
    )
    validator = kind(schema, registry=registry)

    def encode(body: bytes) -> bytes:
        try:
            worst = best_match(validator.iter_errors(_json(body)))
        except (Unresolvable, SchemaError, RecursionError) as error:
            raise Unfit(f"cannot be checked ({type(error).__name__})") from None
        if worst is not None:
            raise _violation(worst)
        return prefix + body

    return encode


def _violation(error: Any) -> Unfit:
    path = [f"[{part}]" if isinstance(part, int) else str(part) for part in error.absolute_path]
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return Unfit("is required", *path, *missing[:1])
    return Unfit(f"does not match {error.validator} {error.validator_value!r}"[:200], *path)


# Protobuf


def protobuf(prefix: bytes, text: str, references: Mapping[str, str], message_type: str) -> Encode:
    """Return an encoder of a Protobuf message.

    Args:
        prefix: the schema's id on the wire.
        text: the schema, a FileDescriptorProto in base64.
        references: other files that it imports, by name.
        message_type: the name of the message; without one of that name, the first is used.
    """
    file = protobuf_file(text, references)
    messages = file.message_types_by_name
    if not messages:
        raise ValueError("it has no message")
    names = list(messages)
    index = names.index(message_type) if message_type in names else 0
    model = message_factory.GetMessageClass(messages[names[index]])
    prefix += _indexes(index)

    def encode(body: bytes) -> bytes:
        value, message = _json(body), model()
        if not isinstance(value, dict):
            raise Unfit("is not a JSON object")
        try:
            json_format.ParseDict(value, message, descriptor_pool=file.pool)
            written: bytes = message.SerializeToString()
        except json_format.ParseError as error:
            raise _protobuf_fault(str(error)) from None
        except (ValueError, RecursionError):
            raise Unfit("does not match the schema") from None
        return prefix + written

    return encode


def protobuf_file(text: str, references: Mapping[str, str]) -> Any:
    """Return the descriptor of a file; ``text`` and ``references`` as in `protobuf`."""
    pool = DescriptorPool()
    known = well_known()
    for data in known.values():
        pool.AddSerializedFile(data)
    for name, other in references.items():
        if name not in known:
            _add(pool, name, other)
    return _add(pool, "saf-body.proto", text)


@cache
def well_known() -> Mapping[str, bytes]:
    """Return the files of `WELL_KNOWN` by name; older releases of the packages lack some."""
    found: dict[str, bytes] = {}
    for module in WELL_KNOWN:
        with suppress(ImportError):
            file = import_module(module).DESCRIPTOR
            found[file.name] = file.serialized_pb
    return found


def _add(pool: DescriptorPool, name: str, text: str) -> Any:
    file = FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    file.name = name
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(name)


def _protobuf_fault(text: str) -> Unfit:
    """Return the error for one of Protobuf's, whose text quotes the value.

    >>> str(_protobuf_fault('Failed to parse total field: Couldn\\'t parse integer: "secret".'))
    'total: does not match the type of the field'
    """
    path = FAILED_FIELD.findall(text)
    if unknown := NO_FIELD.search(text):
        return Unfit("is not in the schema", *path, unknown[1])
    return Unfit("does not match the type of the field" if path else "does not match", *path)


def _indexes(index: int) -> bytes:
    r"""Return the indexes that lead to a message at the top of its file.

    The number of indexes and each index, as zigzag varints; the first message is a single 0.

    >>> _indexes(0), _indexes(1), _indexes(64)
    (b'\x00', b'\x02\x02', b'\x02\x80\x01')
    """
    if index == 0:
        return b"\0"
    rest, written = 2 * index, bytearray(b"\x02")
    while rest > 0x7F:  # noqa: PLR2004 - seven bits per byte
        written.append(rest & 0x7F | 0x80)
        rest >>= 7
    written.append(rest)
    return bytes(written)


# Avro


def avro(prefix: bytes, text: str, references: Mapping[str, str], _: str) -> Encode:
    """Return an encoder of Avro records."""
    named: dict[str, Any] = {}
    for other in references.values():
        fastavro.parse_schema(json.loads(other), named)
    schema = fastavro.parse_schema(json.loads(text), named)
    convert = Conversion(named).of(schema)

    def encode(body: bytes) -> bytes:
        value = convert(_json(body))
        written = BytesIO()
        written.write(prefix)
        try:
            fastavro.schemaless_writer(written, schema, value, strict_allow_default=True)
        except Exception:
            # it has no class of its own for a value that does not fit
            raise _avro_fault(value, schema) from None
        return written.getvalue()

    return encode


def _avro_fault(value: Any, schema: Any) -> Unfit:
    """Return the error for a record that cannot be written."""
    try:
        validate(value, schema, raise_errors=True)
    except ValidationError as error:
        first = error.errors[0]
        field = getattr(first, "field", "") or ""
        expected = _avro_kind(getattr(first, "schema", None))
        return Unfit(f"is not {expected}", *field.split(".")[-1:])
    except Exception:  # noqa: S110 - the text below is as exact as possible
        pass
    return Unfit("does not match the schema")


def _avro_kind(schema: Any) -> str:
    if isinstance(schema, dict):
        return str(schema.get("logicalType") or schema.get("name") or schema.get("type"))
    if isinstance(schema, list):
        return " or ".join(map(_avro_kind, schema))
    return str(schema)


Convert = Callable[[Any], Any]


class Conversion:
    """Functions that turn JSON into the values that fastavro writes for a schema."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.named = named
        self._known: dict[str, Convert] = {}

    def of(self, schema: Any) -> Convert:
        """Return the function for a schema."""
        if isinstance(schema, list):
            return partial(_one_of, [(_record_name(item), self.of(item)) for item in schema])
        if isinstance(schema, str):
            return SIMPLE.get(schema) or partial(self._as_named, schema)
        kind, logical = schema["type"], schema.get("logicalType", "")
        if logical == "decimal":
            return partial(_decimal, schema.get("scale", 0))
        if logical in LOGICAL and (logical != "uuid" or kind == "fixed"):
            return LOGICAL[logical]
        make: dict[str, Callable[[], Convert]] = {
            "record": lambda: self._of_record(schema),
            "error": lambda: self._of_record(schema),
            "array": lambda: partial(_each, self.of(schema["items"])),
            "map": lambda: partial(_each_value, self.of(schema["values"])),
            "fixed": lambda: _bytes,
            "enum": lambda: partial(_symbol, schema["symbols"]),
        }
        return make[kind]() if isinstance(kind, str) and kind in make else self.of(kind)

    def _as_named(self, name: str, value: Any) -> Any:
        """Convert a value as the schema of a name, which may contain itself."""
        if name not in self._known:
            self._known[name] = self.of(self.named[name])
        return self._known[name](value)

    def _of_record(self, schema: Any) -> Convert:
        fields = {field["name"]: self.of(field["type"]) for field in schema["fields"]}
        required = [field["name"] for field in schema["fields"] if "default" not in field]

        def convert(value: Any) -> dict[str, Any]:
            if not isinstance(value, dict):
                raise Unfit(f"is not {schema['name']}")
            for name in value:
                if name not in fields:
                    raise Unfit("is not in the schema", name)
            for name in required:
                if name not in value:
                    raise Unfit("is required", name)
            result = {}
            for name, item in value.items():
                try:
                    result[name] = fields[name](item)
                except Unfit as error:
                    raise error.below(name) from None
            return result

        self._known[schema["name"]] = convert
        return convert


def _record_name(schema: Any) -> str | None:
    """Return the name of a record in a union; None for other types."""
    if isinstance(schema, dict):
        return schema["name"] if schema["type"] in ("record", "error") else None
    return None if schema in SIMPLE or isinstance(schema, list) else str(schema)


def _one_of(branches: list[tuple[str | None, Convert]], value: Any) -> Any:
    """Return a value as the first branch of a union that takes it; fastavro gets a record's name.

    If none takes it, raise the error of the branch that got furthest.
    """
    found = Unfit("is not null")
    for name, convert in branches:
        try:
            converted = convert(value)
        except Unfit as error:
            found = max(error, found, key=lambda item: len(item.path))
        else:
            return converted if name is None or not isinstance(value, dict) else (name, converted)
    raise found


def _each(convert: Convert, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Unfit("is not an array")
    result = []
    for number, item in enumerate(value):
        try:
            result.append(convert(item))
        except Unfit as error:
            raise error.below(f"[{number}]") from None
    return result


def _each_value(convert: Convert, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unfit("is not a map")
    result = {}
    for name, item in value.items():
        try:
            result[name] = convert(item)
        except Unfit as error:
            raise error.below(name) from None
    return result


def _plain(kinds: tuple[type, ...], expected: str, value: Any) -> Any:
    # a bool is an int in Python, and no number in JSON
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise Unfit(f"is not {expected}")
    return value


def _whole(bits: int, value: Any) -> int:
    number: int = _plain((int,), "a whole number", value)
    if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
        raise Unfit(f"does not fit into {bits} bits")
    return number


def _symbol(symbols: list[str], value: Any) -> str:
    if value not in symbols:
        raise Unfit(f"is not one of {', '.join(symbols)}")
    return str(value)


def _bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(_text(value), validate=True)
    except (binascii.Error, ValueError):
        raise Unfit("is not base64") from None


def _text(value: Any) -> str:
    return str(_plain((str,), "text", value))


def _from_text(read: Callable[[str], Any], expected: str, value: Any) -> Any:
    """Return what a text says; a number is taken as the schema's own unit."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return read(_text(value))
    except (ValueError, InvalidOperation):
        raise Unfit(f"is not {expected}") from None


def _decimal(scale: int, value: Any) -> Decimal:
    try:
        number = Decimal(str(_plain((str, int, float), "a decimal", value)))
    except InvalidOperation:
        raise Unfit("is not a decimal") from None
    exponent = number.normalize().as_tuple().exponent
    if not isinstance(exponent, int) or exponent < -scale:
        raise Unfit(f"has more than {scale} decimals")
    return number.normalize()


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("it has no offset")
    return moment


NUMBER = partial(_plain, (int, float), "a number")
SIMPLE: dict[str, Convert] = {
    "null": partial(_plain, (type(None),), "null"),
    "boolean": partial(_plain, (bool,), "a boolean"),
    "int": partial(_whole, 32),
    "long": partial(_whole, 64),
    "float": NUMBER,
    "double": NUMBER,
    "string": _text,
    "bytes": _bytes,
}
MOMENT = partial(_from_text, _moment, "a time in ISO 8601, with an offset")
LOCAL = partial(_from_text, datetime.fromisoformat, "a time in ISO 8601")
TIME = partial(_from_text, time.fromisoformat, "a time of day in ISO 8601")
LOGICAL: dict[str, Convert] = {
    **{f"timestamp-{unit}": MOMENT for unit in ("millis", "micros", "nanos")},
    **{f"local-timestamp-{unit}": LOCAL for unit in ("millis", "micros", "nanos")},
    "time-millis": TIME,
    "time-micros": TIME,
    "date": partial(_from_text, date.fromisoformat, "a date in ISO 8601"),
    "uuid": partial(_from_text, UUID, "a UUID"),
}
