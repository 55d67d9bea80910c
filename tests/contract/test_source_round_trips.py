"""PostgreSQL, a topic, PostgreSQL: saf at both ends, killed everywhere; each once, in order."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from uuid import uuid4

import pytest

from saf.database import Dsn
from tests.kafka_server import KafkaServer
from tests.nats_server import nats_server
from tests.programs import received, saf, send
from tests.rabbitmq_server import Queues, RabbitmqServer
from tests.receivers import prepare
from tests.redis_server import RedisServer
from tests.tiers import sized

POINTS = (
    *("source_read:1", "mom_insert:1", "mom_commit:1", "source_stored:1", "mark_commit:1"),
    *("mom_commit:2", "mark_forwarded:1", "mom_insert:3", "source_read:2", "mom_commit:4"),
)


def round_trip(app: Dsn, mom: Dsn, file: Path, destination: str, source: str) -> None:
    """Send, and forward by runs that are killed at each point in turn; then to the end."""
    prepare(mom)
    file.write_text(
        f"[brokers.app]\ndsn = {json.dumps(app.conninfo)}\n"
        f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
        f"[destinations.events]\n{destination}\n"
        f'[sources.payments]\nservice = "billing"\ninto = "mom"\nchunk_rows = 30\n{source}\n'
        '[forwarder]\ndefault_destination = "events"\nchunk_rows = 100\n'
    )
    sent: list[str] = []
    for number, point in enumerate(POINTS):
        sent += send(app, sized(60, 600), f"round {number}")
        saf("forward", "--config", file, env={"SAF_FAILPOINT": point})
    for _ in range(2):
        done = saf("forward", "--config", file)
        assert done.returncode == 0, done.stderr
    found = received(mom)
    assert sorted(body for _, body in found) == sorted(sent)
    by_key: dict[str, list[str]] = defaultdict(list)
    for key, body in found:
        by_key[key].append(body)
    order = {body: place for place, body in enumerate(sent)}
    for bodies in by_key.values():
        assert bodies == sorted(bodies, key=order.__getitem__)


@pytest.mark.slow
def test_a_round_trip_through_redis(app: Dsn, mom: Dsn, queue: RedisServer, tmp_path: Path) -> None:
    server = f'kind = "redis"\nserver = "{queue.address}"'
    round_trip(app, mom, tmp_path / "saf.toml", server, f'{server}\ntopic = "{{saf}}:billing"')


@pytest.mark.slow
def test_a_round_trip_through_nats(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as queue:
        server = f'kind = "nats"\nserver = "{queue.address}"'
        source = f'{server}\nstream = "SAF"\ntopic = "saf.billing"'
        round_trip(app, mom, tmp_path / "saf.toml", server, source)


@pytest.mark.slow
def test_a_round_trip_through_a_stream_of_rabbitmq(
    app: Dsn, mom: Dsn, rabbitmq: RabbitmqServer, tmp_path: Path
) -> None:
    server = f'kind = "rabbitmq_stream"\nserver = "{rabbitmq.address}"'
    round_trip(app, mom, tmp_path / "saf.toml", server, f'{server}\ntopic = "billing"')


@pytest.mark.slow
def test_a_round_trip_through_a_queue_of_rabbitmq(
    app: Dsn, mom: Dsn, rabbitmq_queues: Queues, tmp_path: Path
) -> None:
    """The destination sends some messages twice; the window drops the second ones."""
    server = f'kind = "rabbitmq"\nserver = "{rabbitmq_queues.address}"'
    destination = f'{server}\ntopic = "{{service}}"'
    round_trip(app, mom, tmp_path / "saf.toml", destination, f'{server}\ntopic = "billing"')


@pytest.mark.slow
def test_a_round_trip_through_kafka(
    app: Dsn, mom: Dsn, running_kafka: KafkaServer, tmp_path: Path
) -> None:
    topic = f"t{uuid4().hex[:8]}"
    server = f'kind = "kafka"\nbrokers = "{running_kafka.address}"'
    destination = f'{server}\ntopic = "{topic}.{{service}}"\nmarks_topic = "{topic}.marks"'
    destination += "\npartitions = 3"
    round_trip(app, mom, tmp_path / "saf.toml", destination, f'{server}\ntopic = "{topic}.billing"')
