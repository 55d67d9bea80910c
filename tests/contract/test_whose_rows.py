"""Whose rows a statement reads and writes: its own subscription's, destination's, shards', lane's.

Each test has the same rows twice, and looks that only one of the two is met.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from saf.broker import services
from saf.database import Dsn, fetch
from saf.destinations.marks import MAIN, Mark
from saf.engine import acknowledged, kept_results
from saf.errors import SafError
from saf.log.cursor import Batch
from saf.log.shards import NEWEST, Member, living
from saf.receiving import inbox, reading, retries
from saf.receiving.hand import Hand, Reader
from saf.receiving.retries import Policy, Waiting
from saf.setaside import backoff, dead, dropped, in_hand, parking, unhandled, waiting
from saf.setaside.dead import AsStored
from saf.setaside.dropped import Reason
from saf.setaside.lane import NO_BROKER, Kind, Lane
from saf.setaside.selection import DeadLetters, ParkedMessages
from tests.destinations import subscription
from tests.pipeline import connect

Connection = psycopg.Connection[Any]

MINE, OTHER = Lane(destination="mom"), Lane(destination="other")
LATER = datetime.now(UTC) + timedelta(hours=1)
AT_ONE, AT_TWO = UUID(int=1), UUID(int=2)
DOWN = SafError("down")


@pytest.fixture
def mine(source: Connection) -> int:
    """The forwarder's subscription."""
    return subscription(source)


@pytest.fixture
def others(source: Connection) -> int:
    """Another subscription, with the same rows."""
    services.create_service(source, "billing")
    return services.subscription(source, "billing").subscription_id


def park(source: Connection, subscription_id: int, *ids: int, **more: Any) -> None:
    """Messages of one lane, each with an id; by default in the destination's own lane, shard 7."""
    columns = {
        **dict.fromkeys(parking.PARKED_COLUMNS),
        "subscription_id": subscription_id,
        "destination": "mom",
        "kind": "main",
        "subject": "",
        "broker": NO_BROKER,
        "shard": 7,
        "batch": 1,
        "position": 1,
        "to_service": "billing",
        "body": b"",
        "created_at": datetime.now(UTC),
    } | more
    rows = [{**columns, "id": id_, "message_id": UUID(int=id_)} for id_ in ids]
    with source.transaction():
        parking.park(source, rows)


def bury(source: Connection, subscription_id: int, destination: str, *ids: int) -> None:
    columns = dict.fromkeys(dead.DEAD_COLUMNS) | {
        "subscription_id": subscription_id,
        "destination": destination,
        "shard": 7,
        "reason": "rejected",
        "error": "no",
        "to_service": "billing",
        "body": b"",
        "created_at": datetime.now(UTC),
    }
    dead.bury(source, [{**columns, "id": id_, "message_id": UUID(int=id_)} for id_ in ids])


def batch(subscription_id: int, *shards: int, **more: Any) -> Batch:
    given: dict[str, Any] = {
        "log": "outbox",
        "subscription_id": subscription_id,
        "owner": uuid4(),
        "number": 5,
        "done": "1:1:",
        "open": "9:9:",
        "position": 0,
        "route_version": None,
        "opened_at": LATER,
        "epochs": tuple((shard, 1) for shard in shards or (7,)),
    }
    return Batch(**given | more)


def lanes_of(source: Connection, subscription_id: int) -> list[tuple[str, int, bool]]:
    return fetch(
        source,
        "SELECT destination, attempts, next_attempt_at <= now() FROM saf.backoff "
        "WHERE subscription_id = %(number)s ORDER BY 1, kind",
        {"number": subscription_id},
    )


# Lanes


def test_a_lane_is_asked_for_made_due_and_forgotten_for_its_own_subscription(
    source: Connection, mine: int, others: int
) -> None:
    for one in (mine, others):
        park(source, one, 1)
    source.execute("UPDATE saf.backoff SET attempts = 3, next_attempt_at = now() + '1 h'")
    before = lanes_of(source, others)
    backoff.succeeded(source, mine, [MINE])
    assert lanes_of(source, mine) == [("mom", 0, True)]
    assert lanes_of(source, others) == before
    assert backoff.any_due(source, mine)
    assert not backoff.any_due(source, others)
    source.execute("DELETE FROM saf.parked")
    backoff.forget(source, mine, [MINE])
    asked = [fetch(source, backoff.ANY_LANE, {"subscription_id": one}) for one in (mine, others)]
    assert asked == [[(False,)], [(True,)]]
    assert [backoff.summary(source, one).lanes for one in (mine, others)] == [0, 1]
    assert backoff.named(source, mine, [MINE]) == ()
    assert len(backoff.named(source, others, [MINE, OTHER])) == 1


def test_a_lane_is_not_empty_while_a_message_of_it_waits_and_those_of_other_lanes_say_nothing(
    source: Connection, mine: int, others: int
) -> None:
    park(source, mine, 1)
    park(source, mine, 2, destination="other")
    park(source, others, 3)
    source.execute("DELETE FROM saf.parked WHERE id = 1")
    backoff.forget(source, mine, [MINE, OTHER])
    assert [name for name, *_ in lanes_of(source, mine)] == ["other"]
    assert [name for name, *_ in lanes_of(source, others)] == ["mom"]


def test_only_a_lane_that_is_due_starts_again_while_something_goes(
    source: Connection, mine: int, others: int
) -> None:
    park(source, mine, 1)
    park(source, mine, 2, destination="other")
    park(source, others, 3)
    source.execute("UPDATE saf.backoff SET attempts = 3, next_attempt_at = now()")
    source.execute(
        "UPDATE saf.backoff SET next_attempt_at = now() + '1 h' WHERE destination = 'other'"
    )
    with source.transaction():
        backoff.postpone(source, mine, {MINE: DOWN, OTHER: DOWN}, moving=[MINE, OTHER])
    assert lanes_of(source, mine) == [("mom", 1, False), ("other", 3, False)]
    assert lanes_of(source, others) == [("mom", 3, True)]


def test_lanes_hold_messages_up_in_the_shards_and_the_subscription_that_they_are_of(
    source: Connection, mine: int, others: int
) -> None:
    lane = {"kind": "service", "subject": "billing"}
    park(source, mine, 1, shard=7, **lane)
    park(source, others, 2, shard=8, **lane)
    wanted = [Lane(kind=Kind.SERVICE, subject="billing")]
    assert [len(backoff.held(source, mine, [shard], wanted)) for shard in (7, 8)] == [1, 0]
    assert [len(backoff.held(source, others, [shard], wanted)) for shard in (7, 8)] == [0, 1]
    assert not backoff.held(source, mine, [7], [Lane(kind=Kind.SERVICE, subject="shipping")])
    assert not backoff.held(source, mine, [7], [Lane(kind=Kind.FOUND_ROUTE, subject="billing")])
    assert not backoff.held(
        source, mine, [7], [Lane(kind=Kind.SERVICE, subject="billing", broker=AT_ONE)]
    )
    assert backoff.any_of_services(source, mine)
    source.execute("DELETE FROM saf.backoff WHERE subscription_id = %s", [mine])
    assert not backoff.any_of_services(source, mine)


def test_a_member_hears_of_lanes_of_services_that_are_due_in_its_own_shards(
    source: Connection, mine: int
) -> None:
    member = Member(subscription_id=mine, lease_seconds=30)
    member.join(source)
    member.balance(source)
    source.execute("UPDATE saf.cursor SET owner = NULL WHERE shard = 8")
    for number, (service, shard) in enumerate((("a", 7), ("b", 8), ("c", 7)), start=1):
        park(source, mine, number, kind="service", subject=service, shard=shard)
    park(source, mine, 9, shard=8)
    source.execute("UPDATE saf.backoff SET next_attempt_at = now() + '1 h' WHERE subject = 'c'")
    known = [(lane.kind, lane.subject) for lane in backoff.waiting(source, mine, member.member_id)]
    assert known == [("main", ""), ("service", "a")]
    assert backoff.due_here(source, mine, member.member_id)
    source.execute("UPDATE saf.backoff SET next_attempt_at = now() + '1 h' WHERE subject = 'a'")
    assert not backoff.due_here(source, mine, member.member_id), "what is due is another's"
    assert backoff.any_due(source, mine)
    park(source, mine, 10)
    known = [(lane.kind, lane.subject) for lane in backoff.waiting(source, mine, member.member_id)]
    assert known == [("main", "")], "once, though it is due in these shards too"


def test_a_lane_had_no_turn_only_if_it_was_due_then_and_has_not_been_tried(
    source: Connection, mine: int
) -> None:
    member = Member(subscription_id=mine, lease_seconds=30)
    member.join(source)
    member.balance(source)
    park(source, mine, 1)
    then = datetime.now(UTC) - timedelta(minutes=1)

    def had_no_turn(attempts: int, due: datetime) -> bool:
        source.execute(
            "UPDATE saf.backoff SET attempts = %s, next_attempt_at = %s", [attempts, due]
        )
        return backoff.had_no_turn(source, mine, member.member_id, then)

    assert had_no_turn(0, then + timedelta(seconds=1))
    assert had_no_turn(3, then)
    assert not had_no_turn(3, then + timedelta(seconds=1))
    assert not had_no_turn(0, LATER)
    source.execute("UPDATE saf.parked SET shard = 8")
    source.execute("UPDATE saf.cursor SET owner = NULL WHERE shard = 8")
    assert not had_no_turn(3, then)


# Parked messages and dead letters


def test_what_is_set_aside_is_known_by_subscription_and_destination(
    source: Connection, mine: int, others: int
) -> None:
    park(source, mine, 1)
    park(source, mine, 2, destination="other")
    park(source, others, 3)
    rows = [{"id": number, "message_id": UUID(int=number)} for number in (1, 2, 3)]
    for known in (parking.known, dead.known):
        if known is dead.known:
            bury(source, mine, "mom", 1)
            bury(source, mine, "other", 2)
            bury(source, others, "mom", 3)
        assert known(source, mine, "mom", rows) == {UUID(int=1)}
        assert known(source, mine, "other", rows) == {UUID(int=2)}
        assert known(source, others, "mom", rows) == {UUID(int=3)}
        assert known(source, mine, "mom", rows[1:]) == set()
        twin = {"id": 1, "message_id": UUID(int=9)}
        assert known(source, mine, "mom", [twin]) == set(), "another message has the same id"


def test_lanes_and_parked_messages_are_chosen_by_subscription_kind_and_subject(
    source: Connection, mine: int, others: int
) -> None:
    park(source, mine, 1, kind="service", subject="billing")
    park(source, mine, 2, kind="service", subject="shipping")
    park(source, mine, 3)
    park(source, others, 4, destination="", kind="key", subject="billing")

    def chosen(**which: str) -> list[int]:
        return [one.message_id.int for one in ParkedMessages(**which).rows(source)]  # type: ignore[arg-type]

    assert chosen(subject="billing") == [1, 4]
    assert chosen(subject="billing", waits_for="service") == [1]
    assert chosen(subscription="billing") == [4]
    found = waiting.parked(source, subscription="forwarder")
    assert (found.lanes, found.messages) == (3, 3)
    assert waiting.parked(source).messages == 4
    of_others = waiting.Lanes(subscription="billing")
    assert [lane.kind for lane in waiting.parked(source, lanes=of_others).shown] == ["key"]
    source.execute("UPDATE saf.backoff SET next_attempt_at = now() + '1 h'")
    assert waiting.due(source, of_others).tried == 1
    assert waiting.retry_now(source, lanes=of_others) == 1
    assert [is_due for *_, is_due in lanes_of(source, mine)] == [False] * 3


def test_lanes_are_read_for_the_batchs_shards_and_without_what_it_has_set_aside_itself(
    source: Connection, mine: int, others: int
) -> None:
    park(source, mine, 1, 2, 3)
    park(source, mine, 4, shard=8)
    park(source, mine, 5, destination="other")
    park(source, mine, 6, kind="retry")
    park(source, others, 7)

    def read(one: Batch, destination: str = "mom", kind: Kind = Kind.MAIN) -> list[int]:
        lanes = [Lane(destination=destination, kind=kind)]
        return [id_ for (id_,) in fetch(source, parking.in_lanes(one, destination, lanes, ["id"]))]

    assert read(batch(mine)) == [1, 2, 3]
    assert read(batch(mine, 8)) == [4]
    assert read(batch(mine), "other") == [5]
    assert read(batch(mine), kind=Kind.RETRY) == [6]
    assert read(batch(others)) == [7]
    opened_at = datetime.now(UTC)
    source.execute("UPDATE saf.parked SET opened_at = %s WHERE id = 3", [opened_at])
    assert read(batch(mine, opened_at=opened_at, position=2)) == [1, 2]
    assert read(batch(mine, opened_at=opened_at, position=3)) == [1, 2, 3]
    another = batch(mine, opened_at=opened_at + timedelta(microseconds=1), position=0)
    assert read(another) == [1, 2, 3], "it was parked by another batch"


def test_a_batch_has_set_aside_what_is_beyond_its_position_since_it_was_opened(
    source: Connection, mine: int, others: int
) -> None:
    opened_at = datetime.now(UTC) - timedelta(hours=1)
    park(source, mine, 1, 2, opened_at=opened_at)
    park(source, mine, 3, shard=8, opened_at=opened_at)
    park(source, others, 4, opened_at=opened_at)
    bury(source, mine, "mom", 5)
    bury(source, others, "mom", 6)
    found = parking.set_aside(source, batch(mine, opened_at=opened_at, position=1))
    assert sorted(id_ for id_, *_ in found) == [2, 5]
    assert {id_: lane for id_, _, lane in found}[5] is None
    assert parking.set_aside(source, batch(mine, opened_at=LATER)) == []
    assert len(parking.set_aside(source, batch(mine, 7, 8, opened_at=opened_at))) == 4


def test_lanes_are_occupied_by_their_own_messages_in_the_batchs_shards(
    source: Connection, mine: int, others: int
) -> None:
    park(source, mine, 1)
    park(source, others, 2, shard=8)
    lanes = [MINE, OTHER, replace(MINE, kind=Kind.RETRY)]
    assert parking.occupied(source, batch(mine), lanes) == {MINE}
    assert parking.occupied(source, batch(mine, 8), lanes) == set()
    assert parking.occupied(source, batch(others), lanes) == set()


def test_a_message_is_still_there_if_it_is_in_the_lane_that_it_was_read_from(
    source: Connection, mine: int
) -> None:
    park(source, mine, 1)
    ((number,),) = fetch(source, "SELECT parked_id FROM saf.parked")

    def still(destination: str = "mom", kind: str = "main", broker: UUID = NO_BROKER) -> bool:
        lanes: dict[str, list[Any]] = {"kinds": [kind], "subjects": [""], "brokers": [broker]}
        return bool(parking.still(source, destination, lanes, [number]))

    assert still()
    assert not still(destination="other")
    assert not still(kind="retry")
    assert not still(broker=AT_ONE)


def test_what_has_expired_without_a_route_is_buried_for_the_batchs_own_shards(
    source: Connection, mine: int, others: int
) -> None:
    opened_at = datetime.now(UTC) + timedelta(minutes=1)
    lane = {"destination": "", "kind": "route", "subject": "billing", "expires_at": opened_at}
    park(source, mine, 1, **lane)
    park(source, mine, 2, **lane, shard=8)
    park(source, mine, 3, **lane | {"expires_at": opened_at + timedelta(microseconds=1)})
    park(source, mine, 4, expires_at=opened_at)
    park(source, others, 5, **lane)
    with source.transaction():
        assert dropped.bury_unrouted(source, batch(mine, opened_at=opened_at)) == 1
    assert [one.reason for one in DeadLetters().rows(source)] == ["expired"]
    left = fetch(source, "SELECT id FROM saf.parked ORDER BY id")
    assert left == [(2,), (3,), (4,), (5,)]


def test_a_dead_letter_of_one_destination_is_none_of_another_one(
    source: Connection, mine: int
) -> None:
    source.execute("INSERT INTO saf.outbox (to_service, key, body) VALUES ('billing', 'k', '')")
    ((shard, id_),) = fetch(source, "SELECT shard, id FROM saf.outbox")
    for destination in ("mom", "other", "mom"):
        with source.transaction():
            dead.bury_as_stored(
                source,
                mine,
                "outbox",
                [AsStored(shard=shard, id=id_)],
                destination=destination,
            )
    found = DeadLetters().rows(source)
    assert sorted(one.destination for one in found) == ["mom", "other"]


def test_dead_letters_are_chosen_up_to_a_number_and_before_a_moment(
    source: Connection, mine: int
) -> None:
    bury(source, mine, "mom", 1)
    bury(source, mine, "other", 2)
    first, second = DeadLetters().rows(source)
    assert DeadLetters(through=first.dead_letter_id).rows(source) == [first]
    assert DeadLetters(after=first.dead_letter_id).rows(source) == [second]
    assert DeadLetters(before=second.dead_letter_at).rows(source) == [first]
    assert DeadLetters(destination="other").rows(source) == [second]
    assert DeadLetters(subscription="billing").rows(source) == []
    counted = DeadLetters().count(source, 1)
    assert (counted.messages, counted.more) == (1, True)
    assert not DeadLetters().count(source, 2).more


def test_what_a_person_takes_out_of_a_forwarders_lanes_is_remembered_and_nothing_else(
    source: Connection, mine: int, others: int
) -> None:
    opened = {"opened_at": datetime.now(UTC)}
    park(source, mine, 1, **opened)
    park(source, mine, 2)
    park(source, mine, 3, destination="", kind="route", subject="billing", **opened)
    park(source, others, 4, destination="", kind="key", subject="k")
    park(source, mine, 5, destination="other", **opened)
    numbers = [number for (number,) in fetch(source, "SELECT parked_id FROM saf.parked")]
    source.execute(
        "INSERT INTO saf.taken_out (subscription_id, destination, kind, subject, broker, shard, "
        "opened_at, taken_out_at) SELECT %s, 'old', 'main', '', %s, days, now(), "
        "now() - make_interval(days => days) FROM unnest(ARRAY[364, 366]) AS days",
        [mine, NO_BROKER],
    )
    in_hand.note(source, numbers[:4])
    found = fetch(source, "SELECT destination, shard FROM saf.taken_out ORDER BY 1")
    assert found == [("mom", 7), ("old", 364)]


def test_what_is_dropped_is_counted_by_subscription_shard_and_reason(
    source: Connection, mine: int, others: int
) -> None:
    last = uuid4()
    for one, shard in ((mine, 7), (mine, 7), (mine, 8), (others, 7)):
        dropped.count(source, one, [(shard, Reason.REPEAT, uuid4()), (shard, Reason.REPEAT, last)])
    dropped.count(source, mine, [(7, Reason.ENDED, last)])
    found = fetch(source, "SELECT subscription_id, shard, reason, messages FROM saf.dropped")
    assert sorted(found) == sorted(
        [
            (mine, 7, "repeat", 4),
            (mine, 8, "repeat", 2),
            (others, 7, "repeat", 2),
            (mine, 7, "ended", 1),
        ]
    )
    counts = {(one.subscription, one.reason): one for one in dropped.dropped(source)}
    assert counts["forwarder", "repeat"].messages == 6
    assert counts["forwarder", "repeat"].last_message_id == last


def test_what_waits_for_a_handler_is_counted_with_its_own_lanes_messages(
    source: Connection, mine: int, others: int
) -> None:
    for number, key in enumerate(("a", "a", "b"), start=1):
        park(source, others, number, destination="", kind="key", subject=key)
    park(source, mine, 4)
    source.execute(
        "UPDATE saf.backoff SET awaits_handler = true, message_type = 'Paid', shard = 7, "
        f"next_attempt_at = '{parking.BLOCKED}' WHERE subject = 'a'"
    )
    (one,) = unhandled.unhandled(source)
    assert (one.subscription, one.message_type, one.keys, one.messages) == ("billing", "Paid", 1, 2)
    source.execute(
        "UPDATE saf.backoff SET awaits_handler = true, message_type = 'Paid', shard = 7, "
        f"next_attempt_at = '{parking.BLOCKED}', since = %s WHERE subject = 'b'",
        [LATER],
    )
    (both,) = unhandled.unhandled(source)
    assert (both.keys, both.messages, both.since) == (2, 3, one.since), "since the first of them"


# Keys that wait for a receiver


def test_the_attempts_and_the_messages_of_a_key_are_those_of_one_reader(
    source: Connection, others: int
) -> None:
    services.create_service(source, "shipping")
    readers = [
        Reader(subscription_id=number, name="reader", service=None)
        for number in (others, services.subscription(source, "shipping").subscription_id)
    ]
    mine, other = readers
    for id_, reader in enumerate(readers, start=1):
        park(source, reader.subscription_id, id_, destination="", kind="key", subject="k")
    source.execute("UPDATE saf.backoff SET shard = 7")

    def attempts() -> list[int]:
        found = [retries.attempts(source, reader, "k") for reader in readers]
        return [one[0] for one in found if one]

    retries.count(source, mine, "k", 3, Policy())
    assert attempts() == [3, 0]
    retries.count(source, other, "k", 3, Policy())
    retries.uncount(source, mine, "k", 3)
    assert attempts() == [2, 3]
    retries.wait(source, mine, {"k": Waiting(lane="k", shard=7, attempts=5, error="no")})
    assert attempts() == [5, 3]
    hand = Hand(reader=mine, transaction="", shards={})
    reading.read_lane(source, hand, "k", 5, 9)
    assert [message.id for message in hand.messages] == [1]


def test_delayed_messages_are_due_when_the_first_of_their_own_reader_is(
    source: Connection, others: int
) -> None:
    services.create_service(source, "shipping")
    second = services.subscription(source, "shipping").subscription_id
    lane = {"destination": "", "kind": "later"}
    for id_, (number, shard, hours) in enumerate(
        ((others, 7, 3), (others, 7, 2), (others, 8, 1), (second, 7, 1)), start=1
    ):
        at = LATER + timedelta(hours=hours)
        park(source, number, id_, **lane, subject=str(shard), shard=shard, deliver_at=at)
    source.execute("DELETE FROM saf.backoff")
    reader = Reader(subscription_id=others, name="reader", service=None)
    retries.time_late(source, reader, [7])
    times = "SELECT subscription_id, subject, next_attempt_at FROM saf.backoff"
    assert fetch(source, times) == [(others, "7", LATER + timedelta(hours=2))]
    retries.time_late(source, replace(reader, subscription_id=second), [7])
    source.execute("DELETE FROM saf.parked WHERE id IN (1, 2)")
    retries.time_late(source, reader, [7])
    assert fetch(source, times) == [(second, "7", LATER + timedelta(hours=1))]


def test_a_subscription_that_was_dropped_has_no_cursors(source: Connection, others: int) -> None:
    source.execute("DELETE FROM saf.subscription WHERE subscription_id = %s", [others])
    found = fetch(source, f"SELECT FROM {NEWEST} AS c", {"subscription_id": others})
    assert found == [], "and none of the one before it"


def test_the_last_answer_to_a_message_is_its_own(source: Connection, others: int) -> None:
    for number in (1, 2):
        source.execute(
            "INSERT INTO saf.inbox (to_service, message_id, body) VALUES ('billing', %s, '')",
            [UUID(int=number)],
        )
    source.execute(
        "INSERT INTO saf.attempt (subscription_id, message_id, seconds, outcome, error) "
        "VALUES (%s, %s, 1, 'failed', 'busy')",
        [others, UUID(int=2)],
    )
    found = [(one.message_id.int, one.last_answer) for one in inbox.peek(source, "billing")]
    assert found == [(1, None), (2, "busy")]


# Marks that a source remembers


def test_a_mark_is_remembered_for_its_own_destination_lane_and_shard(source: Connection) -> None:
    first, second = uuid4(), uuid4()
    here, places = (MAIN, 7), [(MAIN, 7), (MAIN, 8), ("retry", 7)]
    for destination in (first, second):
        acknowledged.acknowledge(
            source, destination, {one: Mark(batch=1, position=1) for one in places}, {}
        )
    known = {here: Mark(batch=1, position=1)}
    acknowledged.acknowledge(source, first, {here: Mark(batch=2, position=5)}, known)

    def numbers(destination: UUID) -> list[tuple[int, int]]:
        found = acknowledged.acknowledged(source, destination, places)
        return [found[one].number for one in places]

    assert numbers(first) == [(2, 5), (1, 1), (1, 1)]
    assert numbers(second) == [(1, 1)] * 3
    # a task that lags behind its twin
    acknowledged.acknowledge(
        source, first, {here: Mark(batch=2, position=4)}, {here: Mark(batch=2)}
    )
    assert numbers(first) == [(2, 5), (1, 1), (1, 1)]
    acknowledged.adopt(source, first, {here: Mark(batch=1, position=3)}, [here, ("retry", 7)])
    assert acknowledged.acknowledged(source, first, places) == {
        here: Mark(batch=1, position=3, acknowledged=True),
        (MAIN, 8): Mark(batch=1, position=1, acknowledged=True),
    }
    assert numbers(second) == [(1, 1)] * 3


@pytest.mark.parametrize("taken", [False, True])
def test_a_mark_is_of_parked_messages_of_its_own_lane_shard_and_opening(
    source: Connection, mine: int, others: int, taken: bool
) -> None:
    opened_at = datetime.now(UTC)
    park(source, mine, 1, opened_at=opened_at)
    park(source, mine, 2, destination="other", opened_at=opened_at, shard=8)
    park(source, others, 3, opened_at=opened_at, shard=9)
    if taken:
        source.execute(
            "INSERT INTO saf.taken_out (subscription_id, destination, kind, subject, broker, "
            "shard, opened_at) SELECT subscription_id, destination, kind, subject, broker, shard, "
            "opened_at FROM saf.parked"
        )
        source.execute("DELETE FROM saf.parked")

    def is_parked(shard: int = 7, at: datetime = opened_at, lane: str = MAIN) -> bool:
        place = (lane, shard)
        given = {place: Mark(batch=1, opened_at=at)}
        return acknowledged.not_parked(source, mine, "mom", given) == []

    assert is_parked()
    assert not is_parked(shard=8)
    assert not is_parked(shard=9)
    assert not is_parked(at=opened_at + timedelta(microseconds=1))
    assert not is_parked(lane="retry")


# Members and cursors


def test_members_of_one_subscription_are_nothing_to_another_one(
    app: Dsn, source: Connection, mine: int, others: int
) -> None:
    members = [Member(subscription_id=one, lease_seconds=30) for one in (mine, others)]
    with connect(app) as beside:
        for member, session in zip(members, (source, beside), strict=True):
            member.join(session)
            assert member.balance(session) == 64
        source.execute("UPDATE saf.member SET lease_until = now() - interval '1 s'")
        members[1].renew(beside)
        assert living(beside, others) == [members[1].name]
        owners = "SELECT subscription_id, count(DISTINCT owner) FROM saf.cursor GROUP BY 1"
        assert dict(fetch(source, owners)) == {mine: 1, others: 1}, "nobody of its own has looked"
        assert living(source, mine) == []
        assert dict(fetch(source, owners)) == {mine: 0, others: 1}
        members[1].leave(beside)


def test_a_member_keeps_the_shards_that_it_has_work_in_and_lets_go_no_more_than_it_must(
    app: Dsn, source: Connection, mine: int
) -> None:
    first, second = (Member(subscription_id=mine, lease_seconds=30) for _ in range(2))
    first.join(source)
    first.balance(source)
    gone: list[int] = []
    with connect(app) as beside:
        second.join(beside)
        assert second.balance(beside) == 0
        assert first.balance(source, gone.extend, keep=range(32, 64)) == 32
        assert sorted(gone) == list(range(32))
        assert second.balance(beside) == 32
        epochs = "SELECT DISTINCT owner, epoch FROM saf.cursor ORDER BY epoch"
        assert fetch(source, epochs) == [(first.member_id, 1), (second.member_id, 2)]
        second.leave(beside)
        free = "SELECT count(*) FROM saf.cursor WHERE owner IS NULL"
        assert fetch(source, free) == [(32,)]


def test_a_place_without_a_mark_does_not_get_that_of_another_place(source: Connection) -> None:
    here, retry, mark = (MAIN, 7), ("retry", 7), Mark(batch=1, position=1)
    acknowledged.acknowledge(source, AT_ONE, {here: mark}, {})
    for destination, place in ((AT_TWO, here), (AT_ONE, (MAIN, 8)), (AT_ONE, retry)):
        assert acknowledged.acknowledged(source, destination, [place]) == {}
    acknowledged.adopt(source, AT_ONE, {}, [retry])
    assert acknowledged.acknowledged(source, AT_ONE, [here]).keys() == {here}


def test_kept_results_of_its_own_message_are_collected_when_it_is_gone(
    source: Connection, mine: int, others: int
) -> None:
    park(source, mine, 1)
    bury(source, mine, "mom", 2)
    for subscription_id in (mine, others):
        source.execute(
            "INSERT INTO saf.kept_result (subscription_id, shard, id, number, batch) "
            "SELECT %s, 7, id, 0, 1 FROM generate_series(1, 3) AS id",
            [subscription_id],
        )
    source.execute("UPDATE saf.cursor SET open = '1:1:', opened_at = now()")
    assert kept_results.collect(source) == 0
    source.execute("UPDATE saf.cursor SET open = NULL WHERE subscription_id = %s", [mine])
    assert kept_results.collect(source) == 1
    left = "SELECT subscription_id, id FROM saf.kept_result ORDER BY subscription_id, id"
    assert fetch(source, left) == [(mine, 1), (mine, 2), *((others, id_) for id_ in (1, 2, 3))]
