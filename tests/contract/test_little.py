"""Little work: the short cut of a few messages does what a task does, or leaves the batch to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from saf.broker.services import create_service
from saf.columns import COLUMNS
from saf.config import load
from saf.database import Dsn, fetch
from saf.engine import little
from saf.engine.task import Task
from saf.failpoints import arm
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.message import CLAIMED_FROM, VERIFIED_FROM
from saf.routing.routes import add_route
from saf.telemetry import tracing
from tests.destinations import count
from tests.kept import _nothing_stays
from tests.pipeline import bodies, connect, send
from tests.programs import configuration

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

    def set(self, **columns: object) -> None:
        """Send a message with further columns."""
        row = {"to_service": "billing", "key": KEY, "body": b"third", **columns}
        names = ", ".join(row)
        values = ", ".join(f"%({name})s" for name in row)
        self.source.execute(f"INSERT INTO saf.outbox ({names}) VALUES ({values})", row)

    @property
    def problems(self) -> str:
        return str(self.driver.summary.problems)


@pytest.fixture
def looping(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Looping]:
    one = Looping(app, mom, tmp_path, monkeypatch)
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
    assert asked[0] == little.READ
    assert {*asked[1:]} == {little.NEXT}
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
        create_service(mom, "billing")
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
    assert looping.cycle() == 1
    assert bodies(looping.mom) == ["first", "second", "third"]


def test_a_message_does_not_overtake_those_that_wait(looping: Looping) -> None:
    with connect(looping.mom) as mom:
        create_service(mom, "billing")
        looping.begin()
        looping.set(to_service="shipping")
        assert looping.cycle() == 1
        looping.set(body=b"another service's")  # both sides agree about the shard again
        assert looping.cycle() == 1
        create_service(mom, "shipping")
    looping.set(to_service="shipping", body=b"fourth")
    assert looping.cycle() == 1
    assert bodies(looping.mom)[3:] in ([], ["third", "fourth"])


def test_many_messages_or_bytes_are_left_to_a_task(looping: Looping) -> None:
    looping.begin()
    looping.driver.rules = looping.driver.rules.__class__(
        **{**looping.driver.rules.__dict__, "chunk_rows": 2, "max_bytes": 10}
    )
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
            other.execute("UPDATE saf.cursor SET epoch = epoch + 1 WHERE shard = 0")

    arm("mom_commit", take_over)
    assert looping.cycle() == 1
    shards = "SELECT shards FROM saf.broker"
    assert fetch(looping.source, OPEN) == fetch(looping.source, shards)
    assert bodies(looping.mom) == ["first", "second", "third"]
