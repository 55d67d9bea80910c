"""Bodies in a schema registry's wire format, decoded to JSON.

    0 · id of the schema in four bytes · encoded body

It is the reverse of `saf.destinations.kafka.encoding`. With JSON Schema, the body follows the
prefix. Avro becomes a JSON object: times, dates and UUIDs become texts in ISO 8601, decimals become
texts, and bytes become base64, so that what saf has encoded comes back equal.

A body that cannot be decoded is a dead letter, and the error says why: it has no such prefix, its
schema is unknown or of another type, or it does not match the schema. A registry that does not
answer is `Unavailable`, and the topic waits.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from io import BytesIO
from typing import TYPE_CHECKING, Any
from uuid import UUID

import fastavro
from confluent_kafka.schema_registry import SchemaRegistryError

from saf.destinations.kafka.encoding import NOT_FOUND, Encoding

if TYPE_CHECKING:
    from saf.destinations.kafka import Kafka as Destination

PREFIX = 5
"""Bytes before an encoded body."""

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
            except SchemaRegistryError as error:
                if error.http_status_code == NOT_FOUND:
                    return Unreadable(f"the schema registry has no schema {number}")
                raise
            references = dict(self._references(registry, schema))
        kind = schema.schema_type or "AVRO"
        if kind == "JSON":
            return json_text
        if kind != "AVRO":
            return Unreadable(f"schema {number} is {kind}: only AVRO and JSON can be read")
        try:
            return avro(schema.schema_str or "", references)
        except Exception as error:
            return Unreadable(f"schema {number} cannot be read ({type(error).__name__})")

    @property
    def _form(self) -> str | None:
        return None


def json_text(body: bytes) -> bytes:
    """Return a body that is JSON.

    Raises:
        ValueError: it is not JSON.
    """
    json.loads(body)
    return body


def avro(text: str, references: dict[str, str]) -> Decode:
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
