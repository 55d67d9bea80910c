"""Topics of a Kafka cluster: exactly once, killed, cut off, claimed, lost, limited, compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # they are public
    AclBinding,
    AclOperation,
    AclPermissionType,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from pydantic import SecretStr

from saf.database import Dsn
from saf.database.bounds import Bounds
from saf.destinations import Destination
from saf.destinations.kafka import Kafka
from saf.destinations.kafka.server import Link
from saf.destinations.marks import MAIN, ONCE
from saf.errors import Fenced, Refused, Rejected, SafError, Unavailable
from saf.operating.repair.reconcile import reconcile
from saf.testing.forwarder import SHARDS, Forwarder, all_stored
from tests.destinations import send_to
from tests.kafka_server import BOUNDS, ENDS, PASSWORD, KafkaQueue, KafkaServer, LossyKafka
from tests.pipeline import connect, forward
from tests.programs import ROOT
from tests.queue_suite import WEEK, QueueSuite, errors, ids, send_numbers, texts
from tests.schema_registry import schema_registry
from tests.token_server import token_server

VALUE = SerializationContext("billing", MessageField.VALUE)


@pytest.fixture
def queue(running_kafka: KafkaServer) -> KafkaQueue:
    return KafkaQueue(server=running_kafka)


@pytest.fixture
def events(queue: KafkaQueue) -> Kafka:
    return queue.settings()


@pytest.mark.full
class TestKafka(QueueSuite):
    """What every queue has to keep."""

    request = ENDS
    insistent = True

    @pytest.fixture
    def queue(self, running_kafka: KafkaServer) -> KafkaQueue:
        self.there = KafkaQueue(server=running_kafka)
        return self.there

    def at(self, port: int) -> Kafka:
        events = self.there.settings(brokers=f"127.0.0.1:{port}", step_rows=100)
        return events if port == self.there.port else events.bounded(Bounds(chunk_seconds=3))

    def proxy(self, port: int) -> LossyKafka:
        return LossyKafka(port)

    def settle(self, destination: Destination, forwarder: Forwarder) -> None:
        destination.store(forwarder.chunk([]), exactly_once=True)  # it claims its shards


@pytest.mark.parametrize("ended", [True, False])
def test_a_new_destination_gets_its_identity_though_the_broker_does_not_know_who_has_given_it_one(
    events: Kafka, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """It may answer so if two connect at once, and one ends the transaction of the other."""
    commit, asked = Link.commit, list[Producer]()

    def unknown(link: Link, producer: Producer) -> None:
        asked.append(producer)
        if len(asked) > 1 or ended:
            commit(link, producer)
        if len(asked) == 1:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN))

    monkeypatch.setattr(Link, "commit", unknown)
    with closing(events.open("events")) as destination:
        identity = destination.identity()
    assert len(asked) == (1 if ended else 2)
    with closing(events.open("events")) as destination:
        assert destination.identity() == identity


# Who owns a shard


def of(forwarder: Forwarder, rows: Sequence[Any], *shards: int) -> Any:
    """A chunk of a task that has some shards in hand, and no others."""
    chunk = forwarder.chunk([row for row in rows if row["shard"] in shards])
    epochs = tuple((shard, forwarder.epoch) for shard in shards)
    return replace(chunk, batch=replace(chunk.batch, epochs=epochs))


def test_tasks_of_one_batch_store_beside_each_other_and_then_one_task_alone(
    queue: KafkaQueue, events: Kafka
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(40)
    with closing(events.open("events")) as even, closing(events.open("events")) as odd:
        for last in (8, 20, 32):
            even.store(of(forwarder, rows[:last], 0, 2), exactly_once=True)
            odd.store(of(forwarder, rows[:last], 1, 3), exactly_once=True)
    with closing(events.open("events")) as alone:
        done = all_stored(alone.store(forwarder.chunk(rows), exactly_once=True))
    assert (done.messages, done.dropped) == (8, 32)
    assert sorted(map(str, ids(queue))) == sorted(str(row["message_id"]) for row in rows)


@pytest.mark.parametrize("shards", [(0, 1, 2, 3), (1, 2, 3), (3,)], ids=str)
def test_a_transaction_of_the_owner_before_that_is_still_open_is_never_stored(
    queue: KafkaQueue, events: Kafka, shards: tuple[int, ...]
) -> None:
    """The new owner has other shards in hand, so its transactions have another name."""
    forwarder = Forwarder()
    rows = forwarder.messages(40)
    with before_its_end(events) as (zombie, go_on):
        steps = zombie.store(forwarder.chunk(rows[:20]), exactly_once=True)
        assert steps.messages == 20
        late = forwarder.chunk(rows)
        forwarder.epoch += 1
        mine = [row for row in rows if row["shard"] in shards]

        def take_over() -> None:
            with closing(events.open("events")) as other:
                done = all_stored(other.store(of(forwarder, rows, *shards), exactly_once=True))
            assert done.messages == len(mine) // 2

        go_on.append(take_over)
        with pytest.raises(Fenced):
            zombie.store(late, exactly_once=True)
    there = ids(queue)
    assert len(there) == len({*there})
    assert [one for one in there if one in {row["message_id"] for row in mine}] == [
        row["message_id"] for row in mine
    ]


def test_who_is_fenced_by_a_task_that_took_one_of_its_shards_goes_on_with_the_others(
    queue: KafkaQueue, events: Kafka
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(40)
    with before_its_end(events) as (first, go_on):
        first.store(forwarder.chunk(rows[:20]), exactly_once=True)

        def take_one() -> None:
            with closing(events.open("events")) as other:
                other.store(of(forwarder, rows, 3), exactly_once=True)

        go_on.append(take_one)
        done = all_stored(first.store(of(forwarder, rows, 0, 1, 2), exactly_once=True))
        assert (done.messages, done.dropped) == (15, 15)
    assert sorted(map(str, ids(queue))) == sorted(str(row["message_id"]) for row in rows)


def test_what_was_stored_by_an_owner_while_it_is_being_fenced_is_not_stored_again(
    queue: KafkaQueue, events: Kafka
) -> None:
    """The owner before ends a transaction after its successor has read the marks."""
    forwarder = Forwarder()
    rows = forwarder.messages(40)
    with before_its_end(events) as (before, happens), closing(events.open("events")) as after:
        before.store(forwarder.chunk(rows[:8]), exactly_once=True)
        late = forwarder.chunk(rows[:20])
        forwarder.epoch += 1
        after.connect()
        link = after._link  # type: ignore[attr-defined]
        begin, done = link.producer, list[Any]()

        def fence(name: str, **more: Any) -> Any:
            if name.endswith("-0") and before._producer is not None:
                before._producer.commit_transaction(30)  # at the last moment
                before._producer = None
            return begin(name, **more)

        def take_over() -> None:
            link.producer = fence
            done.append(after.store(of(forwarder, rows, 1, 2, 3), exactly_once=True))

        happens.append(take_over)
        with pytest.raises(Unavailable):  # it has ended already, which it does not know
            before.store(late, exactly_once=True)
    assert [(one.messages, one.dropped) for one in done] == [(15, 15)]
    assert len(ids(queue)) == len({*ids(queue)}) == 35


@pytest.mark.parametrize("quality", [MAIN, ONCE])
def test_what_was_stored_just_before_its_owner_was_fenced_is_not_stored_again(
    queue: KafkaQueue, events: Kafka, quality: str
) -> None:
    """Its transaction has ended, but the answer was that it is fenced."""
    forwarder = Forwarder()
    rows = forwarder.messages(20)
    with before_its_end(events) as (destination, happens):
        destination.store(forwarder.chunk([]), exactly_once=True)

        def end_and_fence() -> None:
            destination._producer.commit_transaction(30)
            raise KafkaException(KafkaError(KafkaError._FENCED))

        happens.append(end_and_fence)
        destination.store(forwarder.chunk(rows, prefix=quality), exactly_once=quality == MAIN)
    assert ids(queue) == [row["message_id"] for row in rows]


def test_marks_behind_an_open_transaction_of_another_source_are_waited_for(
    queue: KafkaQueue, events: Kafka
) -> None:
    forwarder, other = Forwarder(), Forwarder()
    rows = forwarder.messages(8)
    with before_its_end(events) as (destination, happens):
        destination.store(other.chunk(other.messages(4)), exactly_once=True)

        def meanwhile() -> None:
            with closing(events.open("events")) as mine:
                mine.connect()
                short = events.bounded(Bounds(statement_seconds=3))
                mine.settings = short  # type: ignore[attr-defined]
                with pytest.raises(Unavailable, match="a transaction that does not end"):
                    short.known("events", other.source, role="test")
                with pytest.raises(Unavailable, match="a transaction that does not end"):
                    mine.store(forwarder.chunk(rows), exactly_once=True)

        happens.append(meanwhile)
        destination.store(other.chunk(other.messages(4)), exactly_once=True)
    with closing(events.open("events")) as mine:
        mine.store(forwarder.chunk(rows), exactly_once=True)
    assert len(ids(queue)) == len({*ids(queue)}) == 16


@contextmanager
def before_its_end(events: Kafka) -> Iterator[tuple[Any, list[Any]]]:
    """A destination, and what happens once, just before its next transaction ends."""
    happens: list[Any] = []
    with closing(events.open("events")) as destination:
        destination.connect()
        link = destination._link  # type: ignore[attr-defined]
        commit = link.commit

        def committed(producer: Any) -> None:
            producer.flush(30)  # its messages and marks are there, but for the end
            while happens:
                happens.pop()()
            commit(producer)

        link.commit = committed
        yield destination, happens
        assert not happens


# What it takes


@pytest.mark.parametrize(
    ("columns", "given", "reason"),
    [
        ({"body": b"x" * 20_001}, {}, "more than its topic takes"),
        ({"headers": '{"a": "%s"}' % ("x" * 20_001)}, {}, "more than its topic takes"),
        ({"key": "x" * 10_001}, {}, "more than its topic takes"),
        ({"headers": '{"saf-id": "x"}'}, {}, "which saf gives"),
        ({"to_service": "x" * 250}, {}, "more than 249"),
        ({"to_service": ".."}, {"topic": "{service}"}, "is not a topic's name"),
        ({"to_service": "__consumer_offsets"}, {"topic": "{service}"}, "the cluster's own"),
    ],
    ids=["body", "headers", "key", "ours", "long", "dots", "internal"],
)
def test_what_a_topic_does_not_take_is_rejected_before_anything_is_stored(
    queue: KafkaQueue, columns: dict[str, Any], given: dict[str, Any], reason: str
) -> None:
    topic = f"{queue.prefix}.billing"
    limited = NewTopic(topic, 1, config={"max.message.bytes": "20000"})
    admin = queue.server.admin()
    for made in admin.create_topics([limited]).values():
        made.result()
    forwarder = Forwarder()
    rows = [forwarder.message(), forwarder.message(**columns)]
    with closing(queue.settings(step_rows=1, **given).open("events")) as destination:
        with pytest.raises(Rejected, match=reason):
            destination.store(forwarder.chunk(rows), exactly_once=True)
        assert ids(queue) == []
    many = [forwarder.message(body=b"x" * 9_000) for _ in range(20)]  # no batch is too large
    with closing(queue.settings().open("events")) as destination:
        destination.store(forwarder.chunk(many), exactly_once=True)
    assert ids(queue) == [row["message_id"] for row in many]


def test_the_same_key_goes_to_the_partition_that_java_would_choose(queue: KafkaQueue) -> None:
    forwarder = Forwarder()
    rows = [forwarder.message(key=key) for key in ("order-1", "order-2", "grüezi", "", "k") * 2]
    with closing(queue.settings(partitions=7).open("events")) as destination:
        destination.store(forwarder.chunk(rows), exactly_once=True)
    found = {one.key().decode(): one.partition() for one in queue.messages(*queue.topics())}  # type: ignore[union-attr]
    assert found == {key: murmur2(key.encode()) % 7 for key in found}
    assert len(found) == 5


def murmur2(data: bytes) -> int:
    """The hash of Kafka's own clients, which is positive."""
    mask, m, h = 0xFFFFFFFF, 0x5BD1E995, 0x9747B28C ^ len(data)
    for at in range(0, len(data) - len(data) % 4, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ (k >> 24)) * m & mask)
    if rest := data[len(data) - len(data) % 4 :]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return (h ^ (h >> 15)) & 0x7FFFFFFF


def test_a_service_whose_name_no_topic_can_have_gets_one_that_is_near(
    app: Dsn, queue: KafkaQueue, events: Kafka
) -> None:
    with connect(app) as connection:
        send_to(connection, "//example.com/grüezi", "1")
    forward(app, chunk_rows=3, events=events)
    (one,) = queue.entries("__example.com_gr_ezi")
    assert (one["saf-service"], one["body"]) == ("//example.com/grüezi", "1")


# What is refused


@pytest.mark.parametrize(
    ("partitions", "policy", "reason"),
    [(1, "delete", "forgets marks, because its cleanup.policy is delete"),
     (2, "compact", "has 2 partitions")],
)  # fmt: skip
def test_a_topic_that_would_lose_marks_is_refused_with_what_to_set(
    queue: KafkaQueue, events: Kafka, partitions: int, policy: str, reason: str
) -> None:
    admin = queue.server.admin()
    marks = NewTopic(queue.marks, partitions, config={"cleanup.policy": policy})
    for made in admin.create_topics([marks]).values():
        made.result()
    forwarder = Forwarder()
    with closing(events.open("events")) as destination, pytest.raises(Refused, match=reason):
        destination.store(forwarder.chunk(forwarder.messages(1)), exactly_once=True)
    with pytest.raises(Refused, match=reason):
        [*events.problems("events")]
    assert ids(queue) == []


def test_who_has_a_certificate_may_write_there_and_nobody_else(queue: KafkaQueue) -> None:
    assert queue.server.certificate is not None
    public, key = queue.server.certificate
    there: dict[str, Any] = {"brokers": f"localhost:{queue.server.tls}", "security_protocol": "SSL"}
    files = {"ca_file": public, "certificate_file": public, "key_file": key}
    forwarder = Forwarder()
    with closing(queue.settings(**there, **files).open("events")) as destination:
        destination.store(forwarder.chunk(forwarder.messages(4)), exactly_once=True)
    assert len(ids(queue)) == 4
    for lacking in ({}, {"ca_file": public}):
        with pytest.raises(SafError, match=r"(?i)ssl"):
            queue.settings(**there, **lacking).identity("events")


RIGHTS = [
    line.split()
    for line in (ROOT / "docs" / "destinations.md").read_text().splitlines()
    if line.startswith("kafka-acls.sh")
]


def test_the_rights_that_the_page_lists_are_enough_and_each_is_named_if_it_lacks(
    queue: KafkaQueue,
) -> None:
    admin = queue.server.admin()
    given = [right for words in RIGHTS for right in rights(words, queue)]
    assert {one.restype for one in given} == {ResourceType.TOPIC, ResourceType.TRANSACTIONAL_ID}
    for made in admin.create_acls(given).values():
        made.result()
    events = queue.settings(
        brokers=f"127.0.0.1:{queue.server.sasl}",
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        username="saf",
        password=SecretStr(PASSWORD),
    )
    forwarder = Forwarder()
    with closing(events.open("events")) as destination:
        destination.store(forwarder.chunk(forwarder.messages(4)), exactly_once=True)
    assert len(ids(queue)) == 4
    assert events.guarantee("events").promise.startswith("exactly once")
    with events.reading("events") as reading:
        assert reading.identity() == events.identity("events")
    nobody = events.model_copy(update={"username": "nobody"}).bounded(BOUNDS)
    with (
        closing(nobody.open("events")) as destination,
        pytest.raises(Refused, match=r"what docs/destinations\.md lists") as caught,
    ):
        destination.store(forwarder.chunk(forwarder.messages(4)), exactly_once=True)
    assert PASSWORD not in str(caught.value)


def test_who_has_a_token_for_the_clients_credentials_is_let_in_and_nobody_else(
    queue: KafkaQueue,
) -> None:
    forwarder = Forwarder()
    with token_server("robot", PASSWORD) as tokens:
        given = {
            "brokers": f"127.0.0.1:{queue.server.sasl}",
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "OAUTHBEARER",
            "sasl_oauthbearer_token_endpoint_url": tokens.address,
            "sasl_oauthbearer_client_id": "robot",
            "sasl_oauthbearer_client_secret": PASSWORD,
            "sasl_oauthbearer_scope": "kafka",
        }
        events = queue.settings(**given)
        with closing(events.open("events")) as destination:
            destination.store(forwarder.chunk(forwarder.messages(4)), exactly_once=True)
        assert len(ids(queue)) == 4
        assert events.guarantee("events").promise.startswith("exactly once")
        with events.reading("events") as reading:
            assert reading.identity() == events.identity("events")
        assert {*tokens.asked} == {"kafka"}
        for wrong, said in [
            ({"sasl_oauthbearer_client_secret": f"{PASSWORD}-other"}, "invalid_client"),
            ({"sasl_oauthbearer_scope": "other"}, "insufficient_scope"),
            ({"sasl_oauthbearer_token_endpoint_url": "http://127.0.0.1:9"}, "Failed to connect"),
        ]:
            with (
                closing(queue.settings(**{**given, **wrong}).open("events")) as destination,
                pytest.raises(Refused, match=said) as caught,
            ):
                destination.connect()
            assert "Fix sasl_oauthbearer_… in saf.toml, or the token endpoint" in str(caught.value)
            assert PASSWORD not in str(caught.value)


def rights(words: Sequence[str], queue: KafkaQueue) -> Iterator[Any]:
    """What a command of the page gives, for the topics of a test."""
    said = {name: words[at + 1] for at, name in enumerate(words) if name.startswith("--")}
    operations = [words[at + 1] for at, name in enumerate(words) if name == "--operation"]
    assert said["--allow-principal"] == "User:saf"
    prefixed = said.get("--resource-pattern-type") == "prefixed"
    if "--topic" in said:
        kind, name = ResourceType.TOPIC, said["--topic"]
        name = queue.marks if name == "saf.marks" else name.replace("orders.", f"{queue.prefix}.")
    else:
        kind, name = ResourceType.TRANSACTIONAL_ID, said["--transactional-id"]
    pattern = ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL
    for operation in operations:
        yield AclBinding(
            kind, name, pattern, "User:saf", "*",
            AclOperation[{"DescribeConfigs": "DESCRIBE_CONFIGS"}.get(operation, operation.upper())],
            AclPermissionType.ALLOW,
        )  # fmt: skip


# What is there


def test_what_was_removed_is_not_taken_for_lost(app: Dsn, queue: KafkaQueue, events: Kafka) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    admin = queue.server.admin()
    there = TopicPartition(f"{queue.prefix}.billing", 0, 2)
    for deleted in admin.delete_records([there]).values():
        deleted.result()
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.counts, found.same) == ({"not_compared": 5}, True)
    assert "2 offsets of its topic" in found.unread["events"]


def test_what_is_there_twice_is_found(app: Dsn, queue: KafkaQueue, events: Kafka) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    (topic,) = queue.topics()
    first = queue.messages(topic)[0]
    producer = Producer(queue.server.client())
    producer.produce(topic, first.value(), first.key(), headers=first.headers())
    producer.flush(30)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert found.counts == {"duplicate": 1}


def test_marks_that_were_lost_are_noticed_while_the_messages_are_there(
    app: Dsn, queue: KafkaQueue, events: Kafka
) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, events=events)
    admin = queue.server.admin()
    for deleted in admin.delete_topics([queue.marks]).values():
        deleted.result()
    send_numbers(app, 1)
    (said,) = errors(app, events)
    assert "has lost messages that it acknowledged" in said
    assert texts(queue) == ["0"]


def test_what_its_settings_give_is_said_with_the_setting_that_gives_more(
    queue: KafkaQueue, events: Kafka
) -> None:
    said = events.guarantee("events")
    assert said.server.startswith("Kafka cluster ")
    assert f"topic {queue.marks}, which is made at the first message" in said.server
    forwarder = Forwarder()
    with closing(events.open("events")) as destination:
        destination.store(forwarder.chunk(forwarder.messages(SHARDS)), exactly_once=True)
    (topic,) = queue.topics()
    admin = queue.server.admin()
    unclean = ConfigEntry(
        "unclean.leader.election.enable", "true",
        incremental_operation=AlterConfigOpType.SET,
    )  # fmt: skip
    wanted = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[unclean])
    for set_ in admin.incremental_alter_configs([wanted]).values():
        set_.result()
    said = events.guarantee("events")
    assert "a crash of a broker's process loses nothing" in said.promise
    cures = [cure for _, cure in said.more]
    assert f"3 replicas, and min.insync.replicas = 2, for topic {topic}" in cures
    assert f"unclean.leader.election.enable = false for topic {topic}" in cures


def test_a_consumer_of_committed_messages_sees_no_open_transaction(
    queue: KafkaQueue, events: Kafka
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(20)
    with before_its_end(events) as (destination, happens):
        destination.store(forwarder.chunk(rows[:10]), exactly_once=True)
        happens.append(lambda: seen.extend(ids(queue)))
        seen: list[UUID] = []
        destination.store(forwarder.chunk(rows), exactly_once=True)
    assert seen == [row["message_id"] for row in rows[:10]]
    assert ids(queue) == [row["message_id"] for row in rows]


# Bodies in the form of a schema registry

PAID = {"type": "record", "name": "Paid", "fields": [{"name": "order", "type": "string"}]}


def test_avro_bodies_are_read_by_confluents_client_and_one_that_does_not_fit_is_rejected(
    queue: KafkaQueue,
) -> None:
    with schema_registry() as registry:
        registry.register(f"{queue.prefix}.billing-value", {"schema": json.dumps(PAID)})
        settings = queue.settings(format="avro", schema_registry=registry.address)
        forwarder = Forwarder()
        bodies = [b'{"order": "A-1"}', b'{"order": "A-2"}', b'{"order": 3}']
        rows = [forwarder.message(body=body, message_type="Paid") for body in bodies]
        with closing(settings.open("events")) as destination:
            with pytest.raises(Rejected, match="order: is not text"):
                destination.store(forwarder.chunk(rows), exactly_once=True)
            for _ in range(2):
                destination.store(forwarder.chunk(rows[:2]), exactly_once=True)
        with SchemaRegistryClient({"url": registry.address}) as client:
            read = AvroDeserializer(client)
            found = [read(one.value(), VALUE) for one in queue.messages(*queue.topics())]
        assert sorted(one["order"] for one in found) == ["A-1", "A-2"]
        assert sorted(ids(queue)) == sorted(row["message_id"] for row in rows[:2])
