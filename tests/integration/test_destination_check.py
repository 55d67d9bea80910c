"""`saf destination check`: what it says of each kind, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined] # it is public

from saf.database import Dsn
from saf_demo.servers import free_port
from tests.kafka_server import KafkaQueue, KafkaServer
from tests.nats_server import nats_server
from tests.object_store import ObjectStore
from tests.programs import saf
from tests.rabbitmq_server import RabbitmqServer
from tests.redis_server import redis_server
from tests.schema_registry import schema_registry


def configuration(folder: Path, app: Dsn, destination: str) -> None:
    (folder / "saf.toml").write_text(
        f"[brokers.app]\ndsn = {json.dumps(app.conninfo)}\n[destinations.there]\n{destination}\n"
    )


def test_it_says_what_a_redis_server_gives_and_whether_it_can_be_used(
    app: Dsn, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis", appendfsync="everysec") as server:
        configuration(tmp_path, app, f'kind = "redis"\nserver = "{server.address}"')
        said = saf("destination", "check", "there", cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        assert "destination 'there': Redis 7" in said.stdout
        assert (
            "not guaranteed: a crash loses messages acknowledged in the last second or two"
            in said.stdout
        )
        assert "fix: appendfsync always in redis.conf" in said.stdout
        as_json = json.loads(saf("destination", "check", "there", "--json", cwd=tmp_path).stdout)
        assert (as_json["problems"], len(as_json["more"])) == ([], 1)
        doctor = json.loads(saf("doctor", "--json", cwd=tmp_path).stdout)["findings"]
        there = [(one["check"], one["severity"]) for one in doctor if "there" in one["where"]]
        assert there == [("reachable", "ok"), ("promise", "warning")]

        server.client().config_set("maxmemory-policy", "allkeys-lru")
        refused = saf("destination", "check", "there", cwd=tmp_path)
        assert refused.returncode == 2
        assert "maxmemory-policy is allkeys-lru" in refused.stderr
    gone = saf("destination", "check", "there", cwd=tmp_path)
    assert gone.returncode == 75
    assert "destination 'there' is unavailable" in gone.stderr
    unknown = saf("destination", "check", "thee", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "did you mean 'there'" in unknown.stderr


def test_it_says_what_a_nats_server_gives_and_whether_it_can_be_used(
    app: Dsn, tmp_path: Path
) -> None:
    with nats_server(tmp_path / "nats") as server:
        configuration(tmp_path, app, f'kind = "nats"\nserver = "{server.address}"')
        said = saf("destination", "check", "there", cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        assert "stream SAF, which is made at the first message" in said.stdout
        subjects = ["saf.>", "saf-marks.SAF.>"]
        server.ask("$JS.API.STREAM.CREATE.SAF", name="SAF", subjects=subjects, allow_atomic=True)
        as_json = json.loads(saf("destination", "check", "there", "--json", cwd=tmp_path).stdout)
        assert as_json["problems"] == []
        assert [one["cure"] for one in as_json["more"]][1:] == ["allow_rollup_hdrs", "allow_direct"]
        server.ask("$JS.API.STREAM.UPDATE.SAF", name="SAF", subjects=subjects, max_msgs=5)
        refused = saf("destination", "check", "there", cwd=tmp_path)
        assert refused.returncode == 2
        assert "takes no batches" in refused.stderr
    gone = saf("destination", "check", "there", cwd=tmp_path)
    assert gone.returncode == 75
    assert "destination 'there' is unavailable" in gone.stderr


@pytest.mark.full
def test_it_says_what_a_kafka_cluster_gives_and_whether_it_can_be_used(
    app: Dsn, tmp_path: Path, running_kafka: KafkaServer
) -> None:
    queue = KafkaQueue(server=running_kafka)
    there = f'kind = "kafka"\nbrokers = "{running_kafka.address}"\nmarks_topic = "{queue.marks}"'
    configuration(tmp_path, app, there)
    said = saf("destination", "check", "there", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "destination 'there': Kafka cluster" in said.stdout
    assert "which is made at the first message" in said.stdout
    admin, marks = running_kafka.admin(), NewTopic(queue.marks, 3)
    for made in admin.create_topics([marks]).values():
        made.result()
    refused = saf("destination", "check", "there", cwd=tmp_path)
    assert refused.returncode == 2
    assert "has 3 partitions. Choose another marks_topic" in refused.stderr
    nowhere = f'kind = "kafka"\nbrokers = "127.0.0.1:{free_port()}"'
    configuration(tmp_path, app, nowhere)
    gone = saf("destination", "check", "there", cwd=tmp_path)
    assert gone.returncode == 75
    assert "destination 'there' is unavailable" in gone.stderr
    assert "Connection refused" in gone.stderr
    assert "%3|" not in gone.stderr


@pytest.mark.full
def test_it_asks_the_schema_registry_of_a_kafka_cluster(
    app: Dsn, tmp_path: Path, running_kafka: KafkaServer
) -> None:
    queue = KafkaQueue(server=running_kafka)
    there = (
        f'kind = "kafka"\nbrokers = "{running_kafka.address}"\nmarks_topic = "{queue.marks}"\n'
        'topic = "orders"\nformat = "avro"\n'
    )
    with schema_registry() as registry:
        configuration(tmp_path, app, f'{there}schema_registry = "{registry.address}"')
        refused = saf("destination", "check", "there", cwd=tmp_path)
        assert refused.returncode == 2
        assert f"schema registry {registry.address}: " in refused.stderr
        assert "Register a schema for subject 'orders-value'" in refused.stderr
        registry.register("orders-value", {"schema": '{"type": "string"}'})
        assert saf("destination", "check", "there", cwd=tmp_path).returncode == 0
    gone = saf("destination", "check", "there", cwd=tmp_path)
    assert gone.returncode == 75
    assert f"schema registry {registry.address}: " in gone.stderr


@pytest.mark.full
def test_it_says_what_a_rabbitmq_server_gives_and_whether_it_can_be_used(
    app: Dsn, rabbitmq: RabbitmqServer, tmp_path: Path
) -> None:
    server = f'kind = "rabbitmq_stream"\nserver = "{rabbitmq.address}"'
    configuration(tmp_path, app, server)
    said = saf("destination", "check", "there", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "destination 'there': RabbitMQ 3." in said.stdout
    assert "promise: exactly once" in said.stdout
    login = 'username = "saf"\npassword = "hunter2-canary"'
    configuration(tmp_path, app, f"{server}\n{login}")
    refused = saf("destination", "check", "there", cwd=tmp_path)
    assert refused.returncode == 2
    assert "the login is refused. Fix its login" in refused.stderr
    assert "hunter2" not in refused.stderr + refused.stdout
    configuration(tmp_path, app, 'kind = "rabbitmq_stream"\nserver = "rabbitmq-stream://[::1]:1"')
    gone = saf("destination", "check", "there", cwd=tmp_path)
    assert gone.returncode == 75
    assert "destination 'there' is unavailable" in gone.stderr


def test_it_says_what_a_broker_and_a_folder_give(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    configuration(tmp_path, app, f"dsn = {json.dumps(mom.conninfo)}")
    said = saf("destination", "check", "there", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert f"database '{mom.database}'" in said.stdout
    assert "promise: exactly once; a crash" in said.stdout
    (tmp_path / "lake").mkdir()
    configuration(tmp_path, app, 'kind = "jsonl"\nfolder = "lake"\nquality = "at_least_once"')
    said = saf("destination", "check", "there", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "promise: at least once" in said.stdout


def in_a_bucket(objects: ObjectStore, kind: str, folder: Path, app: Dsn, of: str) -> str:
    """A destination in a bucket of a kind, in saf.toml; return the bucket."""
    bucket = objects.bucket(of)
    where, options = f"s3://{bucket}/lake", objects.options
    if kind == "iceberg":
        options = {name: one.get_secret_value() for name, one in objects.properties.items()}
    said = {
        "delta": f'table = "{where}"\n[destinations.there.storage_options]\n',
        "iceberg": f'catalog = "sqlite:///{folder}/catalog.db"\ntable = "shop.messages"\n'
        f'warehouse = "{where}"\n[destinations.there.properties]\n',
    }
    more = "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in options.items())
    configuration(folder, app, f'kind = "{kind}"\n{said[kind]}{more}')
    return bucket


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_it_tries_an_object_store_and_leaves_nothing_there(
    app: Dsn, tmp_path: Path, objects: ObjectStore, kind: str
) -> None:
    bucket = in_a_bucket(objects, kind, tmp_path, app, "bucket")
    said = saf("destination", "check", "there", cwd=tmp_path)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "promise: exactly once" in said.stdout
    assert [key for key in objects.keys(bucket) if not key.endswith("/")] == []  # but folders


@pytest.mark.parametrize(
    "case",
    [
        ("delta", "unconditional", 2, "lets two commits write the same file of a table's log"),
        ("delta", "undeletable", 1, "its login may not delete: 11 files of a probe stay at s3://"),
        ("delta", "readonly", 2, "lacked the necessary privileges"),
        ("iceberg", "undeletable", 1, "its login may not delete: a probe stays at s3://"),
        ("iceberg", "readonly", 2, "ACCESS_DENIED"),
    ],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def test_it_finds_what_an_object_store_does_not_keep(
    app: Dsn, tmp_path: Path, objects: ObjectStore, case: tuple[str, str, int, str]
) -> None:
    kind, of, code, what = case
    in_a_bucket(objects, kind, tmp_path, app, of)
    said = saf("destination", "check", "there", cwd=tmp_path)
    assert said.returncode == code, said.stdout + said.stderr
    assert what in " ".join((said.stdout + said.stderr).split())
    assert ("promise: exactly once" in said.stdout) == (code == 1)
    assert "hunter2" not in said.stdout + said.stderr
