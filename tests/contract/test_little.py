"""Little work: the short cut of a few messages does what a task does, or leaves the batch to it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from saf.broker.services import create_service
from saf.columns import COLUMNS
from saf.config import load
from saf.database import Dsn, connections, fetch
from saf.destinations.postgresql import Postgresql
from saf.engine import little
from saf.engine.task import Task
from saf.engine.work import Work
from saf.failpoints import arm
from saf.forwarding import forwarder
from saf.forwarding.broker import SourceBroker
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.message import CLAIMED_FROM, VERIFIED_FROM
from saf.routing.routes import add_route
from saf.telemetry import tracing
from tests.destinations import count
from tests.kept import _nothing_stays
from tests.pipeline import bodies, connect, send
from tests.programs import configuration
from tests.waits import until

__all__ = ["_nothing_stays"]

SAME = """
SELECT w.shard, w.batch, w.position, w.opened_at FROM saf.watermark w
WHERE w.lane = '' AND w.batch > 0 ORDER BY 1
"""
ACKNOWLEDGED = "SELECT shard, batch, position, opened_at FROM saf.acknowledged ORDER BY 1"
OPEN = "SELECT count(*) FROM saf.cursor WHERE open IS NOT NULL"

KEY = "A-1"


class Looping:
    """A forwarder of one source, in a loop, whose tasks are counted."""

    searches = False
    """Whether the cycle after `begin` searches for work, instead of following the last batch."""

    def __init__(self, app: Dsn, mom: Dsn, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app, self.mom, self.patch, self.tasks = app, mom, monkeypatch, 0
        file = configuration(folder / "saf.toml", {"app": app}, {"mom": mom})
        self.driver = Forwarder(load(file), InProcess())
        self.driver.roster.once = False
        self.source = connect(app)
        run = Task.run

        def counted(task: Task, batches: Any) -> Any:
            self.tasks += 1
            return run(task, batches)

        monkeypatch.setattr(Task, "run", counted)
        monkeypatch.setattr(tracing, "records", lambda: False)  # another test may have begun to

    def cycle(self) -> int:
        """Return how many tasks a cycle took."""
        before = self.tasks
        self.driver.cycle()
        return self.tasks - before

    def begin(self) -> None:
        """Make both sides agree about the key's shard."""
        send(self.source, "first", KEY)
        assert self.cycle() == 1
        send(self.source, "second", KEY)
        assert self.cycle() == 0
        if self.searches:
            self.search()

    def set(self, **columns: object) -> None:
        """Send a message with further columns."""
        row = {"to_service": "billing", "key": KEY, "body": b"third", **columns}
        names = ", ".join(row)
        values = ", ".join(f"%({name})s" for name in row)
        self.source.execute(f"INSERT INTO saf.outbox ({names}) VALUES ({values})", row)

    def search(self) -> None:
        """Let the next cycle search for work."""
        little = self.driver.roster.brokers["app"]._little
        assert little is not None
        little.end()

    @property
    def problems(self) -> str:
        return str(self.driver.summary.problems)


@pytest.fixture(params=[True, False], ids=["searched", "followed"])
def looping(
    app: Dsn,
    mom: Dsn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Looping]:
    one = Looping(app, mom, tmp_path, monkeypatch)
    one.searches = request.param
    yield one
    one.driver._leave()
    one.source.close()


def test_few_messages_need_no_task_once_both_sides_agree(looping: Looping) -> None:
    looping.begin()
    for number in range(5):
        send(looping.source, str(number), KEY)
    assert looping.cycle() == 0
    assert bodies(looping.mom) == ["first", "second", *"01234"]
    assert looping.driver.summary.forwarded == 7
    with connect(looping.mom) as mom:
        assert fetch(looping.source, ACKNOWLEDGED) == fetch(mom, SAME)
    assert fetch(looping.source, OPEN) == [(0,)]


EPOCHS = "SELECT max(epoch) FROM {} WHERE {}"


def test_a_new_owner_needs_no_task_and_fences_the_one_before(
    looping: Looping, tmp_path: Path
) -> None:
    looping.begin()
    looping.driver._leave()
    connections.forget()
    looping.driver = Forwarder(load(tmp_path / "saf.toml"), InProcess())
    send(looping.source, "third", KEY)
    before = looping.tasks
    assert looping.driver.drain().forwarded == 1
    assert looping.tasks == before
    assert bodies(looping.mom) == ["first", "second", "third"]
    with connect(looping.mom) as mom:
        ((left,),) = fetch(mom, EPOCHS.format("saf.watermark", "lane = ''"))
    ((own,),) = fetch(looping.source, EPOCHS.format("saf.cursor", "true"))
    assert left == own > 1
    assert not connections._kept, "a run that ends keeps nothing"


def test_messages_that_follow_soon_take_two_statements_a_batch(
    looping: Looping, monkeypatch: pytest.MonkeyPatch
) -> None:
    looping.begin()
    asked: list[str] = []
    ask = little.Source.ask
    stored = little._stored

    def counted(self: little.Source, statement: str, params: Any) -> Any:
        asked.append(statement)
        return ask(self, statement, params)

    def followed(*given: Any) -> bool:
        result = stored(*given)
        if len(bodies(looping.mom)) < 6:
            send(looping.source, str(len(asked)), KEY)
        return result

    monkeypatch.setattr(little.Source, "ask", counted)
    monkeypatch.setattr(little, "_stored", followed)
    send(looping.source, "0", KEY)
    assert looping.cycle() == 0
    assert bodies(looping.mom) == ["first", "second", *"0123"]
    assert asked == [little.READ if looping.searches else little.NEXT, *[little.NEXT] * 4]
    assert looping.driver.summary.forwarded == 6
    assert fetch(looping.source, OPEN) == [(0,)]
    with connect(looping.mom) as mom:
        assert fetch(looping.source, ACKNOWLEDGED) == fetch(mom, SAME)


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO saf.route (service, destination) VALUES ('billing', 'elsewhere')",
        "INSERT INTO saf.topic (name) VALUES ('billing')",
        "UPDATE saf.broker SET senders_since = 0",
        "UPDATE saf.member SET stopping = true",
    ],
)
def test_a_batch_is_not_opened_under_other_rules_than_before(looping: Looping, change: str) -> None:
    looping.begin()

    def follow() -> None:
        arm("mom_commit", lambda: None)
        looping.source.execute(change)
        send(looping.source, "third", KEY)

    send(looping.source, "0", KEY)
    arm("mom_commit", follow)
    assert looping.cycle() == 0
    assert bodies(looping.mom) == ["first", "second", "0"]
    assert fetch(looping.source, OPEN) == [(0,)]


def test_a_destination_with_a_rate_gets_little_work_by_a_task_too(looping: Looping) -> None:
    looping.begin()
    looping.patch.setattr(Postgresql, "rate", property(lambda _: "1000/s"), raising=False)
    send(looping.source, "0", KEY)
    assert looping.cycle() == 1
    assert bodies(looping.mom) == ["first", "second", "0"]


def test_a_destination_with_a_concurrency_gets_little_work_by_a_task_too(looping: Looping) -> None:
    looping.begin()
    looping.patch.setattr(Postgresql, "concurrency", property(lambda _: 4), raising=False)
    send(looping.source, "0", KEY)
    assert looping.cycle() == 1
    assert bodies(looping.mom) == ["first", "second", "0"]


SEEN = """
CREATE TABLE seen (opens boolean, value text);
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO seen VALUES ({opens}, current_setting('synchronous_commit')); RETURN NULL;
END $$;
CREATE TRIGGER see AFTER {event} FOR EACH ROW EXECUTE FUNCTION see()
"""


def test_what_is_stored_and_what_is_opened_is_durable(looping: Looping) -> None:
    def follow() -> None:
        arm("mom_commit", lambda: None)
        send(looping.source, "third", KEY)

    with connect(looping.mom) as mom:
        for broker, opens, event in (
            (looping.source, "NEW.open IS NOT NULL", "UPDATE ON saf.cursor"),
            (mom, "true", "INSERT ON saf.inbox"),
        ):
            broker.execute(f"ALTER DATABASE {broker.info.dbname} SET synchronous_commit = off")
            broker.execute(SEEN.format(opens=opens, event=event))
        looping.begin()
        send(looping.source, "0", KEY)
        arm("mom_commit", follow)
        assert looping.cycle() == 0
        assert bodies(looping.mom) == ["first", "second", "0", "third"]
        for broker in (looping.source, mom):
            assert fetch(broker, "SELECT DISTINCT value FROM seen WHERE opens") == [("on",)]


def test_a_batch_that_follows_passes_no_messages_that_wait(looping: Looping) -> None:
    with connect(looping.mom) as mom:
        create_service(mom, "billing")
    looping.begin()

    def follow() -> None:
        arm("mom_commit", lambda: None)
        looping.source.execute(
            "INSERT INTO saf.backoff "
            "(subscription_id, destination, kind, subject, attempts, error) "
            "SELECT subscription_id, 'mom', 'service', 'billing', 1, 'unknown' "
            "FROM saf.subscription WHERE name = 'forwarder'"
        )
        send(looping.source, "third", KEY)

    send(looping.source, "0", KEY)
    arm("mom_commit", follow)
    assert looping.cycle() == 0
    assert bodies(looping.mom) == ["first", "second", "0"]
    assert fetch(looping.source, OPEN) == [(0,)]


def test_every_column_arrives_as_a_task_brings_it(looping: Looping) -> None:
    def send_all() -> None:
        looping.set(body=b"\x00\xff'\\", headers='{"a": ["b", null], "ü": 1.50}')
        looping.set(body=b"", message_type="Type'\\\"", from_service="shop")
        looping.set(deliver_at="2100-01-01 00:00:00.000001+00", expires_at="2100-01-02")
        looping.set(body=b'{"a", "b"}', message_type="NULL")

    send_all()
    assert looping.cycle() == 1
    send_all()
    assert looping.cycle() == 0
    names = ", ".join(name for name in COLUMNS if name not in ("message_id", "created_at"))
    with connect(looping.mom) as mom:
        rows = fetch(mom, f"SELECT {names} FROM saf.inbox ORDER BY id")
        arrived = fetch(mom, "SELECT message_id, created_at, key FROM saf.inbox ORDER BY id")
        (broker,) = fetch(looping.source, "SELECT broker_id FROM saf.broker")
        assert fetch(mom, "SELECT DISTINCT source FROM saf.inbox") == [broker]
    assert rows[:4] == rows[4:]
    sent = "SELECT message_id, created_at, key FROM saf.outbox ORDER BY id"
    assert arrived == fetch(looping.source, sent)


@pytest.mark.parametrize(
    ("columns", "arrives"),
    [
        ({"expires_at": "2001-01-01"}, False),
        ({"to_broker": uuid4()}, False),
        ({"to_service": "nobody"}, False),
        ({"headers": f'{{"{VERIFIED_FROM}": "me"}}'}, True),
    ],
    ids=["expired", "addressed", "unknown service", "forged header"],
)
def test_a_message_about_which_must_be_decided_is_left_to_a_task(
    looping: Looping, columns: dict[str, Any], arrives: bool
) -> None:
    with connect(looping.mom) as mom:
        create_service(mom, "billing")
    looping.begin()
    looping.set(**columns)
    assert looping.cycle() == 1
    assert bodies(looping.mom) == ["first", "second", *["third"] * arrives]
    if not arrives:
        assert count(looping.app, "parked") + count(looping.app, "dead_letter") == 1
    else:
        with connect(looping.mom) as mom:
            ((headers,),) = fetch(mom, "SELECT headers FROM saf.inbox WHERE body = 'third'")
        assert headers == {CLAIMED_FROM: "me"}


def at_least_once(looping: Looping) -> None:
    add_route(looping.source, "mom", quality="at_least_once")


def another_destination(looping: Looping) -> None:
    add_route(looping.source, "erp", service="shipping")


def shared_routes(looping: Looping) -> None:
    add_route(looping.source, "mom")
    add_route(looping.source, "mom", service="billing", quality="at_most_once")


def checked_senders(looping: Looping) -> None:
    looping.source.execute("UPDATE saf.broker SET senders_since = 0")


def waiting_messages(looping: Looping) -> None:
    with connect(looping.mom) as mom:
        create_service(mom, "billing", start="beginning")
    looping.set(to_service="nobody")
    assert looping.cycle() == 1


def traces(looping: Looping) -> None:
    looping.patch.setattr(tracing, "records", lambda: True)


@pytest.mark.parametrize(
    "change",
    [
        at_least_once,
        another_destination,
        shared_routes,
        checked_senders,
        waiting_messages,
        traces,
    ],
)
def test_a_batch_to_which_other_rules_apply_is_left_to_a_task(
    looping: Looping, change: Callable[[Looping], None]
) -> None:
    looping.begin()
    change(looping)
    looping.set(from_service="shop")
    assert looping.cycle() in (1, 2)  # for a lane, a batch of the other shards is opened too
    assert bodies(looping.mom) == ["first", "second", "third"]


def test_a_message_does_not_overtake_those_that_wait(looping: Looping) -> None:
    with connect(looping.mom) as mom:
        create_service(mom, "billing")
        looping.begin()
        looping.set(to_service="shipping")
        assert looping.cycle() == 1
        looping.set(body=b"another service's")  # both sides agree about the shard again
        assert looping.cycle() in (1, 2)  # for a lane, a batch of the other shards is opened too
        create_service(mom, "shipping")
    looping.set(to_service="shipping", body=b"fourth")
    assert looping.cycle() == 1
    assert bodies(looping.mom)[3:] in ([], ["third", "fourth"])


def test_many_messages_or_bytes_are_left_to_a_task(looping: Looping) -> None:
    looping.begin()
    looping.driver.rules = looping.driver.rules.__class__(
        **{**looping.driver.rules.__dict__, "chunk_rows": 2, "max_bytes": 10}
    )
    looping.search()
    for number in range(3):
        send(looping.source, str(number), KEY)
    assert looping.cycle() == 1
    assert bodies(looping.mom) == ["first", "second", *"012"]
    send(looping.source, "a body that is too large", KEY)
    assert looping.cycle() == 1
    assert count(looping.app, "dead_letter") == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE saf.watermark SET epoch = epoch + 1", "Ahead"),
        ("UPDATE saf.watermark SET position = position - 1", "Behind"),
        ("UPDATE saf.watermark SET position = position + 1", "Ahead"),
        ("UPDATE saf.watermark SET set_aside_at = '2001-01-01'", "Ahead"),
        ("UPDATE saf.watermark SET opened_at = '2001-01-01'", "Ahead"),
        ("DELETE FROM saf.watermark", "Behind"),
    ],
)
def test_a_destination_whose_marks_differ_stores_nothing(
    looping: Looping, change: str, problem: str
) -> None:
    looping.begin()
    with connect(looping.mom) as mom:
        mom.execute(f"{change} WHERE batch > 0")
    send(looping.source, "third", KEY)
    assert looping.cycle() == 1
    assert bodies(looping.mom) == ["first", "second"]
    assert problem in looping.problems


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("UPDATE saf.broker SET broker_id = gen_random_uuid()", "another broker than before"),
        ("UPDATE saf.alembic_version SET version_num = '9999'", "9999"),
        ("UPDATE saf.broker SET system_identifier = 1", "cluster"),
    ],
)
def test_a_destination_that_has_changed_stores_nothing(
    looping: Looping, change: str, kind: str
) -> None:
    looping.begin()
    with connect(looping.mom) as mom:
        mom.execute(change)
    send(looping.source, "third", KEY)
    assert looping.cycle() == 1
    assert bodies(looping.mom) == ["first", "second"]
    assert kind in looping.problems


def test_messages_whose_answer_got_lost_are_stored_once(looping: Looping) -> None:
    looping.begin()
    send(looping.source, "third", KEY)

    def lose() -> None:
        arm("mom_commit", lambda: None)
        raise psycopg.OperationalError("the answer got lost")

    arm("mom_commit", lose)
    assert looping.cycle() == 1
    assert bodies(looping.mom) == ["first", "second", "third"]
    assert looping.driver.summary.dropped == 1
    assert fetch(looping.source, OPEN) == [(0,)]


def test_a_member_that_has_lost_a_shard_closes_nothing(looping: Looping) -> None:
    looping.begin()
    send(looping.source, "third", KEY)

    def take_over() -> None:
        arm("mom_commit", lambda: None)
        with connect(looping.app) as other:
            other.execute(
                "UPDATE saf.cursor SET owner = NULL, epoch = epoch + 1 "
                "WHERE shard = (SELECT max(shard) FROM saf.outbox)"
            )

    arm("mom_commit", take_over)
    assert looping.cycle() == (1 if looping.searches else 0)
    ((shards,),) = fetch(looping.source, "SELECT shards FROM saf.broker")
    # a batch that follows has only the shard with the message
    assert fetch(looping.source, OPEN) == [(shards if looping.searches else 1,)]
    assert bodies(looping.mom) == ["first", "second", "third"]


def test_a_cursor_that_was_set_back_is_not_passed_over(looping: Looping) -> None:
    looping.begin()
    done = "SELECT DISTINCT done::text FROM saf.cursor"
    ((before,),) = fetch(looping.source, done)
    send(looping.source, "third", KEY)
    assert looping.cycle() == 0
    looping.source.execute("UPDATE saf.cursor SET done = %s", [before])
    send(looping.source, "fourth", KEY)
    looping.cycle()
    assert bodies(looping.mom) == ["first", "second", "third", "third", "fourth"]


def test_a_cursor_that_stayed_behind_and_was_set_back_is_not_passed_over(
    looping: Looping,
) -> None:
    looping.begin()
    for key in "abab":
        send(looping.source, key, key)
        assert looping.cycle() <= 1  # both sides agree about the shard then
    send(looping.source, "c", "a")
    assert looping.cycle() == 0
    looping.source.execute(
        "UPDATE saf.cursor SET done = '1:1:' "
        "WHERE shard = (SELECT DISTINCT shard FROM saf.outbox WHERE key = 'b')"
    )
    looping.search()
    send(looping.source, "d", "a")
    until(lambda: looping.cycle() >= 0 and len(bodies(looping.mom)) == 10)
    assert Counter(bodies(looping.mom)) == Counter(["first", "second", *"ababcdbb"])


def test_a_search_is_due_from_time_to_time(
    looping: Looping, monkeypatch: pytest.MonkeyPatch
) -> None:
    looping.begin()
    monkeypatch.setattr(little, "SURE_SECONDS", 0.0)
    looping.search()
    asked: list[str] = []
    ask = little.Source.ask

    def counted(self: little.Source, statement: str, params: Any) -> Any:
        asked.append(statement)
        return ask(self, statement, params)

    monkeypatch.setattr(little.Source, "ask", counted)
    for _ in range(2):
        send(looping.source, "x", KEY)
        assert looping.cycle() == 0
    assert asked == 2 * [little.READ, little.NEXT]


def test_where_nothing_follows_nothing_is_searched_for(
    looping: Looping, monkeypatch: pytest.MonkeyPatch
) -> None:
    looping.begin()
    send(looping.source, "third", KEY)
    assert looping.cycle() == 0
    searches: list[object] = []

    def search(*given: object) -> list[Work]:
        searches.append(given)
        return []

    monkeypatch.setattr(SourceBroker, "open_work", search)

    def cycles(until_so: Callable[[], bool]) -> None:
        until(lambda: looping.cycle() > 0 or until_so())

    for _ in range(3):
        looping.cycle()
    send(looping.source, "fourth", KEY)
    cycles(lambda: len(bodies(looping.mom)) == 4)
    assert searches == []
    looping.source.execute("UPDATE saf.member SET stopping = true")  # decided by a search
    send(looping.source, "fifth", KEY)
    cycles(lambda: bool(searches))
    assert bodies(looping.mom) == ["first", "second", "third", "fourth"]
    assert looping.tasks == 1


def test_a_search_finds_all_shards_at_one_place(looping: Looping) -> None:
    looping.begin()
    for key in "abc":
        send(looping.source, key, key)
        assert looping.cycle() <= 1  # both sides agree about the shard then
    done = "SELECT count(DISTINCT done::text) FROM saf.cursor WHERE open IS NULL"
    for key in "abc":
        send(looping.source, key, key)
        assert looping.cycle() == 0
    assert fetch(looping.source, done) > [(1,)], "only cursors of shards with messages are written"
    looping.search()
    assert fetch(looping.source, done) == [(1,)]
    send(looping.source, "d", "a")
    assert looping.cycle() == 0
    assert bodies(looping.mom) == ["first", "second", *"abcabcd"]


def test_messages_without_end_do_not_keep_the_driver(looping: Looping) -> None:
    looping.begin()
    sent = 0

    def follow() -> None:
        nonlocal sent
        sent += 1
        send(looping.source, str(sent), KEY)
        arm("mom_commit", follow)

    follow()
    began = time.monotonic()
    looping.driver.cycle()
    arm("")
    assert 0.2 < time.monotonic() - began < 10
    assert 2 < looping.driver.summary.forwarded < 2 + sent


def test_each_of_many_sources_is_forwarded_where_it_is_found(
    new_broker: Callable[[str], Dsn], mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "records", lambda: False)
    sources = {name: new_broker(name) for name in ("a", "b", "c")}
    file = configuration(tmp_path / "saf.toml", sources, {"mom": mom})
    runner = InProcess()
    driver = Forwarder(load(file), runner)
    driver.roster.once = False
    with ExitStack() as stack:
        connected = [stack.enter_context(connect(dsn)) for dsn in sources.values()]
        stack.callback(driver._leave)
        for body in ("first", "second"):  # the first makes both sides agree
            for source in connected:
                send(source, body, KEY)
            driver.cycle()
        jobs: list[object] = []
        monkeypatch.setattr(runner, "run", lambda *given: jobs.append(given))
        for source in connected:
            send(source, "third", KEY)
        while driver.summary.forwarded < 9:
            assert driver.cycle()
        assert jobs == []
    assert sorted(bodies(mom)) == sorted(3 * ["first", "second", "third"])
    assert driver.summary.by_broker == dict.fromkeys(sources, 3)


def test_visits_that_forward_take_turns(
    new_broker: Callable[[str], Dsn], mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "records", lambda: False)
    monkeypatch.setattr(forwarder, "AT_ONCE", 2)
    sources = {name: new_broker(name) for name in "abcd"}
    driver = Forwarder(
        load(configuration(tmp_path / "saf.toml", sources, {"mom": mom})), InProcess()
    )
    driver.roster.once = False
    inside: list[str] = []
    most: list[int] = []
    forward = little.Little._forwarded

    def counted(one: little.Little, chain: little.Chain, *given: Any) -> Any:
        inside.append(chain.work.broker)
        most.append(len(inside))
        time.sleep(0.1)  # meanwhile, all others that may forward do
        inside.remove(chain.work.broker)
        return forward(one, chain, *given)

    monkeypatch.setattr(little.Little, "_forwarded", counted)
    with ExitStack() as stack:
        stack.callback(driver._leave)
        for dsn in sources.values():
            send(stack.enter_context(connect(dsn)), "x", KEY)
        while driver.summary.forwarded < len(sources):
            driver.cycle()
    assert max(most) == 2


def test_a_quiet_source_is_asked_less_and_less_often(
    new_broker: Callable[[str], Dsn], mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {name: new_broker(name) for name in ("busy", "quiet")}
    file = configuration(tmp_path / "saf.toml", sources, {"mom": mom}, interval_seconds=30)
    driver = Forwarder(load(file), InProcess())
    driver.roster.once = False
    visits: Counter[str] = Counter()
    visit = SourceBroker.visit

    def counted(broker: SourceBroker, *given: Any, **named: Any) -> Any:
        visits[broker.name] += 1
        return visit(broker, *given, **named)

    monkeypatch.setattr(SourceBroker, "visit", counted)
    with connect(sources["busy"]) as busy, ExitStack() as stack:
        stack.callback(driver._leave)
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            send(busy, "x", KEY)
            driver.cycle()
        assert 3 <= visits["quiet"] <= 40, "each pause is a share of the time that it is quiet"
        assert visits["busy"] > 2 * visits["quiet"]
        assert driver.roster.rest_seconds == 0, "the busy one is due"
        # the quiet one may be due just now
        until(lambda: driver.cycle() is not None and driver.roster.rest_seconds > 0)
        assert driver.roster.rest_seconds < 2
