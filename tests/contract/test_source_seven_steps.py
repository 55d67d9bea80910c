"""The seven steps with a queue on either side, each of which is killed: nothing else to do.

An application's messages go to a topic of a queue by the seven steps. Then the topic is read into
an inbox: a chunk is read, stored, and committed with its mark.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from uuid import uuid4

import pytest

from saf.database import Dsn, fetch
from saf.destinations.kafka import Kafka as KafkaDestination
from saf.destinations.redis import Redis as RedisDestination
from saf.destinations.settings import DestinationSettings
from saf.sources.kafka import Kafka
from saf.sources.redis import Redis
from saf.sources.settings import SourceSettings
from tests.kafka_server import BOUNDS
from tests.pipeline import Cycle, bodies, connect, drain, forwarding_rules
from tests.processes import KEYS, application, run
from tests.receivers import prepare
from tests.topics import read

IN_APPLICATION = ("business_dml", "outbox_insert", "application_commit")
TO_THE_QUEUE = ("mom_insert", "mom_commit", "mark_forwarded", "mark_commit")
FROM_THE_QUEUE = ("source_read", "mom_insert", "mom_commit", "source_stored")
ROWS = 4

Sides = tuple[DestinationSettings, SourceSettings]
KINDS = ["redis", pytest.param("kafka", marks=pytest.mark.slow)]


@pytest.fixture(params=KINDS)
def sides(request: pytest.FixtureRequest) -> Sides:
    """A topic as a destination and as a source."""
    if request.param == "redis":
        server = request.getfixturevalue("queue").address
        topic = "{saf}:billing"
        source = Redis(server=server, topic=topic, service="billing", chunk_rows=ROWS)
        return RedisDestination(server=server), source
    brokers, name = request.getfixturevalue("running_kafka").address, f"t{uuid4().hex[:8]}"
    destination = KafkaDestination(
        brokers=brokers, topic=f"{name}.{{service}}", marks_topic=f"{name}.marks", partitions=2
    )
    kafka = Kafka(brokers=brokers, topic=f"{name}.billing", service="billing", chunk_rows=ROWS)
    return destination.bounded(BOUNDS), kafka.bounded(BOUNDS)


@pytest.fixture
def accounts(app: Dsn, mom: Dsn) -> Dsn:
    prepare(mom)
    with connect(app) as connection:
        connection.execute("CREATE TABLE account (id text PRIMARY KEY, version int NOT NULL)")
        connection.execute("INSERT INTO account SELECT generate_series(0, %s)::text, 0", [KEYS - 1])
    return app


def forward(app: Dsn, destination: DestinationSettings) -> None:
    """Forward until nothing is left, in chunks of a few messages."""
    rules = forwarding_rules("exactly_once", chunk_rows=ROWS, mom=destination)
    with Cycle(app, rules) as cycle:
        drain(cycle)


def store(mom: Dsn, source: SourceSettings) -> None:
    """Read the topic to its end, in chunks of a few messages."""
    read(source, mom)


def killed(program: Callable[..., None], *arguments: object, point: str) -> None:
    """Run a program that dies at a step, the first and the second time that it comes there."""
    for nth in (1, 2):
        assert run(program, *arguments, failpoint=f"{point}:{nth}") == -signal.SIGKILL


def check(app: Dsn, mom: Dsn) -> None:
    """Each committed count has arrived once, and each account's in order."""
    with connect(app) as connection:
        accounts = fetch(connection, "SELECT id, version FROM account WHERE version > 0")
    arrived = [body.split() for body in bodies(mom)]
    assert accounts
    assert len(arrived) == sum(version for _, version in accounts)
    for account, version in accounts:
        counts = [int(count) for one, count in arrived if one == account]
        assert counts == [*range(1, version + 1)]


@pytest.mark.parametrize("point", IN_APPLICATION)
def test_an_application_killed_at_a_step(accounts: Dsn, mom: Dsn, sides: Sides, point: str) -> None:
    destination, source = sides
    killed(application, accounts, 1, point=point)
    assert run(application, accounts, 2) == 0
    assert run(forward, accounts, destination) == 0
    assert run(store, mom, source) == 0
    check(accounts, mom)


@pytest.mark.parametrize("point", TO_THE_QUEUE)
def test_a_forwarder_to_a_queue_killed_at_a_step(
    accounts: Dsn, mom: Dsn, sides: Sides, point: str
) -> None:
    destination, source = sides
    assert run(application, accounts, 1) == 0
    killed(forward, accounts, destination, point=point)
    assert run(store, mom, source) == 0
    assert run(forward, accounts, destination) == 0
    assert run(store, mom, source) == 0
    check(accounts, mom)


@pytest.mark.parametrize("point", FROM_THE_QUEUE)
def test_a_reader_of_a_queue_killed_at_a_step(
    accounts: Dsn, mom: Dsn, sides: Sides, point: str
) -> None:
    destination, source = sides
    assert run(application, accounts, 1) == 0
    assert run(forward, accounts, destination) == 0
    killed(store, mom, source, point=point)
    assert run(store, mom, source) == 0
    check(accounts, mom)
