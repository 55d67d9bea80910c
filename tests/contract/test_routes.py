"""Routes: the most specific wins, several share, a topic goes to all; each batch its own way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from saf.broker import services
from saf.database import Dsn, fetch
from saf.errors import UsageError
from saf.failpoints import arm
from saf.operating import decide
from saf.routing.matching import Route
from saf.routing.route_choices import NOTED_SECONDS, Asker, choose, forget
from saf.routing.routes import (
    Configured,
    Declared,
    add_route,
    add_topic,
    configuration,
    current_routes,
    enable_route,
    freeze,
    frozen_routes,
    remove_route,
    remove_topic,
)
from saf.setaside.selection import DeadLetters
from tests.destinations import NOWHERE, count
from tests.dying import Crash, crash
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass
from tests.routing import broker_id, run, send, without_default
from tests.timezones import Nowhere

pytestmark = pytest.mark.usefixtures("disarmed")

Broker = Callable[[str], Dsn]


@pytest.fixture
def a(new_broker: Broker) -> Dsn:
    return new_broker("a")


@pytest.fixture
def b(new_broker: Broker) -> Dsn:
    return new_broker("b")


@pytest.fixture
def c(new_broker: Broker) -> Dsn:
    return new_broker("c")


@pytest.fixture
def stores(a: Dsn, b: Dsn) -> dict[str, Dsn]:
    return {"a": a, "b": b}


def send_keys(connection: psycopg.Connection[Any], *keys: str) -> None:
    """A message of each key, whose body it is."""
    for key in keys:
        send(connection, key, key=key)


def numbers(count: int, prefix: str = "k") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


# Which route


def test_the_most_specific_route_wins_and_an_expired_one_is_not_used(
    app: Dsn, source: psycopg.Connection[Any], new_broker: Broker
) -> None:
    names = ("there", "service", "wildcard", "expired", "disabled")
    where = {name: new_broker(name) for name in names}
    there = broker_id(where["there"])
    add_route(source, "there", service="s", broker=there, quality="at_most_once")
    add_route(source, "service", service="s")
    add_route(source, "there", broker=there)
    add_route(source, "wildcard")
    past = datetime.now(UTC) - timedelta(seconds=1)
    add_route(source, "expired", service="s", expires_at=past)
    add_route(source, "disabled", service="s")
    enable_route(source, "disabled", service="s", enabled=False)
    send(source, "there", to_broker=there)
    send(source, "service")
    send(source, "there", service="t", to_broker=there)
    send(source, "wildcard", service="t")
    with without_default(app, 100, **where) as cycle:
        (work,) = cycle.open()
        matches = [work.routes.match(service, str(there)) for service in "st"]
        assert [match and match.routes[0].quality for match in matches] == ["at_most_once", None]
        cycle.close(cycle.deliver())
    arrived = {name: set(bodies(dsn)) for name, dsn in where.items()}
    assert arrived == {n: set() if n in ("expired", "disabled") else {n} for n in names}


def test_a_route_is_used_until_the_moment_it_expires(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    add_route(source, "a", service="s", expires_at=datetime.now(UTC) + timedelta(hours=1))
    add_route(source, "b")
    send(source, "before")
    run(app, a=a, b=b)
    source.execute("UPDATE saf.route SET expires_at = now() WHERE destination = 'a'")
    send(source, "after")
    run(app, a=a, b=b)
    assert (bodies(a), bodies(b)) == (["before"], ["after"])


def test_routes_of_the_file_count_like_rows_and_a_row_stands_in_for_one(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    declared = Declared(
        routes=(
            Configured(route=Route(service="s", destination="a"), origin="saf.toml"),
            Configured(route=Route(destination="b"), origin="saf.toml"),
        )
    )

    def run_declared() -> None:
        with without_default(app, a=a, b=b) as cycle:
            cycle.broker.declared = declared
            assert [r.error for r in cycle.run() if r.error] == []

    send(source, "1")
    run_declared()
    add_route(source, "a", service="s")
    enable_route(source, "a", service="s", enabled=False)
    send(source, "2")
    run_declared()
    assert (bodies(a), bodies(b)) == (["1"], ["2"])
    origins = {one.named: one.origin for one in configuration(source, None, declared).routes}
    assert origins == {("s", None, "a"): "saf.route", (None, None, "b"): "saf.toml"}


# Sharing


def test_two_matching_routes_share_a_hundred_keys_evenly_and_each_sticks_for_life(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn, c: Dsn
) -> None:
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
    keys = numbers(100)
    send_keys(source, *keys)
    run(app, chunk_rows=7, a=a, b=b)
    first = {dsn.database: set(bodies(dsn)) for dsn in (a, b)}
    assert [len(some) for some in first.values()] == [50, 50]
    add_route(source, "c", service="s")
    send_keys(source, *keys, *numbers(30, "new"))
    run(app, chunk_rows=7, a=a, b=b, c=c)
    for dsn in (a, b):
        old = [body for body in bodies(dsn) if body.startswith("k")]
        assert Counter(old) == dict.fromkeys(first[dsn.database], 2)
    assert [len([x for x in bodies(d) if x.startswith("new")]) for d in (a, b, c)] == [10, 10, 10]


def test_messages_without_a_key_take_routes_in_turn(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn, c: Dsn
) -> None:
    for destination in ("a", "b", "c"):
        add_route(source, destination)
    send(source, *numbers(99))
    run(app, chunk_rows=10, a=a, b=b, c=c)
    assert [len(bodies(dsn)) for dsn in (a, b, c)] == [33, 33, 33]
    assert count(app, "route_choice") == 0


@pytest.mark.parametrize("point", ["chosen", "mom_insert", "mom_commit", "mark_forwarded"])
def test_a_batch_read_again_after_a_crash_is_shared_out_the_same_way(
    app: Dsn, source: psycopg.Connection[Any], stores: dict[str, Dsn], point: str
) -> None:
    for destination in stores:
        add_route(source, destination, service="s")
    send_keys(source, *numbers(20))
    send(source, *numbers(20, "keyless"))
    arm(f"{point}:2", crash)
    with without_default(app, 9, **stores) as cycle, pytest.raises(Crash):
        cycle.run()
    add_route(source, "c", service="s")
    run(app, 100, **stores)
    arrived = [bodies(dsn) for dsn in stores.values()]
    assert [len(some) for some in arrived] == [20, 20]
    assert len(set(arrived[0] + arrived[1])) == 40


def test_the_order_of_a_key_holds_where_routes_share_and_one_is_down(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
    for number in range(60):
        send(source, str(number), key=f"k{number % 6}")
    run(app, chunk_rows=7, a=a, b=NOWHERE)
    assert len(bodies(a)) == count(app, "parked") == 30
    for number in range(60, 90):
        send(source, str(number), key=f"k{number % 6}")
    let_time_pass(app)
    run(app, chunk_rows=7, a=a, b=b)
    for dsn in (a, b):
        arrived = [int(body) for body in bodies(dsn)]
        assert arrived == sorted(arrived)
        assert len(arrived) == 45


def test_a_key_whose_route_has_gone_chooses_anew(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn, c: Dsn
) -> None:
    for destination in ("a", "b", "c"):
        add_route(source, destination, service="s")
    keys = numbers(12)
    send_keys(source, *keys)
    run(app, a=a, b=b, c=c)
    orphans = set(bodies(a))
    remove_route(source, "a", service="s")
    send_keys(source, *keys)
    run(app, a=a, b=b, c=c)
    assert len(bodies(a)) == 4
    assert {len([x for x in bodies(dsn) if x in orphans]) for dsn in (b, c)} == {2}
    assert Counter(bodies(b) + bodies(c)) == {k: 1 if k in orphans else 2 for k in keys}


def test_two_forwarders_that_choose_at_the_same_time_stay_balanced(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
    with without_default(app, 5, a=a, b=b) as one, without_default(app, 5, a=a, b=b) as two:
        for _ in range(2):
            for cycle in (one, two):
                cycle.open()
                cycle.close(cycle.deliver())
        send_keys(source, *numbers(200))
        one.open()
        two.open()
        for cycle in (one, two):
            cycle.close(cycle.deliver())
    assert [len(bodies(dsn)) for dsn in (a, b)] == [100, 100]


def test_a_choice_that_is_not_used_is_forgotten_and_one_that_is_stays(
    source: psycopg.Connection[Any],
) -> None:
    keys = [Asker("s", None, key) for key in ("used", "unused")]
    matches = dict.fromkeys(keys, ("a", "b"))
    with source.transaction():
        before = choose(source, matches)
    source.execute("UPDATE saf.route_choice SET used_at = now() - interval '9 days'")
    with source.transaction():
        assert choose(source, {keys[0]: ("a", "b")}) == {keys[0]: before[keys[0]]}
    assert forget(source, retention_seconds=8 * 86400.0) == 1
    assert fetch(source, "SELECT key FROM saf.route_choice") == [("used",)]


def test_a_use_that_went_unnoted_counts(source: psycopg.Connection[Any]) -> None:
    with source.transaction():
        choose(source, {Asker("s", None, "k"): ("a", "b")})
    # it was noted last at most a day before it was used last
    source.execute("UPDATE saf.route_choice SET used_at = now() - interval '6 days 23 hours'")
    assert forget(source, retention_seconds=6 * 86400.0) == 0
    source.execute("UPDATE saf.route_choice SET used_at = now() - interval '7 days 1 hour'")
    assert forget(source, retention_seconds=6 * 86400.0) == 1


@pytest.mark.parametrize("waits_for", ["the destination", "the service"])
def test_a_choice_is_kept_while_messages_wait_for_its_destination_and_no_longer(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn, waits_for: str
) -> None:
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
        add_route(source, destination, service="t")
    with source.transaction():
        turns = [Asker("s", None, "1"), Asker("s", None, "2"), Asker("t", None, "1")]
        choose(source, dict.fromkeys(turns, ("a", "b")))
    assert _choices(source) == [("s", "1", "a"), ("s", "2", "b"), ("t", "1", "a")]
    send(source, "first", key="1")
    down = waits_for == "the destination"
    if not down:
        with connect(a) as store:
            services.create_service(store, "t")
    with without_default(app, 100, a=NOWHERE if down else a, b=b) as cycle:
        send(source, "other", key="2")
        cycle.run()
    assert count(app, "parked") == 1
    source.execute("UPDATE saf.route_choice SET used_at = now() - interval '30 days'")
    forget(source, 0)
    kept = {("s", "1", "a")} | ({("t", "1", "a")} if down else set())
    assert set(_choices(source)) == kept
    send(source, "second", key="1")
    let_time_pass(app)
    if not down:
        with connect(a) as store:
            services.create_service(store, "s")
    run(app, a=a, b=b)
    run(app, a=a, b=b)
    assert bodies(a) == ["first", "second"]
    source.execute("UPDATE saf.route_choice SET used_at = now() - interval '30 days'")
    assert forget(source, 0) == len(kept)


def _choices(source: psycopg.Connection[Any]) -> list[Any]:
    choices = "SELECT service, key, destination FROM saf.route_choice ORDER BY 1, 2"
    return list(fetch(source, choices))


def test_a_batch_in_hand_keeps_the_choices_it_was_delivered_by(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
    send_keys(source, *numbers(10))
    arm("mom_commit:2", crash)
    with without_default(app, 5, a=a, b=b) as cycle, pytest.raises(Crash):
        cycle.run()
    # nobody came by for a long time
    ago = timedelta(seconds=20 * NOTED_SECONDS)
    source.execute("UPDATE saf.cursor SET opened_at = opened_at - %s", [ago])
    source.execute("UPDATE saf.route_choice SET used_at = used_at - %s", [ago])
    assert forget(source, retention_seconds=0) == 0


# Topics


def test_a_topic_goes_to_every_destination_and_one_down_delays_only_its_copies(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn, c: Dsn
) -> None:
    add_topic(source, "s")
    add_route(source, "a", service="s")
    add_route(source, "b", service="s", quality="exactly_once")
    add_route(source, "c")
    for number in range(20):
        send(source, str(number), key=f"k{number % 3}")
    run(app, chunk_rows=6, a=a, b=NOWHERE, c=c)
    everything = [str(number) for number in range(20)]
    assert (bodies(a), bodies(c)) == (everything, everything)
    assert fetch(source, "SELECT DISTINCT destination FROM saf.parked") == [("b",)]
    for number in range(20, 30):
        send(source, str(number), key=f"k{number % 3}")
    let_time_pass(app)
    run(app, chunk_rows=6, a=a, b=b, c=c)
    for dsn in (a, b, c):
        assert bodies(dsn) == [str(number) for number in range(30)]
    assert count(app, "parked") == count(app, "backoff") == 0


def test_each_destination_of_a_topic_gets_one_copy_by_its_most_specific_route(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    add_topic(source, "s")
    add_route(source, "a", service="s", quality="at_most_once")
    add_route(source, "a")
    add_route(source, "b")
    send(source, "1")
    with without_default(app, a=a, b=b) as cycle:
        (work,) = cycle.open()
        match = work.routes.match("s", None)
        assert match is not None
        assert [route.quality for route in match.routes] == ["at_most_once", None]
        cycle.close(cycle.deliver())
    assert (bodies(a), bodies(b)) == (["1"], ["1"])


def test_a_topic_goes_to_the_default_destination_only_if_no_route_matches(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    add_topic(source, "s")
    send(source, "1")
    with Cycle(app, forwarding_rules(a=a, b=b)) as cycle:  # the first is the default
        cycle.run()
        add_route(source, "b", service="s")
        send(source, "2")
        cycle.run()
    assert (bodies(a), bodies(b)) == (["1"], ["2"])


@pytest.mark.parametrize("point", ["mom_insert", "mom_commit", "mark_forwarded", "mark_commit"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_crash_among_the_copies_of_a_topic_loses_and_doubles_none(
    app: Dsn, source: psycopg.Connection[Any], stores: dict[str, Dsn], *, point: str, times: int
) -> None:
    add_topic(source, "s")
    for destination in (*stores, "a is down"):
        add_route(source, destination, service="s")
    send(source, *numbers(10), key="k")
    where = {**stores, "a is down": NOWHERE}  # between the two
    arm(f"{point}:{times}", crash)
    with without_default(app, 4, **where) as cycle, pytest.raises(Crash):
        cycle.run()
    remove_topic(source, "s")  # the batch in hand keeps its routes
    remove_route(source, "a", service="s")
    run(app, 3, **where)
    assert [bodies(dsn) for dsn in stores.values()] == [numbers(10)] * 2
    parked = "SELECT destination, count(*) FROM saf.parked GROUP BY 1"
    assert fetch(source, parked) == [("a is down", 10)]


def test_what_a_destination_of_a_topic_rejects_is_a_dead_letter_of_it_alone(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn, c: Dsn
) -> None:
    add_topic(source, "s")
    for name, dsn in (("a", a), ("b", b), ("c", c)):
        add_route(source, name, service="s")
        if name != "a":
            with connect(dsn) as store:
                store.execute("ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (body <> 'x')")
    send(source, "1", "x", "2", key="k")
    arm("set_aside", crash)
    with without_default(app, a=a, b=b, c=c) as cycle, pytest.raises(Crash):
        cycle.run()
    run(app, a=a, b=b, c=c)
    assert (bodies(a), bodies(b), bodies(c)) == (["1", "x", "2"], ["1", "2"], ["1", "2"])
    letters = "SELECT destination, body FROM saf.dead_letter ORDER BY 1"
    assert fetch(source, letters) == [("b", b"x"), ("c", b"x")]


def test_copies_for_a_destination_that_is_not_configured_wait_for_it_and_others_go(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    add_topic(source, "s")
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
    send(source, "1", "2", key="k")
    run(app, a=a)
    assert bodies(a) == ["1", "2"]
    ((error,),) = fetch(source, "SELECT error FROM saf.backoff")
    assert "[destinations.b]" in error
    send(source, "3", key="k")
    let_time_pass(app)
    run(app, a=a)
    let_time_pass(app)
    run(app, a=a, b=b)
    assert bodies(a) == bodies(b) == ["1", "2", "3"]


def test_a_batch_that_was_opened_before_there_were_topics_goes_its_way(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn
) -> None:
    add_route(source, "a", service="s")
    send(source, "1")
    with without_default(app, a=a) as cycle:
        cycle.open()
    source.execute(
        "UPDATE saf.route_version SET topics = DEFAULT, routes = "
        """'[{"service": "s", "broker": null, "destination": "a", "quality": null}]'"""
    )
    run(app, a=a)
    assert bodies(a) == ["1"]


# Messages that have waited for a route


def test_what_waited_for_a_route_is_shared_out_too(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    for number in range(40):
        send(source, str(number), key=f"k{number % 8}")
    send(source, *numbers(10, "keyless"))
    run(app, a=a, b=b)
    assert count(app, "parked") == 50
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
    for number in range(40, 48):
        send(source, str(number), key=f"k{number % 8}")
    run(app, a=a, b=b)
    assert bodies(a) == bodies(b) == [], "its time has not come, and new ones wait behind the old"
    let_time_pass(app)
    run(app, chunk_rows=6, a=a, b=b)
    for dsn in (a, b):
        arrived = [int(body) for body in bodies(dsn) if body.isdigit()]
        assert len(arrived) == 24
        for key in range(8):
            mine = [number for number in arrived if number % 8 == key]
            assert mine == sorted(mine)
    assert len([x for x in bodies(a) + bodies(b) if x.startswith("keyless")]) == 10
    assert count(app, "parked") == count(app, "backoff") == 0


def test_what_of_a_topic_waited_for_a_route_goes_to_each_destination_in_order(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    add_topic(source, "s")
    send(source, "1", "2", key="k")
    run(app, a=a, b=b)
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
    send(source, "3", key="k")
    run(app, a=a, b=b)
    let_time_pass(app)
    run(app, a=a, b=NOWHERE)
    assert bodies(a) == ["1", "2", "3"]
    send(source, "4", key="k")
    let_time_pass(app)
    run(app, a=a, b=b)
    assert bodies(a) == bodies(b) == ["1", "2", "3", "4"]
    assert count(app, "parked") == count(app, "backoff") == 0


@pytest.mark.parametrize("point", ["routed", "mom_insert", "mom_commit", "unpark", "unpark_commit"])
def test_a_crash_while_what_waited_is_routed_loses_and_doubles_nothing(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn, point: str
) -> None:
    add_topic(source, "s")
    send(source, *numbers(7), key="k")
    run(app, a=a, b=b)
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
    let_time_pass(app)
    arm(f"{point}:2", crash)
    with without_default(app, 3, a=a, b=b) as cycle, pytest.raises(Crash):
        cycle.run()
    let_time_pass(app)
    run(app, chunk_rows=3, a=a, b=b)
    assert bodies(a) == bodies(b) == numbers(7)
    assert count(app, "parked") == count(app, "backoff") == 0


def test_a_dead_letter_without_a_destination_goes_where_routes_lead_when_it_is_retried(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn, b: Dsn
) -> None:
    add_topic(source, "s")
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
    send(source, "late", expires_at=datetime.now(UTC) - timedelta(seconds=1))
    run(app, a=a, b=b)
    assert len(decide.retry(source, DeadLetters(reason="expired"), "it is not too late")) == 1
    run(app, a=a, b=b)
    assert bodies(a) == bodies(b) == ["late"]
    assert count(app, "parked") == count(app, "backoff") == 0


def test_a_route_for_one_broker_is_no_route_for_another(
    app: Dsn, source: psycopg.Connection[Any], a: Dsn
) -> None:
    there = broker_id(a)
    add_route(source, "a", broker=there)
    send(source, "mine", to_broker=there)
    send(source, "another's", to_broker=UUID(int=8))
    send(source, "nobody's")
    run(app, a=a)
    assert bodies(a) == ["mine"]
    assert count(app, "parked") == 2


def test_a_route_is_over_at_the_moment_that_it_names() -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    one = Configured(route=Route(destination="mom"), origin="saf.route", expires_at=moment)
    assert one.in_force(moment - timedelta(microseconds=1))
    assert not one.in_force(moment)


def test_routes_are_written_anew_only_if_they_have_changed(
    source: psycopg.Connection[Any],
) -> None:
    add_route(source, "a")
    versions = [freeze(source, current_routes(source)) for _ in range(2)]
    add_topic(source, "t")
    versions += [freeze(source, current_routes(source)) for _ in range(2)]
    assert versions == [versions[0], versions[0], versions[2], versions[2]]
    assert versions[2] > versions[0]
    assert frozen_routes(source, versions[2]) == current_routes(source)


def test_the_choice_of_a_conversation_that_is_open_is_not_forgotten(
    source: psycopg.Connection[Any],
) -> None:
    conversation = uuid4()
    with source.transaction():
        for key in (str(conversation), "k"):
            choose(source, {Asker("s", None, key): ["a"]})
        source.execute("INSERT INTO saf.conversation_group (group_id) VALUES (%s)", [conversation])
        source.execute(
            "INSERT INTO saf.conversation (conversation_id, is_initiator, service, far_service, "
            "group_id) VALUES (%s, true, 'shop', 's', %s)",
            [conversation, conversation],
        )
    source.execute("UPDATE saf.route_choice SET used_at = now() - interval '9 days'")
    assert forget(source, 0) == 1
    assert fetch(source, "SELECT key FROM saf.route_choice") == [(str(conversation),)]


def test_a_moment_without_a_time_zone_is_refused_also_if_it_has_one_that_says_nothing(
    source: psycopg.Connection[Any],
) -> None:
    for zone in (None, Nowhere()):
        with pytest.raises(UsageError, match="has no time zone"):
            add_route(source, "a", expires_at=datetime(2026, 1, 2, tzinfo=zone))
