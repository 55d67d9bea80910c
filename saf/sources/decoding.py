"""Decoding: records of a topic as messages of an inbox.

A message that saf wrote comes back as it was sent, from each format of `saf.destinations.mapping`:
id, key, type, times, the sender's headers and the body. A header's value is a text in a queue, so
a number comes back as a text. The message keeps a header ``saf-sent-by``, which names the broker
that sent it.

A CloudEvent of another writer gives its type and its partitionkey. Its attributes stay headers.
Any other record has its headers, and its key is the record's own, or a header that the settings
name. Its id is computed from the source and the position, so the same record always has the same
id. A header that is not text becomes ``{"base64": "…"}``.

A record that no inbox takes is a dead letter of the service's subscription, with a reason:

    undecodable    its headers or its event cannot be read, or do not fit into a message
    over_size      its body is too large
    no_dialog      it belongs to a dialog: no end of it lives at a topic

`Decoder.table` reads record by record. `saf.sources.columns` does so a column at a time, where
records are alike.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa

from saf.destinations.mapping import CONTENT_TYPE, EVENT_SOURCE, HEADERS, names, source_of
from saf.destinations.queues import Format
from saf.log.columns import TYPES
from saf.message import (
    CLAIMED_FROM,
    FIRST_MOMENT,
    LAST_DAY,
    MAX_HEADERS,
    MAX_KEY,
    MAX_NAME,
    RESERVED_HEADER,
    VERIFIED_FROM,
    fits,
)
from saf.sources import Record

SENT_BY = f"{RESERVED_HEADER}sent-by"
"""Header of a message that saf wrote into the topic: the broker_id of the broker that sent it."""
UNDECODABLE, OVER_SIZE, NO_DIALOG = "undecodable", "over_size", "no_dialog"
EVENT_TYPES = ("application/cloudevents+json",)
REASON, ERROR = "reason", "error"

SCHEMA = pa.schema(
    [
        ("batch", pa.int64()),
        ("id", pa.int64()),
        ("shard", pa.int16()),
        *TYPES.items(),
        (REASON, pa.string()),
        (ERROR, pa.string()),
    ]
)
"""Columns of decoded records: the position as ``batch`` and ``id``, and a dead letter's reason."""

OUR_NAMES = {form: names(form, "") for form in ("saf", "cloudevents")}


class Row(NamedTuple):
    """Columns of a decoded record; the others are NULL, or the same in all rows."""

    message_id: bytes
    to_service: str
    headers: str | None
    body: bytes
    created_at: datetime
    from_service: str | None = None
    key: str | None = None
    message_type: str | None = None
    deliver_at: datetime | None = None
    expires_at: datetime | None = None
    reason: str | None = None
    error: str | None = None


class Undecodable(ValueError):
    """A record that no inbox takes."""

    def __init__(self, problem: str, reason: str = UNDECODABLE) -> None:
        super().__init__(problem)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Decodes the records of a source."""

    source: UUID
    service: str
    prefix: str
    """Prefix of CloudEvents attributes in headers."""
    max_bytes: int
    named_services: bool = False
    key_header: str | None = None

    def table(self, shard: int, records: Sequence[Record]) -> pa.Table:
        """Return records as a table with the columns `SCHEMA`."""
        rows = [self._row(shard, record) for record in records]
        columns: dict[str, Sequence[Any]] = {}
        if rows:
            columns.update(zip(Row._fields, zip(*rows, strict=True), strict=True))
        count = len(rows)
        columns["batch"] = [record.position[0] for record in records]
        columns["id"] = [record.position[1] for record in records]
        columns["shard"] = [shard] * count
        arrays = [
            pa.array(columns[field.name], field.type)
            if field.name in columns
            else pa.nulls(count, field.type)
            for field in SCHEMA
        ]
        return pa.table(arrays, schema=SCHEMA)

    def _row(self, shard: int, record: Record) -> Row:
        """Return a record as a message, or as a dead letter."""
        try:
            row = self._message(shard, record)
            _check(row)
        except Undecodable as error:
            row = self._dead(shard, record, error)
        return row

    def _message(self, shard: int, record: Record) -> Row:
        if record.problem is not None:
            raise Undecodable(record.problem)
        texts, headers, body = _read(record, self.prefix)
        if len(body) > self.max_bytes:
            raise Undecodable(
                f"the body has {len(body):,} bytes, forwarder.max_bytes is {self.max_bytes:,}",
                OVER_SIZE,
            )
        form = form_of(texts, self.prefix)
        if form is not None and source_of(texts, self.prefix) is not None:
            return self._own(form, record, texts, headers, body)
        return Row(
            message_id=self.id_of(shard, record),
            to_service=self.service,
            key=self._key(record, texts),
            message_type=texts.get(f"{self.prefix}type"),
            headers=as_json(headers),
            body=body,
            created_at=record.created_at or datetime.now(UTC),
        )

    def _own(
        self,
        form: Format,
        record: Record,
        texts: Mapping[str, str],
        headers: dict[str, Any],
        body: bytes,
    ) -> Row:
        """Return a message that saf wrote."""
        called = OUR_NAMES[form]
        prefix = "" if form == "saf" else self.prefix
        said = {column: texts.get(prefix + name) for column, name in called.items()}
        if said["conversation_id"] is not None:
            raise Undecodable(
                f"it belongs to dialog {said['conversation_id']}, and no end of a dialog can live "
                "at a topic",
                NO_DIALOG,
            )
        own = {name: value for name, value in headers.items() if not self.is_saf_header(name)}
        own[SENT_BY] = str(said["source"]).removeprefix(EVENT_SOURCE)
        message_type = said["message_type"]
        if form != "saf" and message_type == said["to_service"]:
            message_type = None  # a message without a type has its service as the event's type
        return Row(
            message_id=_uuid(said["message_id"], called["message_id"]),
            from_service=said["from_service"],
            to_service=(said["to_service"] if self.named_services else None) or self.service,
            key=said["key"],
            message_type=message_type,
            headers=as_json(own),
            body=body,
            created_at=_moment(said["created_at"], called["created_at"])
            or record.created_at
            or datetime.now(UTC),
            deliver_at=_moment(said["deliver_at"], called["deliver_at"]),
            expires_at=_moment(said["expires_at"], called["expires_at"]),
        )

    def is_saf_header(self, name: str) -> bool:
        """Return whether a header is saf's own, and not the sender's."""
        if name in _SAF_NAMES:
            return True
        event = name.removeprefix(self.prefix)
        return event != name and (event in _EVENT_NAMES or event == "specversion")

    def id_of(self, shard: int, record: Record) -> bytes:
        """Return the id of another writer's message."""
        if record.id is not None:
            return uuid5(self.source.bytes, f"{shard}/id/{record.id}")
        batch, number = record.position
        return uuid5(self.source.bytes, f"{shard}/{batch}-{number}")

    def _key(self, record: Record, texts: Mapping[str, str]) -> str | None:
        if self.key_header is not None:
            return texts.get(self.key_header)
        if record.key is not None:
            try:
                return record.key.decode() or None
            except UnicodeDecodeError:
                return "base64:" + base64.b64encode(record.key).decode()
        return texts.get(f"{self.prefix}partitionkey")

    def _dead(self, shard: int, record: Record, error: Undecodable) -> Row:
        """Return a record as it is, with the reason why no inbox takes it."""
        headers = {_name(name): _value(value) for name, value in record.headers.items()}
        text = as_json(headers)
        return Row(
            message_id=self.id_of(shard, record),
            to_service=self.service,
            headers=text if fits(text, MAX_HEADERS) else None,
            body=record.body if len(record.body) <= self.max_bytes else b"",
            created_at=record.created_at or datetime.now(UTC),
            reason=error.reason,
            error=str(error),
        )


def form_of(headers: Collection[str], prefix: str) -> Format | None:
    """Return the format whose names saf's own headers have; None if no source is named.

    >>> form_of(["saf-source", "saf-shard"], "ce_"), form_of(["ce_source", "ce_id"], "ce_")
    ('saf', None)
    """
    if "saf-source" in headers and "saf-shard" in headers:
        return "saf"
    if f"{prefix}source" in headers and f"{prefix}safshard" in headers:
        return "cloudevents"
    return None


def is_event(content_type: str) -> bool:
    """Return whether a body with this content type is a whole event.

    >>> is_event("application/CloudEvents+json; charset=utf-8"), is_event("application/json")
    (True, False)
    """
    return content_type.partition(";")[0].strip().lower() in EVENT_TYPES


_SAF_NAMES = {header.saf for header in HEADERS}
_EVENT_NAMES = {header.event for header in HEADERS}


def _read(record: Record, prefix: str) -> tuple[dict[str, str], dict[str, Any], bytes]:
    """Return a record's headers that are texts, all of its headers as JSON values, and its body.

    The attributes of an event in the body become headers, with the prefix.
    """
    texts: dict[str, str] = {}
    headers: dict[str, Any] = {}
    for given, value in record.headers.items():
        # a topic's claim about a sender is not verified
        name = CLAIMED_FROM if given == VERIFIED_FROM else _name(given)
        headers[name] = text = _value(value)
        if isinstance(text, str):
            texts[name] = text
    if not is_event(texts.get(CONTENT_TYPE, "")):
        return texts, headers, record.body
    attributes, body, content_type = _event(record.body)
    del headers[CONTENT_TYPE], texts[CONTENT_TYPE]
    named = {prefix + _sound(name): _sound(value) for name, value in attributes.items()}
    if content_type is not None:
        named[CONTENT_TYPE] = _sound(str(content_type))
    return texts | named, headers | named, body


def _event(body: bytes) -> tuple[dict[str, str], bytes, str | None]:
    """Return an event's attributes, its data, and the content type of the data.

    >>> _event(b'{"specversion":"1.0","id":"7","data":{"n":1.50},"datacontenttype":"text/json"}')
    ({'specversion': '1.0', 'id': '7'}, b'{"n":1.50}', 'text/json')
    """
    try:
        text = body.decode()
        event = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"the body is not the CloudEvent that its type says: {error}") from None
    if not isinstance(event, dict) or "specversion" not in event:
        raise Undecodable("the body is not the CloudEvent that its type says: no specversion")
    content_type = event.pop("datacontenttype", None)
    encoded, data = event.pop("data_base64", None), event.pop("data", None)
    attributes = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in event.items()
    }
    if encoded is not None:
        try:
            return attributes, base64.b64decode(encoded, validate=True), content_type
        except (TypeError, binascii.Error, ValueError) as error:
            raise Undecodable(f"data_base64 of the event is not base64: {error}") from None
    if data is None:
        return attributes, b"", content_type
    kind = str(content_type or "application/json").partition(";")[0].strip().lower()
    if isinstance(data, str) and not kind.endswith(("/json", "+json")):
        return attributes, data.encode(errors="replace"), content_type
    return attributes, _raw_data(text), content_type


def _raw_data(text: str) -> bytes:
    """Return the member ``data`` of an event byte for byte: parsing may change numbers.

    >>> _raw_data('{"a": "data", "data" : [1.50, {}], "b": 1}')
    b'[1.50, {}]'
    """
    decoder = json.JSONDecoder()
    at, found = text.index("{") + 1, ""
    while True:
        at = _skipped(text, at)
        if text[at] == "}":
            return found.encode()
        name, at = decoder.raw_decode(text, at)
        at = _skipped(text, at, ":")
        _, end = decoder.raw_decode(text, at)
        if name == "data":
            found = text[at:end]
        at = _skipped(text, end, ",")


def _skipped(text: str, at: int, but: str = "") -> int:
    while text[at] in " \t\r\n" or text[at] == but:
        at += 1
    return at


def _value(value: bytes) -> Any:
    r"""Return a header's value for JSON.

    >>> _value(b"a"), _value(b"\xff")
    ('a', {'base64': '/w=='})
    """
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\x00"
    return {"base64": base64.b64encode(value).decode()} if "\x00" in text else text


def _sound(text: str) -> str:
    """Return a text of an event, if PostgreSQL takes it."""
    try:
        if b"\x00" not in text.encode():
            return text
    except UnicodeEncodeError:
        pass
    raise Undecodable("the event contains a zero byte, or half of a surrogate pair")


def _name(name: str) -> str:
    return name.replace("\x00", "\\x00")


as_json: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False).encode


def uuid5(namespace: bytes, name: str) -> bytes:
    """Return the bytes of a UUID of version 5, in a third of the time that `uuid` takes.

    >>> import uuid
    >>> uuid5(UUID(int=7).bytes, "0/1-2") == uuid.uuid5(UUID(int=7), "0/1-2").bytes
    True
    """
    made = bytearray(hashlib.sha1(namespace + name.encode(), usedforsecurity=False).digest()[:16])
    made[6] = made[6] & 0x0F | 0x50
    made[8] = made[8] & 0x3F | 0x80
    return bytes(made)


def _uuid(text: str | None, name: str) -> bytes:
    try:
        return UUID(text).bytes
    except (ValueError, TypeError, AttributeError):
        raise Undecodable(f"header {name!r} is not a UUID: {text!r}") from None


def _moment(text: str | None, name: str) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None and FIRST_MOMENT <= moment < LAST_DAY:
            return moment
    except (ValueError, OverflowError):
        pass
    raise Undecodable(f"header {name!r} is not a time with a zone: {text!r}")


def _check(row: Row) -> None:
    """Raise if an inbox does not take a message.

    Raises:
        Undecodable: names the value at fault.
    """
    for column, text, most in (
        ("to_service", row.to_service, MAX_NAME),
        ("message_type", row.message_type, MAX_NAME),
        ("key", row.key, MAX_KEY),
    ):
        if text is None:
            continue
        if not text or "\x00" in text:
            raise Undecodable(f"its {column} is empty, or contains a zero byte")
        if not fits(text, most):
            raise Undecodable(f"its {column} has more than {most:,} bytes")
    if not fits(row.headers or "", MAX_HEADERS):
        raise Undecodable(f"its headers have more than {MAX_HEADERS:,} bytes")
