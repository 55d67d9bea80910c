"""Bodies in a schema registry's wire format: Confluent's own clients read them back."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pydantic
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import message_factory, timestamp_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from saf.database.bounds import Bounds
from saf.destinations.kafka import Kafka, encoding
from saf.destinations.kafka.encoding import Encoding
from saf.destinations.mapping import Mapped, mapped
from saf.errors import Refused, Rejected, Unavailable
from saf.testing.forwarder import Forwarder
from tests.schema_registry import SchemaRegistry, proto, proto_file, schema_registry, serialized
from tests.waits import until

LOGIN = "saf:hunter2-canary"
SECRET = "no-error-quotes-this"
VALUE = SerializationContext("billing", MessageField.VALUE)

ORDER = {
    "type": "record",
    "name": "OrderPlaced",
    "namespace": "shop",
    "fields": [
        {"name": "number", "type": "string"},
        {"name": "total", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9,
                                   "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "due", "type": ["null", {"type": "int", "logicalType": "date"}], "default": None},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["web", "shop"]}},
        {"name": "lines", "type": {"type": "array", "items": {
            "type": "record", "name": "Line", "fields": [
                {"name": "article", "type": "string"},
                {"name": "count", "type": "int"},
                {"name": "parts", "type": {"type": "array", "items": "Line"}, "default": []},
            ]}}},
        {"name": "note", "type": "string", "default": "none"},
    ],
}  # fmt: skip
BODY: dict[str, Any] = {
    "number": "A-1",
    "total": "19.90",
    "at": "2026-01-31T12:00:00.000001+00:00",
    "due": "2026-02-28",
    "id": str(UUID(int=7)),
    "kind": "web",
    "lines": [{"article": "tea", "count": 2, "parts": [{"article": "bag", "count": 20}]}],
}


@pytest.fixture
def registry() -> Iterator[SchemaRegistry]:
    with schema_registry(LOGIN) as running:
        yield running


@pytest.fixture
def client(registry: SchemaRegistry) -> Iterator[SchemaRegistryClient]:
    options = {"url": registry.address, "basic.auth.user.info": LOGIN}
    with SchemaRegistryClient(options) as connected:
        yield connected


def settings(registry: SchemaRegistry, form: str, **more: Any) -> Kafka:
    user, password = LOGIN.split(":")
    given = {
        "brokers": "kafka:9092",
        "format": form,
        "schema_registry": registry.address,
        "schema_registry_username": user,
        "schema_registry_password": password,
        **more,
    }
    return Kafka(**given).bounded(Bounds(network_seconds=5))


def messages(kafka: Kafka, *bodies: Any, message_type: str | None = "OrderPlaced") -> Mapped:
    forwarder = Forwarder()
    rows = [
        forwarder.message(
            body=body if isinstance(body, bytes) else json.dumps(body).encode(),
            message_type=message_type,
            headers='{"content-type": "application/json"}',
        )
        for body in bodies
    ]
    return mapped("here", forwarder.chunk(rows).rows, UUID(int=5), kafka, prefix="ce_")


def encoded(kafka: Kafka, *bodies: Any, **more: Any) -> list[bytes]:
    with closing(Encoding("events", kafka)) as encoding:
        found: list[bytes] = encoding.encoded(messages(kafka, *bodies, **more)).body.to_pylist()
        return found


def avro(registry: SchemaRegistry, schema: Any, subject: str = "billing-value") -> int:
    return registry.register(subject, {"schema": json.dumps(schema)})


def refusal(kafka: Kafka, body: Any, **more: Any) -> str:
    with pytest.raises(Rejected) as error:
        encoded(kafka, body, **more)
    assert SECRET not in str(error.value)
    return str(error.value)


# Avro


def test_an_avro_body_is_read_back_with_its_times_and_decimals(
    registry: SchemaRegistry, client: SchemaRegistryClient
) -> None:
    avro(registry, {"type": "string"}, "another")
    number = avro(registry, ORDER)
    (body,) = encoded(settings(registry, "avro"), BODY)
    assert body[:5] == b"\0" + number.to_bytes(4) == b"\0\0\0\0\2"
    assert AvroDeserializer(client)(body, VALUE) == {
        **BODY,
        "total": Decimal("19.90"),
        "at": datetime(2026, 1, 31, 12, 0, 0, 1, tzinfo=UTC),
        "due": date(2026, 2, 28),
        "id": UUID(int=7),
        "lines": [
            {"article": "tea", "count": 2, "parts": [{"article": "bag", "count": 20, "parts": []}]}
        ],
        "note": "none",
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"total": SECRET}, "total: is not a decimal"),
        ({"total": "1.999"}, "total: has more than 2 decimals"),
        ({"at": "2026-01-31T12:00:00"}, "at: is not a time in ISO 8601, with an offset"),
        ({"due": SECRET}, "due: is not a date in ISO 8601"),
        ({"kind": SECRET}, "kind: is not one of web, shop"),
        ({"number": 7}, "number: is not text"),
        ({"number": None}, "number: is not text"),
        ({"currency": SECRET}, "currency: is not in the schema"),
        ({"lines": [{"article": "tea", "count": 2.5}]}, "lines[0].count: is not a whole number"),
        ({"lines": [{"article": "tea", "count": 1 << 31}]}, "lines[0].count: does not fit into 32"),
        ({"lines": [{"article": "tea", "count": True}]}, "lines[0].count: is not a whole number"),
        ({"lines": [{"article": "tea"}]}, "lines[0].count: is required"),
        ({"lines": {}}, "lines: is not an array"),
    ],
)
def test_what_does_not_fit_an_avro_schema_is_rejected_by_its_field(
    registry: SchemaRegistry, change: dict[str, Any], problem: str
) -> None:
    avro(registry, ORDER)
    assert f"its body does not fit its schema: {problem}" in refusal(
        settings(registry, "avro"), {**BODY, **change}
    )


@pytest.mark.parametrize("body", [b"", b"\xff", b"[1", b"NaN", b'"text"'])
def test_what_is_no_object_of_json_is_rejected(registry: SchemaRegistry, body: bytes) -> None:
    avro(registry, ORDER)
    assert "body: is not" in refusal(settings(registry, "avro"), body)


def test_a_union_takes_the_branch_that_fits(
    registry: SchemaRegistry, client: SchemaRegistryClient
) -> None:
    branches = [
        {"type": "record", "name": name, "fields": [{"name": field, "type": "string"}]}
        for name, field in (("Card", "number"), ("Invoice", "address"))
    ]
    of = {
        "type": "record",
        "name": "Paid",
        "fields": [
            {"name": "by", "type": ["null", *branches]},
            {"name": "again", "type": ["null", "Invoice"], "default": None},
            {"name": "more", "type": {"type": "map", "values": ["long", "bytes"]}, "default": {}},
        ],
    }
    avro(registry, of)
    body = {
        "by": {"address": "here"},
        "again": {"address": "there"},
        "more": {"a": 1, "b": base64.b64encode(b"\xff").decode()},
    }
    (written,) = encoded(settings(registry, "avro"), body)
    assert AvroDeserializer(client)(written, VALUE) == {**body, "more": {"a": 1, "b": b"\xff"}}
    assert "by.address: is not text" in refusal(
        settings(registry, "avro"), {**body, "by": {"address": 1}}
    )


def test_a_schema_may_refer_to_other_subjects(
    registry: SchemaRegistry, client: SchemaRegistryClient
) -> None:
    line = {"type": "record", "name": "shop.Line", "fields": [{"name": "article", "type": "int"}]}
    avro(registry, line, "line")
    order = {"type": "record", "name": "O", "fields": [{"name": "line", "type": "shop.Line"}]}
    references = [{"name": "shop.Line", "subject": "line", "version": 1}]
    registry.register("billing-value", {"schema": json.dumps(order), "references": references})
    (written,) = encoded(settings(registry, "avro"), {"line": {"article": 3}})
    assert AvroDeserializer(client)(written, VALUE) == {"line": {"article": 3}}


# Protobuf


TEXT, INT = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_INT64
MESSAGES = (
    ("Line", [("article", TEXT), ("count", INT)]),
    ("OrderPlaced", [("number", TEXT), ("line", ".shop.Line"),
                     ("at", ".google.protobuf.Timestamp")]),
)  # fmt: skip
PLACED = {"number": "A-1", "line": {"article": "tea", "count": 2}, "at": "2026-01-31T12:00:00Z"}


def read_protobuf(body: bytes, client: SchemaRegistryClient, text: str, name: str) -> Any:
    pool = DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(base64.b64decode(text))
    model = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{name}"))
    options = {"use.deprecated.format": False}
    return ProtobufDeserializer(model, options, client)(body, VALUE)


@pytest.mark.parametrize(
    ("message_type", "body", "indexes"),
    [("OrderPlaced", PLACED, b"\x02\x02"), ("Line", PLACED["line"], b"\0"),
     (None, PLACED["line"], b"\0")],
)  # fmt: skip
def test_a_protobuf_body_is_read_back_as_the_message_with_the_types_name(
    registry: SchemaRegistry, client: SchemaRegistryClient, message_type: str | None, body: Any,
    indexes: bytes,
) -> None:  # fmt: skip
    text = proto(*MESSAGES)
    number = registry.register("billing-value", {"schema": text, "schemaType": "PROTOBUF"})
    (written,) = encoded(settings(registry, "protobuf"), body, message_type=message_type)
    prefix = b"\0" + number.to_bytes(4) + indexes
    assert written.startswith(prefix)
    found = read_protobuf(written, client, text, message_type or "Line")
    if message_type == "OrderPlaced":
        assert (found.number, found.line.count, found.at.seconds) == ("A-1", 2, 1769860800)
    else:
        assert (found.article, found.count) == ("tea", 2)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({**PLACED, "line": {"count": SECRET}}, "line.count: does not match the type"),
        ({**PLACED, "at": SECRET}, "at: does not match the type"),
        ({**PLACED, "currency": SECRET}, "currency: is not in the schema"),
        (b"{", "body: is not"),
        (b"\xff", "body: is not"),
        (b"[]", "body: is not"),
    ],
)
def test_what_does_not_fit_a_protobuf_message_is_rejected_by_its_field(
    registry: SchemaRegistry, body: Any, problem: str
) -> None:
    registry.register("billing-value", {"schema": proto(*MESSAGES), "schemaType": "PROTOBUF"})
    assert problem in refusal(settings(registry, "protobuf"), body)


def test_a_protobuf_file_may_import_another_subject(registry: SchemaRegistry) -> None:
    line = proto(MESSAGES[0], name="line.proto")
    registry.register("line", {"schema": line, "schemaType": "PROTOBUF"})
    file = proto_file(("O", [("line", ".shop.Line")]))
    file.dependency.append("line.proto")
    registry.register(
        "billing-value",
        {
            "schema": serialized(file),
            "schemaType": "PROTOBUF",
            "references": [{"name": "line.proto", "subject": "line", "version": 1}],
        },
    )
    (written,) = encoded(settings(registry, "protobuf"), {"line": PLACED["line"]})
    assert written.endswith(b"\n\x03tea\x10\x02")


def test_an_older_client_that_lacks_a_well_known_file_encodes_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        encoding, "WELL_KNOWN", ["confluent_kafka.is_older_pb2", "google.protobuf.timestamp_pb2"]
    )
    encoding.well_known.cache_clear()
    try:
        assert [*encoding.well_known()] == ["google/protobuf/timestamp.proto"]
        assert encoding.protobuf_file(proto(*MESSAGES), {}).message_types_by_name
    finally:
        encoding.well_known.cache_clear()


# JSON Schema

SCHEMA = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "string"}, "total": {"type": "number", "minimum": 0}},
}


def test_a_json_body_is_validated_and_read_back(
    registry: SchemaRegistry, client: SchemaRegistryClient
) -> None:
    registry.register("billing-value", {"schema": json.dumps(SCHEMA), "schemaType": "JSON"})
    body = {"number": "A-1", "total": 19.9}
    (written,) = encoded(settings(registry, "json-schema"), body)
    assert written == b"\0\0\0\0\1" + json.dumps(body).encode()
    read = JSONDeserializer(json.dumps(SCHEMA), schema_registry_client=client)
    assert read(written, VALUE) == body


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "number: is required"),
        ({"number": "A", "total": SECRET}, "total: does not match type 'number'"),
        ({"number": "A", "total": -1}, "total: does not match minimum 0"),
        (b"{", "body: is not JSON"),
    ],
)
def test_what_does_not_match_a_json_schema_is_rejected_by_its_field(
    registry: SchemaRegistry, body: Any, problem: str
) -> None:
    registry.register("billing-value", {"schema": json.dumps(SCHEMA), "schemaType": "JSON"})
    assert problem in refusal(settings(registry, "json-schema"), body)


# The registry


def test_each_type_of_a_topic_may_have_its_own_subject_which_is_asked_for_once(
    registry: SchemaRegistry,
) -> None:
    for name in ("Paid", "untyped"):
        avro(registry, {"type": "record", "name": name, "fields": []}, f"billing-{name}")
    kafka = settings(registry, "avro", subject="{topic}-{message_type}")
    with closing(Encoding("events", kafka)) as encoding:
        for kind, number in (("Paid", 1), (None, 2), ("Paid", 1)):
            what = encoding.encoded(messages(kafka, {}, {}, {}, message_type=kind))
            assert what.body.to_pylist() == [b"\0\0\0\0" + bytes([number])] * 3
    assert len(registry.asked) == 2


def test_a_new_schema_is_used_once_the_old_one_is_forgotten(
    registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saf.destinations.kafka.encoding.NEWEST_SECONDS", 0.01)
    avro(registry, {"type": "record", "name": "A", "fields": []})
    kafka = settings(registry, "avro")
    with closing(Encoding("events", kafka)) as encoding:
        assert encoding.encoded(messages(kafka, {})).body.to_pylist() == [b"\0\0\0\0\1"]
        avro(registry, {"type": "record", "name": "B", "fields": []})
        what = messages(kafka, {})
        until(lambda: encoding.encoded(what).body.to_pylist() == [b"\0\0\0\0\2"], seconds=10)


def test_without_a_schema_the_messages_wait_and_the_subject_is_named(
    registry: SchemaRegistry,
) -> None:
    with pytest.raises(Refused, match="Register a schema for subject 'billing-value'"):
        encoded(settings(registry, "avro"), BODY)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"schema": json.dumps(SCHEMA), "schemaType": "JSON"}, "a schema of type JSON"),
        (
            {"schema": '{"type": "record"}'},
            "subject 'billing-value' cannot be read",
        ),
    ],
)
def test_a_schema_that_cannot_be_used_is_for_the_operator(
    registry: SchemaRegistry, schema: dict[str, Any], problem: str
) -> None:
    registry.register("billing-value", schema)
    with pytest.raises(Refused, match=problem):
        encoded(settings(registry, "avro"), BODY)


def test_a_wrong_password_is_refused_and_not_shown(registry: SchemaRegistry) -> None:
    kafka = settings(registry, "avro", schema_registry_password="wrong-canary")
    with pytest.raises(Refused, match="schema_registry_password") as error:
        encoded(kafka, BODY)
    assert "wrong-canary" not in str(error.value)


def test_a_registry_that_does_not_answer_is_unavailable(registry: SchemaRegistry) -> None:
    kafka = settings(registry, "avro", schema_registry="http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="schema registry http://127\\.0"):
        encoded(kafka, BODY)


def look(kafka: Kafka) -> None:
    with closing(Encoding("events", kafka)) as encoding:
        encoding.look()


@pytest.mark.parametrize(
    ("topic", "subject", "lacks"),
    [
        ("orders//all", "{topic}-value", "Register a schema for subject 'orders__all-value'"),
        ("orders.{service}", "{topic}-value", "no subject matches 'orders.*-value'"),
        ("orders", "{topic}-{message_type}", "no subject matches 'orders-*'"),
    ],
)
def test_a_look_names_a_subject_that_the_registry_lacks_and_the_registrys_address(
    registry: SchemaRegistry, topic: str, subject: str, lacks: str
) -> None:
    kafka = settings(registry, "avro", topic=topic, subject=subject)
    registry.register("other-value", {"schema": json.dumps(ORDER)})
    with pytest.raises(Refused, match=re.escape(lacks)) as error:
        look(kafka)
    assert f"schema registry {registry.address}: " in str(error.value)
    for name in ("orders__all-value", "orders.billing-value", "orders-Paid"):
        registry.register(name, {"schema": json.dumps(ORDER)})
    look(kafka)


def test_a_look_is_refused_by_a_registry_that_refuses_the_login_and_names_its_address(
    registry: SchemaRegistry,
) -> None:
    for topic in ("orders", "{service}"):
        given = {"schema_registry_password": "wrong-canary", "topic": topic}
        with pytest.raises(Refused, match="Fix schema_registry_username") as error:
            look(settings(registry, "avro", **given))
        assert f"schema registry {registry.address}: " in str(error.value)
        assert "wrong-canary" not in str(error.value)
        with pytest.raises(Unavailable, match="schema registry http://127\\.0"):
            look(settings(registry, "avro", schema_registry="http://127.0.0.1:9", topic=topic))


def test_without_its_packages_the_extra_is_named(
    registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "saf.destinations.kafka.encoding", None)
    with pytest.raises(Refused, match=r"pip install 'saf-outbox\[kafka-schemas\]'"):
        settings(registry, "avro").encoding("events")


def test_headers_say_what_the_body_is_and_saf_names_its_own(registry: SchemaRegistry) -> None:
    avro(registry, ORDER)
    kafka = settings(registry, "avro")
    with closing(Encoding("events", kafka)) as encoding:
        what = encoding.encoded(messages(kafka, BODY))
    assert what.own == [{"content-type": "application/avro"}]
    assert "saf-type" in what.headers
    types = what.each("message_type")
    assert types is not None
    assert types.to_pylist() == ["OrderPlaced"]


# Settings


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"format": "avro"}, "needs schema_registry"),
        ({"schema_registry": "http://r"}, "schema_registry needs format"),
        ({"subject": "{topic}"}, "subject needs format"),
        ({"format": "avro", "schema_registry": "r:8081"}, "is not the address"),
        ({"format": "avro", "schema_registry": "http://u:p@r"}, "contains a login"),
        ({"format": "avro", "schema_registry": "http://r", "subject": "{key}"}, "is neither"),
        ({"format": "avro", "schema_registry": "http://r", "schema_registry_username": "u"},
         "go together"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=problem):
        Kafka(brokers="kafka:9092", **given)


def test_other_formats_ask_no_registry() -> None:
    kafka = Kafka(brokers="kafka:9092", format="cloudevents")
    assert (kafka.encodes, kafka.headers_as) == (False, "cloudevents")
    assert messages(kafka, BODY).body.to_pylist() == [json.dumps(BODY).encode()]
