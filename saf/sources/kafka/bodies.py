"""Bodies in a schema registry's wire format, decoded to JSON.

    0 · id of the schema in four bytes · [indexes of the message, with Protobuf] · encoded body

It is the reverse of `saf.destinations.kafka.encoding`. With JSON Schema, the body follows the
prefix. Avro becomes a JSON object: times, dates and UUIDs become texts in ISO 8601, decimals become
texts, and bytes become base64, so that what saf has encoded comes back equal. Protobuf becomes JSON
as Protobuf's own mapping defines it, with the schema's names of fields; a field without presence
that is not set has its default, so that each message has all of them.

A body that cannot be decoded is a dead letter, and the error says why: it has no such prefix, its
schema is unknown, or it does not match the schema. A field that the schema lacks is a mismatch,
too, because it would be lost (inside of a google.protobuf.Any, it is lost). A registry that does
not answer is `Unavailable`, and the topic waits.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any
from uuid import UUID

import fastavro
from confluent_kafka.schema_registry import SchemaRegistryError
from google.protobuf import json_format, message_factory

from saf.destinations.kafka.encoding import NOT_FOUND, WRITTEN, Encoding, protobuf_file

if TYPE_CHECKING:
    from saf.destinations.kafka import Kafka as Destination

PREFIX = 5
"""Bytes before an encoded body."""
INDEX_BITS = 35
"""Bits of an index: more cannot follow."""

Decode = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Unreadable:
    """A body that cannot be decoded."""

    why: str


class Bodies(Encoding):
    """Decodes the bodies of one source."""

    def __init__(self, what: str, settings: Destination) -> None:
        super().__init__("", settings)
        self.what = what
        self._decoders: dict[int, Decode | Unreadable] = {}
        """Decoders by the id of the schema, or why there is none."""

    def decoded(self, body: bytes) -> bytes | Unreadable:
        """Return a body as JSON; an empty one stays empty.

        Raises:
            Refused: the registry refuses the login.
            Unavailable: the registry does not answer.
        """
        if not body:
            return body
        if len(body) < PREFIX or body[0] != 0:
            return Unreadable("its body does not begin with the id of a schema")
        number = int.from_bytes(body[1:PREFIX])
        if number not in self._decoders:
            self._decoders[number] = self._decoder(number)
        decode = self._decoders[number]
        if isinstance(decode, Unreadable):
            return decode
        try:
            return decode(body[PREFIX:])
        except Exception as error:
            # fastavro raises whatever its reader stumbles over
            kind = type(error).__name__
            return Unreadable(f"its body does not match schema {number} ({kind})")

    def _decoder(self, number: int) -> Decode | Unreadable:
        with self._asking("fix the registry") as registry:
            try:
                schema = registry.get_schema(number)
                if form := WRITTEN.get(schema.schema_type or ""):
                    client: Any = registry  # its types are incomplete
                    client.clear_caches()  # it would answer with the other form
                    schema = registry.get_schema(number, fmt=form)
            except SchemaRegistryError as error:
                if error.http_status_code == NOT_FOUND:
                    return Unreadable(f"the schema registry has no schema {number}")
                raise
            references = dict(self._references(registry, schema))
        kind = schema.schema_type or "AVRO"
        if kind not in DECODERS:
            return Unreadable(f"schema {number} is {kind}: only {', '.join(DECODERS)} can be read")
        try:
            return DECODERS[kind](schema.schema_str or "", references)
        except Exception as error:
            return Unreadable(f"schema {number} cannot be read ({type(error).__name__})")


def json_schema(text: str, references: Mapping[str, str]) -> Decode:  # noqa: ARG001 - as the others
    """Return a decoder of JSON, which must be valid; its schema is not checked."""

    def decode(body: bytes) -> bytes:
        json.loads(body)
        return body

    return decode


def protobuf(text: str, references: Mapping[str, str]) -> Decode:
    """Return a decoder of the messages of a Protobuf file.

    Args:
        text: the file, a FileDescriptorProto in base64.
        references: other files that it imports, by name.
    """
    file = protobuf_file(text, references)
    models: dict[tuple[int, ...], Any] = {}
    as_json = partial(
        json_format.MessageToJson,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        indent=None,
        ensure_ascii=False,
        descriptor_pool=file.pool,
    )

    def decode(body: bytes) -> bytes:
        indexes, size = _indexes(body)
        if indexes not in models:
            models[indexes] = message_factory.GetMessageClass(_found(file, indexes))
        message = models[indexes].FromString(body[size:])
        whole = message.ByteSize()
        message.DiscardUnknownFields()
        if message.ByteSize() != whole:
            raise ValueError("a field is not in the schema")
        written: str = as_json(message)
        return written.encode()

    return decode


def _found(file: Any, indexes: Sequence[int]) -> Any:
    """Return the descriptor of a message.

    Raises:
        IndexError: there is none.
        ValueError: it may be another one: some clients count the entries of maps, too.
    """
    first, *others = indexes
    found = [*file.message_types_by_name.values()][first]
    for index in others:
        before = found.nested_types[: index + 1]
        if any(one.GetOptions().map_entry for one in before):
            raise ValueError("the entries of a map come before the message")
        found = found.nested_types[index]
    return found


def _indexes(body: bytes) -> tuple[tuple[int, ...], int]:
    r"""Return the indexes that lead to a message of a file, and their size in bytes.

    The number of indexes and each index, as zigzag varints; a single 0 is the first message.

    >>> _indexes(b"\x00..."), _indexes(b"\x02\x80\x01..."), _indexes(b"\x04\x02\x00...")
    (((0,), 1), ((64,), 3), ((1, 0), 3))

    Raises:
        ValueError: the body does not begin with indexes.
    """
    numbers: list[int] = []
    number = shift = 0
    for size, byte in enumerate(body, 1):
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80 and shift < INDEX_BITS:
            continue
        numbers.append(number >> 1 ^ -(number & 1))
        number = shift = 0
        if len(numbers) > numbers[0]:
            if min(numbers) < 0:
                raise ValueError("an index is negative")
            return tuple(numbers[1:]) or (0,), size
    raise ValueError("the body does not begin with indexes")


def avro(text: str, references: Mapping[str, str]) -> Decode:
    """Return a decoder of Avro records."""
    named: dict[str, Any] = {}
    for other in references.values():
        fastavro.parse_schema(json.loads(other), named)
    schema = fastavro.parse_schema(json.loads(text), named)

    def decode(body: bytes) -> bytes:
        rest = BytesIO(body)
        value = fastavro.schemaless_reader(rest, schema, None)
        if rest.read(1):
            raise ValueError("bytes follow the record")
        return json.dumps(
            value, default=_plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False
        ).encode()

    return decode


DECODERS: Mapping[str, Callable[[str, Mapping[str, str]], Decode]] = {
    "AVRO": avro, "JSON": json_schema, "PROTOBUF": protobuf,
}  # fmt: skip
"""How to make a decoder of a schema and those that it refers to, by the registry's types."""


def _plain(value: object) -> str:
    """Return a value that JSON lacks as the text that a destination encodes again.

    >>> _plain(b"a"), _plain(Decimal("1.50")), _plain(date(2026, 1, 31))
    ('YQ==', '1.50', '2026-01-31')
    """
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")
