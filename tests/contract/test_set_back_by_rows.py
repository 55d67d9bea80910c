"""What a repair concludes from the rows of a source, and whose rows they are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from saf.broker import services
from saf.database import fetch
from saf.destinations.marks import MAIN, Known, Mark
from saf.operating.repair.rebase import rebase
from saf.operating.repair.replay import replay
from saf.operating.repair.set_back import remembered, set_back
from saf.routing.matching import Route, Routes
from tests.destinations import subscription
from tests.pipeline import send

Connection = psycopg.Connection[Any]
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
CURSORS = "SELECT subscription_id, shard, batch, set_aside_at FROM saf.cursor"
PARKED = """
INSERT INTO saf.parked
    (subscription_id, kind, subject, shard, id, batch, position, to_service, body)
SELECT subscription_id, 'route', 'billing', shard, 7, 3, 1, 'billing', ''
FROM saf.cursor WHERE shard IN (7, 8)
"""
SECOND = timedelta(seconds=1)
HERE = (MAIN, 7)
MOM = uuid4()


@pytest.fixture
def here(source: Connection) -> Connection:
    """A source whose forwarder has batch 5 in hand, beside a reader of its inbox with that name."""
    services.create_service(source, "forwarder")
    source.execute("UPDATE saf.cursor SET batch = 9, epoch = 9, opened_at = now()")
    source.execute(
        "UPDATE saf.cursor SET batch = 5, epoch = 4, open = '1:1:', opened_at = %s, "
        "set_aside_at = ARRAY[%s] WHERE subscription_id = %s",
        [NOON, NOON, subscription(source)],
    )
    return source


def acknowledge(source: Connection, batch: int, destination: object = MOM, shard: int = 7) -> None:
    source.execute(
        "INSERT INTO saf.acknowledged (destination, lane, shard, batch, position, opened_at) "
        "VALUES (%s, '', %s, %s, 1, %s)",
        [destination, shard, batch, NOON],
    )


def known(epoch: int = 4, here: Mark | None = None) -> Known:
    """What the destination says of shard 7."""
    return Known(destination=MOM, marks={HERE: here} if here else {}, epochs={7: epoch})


def test_a_source_remembers_the_newest_mark_of_each_place_of_this_destination(
    here: Connection,
) -> None:
    for batch in (2, 4, 3):
        acknowledge(here, batch)
    acknowledge(here, 5, shard=8)
    acknowledge(here, 6, destination=uuid4())
    found = remembered(here, MOM)
    assert {place: mark.batch for place, mark in found.marks.items()} == {HERE: 4, (MAIN, 8): 5}


def test_a_source_has_in_hand_what_its_forwarder_has_and_not_what_others_read(
    here: Connection,
) -> None:
    found = remembered(here, MOM)
    assert found.subscription_id == subscription(here)
    assert (found.in_hand[7].batch, found.epochs[7]) == (5, 4)
    assert found.in_hand[7].set_aside_at == [NOON]


@pytest.mark.parametrize(("epoch", "is_ahead"), [(3, False), (4, False), (5, True)])
def test_an_epoch_that_the_source_has_not_given_says_that_it_was_set_back(
    here: Connection, epoch: int, is_ahead: bool
) -> None:
    assert set_back(here, "mom", known(epoch)).ahead == ({HERE} if is_ahead else frozenset())


def test_a_time_of_setting_aside_that_the_source_does_not_know_says_that_it_was_set_back(
    here: Connection,
) -> None:
    for seconds, ahead in ((0, frozenset()), (1, {HERE})):
        mark = Mark(set_aside_at=NOON + timedelta(seconds=seconds))
        assert set_back(here, "mom", known(here=mark)).ahead == ahead


def test_a_source_that_lacks_its_forwarders_cursors_was_set_back(here: Connection) -> None:
    here.execute("DELETE FROM saf.subscription WHERE subscription_id = %s", [subscription(here)])
    mark = Mark(batch=5, position=1, opened_at=NOON)
    assert set_back(here, "mom", known(here=mark)).ahead == {HERE}


def test_a_mark_that_is_higher_is_farther_and_one_that_is_lower_is_behind(
    here: Connection,
) -> None:
    acknowledge(here, 3)
    for batch, farther, behind in ((2, 0, 1), (3, 0, 0), (5, 1, 0)):
        mark = Mark(batch=batch, position=1, opened_at=NOON, acknowledged=True)
        found = set_back(here, "mom", known(here=mark))
        assert (len(found.farther), len(found.behind)) == (farther, behind)
        assert found.ahead == frozenset()


def test_what_was_acknowledged_while_the_destination_was_asked_is_not_behind(
    here: Connection,
) -> None:
    acknowledge(here, 2)
    before = remembered(here, MOM)
    acknowledge(here, 3)
    mark = Mark(batch=2, position=1, opened_at=NOON, acknowledged=True)
    assert set_back(here, "mom", known(here=mark)).behind == {HERE}
    assert set_back(here, "mom", known(here=mark), before).behind == frozenset()


def test_a_repair_lets_the_forwarder_go_on_in_the_shards_in_which_a_destination_is_farther(
    here: Connection,
) -> None:
    """One of two destinations is. Other shards, and what others read, stay where they are."""
    here.execute(PARKED)
    mine = subscription(here)
    here.execute(
        "UPDATE saf.cursor SET opened_at = %s WHERE subscription_id = %s AND shard = 8",
        [NOON + SECOND, mine],
    )
    mark = Mark(batch=20, position=1, opened_at=NOON, set_aside_at=NOON + SECOND)
    other = Known(destination=uuid4(), marks={}, epochs={})
    done = rebase(here, {"mom": known(here=mark), "other": other})
    assert done is not None
    assert (done.destinations_ahead, done.remembered_until) == (("mom",), NOON + SECOND)
    after = {shard: (5, [NOON]) for shard in range(64)} | {7: (25, [NOON, NOON + SECOND])}
    others = dict.fromkeys(range(64), (9, None))
    found: dict[int, dict[int, tuple[int, list[datetime] | None]]] = {}
    for number, shard, *place in fetch(here, CURSORS):
        found.setdefault(number, {})[shard] = tuple(place)
    assert found.pop(mine) == after
    assert [*found.values()] == [others]
    parked = fetch(here, "SELECT subscription_id, shard, batch FROM saf.parked")
    assert {place for place in parked if place[2] != 3} == {(mine, 7, 23)}
    assert len(parked) == 4


def test_what_is_replayed_is_due_for_the_forwarder_and_for_no_other_reader_of_that_name(
    here: Connection,
) -> None:
    send(here, "lost")
    lost = fetch(here, "SELECT shard, id FROM saf.outbox")
    assert list(replay(here, lost, Routes(routes=(Route(destination="mom"),)), "")) == ["mom"]
    for table in ("parked", "backoff"):
        found = fetch(here, f"SELECT subscription_id FROM saf.{table}")
        assert found == [(subscription(here),)]
