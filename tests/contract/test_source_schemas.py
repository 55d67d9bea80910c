"""Bodies that a schema registry's clients have encoded: read back as JSON, or dead letters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from pydantic import ValidationError

from saf.database import Dsn, fetch
from saf.destinations.kafka import Kafka as Destination
from saf.errors import Unavailable
from saf.sources.kafka import Kafka
from tests.kafka_server import BOUNDS, KafkaServer, make
from tests.pipeline import bodies, connect, forward
from tests.receivers import prepare
from tests.schema_registry import SchemaRegistry, proto, proto_file, schema_registry, serialized
from tests.topics import arrived, dead, read

AVRO = {
    "type": "record", "name": "Paid",
    "fields": [
        {"name": "order", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "total", "type": {
            "type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2,
        }},
        {"name": "key", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "raw", "type": "bytes"},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}  # fmt: skip
BODY = {
    "order": "grüezi", "at": "2026-01-31T12:00:00.000001+00:00", "day": "2026-01-31",
    "total": "1.50", "key": "00000000-0000-0000-0000-000000000007", "raw": "AP8=", "note": None,
}  # fmt: skip
OBJECT = {"type": "object", "required": ["order"]}
TEXT, INT, BIG = (
    FieldDescriptorProto.TYPE_STRING,
    FieldDescriptorProto.TYPE_INT32,
    FieldDescriptorProto.TYPE_INT64,
)
LINE = ("Line", [("article", TEXT), ("pieces_left", INT), ("cents", BIG)])
PLACED = proto(
    LINE,
    (
        "OrderPlaced",
        [("order", TEXT), ("line", ".shop.Line"), ("at", ".google.protobuf.Timestamp")],
    ),
)
LESS = proto(("Line", [("article", TEXT)]))
PROTOBUF_BODY = {
    "order": "grüezi", "at": "2026-01-31T12:00:00.000001Z",
    "line": {"article": "tea", "pieces_left": 0, "cents": "9007199254740993"},
}  # fmt: skip


def protobuf_schema(text: str) -> dict[str, str]:
    return {"schema": text, "schemaType": "PROTOBUF"}


SCHEMAS = {
    "avro": ({"schema": json.dumps(AVRO)}, BODY),
    "json-schema": ({"schema": json.dumps(OBJECT), "schemaType": "JSON"}, BODY),
    "protobuf": (protobuf_schema(PLACED), PROTOBUF_BODY),
}
"""A schema, and a body that fits it, by format."""


@pytest.fixture
def registry() -> Iterator[SchemaRegistry]:
    with schema_registry() as registry:
        yield registry


@pytest.fixture
def topic() -> str:
    return f"t{uuid4().hex[:8]}"


def source(server: KafkaServer, topic: str, registry: SchemaRegistry) -> Kafka:
    settings = Kafka(
        brokers=server.address, topic=f"{topic}.billing", service="billing",
        schema_registry=registry.address,
    )  # fmt: skip
    return settings.bounded(BOUNDS)


def add(server: KafkaServer, topic: str, *bodies: bytes) -> None:
    """Add records to a topic of one partition, which is made."""
    make(server, topic, 1)
    producer = Producer(server.client())
    for body in bodies:
        producer.produce(topic, body)
    producer.flush(30)


SEND = """
INSERT INTO saf.outbox (to_service, key, message_type, headers, body)
VALUES (
    'billing', 'A-1', 'OrderPlaced', '{"content-type": "application/json"}', convert_to(%s, 'UTF8')
)
"""


def there_and_back(
    app: Dsn, mom: Dsn, server: KafkaServer, registry: SchemaRegistry, topic: str, *, form: str,
    schema: dict[str, Any], body: object,
) -> bool:  # fmt: skip
    """Whether messages come back as they were sent, encoded by a destination in between."""
    prepare(mom)
    registry.register(f"{topic}.billing-value", schema)
    destination = Destination.model_validate({
        "brokers": server.address, "topic": f"{topic}.{{service}}",
        "marks_topic": f"{topic}.marks", "format": form, "schema_registry": registry.address,
    })  # fmt: skip
    with connect(app) as connection:
        for _ in range(40):
            connection.execute(SEND, [json.dumps(body)])
        sent = [
            id_ for (id_,) in fetch(connection, "SELECT message_id FROM saf.outbox ORDER BY id")
        ]
    receipts = forward(app, there=destination.bounded(BOUNDS))
    assert not [receipt.error for receipt in receipts if receipt.error]
    turn = read(source(server, topic, registry), mom)
    assert (turn.messages, turn.dead) == (40, 0)
    found = arrived(mom)
    assert {row["headers"]["content-type"] for row in found} == {"application/json"}
    assert [row["message_id"] for row in found] == sent
    return all(json.loads(row["body"]) == body for row in found)


@pytest.mark.slow
@pytest.mark.parametrize("form", SCHEMAS)
def test_what_a_destination_encodes_a_source_reads_back(
    app: Dsn,
    mom: Dsn,
    running_kafka: KafkaServer,
    registry: SchemaRegistry,
    topic: str,
    *,
    form: str,
) -> None:
    schema, body = SCHEMAS[form]
    assert there_and_back(
        app, mom, running_kafka, registry, topic, form=form, schema=schema, body=body
    )


@pytest.mark.slow
def test_a_body_that_cannot_be_decoded_is_a_dead_letter_that_says_why(
    mom: Dsn, running_kafka: KafkaServer, topic: str, registry: SchemaRegistry
) -> None:
    prepare(mom)
    registry.register("x", {"schema": json.dumps(OBJECT), "schemaType": "JSON"})
    registry.register("y", {"schema": json.dumps(AVRO)})
    registry.register("z", protobuf_schema(LESS))
    registry.register("broken", protobuf_schema("AAAA"))
    registry.register("odd", {"schema": "", "schemaType": "XML"})
    good = b"\0\0\0\0\x01" + b'{"order": 1}'
    bad = {
        b"plain": "does not begin with the id of a schema",
        b"\0\0\0\0\x09{}": "the schema registry has no schema 9",
        b"\0\0\0\0\x01{": "does not match schema 1",
        b"\0\0\0\0\x02{": "does not match schema 2",
        b"\0\0\0\0\x03\0\n\x03tea\x10\x02": "does not match schema 3 (ValueError)",
        b"\0\0\0\0\x03\x02\x02\n\x03tea": "does not match schema 3 (IndexError)",
        b"\0\0\0\0\x03\x02\x01\n\x03tea": "does not match schema 3 (ValueError)",
        b"\0\0\0\0\x03\0\n\x03t": "does not match schema 3 (DecodeError)",
        b"\0\0\0\0\x03" + b"\xff" * 9: "does not match schema 3 (ValueError)",
        b"\0\0\0\0\x04\0": "schema 4 cannot be read",
        b"\0\0\0\0\x05x": "schema 5 is XML: only AVRO, JSON, PROTOBUF can be read",
    }
    add(running_kafka, f"{topic}.billing", good, *bad, good, b"")
    turn = read(source(running_kafka, topic, registry), mom)
    assert (turn.messages, turn.dead) == (3, len(bad))
    assert bodies(mom) == ['{"order": 1}', '{"order": 1}', ""]
    assert [(reason, body) for reason, _, body in dead(mom)] == [
        ("undecodable", body) for body in bad
    ]
    with connect(mom) as connection:
        said = fetch(connection, "SELECT error FROM saf.dead_letter ORDER BY dead_letter_id")
    for (error,), expected in zip(said, bad.values(), strict=True):
        assert expected in error


@pytest.mark.slow
def test_a_message_within_another_of_an_imported_file_is_read(
    mom: Dsn, running_kafka: KafkaServer, topic: str, registry: SchemaRegistry
) -> None:
    prepare(mom)
    registry.register("line", protobuf_schema(proto(LINE, name="line.proto")))
    file = proto_file(("Order", []))
    file.dependency.append("line.proto")
    inner = file.message_type[0].nested_type.add(name="Item")
    kind = FieldDescriptorProto.TYPE_MESSAGE
    inner.field.add(name="line", number=1, label=1, type=kind, type_name=".shop.Line")
    schema = protobuf_schema(serialized(file))
    reference = {"name": "line.proto", "subject": "line", "version": 1}
    number = registry.register("order", {**schema, "references": [reference]})
    prefix = b"\0" + number.to_bytes(4) + b"\x04\0\0"
    add(running_kafka, f"{topic}.billing", prefix + b"\n\x05\n\x03tea")
    turn = read(source(running_kafka, topic, registry), mom)
    assert (turn.messages, turn.dead) == (1, 0)
    (body,) = bodies(mom)
    assert json.loads(body) == {"line": {"article": "tea", "pieces_left": 0, "cents": "0"}}


@pytest.mark.slow
def test_an_index_that_clients_count_differently_is_refused(
    mom: Dsn, running_kafka: KafkaServer, topic: str, registry: SchemaRegistry
) -> None:
    prepare(mom)
    file = proto_file(("Order", []))
    order = file.message_type[0]
    order.nested_type.add(name="TagsEntry").options.map_entry = True
    entry = order.nested_type[0]
    entry.field.add(name="key", number=1, label=1, type=TEXT)
    entry.field.add(name="value", number=2, label=1, type=TEXT)
    kind = FieldDescriptorProto.TYPE_MESSAGE
    order.field.add(name="tags", number=1, label=3, type=kind, type_name=".shop.Order.TagsEntry")
    order.nested_type.add(name="Item").field.add(name="article", number=1, label=1, type=TEXT)
    number = registry.register("order", protobuf_schema(serialized(file)))
    prefix, item = b"\0" + number.to_bytes(4) + b"\4\0", b"\n\x03tea"
    # for some clients Item is the first one, for others the second
    add(running_kafka, f"{topic}.billing", prefix + b"\0" + item, prefix + b"\2" + item)
    turn = read(source(running_kafka, topic, registry), mom)
    assert (turn.messages, turn.dead) == (0, 2)


@pytest.mark.slow
def test_an_any_with_a_message_of_the_file_is_read_back(
    app: Dsn, mom: Dsn, running_kafka: KafkaServer, registry: SchemaRegistry, topic: str
) -> None:
    file = proto_file(("Order", []), LINE)
    file.dependency.extend(["google/protobuf/any.proto", "confluent/meta.proto"])
    kind = FieldDescriptorProto.TYPE_MESSAGE
    file.message_type[0].field.add(
        name="what", number=1, label=1, type=kind, type_name=".google.protobuf.Any"
    )
    text = serialized(file)
    # some registries name files of Protobuf's own as references
    registry.register("any", protobuf_schema(proto(LINE, name="google/protobuf/any.proto")))
    reference = {"name": "google/protobuf/any.proto", "subject": "any", "version": 1}
    schema: dict[str, Any] = {**protobuf_schema(text), "references": [reference]}
    line = {"article": "tea", "pieces_left": 0, "cents": "0"}
    body = {"what": {"@type": "type.googleapis.com/shop.Line", **line}}
    assert there_and_back(
        app, mom, running_kafka, registry, topic, form="protobuf", schema=schema, body=body
    )


@pytest.mark.slow
def test_a_registry_that_does_not_answer_loses_nothing(
    mom: Dsn, running_kafka: KafkaServer, topic: str
) -> None:
    prepare(mom)
    with schema_registry() as registry:
        settings = source(running_kafka, topic, registry)
        registry.register("x", {"schema": json.dumps(OBJECT), "schemaType": "JSON"})
    add(running_kafka, settings.topic, b"\0\0\0\0\x01" + b'{"order": 1}')
    with pytest.raises(Unavailable, match="schema registry"):
        read(settings, mom)
    assert bodies(mom) == []
    with schema_registry() as registry:
        registry.register("x", {"schema": json.dumps(OBJECT), "schemaType": "JSON"})
        read(settings.model_copy(update={"schema_registry": registry.address}), mom)
    assert bodies(mom) == ['{"order": 1}']


def test_settings_of_a_registry_belong_together() -> None:
    given = {"brokers": "x:9092", "topic": "t", "service": "billing"}
    with pytest.raises(ValidationError, match="needs schema_registry"):
        Kafka.model_validate({**given, "schema_registry_username": "saf"})
    with pytest.raises(ValidationError, match="is not the address of a schema registry"):
        Kafka.model_validate({**given, "schema_registry": "registry:8081"})
