"""`saf reconcile --source`: whether an inbox has all of a topic; and what a purge leaves of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from saf import receive
from saf.config import load
from saf.database import Dsn, fetch
from saf.errors import SourceSetBack, UsageError
from saf.operating.maintenance import purge_broker
from saf.operating.repair.reconcile import topics
from saf.operating.repair.reconcile.topics import Compared, compare
from tests.pipeline import bodies, connect
from tests.programs import last_json, saf
from tests.receivers import prepare
from tests.redis_server import RedisServer
from tests.topics import TOPIC, add, read, redis_source, written

Compare = Callable[..., Compared]
EVENT = {"content-type": "application/cloudevents+json"}


@pytest.fixture
def billing(mom: Dsn) -> Dsn:
    """A store that has the service."""
    prepare(mom)
    return mom


@pytest.fixture
def config(queue: RedisServer, billing: Dsn, tmp_path: Path) -> Path:
    return written(tmp_path / "saf.toml", billing, queue, chunk_rows=7)


@pytest.fixture
def compared(config: Path) -> Compare:
    return lambda **given: compare(load(config), TOPIC, **given)


def execute(dsn: Dsn, statement: str) -> list[Any]:
    with connect(dsn) as connection:
        return fetch(connection, statement)


def numbers(found: Compared) -> tuple[int, int, int, int, int]:
    return found.compared, found.pending, found.set_aside, found.missing, found.duplicate


@pytest.mark.parametrize("most", [topics.MOST_IDS, 10])
def test_an_inbox_that_has_all_that_was_read_is_the_same(
    queue: RedisServer, billing: Dsn, compared: Compare, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(topics, "MOST_IDS", most)
    add(queue, *map(str, range(30)))
    assert numbers(compared()) == (0, 30, 0, 0, 0)  # nothing was read
    add(queue, "bad", **EVENT)
    read(redis_source(queue), billing)
    add(queue, *map(str, range(5)))
    found = compared()
    assert found.same
    assert numbers(found) == (30, 5, 1, 0, 0)


@pytest.mark.parametrize("most", [topics.MOST_IDS, 10])
def test_what_the_inbox_lacks_or_has_twice_is_counted_and_named(
    queue: RedisServer, billing: Dsn, compared: Compare, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(topics, "MOST_IDS", most)
    places = add(queue, *map(str, range(30)))
    read(redis_source(queue), billing)
    lost = "DELETE FROM saf.inbox WHERE body IN ('3', '17') RETURNING message_id"
    ids = {message_id for (message_id,) in execute(billing, lost)}
    twice = """
    INSERT INTO saf.inbox (message_id, source, to_service, body, created_at)
    SELECT message_id, source, to_service, body, created_at FROM saf.inbox WHERE body = '5'
    RETURNING id
    """
    execute(billing, twice)
    found = compared()
    assert not found.same
    assert numbers(found) == (30, 0, 0, 2, 1)
    assert {one.message_id for one in found.named} == ids
    assert {one.as_dict()["position"] for one in found.named} == {places[3], places[17]}
    assert len(compared(limit=1).named) == 1


def test_only_messages_of_the_range_are_compared(
    queue: RedisServer, billing: Dsn, compared: Compare
) -> None:
    add(queue, *map(str, range(3)))
    read(redis_source(queue), billing)
    execute(billing, "DELETE FROM saf.inbox RETURNING id")
    later = datetime(2199, 1, 1, tzinfo=UTC)
    assert numbers(compared(since=later)) == (0, 0, 0, 0, 0)
    assert compared(until=later).missing == 3


def test_messages_that_the_topic_no_longer_has_are_not_expected(
    queue: RedisServer, billing: Dsn, compared: Compare
) -> None:
    add(queue, *map(str, range(10)))
    read(redis_source(queue), billing)
    queue.client().xtrim(TOPIC, maxlen=4, approximate=False)
    assert numbers(compared()) == (4, 0, 0, 0, 0)


def test_a_topic_that_was_set_back_is_refused_and_not_compared(
    queue: RedisServer, billing: Dsn, compared: Compare
) -> None:
    first, *_ = add(queue, *map(str, range(10)))
    read(redis_source(queue), billing)
    queue.client().delete(TOPIC)
    queue.client().xadd(TOPIC, {"body": "0"}, id=first)
    with pytest.raises(SourceSetBack):
        compared()


def test_a_queue_which_keeps_nothing_cannot_be_compared(tmp_path: Path) -> None:
    file = tmp_path / "saf.toml"
    file.write_text(
        '[destinations.mom]\ndsn = "dbname=mom"\n[sources.payments]\nkind = "rabbitmq"\n'
        'server = "amqp://x"\ntopic = "t"\nservice = "billing"\n'
    )
    with pytest.raises(UsageError, match="is a queue: its messages are gone"):
        compare(load(file), "payments")


def test_the_command_says_what_is_missing_and_exits_with_1(
    queue: RedisServer, billing: Dsn, config: Path
) -> None:
    add(queue, *map(str, range(10)))
    read(redis_source(queue), billing)
    done = saf("reconcile", "--source", TOPIC, "--config", config)
    assert done.returncode == 0, done.stderr
    assert "10 compared, 0 not read yet, 0 set aside, 0 missing in mom" in done.stdout
    ((lost,),) = execute(billing, "DELETE FROM saf.inbox WHERE body = '3' RETURNING message_id")
    done = saf("reconcile", "--source", TOPIC, "--config", config)
    assert done.returncode == 1
    assert str(lost) in done.stdout
    done = saf("reconcile", "--source", TOPIC, "--config", config, "--json")
    assert done.returncode == 1
    answer = last_json(done.stdout)
    assert (answer["missing"], answer["pending"], answer["same"]) == (1, 0, False)
    assert [one["message_id"] for one in answer["differences"]] == [str(lost)]


def test_a_purge_keeps_what_was_not_handled_and_reads_nothing_again(
    queue: RedisServer, billing: Dsn, config: Path
) -> None:
    add(queue, *map(str, range(10)))
    read(redis_source(queue), billing)
    purge(billing)
    assert len(bodies(billing)) == 10  # nobody has handled them
    with receive(billing, "billing", max_messages=100) as delivery:
        assert len(list(delivery)) == 10
    purge(billing)
    assert bodies(billing) == []
    # what was purged on purpose is not missing
    with config.open("a") as file:
        file.write("[purge]\nretention_seconds = 0\n")
    found = compare(load(config), TOPIC)
    assert (found.range.purged, found.same) == (("inbox",), True)
    assert read(redis_source(queue), billing).messages == 0
    add(queue, "new")
    assert read(redis_source(queue), billing).messages == 1
    assert bodies(billing) == ["new"]


def purge(dsn: Dsn) -> None:
    """Leave the slot that ids are in, and purge all that may go."""
    for _ in range(3):
        with dsn.connect(role="purge", autocommit=True) as connection:
            purge_broker(connection, retention_seconds=0, rotate_after_seconds=0)
