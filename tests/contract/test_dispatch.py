"""Dispatch: each message reaches its endpoint, in the order of its key, at least once."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, dumps
from xmlrpc.server import SimpleXMLRPCServer

import psutil
import psycopg
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from structlog.testing import capture_logs

import saf
from saf.broker.services import create_services, subscription
from saf.config import load
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, Fenced, Restored, Unavailable
from saf.log import pauses
from saf.log.shards import Member
from saf.operating.decide import retry
from saf.operating.endpoints import find
from saf.operating.repair.rebase import rebase
from saf.receiving import link, reading
from saf.receiving.dispatch import dispatcher as running
from saf.receiving.dispatch import marking, source
from saf.receiving.dispatch.condition import Book
from saf.receiving.dispatch.dispatcher import Dispatcher
from saf.receiving.dispatch.envelope import Request
from saf.receiving.dispatch.http import Client
from saf.receiving.dispatch.progress import InHand, Mark
from saf.receiving.dispatch.replies import Answer
from saf.receiving.dispatch.session import LOOK_SECONDS
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.window import Marks, Window
from saf.receiving.hand import Reader
from saf.receiving.inbox import inbox_status
from saf.receiving.retries import FailedAttempt
from saf.setaside.selection import DeadLetters
from tests.endpoints import (
    Got,
    Partner,
    Reply,
    dispatch,
    dispatcher,
    dispatching,
    held,
    inbox,
    let_lanes_be_due,
    let_probes_be_due,
    partner,
    program,
    state,
)
from tests.hostile import unbounded
from tests.pipeline import connect, outlive_lease
from tests.processes import start
from tests.programs import configuration
from tests.receivers import (
    SUBSCRIPTION,
    dead,
    double,
    keys_of_one_shard,
    put,
    store,
    waiting,
)
from tests.tiers import sized
from tests.waits import until

__all__ = ["inbox", "partner"]

EVENT = {"content-type": "application/cloudevents+json"}

every_postgresql = pytest.mark.every_postgresql


def unfinished(inbox: Dsn) -> int:
    """How many shards have an open batch."""
    with connect(inbox) as connection:
        ((count,),) = fetch(connection, "SELECT count(*) FROM saf.cursor WHERE open IS NOT NULL")
    return int(count)


def unread(inbox: Dsn) -> int:
    with connect(inbox) as connection:
        (status,) = inbox_status(connection)
    return status.unread


def attempts(inbox: Dsn) -> list[tuple[Any, ...]]:
    with connect(inbox) as connection:
        return fetch(connection, "SELECT subject, attempts, error FROM saf.backoff ORDER BY 1")


@every_postgresql
def test_each_message_is_sent_once_in_the_order_of_its_key(inbox: Dsn, partner: Partner) -> None:
    store(inbox, keys=20, each=10, transactions=5)
    partner.after(0.005)
    done = dispatch(inbox, partner)
    assert partner.by_key() == {f"k{k}": list(range(1, 11)) for k in range(1, 21)}
    assert (done.summary.handled, done.summary.exit_code) == (200, 0)
    assert partner.most_in_flight > 1
    assert partner.overlaps == 0
    assert unfinished(inbox) == 0
    dispatch(inbox, partner)
    assert len(partner.begun) == 200


def test_messages_that_stand_twice_are_not_sent_until_the_repair(
    inbox: Dsn, partner: Partner
) -> None:
    store(inbox, keys=2, each=3)
    double(inbox)
    for key in ("k1", "k2"):  # so that the newest of their shards look well
        put(inbox, "4", "5", key=key)
    with pytest.raises(Restored, match="several messages with id"):
        dispatch(inbox, partner)
    assert partner.begun == []
    with connect(inbox) as connection:
        rebase(connection, {})
    dispatch(inbox, partner)
    assert partner.by_key() == {"k1": [1, 2, 3, 4, 5], "k2": [1, 2, 3, 4, 5]}


def test_a_slow_key_delays_no_other(inbox: Dsn, partner: Partner) -> None:
    release = asyncio.Event()

    async def answer(got: Got) -> Reply:
        if got.key == "k1":
            await asyncio.wait_for(release.wait(), 30)
        return 204, {}, b""

    partner.answer = answer
    store(inbox, keys=70, each=5)
    with dispatching(dispatcher(inbox, partner, timeout_seconds=30)):
        until(lambda: len(partner.accepted) == 69 * 5)
        # also where the others of its shard are beyond the position
        until(lambda: unread(inbox) == 5)
        store(inbox, keys=70, each=5)
        until(lambda: len(partner.accepted) >= 69 * 5 + 60)
        assert [got.key for got in partner.begun].count("k1") == 1
        release._loop.call_soon_threadsafe(release.set)  # type: ignore[attr-defined]
        until(lambda: len(partner.accepted) == 70 * 10)


def test_in_a_backlog_all_shards_take_turns(inbox: Dsn, partner: Partner) -> None:
    store(inbox, keys=2560, each=1)
    with connect(inbox) as connection:
        shards = dict(fetch(connection, "SELECT key, shard FROM saf.inbox"))
    dispatch(inbox, partner, max_in_flight=4)
    # memory holds 20 messages of 16 shards at a time: of each shard, 20 come before any more
    first = Counter(shards[str(got.key)] for got in partner.accepted[: 64 * 20 + 320])
    assert len(first) == len(set(shards.values())) == 64
    assert max(first.values()) <= 2 * 20


def test_the_sdk_of_cloudevents_reads_what_is_sent(inbox: Dsn, partner: Partner) -> None:
    put(
        inbox,
        '{"total": 7}',
        key='Zürich "1"\r\n%',
        message_type="OrderPlaced",
        from_service="shop/1",
        headers='{"content-type": "application/json", "traceid": "a\\u00fc", "empty": ""}',
    )
    dispatch(inbox, partner)
    (got,) = partner.accepted
    event = from_http_event(HTTPMessage(headers=got.headers, body=got.body))
    assert event.get_type() == "OrderPlaced"
    assert event.get_source() == "/saf/shop%2F1"
    assert event.get_subject() == 'Zürich "1"\r\n%'
    assert event.get_id() == got.id
    assert event.get_data() == {"total": 7}
    assert event.get_attributes()["traceid"] == "aü"
    assert "ce-empty" not in got.headers, "CloudEvents has no attribute without a value"


@pytest.mark.parametrize("content_type", ["7", "null", '""', "[1]"])
def test_a_content_type_that_is_no_text_is_not_sent(
    inbox: Dsn, partner: Partner, content_type: str
) -> None:
    put(inbox, "1", key="a", headers=f'{{"content-type": {content_type}}}')
    dispatch(inbox, partner)
    (got,) = partner.accepted
    assert got.headers["content-type"] == "application/octet-stream"


def test_a_message_that_the_endpoint_rejects_is_a_dead_letter_with_its_answer(
    inbox: Dsn, partner: Partner
) -> None:
    async def answer(got: Got) -> Reply:
        return (422, {}, b"no such\norder") if got.body == b"2" else (200, {}, b"ok")

    partner.answer = answer
    put(inbox, "1", "2", "3", key="a")
    done = dispatch(inbox, partner)
    assert partner.by_key() == {"a": [1, 3]}
    assert dead(inbox) == [("2", "rejected")]
    assert done.summary.exit_code == 1
    with connect(inbox) as connection:
        ((error,),) = fetch(connection, "SELECT error FROM saf.dead_letter")
        ((status, kept),) = fetch(connection, "SELECT status, error FROM saf.attempt")
    assert error == kept == "HTTP 422: no such order"
    assert status == 422


def test_a_message_that_fails_waits_and_only_its_key_behind_it(
    inbox: Dsn, partner: Partner
) -> None:
    failing = True

    async def answer(got: Got) -> Reply:
        if failing and got.key == "a":
            return 500, {}, b"oops"
        await asyncio.sleep(0.1)
        return 200, {}, b"ok"

    partner.answer = answer
    put(inbox, "1", "2", key="a")
    put(inbox, "1", "2", key="b")
    assert dispatch(inbox, partner).summary.exit_code == 75
    assert partner.by_key() == {"b": [1, 2]}
    # the endpoint has accepted others since, so it is this message that has failed
    assert attempts(inbox) == [("a", 1, "HTTP 500: oops")]
    put(inbox, "3", key="a")
    dispatch(inbox, partner)
    assert [got.body for got in partner.begun if got.key == "a"] == [b"1"]
    assert waiting(inbox) == ["a"]
    assert unfinished(inbox) == 0
    failing = False
    let_lanes_be_due(inbox)
    dispatch(inbox, partner)
    assert partner.by_key() == {"b": [1, 2], "a": [1, 2, 3]}
    assert waiting(inbox) == []


def test_after_its_last_attempt_a_message_is_a_dead_letter(inbox: Dsn, partner: Partner) -> None:
    async def answer(got: Got) -> Reply:
        return (500, {}, b"oops") if got.key == "a" else (200, {}, b"ok")

    partner.answer = answer
    put(inbox, "1", key="a")
    with dispatching(dispatcher(inbox, partner, attempts=3)):

        def tried() -> bool:
            put(inbox, "0", key="b")  # the endpoint is up
            let_lanes_be_due(inbox)
            return bool(dead(inbox))

        until(tried)
    assert dead(inbox) == [("1", "failed")]
    assert len([got for got in partner.begun if got.key == "a"]) >= 3
    assert waiting(inbox) == []


@pytest.mark.parametrize("left", [0, 1])
def test_a_failure_of_a_message_that_has_ended_meanwhile_blames_no_other(
    inbox: Dsn, partner: Partner, left: int
) -> None:
    async def answer(got: Got) -> Reply:
        return (500, {}, b"oops") if got.key == "a" else (200, {}, b"ok")

    partner.answer = answer
    put(inbox, "1", *["2"] * left, key="a")
    with dispatching(dispatcher(inbox, partner, attempts=1)):
        until(lambda: waiting(inbox) == ["a"] and unfinished(inbox) == 0)
        with connect(inbox) as connection:
            connection.execute("DELETE FROM saf.parked WHERE body = '1'")
            if not left:
                connection.execute("DELETE FROM saf.backoff")
        put(inbox, "1", key="b")  # the endpoint is up, so the failure counts
        until(lambda: "b" in partner.by_key() and unfinished(inbox) == 0)
    assert [key for key, *_ in attempts(inbox)] == waiting(inbox) == ["a"] * left
    assert all(number == 0 for _, number, _ in attempts(inbox))


def test_an_endpoint_that_is_down_uses_up_no_attempts(inbox: Dsn, partner: Partner) -> None:
    partner.always(503, b"maintenance")
    store(inbox, keys=10, each=3)
    with dispatching(dispatcher(inbox, partner, attempts=1, breaker_failures=3)):
        until(lambda: state(inbox) == "open")
        for _ in range(3):
            sent = len(partner.begun)
            let_probes_be_due(inbox)
            until(lambda before=sent: len(partner.begun) > before)  # type: ignore[misc]
        partner.answer = None
        let_probes_be_due(inbox)
        until(lambda: state(inbox) == "closed")

        def all_there() -> bool:
            let_lanes_be_due(inbox)
            return len(partner.accepted) == 30

        until(all_there)
    assert partner.by_key() == {f"k{k}": [1, 2, 3] for k in range(1, 11)}
    assert dead(inbox) == []


def test_after_a_kill_only_what_was_in_flight_is_sent_again(inbox: Dsn, partner: Partner) -> None:
    chance = random.Random(7)

    async def answer(_: Got) -> Reply:
        await asyncio.sleep(2 if chance.random() < 0.05 else 0.02)
        return 204, {}, b""

    partner.answer = answer
    store(inbox, keys=300, each=10)
    more = {"max_in_flight": 200}
    victim = start(program, inbox, partner.url, more)
    until(lambda: len(partner.accepted) > 1000)
    victim.kill()
    victim.join()
    before = len(partner.begun)
    assert out_of_order(inbox) > 0
    until(lambda: partner.in_flight == 0)
    one = dispatcher(inbox, partner, **more)
    with dispatching(one):
        until(lambda: len({got.id for got in partner.accepted}) == 3000)
        until(lambda: unfinished(inbox) == 0)
    assert partner.overlaps == 0
    times = Counter(got.id for got in partner.begun)
    again = [id_ for id_, count in times.items() if count > 1]
    assert before < 3000
    assert len(again) <= 2 * 200
    for numbers in partner.by_key().values():
        first = list(dict.fromkeys(numbers))
        assert first == list(range(1, 11))
        assert all(later - number <= 1 for number, later in pairwise(numbers))


def test_nothing_more_is_sent_while_marks_cannot_be_written(inbox: Dsn, partner: Partner) -> None:
    release = threading.Event()

    async def answer(_: Got) -> Reply:
        while not release.is_set():
            await asyncio.sleep(0.01)
        return 204, {}, b""

    partner.answer = answer
    store(inbox, keys=100, each=1)
    with dispatching(dispatcher(inbox, partner, max_in_flight=10)):
        until(lambda: len(partner.begun) == 10)
        with connect(inbox) as connection, connection.transaction():
            connection.execute("SELECT FROM saf.cursor FOR UPDATE")
            release.set()
            until(lambda: len(partner.begun) >= 20)
            time.sleep(0.5)
            assert len(partner.begun) == 20
        until(lambda: len(partner.accepted) == 100)


def test_dispatchers_that_come_and_go_share_the_keys_and_repeat_nothing(
    inbox: Dsn, partner: Partner
) -> None:
    # something of nearly every shard is in flight, always
    partner.after(0.1)
    store(inbox, keys=100, each=20)
    with dispatching(dispatcher(inbox, partner)):
        until(lambda: len(partner.accepted) > 100)
        with dispatching(dispatcher(inbox, partner)):
            until(lambda: members(inbox) == [32, 32])
            sent = len(partner.accepted)
            assert sent < 2000
            until(lambda: len(partner.accepted) > min(sent + 200, 1900))
        until(lambda: len(partner.accepted) == 2000)
        until(lambda: unfinished(inbox) == 0)
    assert partner.by_key() == {f"k{k}": list(range(1, 21)) for k in range(1, 101)}
    assert partner.overlaps == 0


def test_shards_that_were_to_leave_go_on_if_who_was_to_have_them_is_gone(
    inbox: Dsn, partner: Partner
) -> None:
    release = asyncio.Event()

    async def answer(_: Got) -> Reply:
        await asyncio.wait_for(release.wait(), 60)
        return 204, {}, b""

    partner.answer = answer
    store(inbox, keys=600, each=2)
    with (
        connect(inbox) as connection,
        dispatching(dispatcher(inbox, partner, max_in_flight=600, timeout_seconds=60)),
    ):
        until(lambda: len(partner.begun) == 600)
        number = subscription(connection, SUBSCRIPTION).subscription_id
        other = Member(subscription_id=number, lease_seconds=60)
        other.join(connection)
        time.sleep(2.5 * LOOK_SECONDS)  # no shard is free to leave
        assert members(inbox) == [64]
        other.leave(connection)
        time.sleep(2.5 * LOOK_SECONDS)
        release._loop.call_soon_threadsafe(release.set)  # type: ignore[attr-defined]
        until(lambda: len(partner.accepted) == 1200, 30)
    assert partner.overlaps == 0


def test_a_lock_at_its_database_holds_no_dispatcher_up_without_a_word_nor_its_stop(
    inbox: Dsn, partner: Partner
) -> None:
    there = replace(inbox, bounds=replace(inbox.bounds, lock_seconds=0.5))
    with connect(inbox) as holder, capture_logs() as lines:
        with dispatching(dispatcher(there, partner)):
            until(lambda: members(inbox) == [64])
            holder.execute("BEGIN")
            holder.execute("LOCK TABLE saf.cursor IN ACCESS EXCLUSIVE MODE")
            until(lambda: [line for line in lines if line["event"] == "session_failed"], 20)
            told = time.monotonic()
        assert time.monotonic() - told < 10
        holder.execute("ROLLBACK")
    (first, *_) = [line for line in lines if line["event"] == "session_failed"]
    assert "lock timeout" in first["error"]


def test_a_lock_at_the_table_of_endpoints_is_unavailable(inbox: Dsn, tmp_path: Path) -> None:
    file = configuration(tmp_path / "saf.toml", {"mom": inbox}, {"mom": inbox})
    file.write_text(file.read_text() + "[bounds]\nlock_seconds = 0.3\n")
    with connect(inbox) as holder:
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE saf.endpoint IN ACCESS EXCLUSIVE MODE")
        (problem,) = find(load(file)).problems
    assert isinstance(problem, Unavailable)
    assert "lock timeout" in str(problem)


def test_an_endpoint_that_could_not_go_on_is_tried_again(
    inbox: Dsn, partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "FIND_SECONDS", 0.1)
    monkeypatch.setattr(running, "AGAIN_SECONDS", 0.2)
    new = Dispatcher("new", Endpoint(url=partner.url, subscription="new"), inbox)
    found, over = threading.Event(), threading.Event()

    def find() -> list[Dispatcher]:
        found.set()
        if over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        return [new]

    def mend() -> None:
        assert found.wait(20)
        time.sleep(0.5)
        with connect(inbox) as connection:
            create_services(connection, ["new"])
        with connect(inbox) as connection:
            connection.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('new', '1')")
        until(lambda: len(partner.accepted) == 1, 20)

    with ThreadPoolExecutor(1) as threads:
        mending = threads.submit(mend)
        mending.add_done_callback(lambda _: over.set())
        running.run([], find=find)
        mending.result()


def out_of_order(inbox: Dsn) -> int:
    """How many messages beyond the positions are known to be complete."""
    with connect(inbox) as connection:
        ((count,),) = fetch(
            connection,
            "SELECT count(*) FROM saf.cursor JOIN saf.dispatched d USING "
            "(subscription_id, shard, batch) JOIN saf.inbox i USING (shard) WHERE i.id <@ d.ids",
        )
    return int(count)


def members(inbox: Dsn) -> list[int]:
    """How many shards each member owns."""
    with connect(inbox) as connection:
        rows = fetch(
            connection, "SELECT count(*) FROM saf.cursor WHERE owner IS NOT NULL GROUP BY owner"
        )
    return sorted(count for (count,) in rows)


@pytest.mark.full
def test_a_dispatcher_whose_connections_are_cut_goes_on(inbox: Dsn, partner: Partner) -> None:
    partner.after(0.01)
    store(inbox, keys=50, each=20)
    with dispatching(dispatcher(inbox, partner)):
        for share in (100, 400):
            until(lambda least=share: len(partner.accepted) > least)  # type: ignore[misc]
            with connect(inbox) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE "
                    "datname = current_database() AND application_name = 'saf dispatch'"
                )
        until(lambda: len({got.id for got in partner.accepted}) == 1000)
        until(lambda: unfinished(inbox) == 0)
    for numbers in partner.by_key().values():
        assert list(dict.fromkeys(numbers)) == list(range(1, 21))
    assert len(partner.begun) <= 1000 + 2 * 200


def test_no_transaction_is_open_while_an_endpoint_is_waited_for(
    inbox: Dsn, partner: Partner
) -> None:
    partner.after(1.5)
    store(inbox, keys=10, each=1)
    with dispatching(dispatcher(inbox, partner)):
        until(lambda: partner.in_flight == 10)
        with connect(inbox) as connection:
            while partner.in_flight:
                ((oldest,),) = fetch(
                    connection,
                    "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0) "
                    "FROM pg_stat_activity WHERE application_name = 'saf dispatch'",
                )
                assert oldest < 1
    assert len(partner.accepted) == 10


def test_a_delayed_message_waits_for_its_time_and_an_expired_one_is_a_dead_letter(
    inbox: Dsn, partner: Partner
) -> None:
    put(inbox, "1", key="a", deliver_at="2999-01-01")
    put(inbox, "2", key="a", expires_at="2001-01-01")
    put(inbox, "3", key="a")
    dispatch(inbox, partner)
    assert partner.by_key() == {"a": [3]}
    assert dead(inbox) == [("2", "expired")]
    assert unfinished(inbox) == 0
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.parked SET deliver_at = now()")
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    dispatch(inbox, partner)
    assert partner.by_key() == {"a": [3, 1]}
    with connect(inbox) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.parked") == [(0,)]
        assert fetch(connection, "SELECT count(*) FROM saf.backoff") == [(0,)]


def test_a_dead_letter_that_a_person_retries_is_sent_before_what_waits_behind_it(
    inbox: Dsn, partner: Partner
) -> None:
    partner.always(400, b"no")
    put(inbox, "1", key="a")
    dispatch(inbox, partner)
    partner.answer = None
    with connect(inbox) as connection:
        retry(connection, DeadLetters(), "mended")
    put(inbox, "2", key="a")
    dispatch(inbox, partner)
    assert partner.by_key() == {"a": [1, 2]}


def test_a_message_of_a_dialog_waits_and_says_for_whom(inbox: Dsn, partner: Partner) -> None:
    put(
        inbox,
        "1",
        key="a",
        conversation_id="5e3b2d53-f5a5-4a46-9a32-7f0bd2c8a1f0",
        from_initiator=True,
        sequence=0,
    )
    put(inbox, "2", key="b")
    dispatch(inbox, partner)
    assert partner.by_key() == {"b": [2]}
    with connect(inbox) as connection:
        rows = fetch(connection, "SELECT subject, awaits_handler, error FROM saf.backoff")
    assert rows == [
        (
            "a",
            True,
            "messages of dialogs are sent with reply = true only; or let a worker handle them",
        )
    ]
    assert unfinished(inbox) == 0


def test_a_stopped_dispatcher_that_wakes_up_after_its_lease_marks_nothing(
    inbox: Dsn, partner: Partner
) -> None:
    partner.after(0.2)
    store(inbox, keys=20, each=5)
    victim = start(program, inbox, partner.url, {})
    until(lambda: len(partner.accepted) >= 10)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGSTOP)
    outlive_lease(inbox)
    with dispatching(dispatcher(inbox, partner)):
        until(lambda: members(inbox) == [64])
        os.kill(victim.pid, signal.SIGCONT)
        until(lambda: len({got.id for got in partner.accepted}) == 100)
        until(lambda: unfinished(inbox) == 0)
    victim.terminate()
    victim.join()
    for numbers in partner.by_key().values():
        assert list(dict.fromkeys(numbers)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(sized(1, 20)))
def test_whatever_fails_and_wherever_dispatchers_die_each_key_is_sent_in_order(
    inbox: Dsn, partner: Partner, seed: int
) -> None:
    chance = random.Random(seed)

    async def answer(_: Got) -> Reply:
        await asyncio.sleep(chance.random() / 50)
        lucky = chance.random() > 0.1
        return (204, {}, b"") if lucky else (500, {}, b"oops")

    partner.answer = answer
    store(inbox, keys=30, each=10)
    more = {"breaker_failures": 1000, "attempts": 1000, "max_in_flight": 20}
    victims: list[BaseProcess] = []

    def idle() -> bool:
        let_lanes_be_due(inbox)
        return unread(inbox) == unfinished(inbox) == 0 and not waiting(inbox)

    for _ in range(4):
        point = f"{chance.choice(('dispatch_answered', 'dispatch_marked'))}:{chance.randint(1, 30)}"
        victims.append(start(program, inbox, partner.url, more, failpoint=point))
        until(lambda victim=victims[-1]: idle() or not victim.is_alive())  # type: ignore[misc]
    with dispatching(dispatcher(inbox, partner, **more)):
        until(idle)
        assert len({got.id for got in partner.accepted}) == 300
        until(lambda: unfinished(inbox) == 0 and not waiting(inbox))
    assert any(victim.exitcode == -signal.SIGKILL for victim in victims)
    for victim in victims:
        victim.kill()
        victim.join()
    for numbers in partner.by_key().values():
        assert list(dict.fromkeys(numbers)) == list(range(1, 11))
    assert dead(inbox) == []


def test_the_sdk_of_cloudevents_reads_an_event_as_json(inbox: Dsn, partner: Partner) -> None:
    json_type = '{"content-type": "application/json; charset=utf-8"}'
    put(inbox, '{"total": 7}', key='a "ü"', message_type="OrderPlaced", headers=json_type)
    put(inbox, "hello", key='a "ü"', headers='{"content-type": "text/plain"}')
    put(inbox, "\x01", key='a "ü"')
    dispatch(inbox, partner, mode="structured")
    events = [
        from_http_event(HTTPMessage(headers=got.headers, body=got.body)) for got in partner.accepted
    ]
    assert [one.get_data() for one in events] == [{"total": 7}, "hello", b"\x01"]
    assert {one.get_subject() for one in events} == {'a "ü"'}
    assert [one.get_id() for one in events] == [got.id for got in partner.accepted]


@pytest.mark.parametrize("mode", ["structured", "batch"])
def test_an_event_as_json_has_a_body_that_is_json_to_the_last_byte(
    inbox: Dsn, partner: Partner, mode: str
) -> None:
    json_type = '{"content-type": "application/json"}'
    same = ['{"n": [1e400, 0.1000000000000000055] ,"n":7}', "1" * 5000, '"ü"', "[ ]\n"]
    other = ["NaN", "[-Infinity]", "1} ", ""]
    for body in (*same, *other):
        put(inbox, body, key="k", headers=json_type)
    dispatch(inbox, partner, mode=mode)
    sent = b"\n".join(got.body for got in partner.accepted)
    assert [body for body in same if f'"data": {body}}}'.encode() not in sent] == []
    in_base64 = [base64.b64encode(body.encode()) for body in other]
    assert [body for body in in_base64 if b'"data_base64": "%b"}' % body not in sent] == []


def batch(got: Got) -> list[Any]:
    """The events of a batch, each read by the SDK, which reads no batches."""
    return [
        from_http_event(HTTPMessage(headers=EVENT, body=json.dumps(one).encode()))
        for one in json.loads(got.body)
    ]


def test_batch_sends_a_message_each_of_many_keys_and_the_sdk_of_cloudevents_reads_it(
    inbox: Dsn, partner: Partner
) -> None:
    partner.after(0.01)
    store(inbox, keys=30, each=4)
    done = dispatch(inbox, partner, mode="batch", batch_messages=10, max_in_flight=2)
    assert done.summary.handled == 120
    sent: dict[str, list[int]] = {}
    for got in partner.accepted:
        assert got.headers["content-type"].startswith("application/cloudevents-batch+json")
        some = batch(got)
        assert len({one.get_subject() for one in some}) == len(some) <= 10
        for one in some:
            sent.setdefault(one.get_subject(), []).append(int(one.get_data()))
    assert sent == {f"k{k}": [1, 2, 3, 4] for k in range(1, 31)}
    assert len(partner.accepted) < 60


def test_batch_of_a_key_sends_several_of_its_messages_in_order(
    inbox: Dsn, partner: Partner
) -> None:
    store(inbox, keys=3, each=20)
    dispatch(inbox, partner, mode="batch", batch_messages=10, batch_of="key")
    for got in partner.accepted:
        some = batch(got)
        assert len({one.get_subject() for one in some}) == 1
    sent: dict[str, list[int]] = {}
    for got in partner.accepted:
        for one in batch(got):
            sent.setdefault(one.get_subject(), []).append(int(one.get_data()))
    assert sent == {f"k{k}": list(range(1, 21)) for k in range(1, 4)}
    assert len(partner.accepted) < 20


@pytest.mark.parametrize(("batch_of", "key"), [("keys", "'k' || k"), ("key", "'k'")])
def test_a_batch_of_large_bodies_has_few_messages(
    inbox: Dsn, partner: Partner, batch_of: str, key: str
) -> None:
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) SELECT 'billing', "
            f"{key}, repeat('x', 400000)::bytea FROM generate_series(1, 10) k"
        )
    dispatch(inbox, partner, mode="batch", batch_of=batch_of)
    sizes = [len(json.loads(got.body)) for got in partner.accepted]
    assert sum(sizes) == 10
    assert max(sizes) == 3, "the third reaches a megabyte"


@pytest.mark.parametrize("batch_of", ["keys", "key"])
def test_of_a_batch_that_is_rejected_only_the_message_at_fault_is_a_dead_letter(
    inbox: Dsn, partner: Partner, batch_of: str
) -> None:
    taken: dict[str, list[int]] = {}

    async def answer(got: Got) -> Reply:
        some = [(one.get_subject(), int(one.get_data())) for one in batch(got)]
        if ("k2", 3) in some:
            return 422, {}, b"no such order"
        for key, number in some:
            taken.setdefault(key, []).append(number)
        return 204, {}, b""

    partner.answer = answer
    store(inbox, keys=5, each=6)
    done = dispatch(inbox, partner, mode="batch", batch_of=batch_of)
    assert done.summary.handled == 29
    assert dead(inbox) == [("3", "rejected")]
    whole = [1, 2, 3, 4, 5, 6]
    assert taken == {f"k{k}": whole for k in (1, 3, 4, 5)} | {"k2": [1, 2, 4, 5, 6]}


def test_of_a_batch_that_is_refused_each_message_is_sent_alone_only_once(
    inbox: Dsn, partner: Partner
) -> None:
    partner.always(503)
    store(inbox, keys=3, each=1)
    with dispatching(dispatcher(inbox, partner, mode="batch", breaker_failures=1)):
        until(lambda: state(inbox) == "open" and partner.answered == 4)
        partner.answer = None
        let_probes_be_due(inbox)
        until(lambda: unread(inbox) == 0)
    assert [len(batch(got)) for got in partner.begun] == [3, 1, 1, 1, 1, 2]


def test_a_template_makes_a_body_of_the_endpoints_own_form(inbox: Dsn, partner: Partner) -> None:
    put(inbox, '{"note": "5\\" & more", "lines": [{"price": 7}]}', key="a&b", from_service="shop")
    put(inbox, "no json", key="c", from_service="shop")
    text = '{"text": {{ data.note }}, "order": {{key}}, "price": {{data.lines.0.price}}}'
    done = dispatch(inbox, partner, mode="plain", template=text)
    (got,) = partner.accepted
    assert json.loads(got.body) == {"text": '5" & more', "order": "a&b", "price": 7}
    assert got.headers["content-type"] == "application/json"
    # what it has not is said, and nothing is sent
    assert done.summary.exit_code == 1
    assert dead(inbox) == [("no json", "rejected")]
    put(inbox, "x=y", key="a&b")
    form = "application/x-www-form-urlencoded"
    dispatch(inbox, partner, template="order={{key}}&text={{data}}", template_type=form)
    assert partner.accepted[-1].body == b"order=a%26b&text=x%3Dy"
    assert partner.accepted[-1].headers["ce-subject"] == "a&b"


def test_a_template_writes_the_numbers_of_a_body_as_they_are(inbox: Dsn, partner: Partner) -> None:
    total, lines = "12345678901234567890.10", '[1e400, {"n": -0.0}, true, null, "1.50"]'
    put(inbox, f'{{"total": {total}, "lines": {lines}}}')
    dispatch(inbox, partner, template='{"of": {{data.total}}, "all": {{data.lines}}}')
    assert partner.accepted[-1].body.decode() == f'{{"of": {total}, "all": {lines}}}'
    form = "application/x-www-form-urlencoded"
    put(inbox, f'{{"total": {total}}}')
    dispatch(inbox, partner, template="total={{data.total}}", template_type=form)
    assert partner.accepted[-1].body.decode() == f"total={total}"
    put(inbox, '{"total": null, "lines": [1]}')
    lines = "total={{data.total}}&lines={{data.lines}}"
    dispatch(inbox, partner, template=lines, template_type=form)
    assert partner.accepted[-1].body.decode() == "total=&lines=%5B1%5D"
    # what is no JSON is a text
    put(inbox, '{"total": NaN}')
    dispatch(inbox, partner, template='{"all": {{data}}}')
    assert json.loads(partner.accepted[-1].body) == {"all": '{"total": NaN}'}


def test_plain_sends_the_headers_of_a_message_that_http_allows(
    inbox: Dsn, partner: Partner
) -> None:
    headers = {
        "content-type": "application/json",
        "X-Order": "A-1\r\nHost: evil",
        "attempt": 3,
        "host": "evil",
        "webhook-id": "evil",
        "not a name": "x",
        "list": [1],
    }
    put(inbox, "{}", key="a", headers=json.dumps(headers))
    dispatch(inbox, partner, mode="plain")
    (got,) = partner.accepted
    assert got.headers["x-order"] == "A-1%0D%0AHost: evil"
    assert got.headers["attempt"] == "3"
    assert got.headers["content-type"] == "application/json"
    assert got.headers["host"].startswith("127.0.0.1:")
    assert not {"webhook-id", "not a name", "list", "ce-id"} & set(got.headers)
    assert got.body == b"{}"


def test_xml_rpc_calls_a_method_and_a_fault_is_a_failure_with_its_text(inbox: Dsn) -> None:
    called: list[object] = []

    def order(number: object, total: object = None) -> bool:
        called.append((number, total))
        if number == "A-2":
            raise LookupError("no such order")
        return True

    with SimpleXMLRPCServer(("127.0.0.1", 0), logRequests=False) as server:
        server.register_function(order)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        partner = Partner(url=f"http://127.0.0.1:{server.server_address[1]}/RPC2")
        put(inbox, '["A-1", 7.5]', '"A-3"', key="a")
        put(inbox, '["A-2", 1]', key="b")
        put(inbox, "no JSON", key="c")
        try:
            done = dispatch(inbox, partner, mode="xmlrpc", method="order", attempts=2)
            assert sorted(map(str, called)) == [
                "('A-1', 7.5)",
                "('A-2', 1)",
                "('A-3', None)",
            ]
            ((lane, count, error),) = attempts(inbox)
            assert (lane, count) == ("b", 1)
            assert error.endswith(":no such order")
            assert [reason for _, reason in dead(inbox)] == ["rejected"]
            assert done.summary.handled == 2
            let_lanes_be_due(inbox)
            dispatch(inbox, partner, mode="xmlrpc", method="order", attempts=2)
            assert dead(inbox)[1:] == [('["A-2", 1]', "failed")]
        finally:
            server.shutdown()
            thread.join()


def test_a_rate_is_kept(inbox: Dsn, partner: Partner) -> None:
    store(inbox, keys=20, each=3)
    began = time.monotonic()
    dispatch(inbox, partner, rate="20/s")
    # the first second's are there at once
    assert time.monotonic() - began > 1.8
    assert len(partner.accepted) == 60


def test_a_rate_of_each_key_is_kept_and_no_other_key_waits(inbox: Dsn, partner: Partner) -> None:
    at: list[tuple[str | None, float]] = []

    async def answer(got: Got) -> Reply:
        at.append((got.key, time.monotonic()))
        return 204, {}, b""

    partner.answer = answer
    store(inbox, keys=20, each=3)
    began = time.monotonic()
    dispatch(inbox, partner, rate_per_key="2/s")
    assert 1.0 < time.monotonic() - began < 10
    for key in {key for key, _ in at}:
        mine = [moment for one, moment in at if one == key]
        assert all(later - moment > 0.45 for moment, later in pairwise(mine))
    # all keys had their first turn at once
    assert max(moment for _, moment in at[:20]) - min(moment for _, moment in at[:20]) < 0.5


def test_keys_that_rest_keep_no_other_key_waiting(inbox: Dsn, partner: Partner) -> None:
    store(inbox, keys=4, each=10)
    with dispatching(dispatcher(inbox, partner, rate_per_key="1/min", max_in_flight=2)):
        until(lambda: len(partner.accepted) == 4)
        put(inbox, "1", key="another")
        until(lambda: len(partner.accepted) == 5, 20)
    assert partner.accepted[-1].key == "another"


def test_one_key_with_many_messages_keeps_no_other_shard_waiting(
    inbox: Dsn, partner: Partner
) -> None:
    partner.after(0.005)
    store(inbox, keys=1, each=2000)
    with dispatching(dispatcher(inbox, partner)):
        until(lambda: len(partner.accepted) > 10)
        store(inbox, keys=40, each=1)
        # those in its shard wait for its batch, as they do for receivers
        with connect(inbox) as connection:
            rows = fetch(
                connection,
                "SELECT DISTINCT key FROM saf.inbox WHERE shard NOT IN "
                "(SELECT shard FROM saf.inbox WHERE key = 'k1')",
            )
        others = {key for (key,) in rows}
        assert len(others) > 30
        until(lambda: others <= {got.key for got in partner.accepted}, 20)
        assert len(partner.accepted) < 2000


@pytest.mark.full
def test_large_bodies_are_read_a_few_at_a_time(inbox: Dsn, partner: Partner) -> None:
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) SELECT 'billing', 'k' || n, "
            "convert_to(repeat('x', 20 * 1024 * 1024), 'UTF8') FROM generate_series(1, 40) n"
        )
    before = psutil.Process().memory_info().rss
    most = 0

    async def answer(_: Got) -> Reply:
        nonlocal most
        partner.begun.clear()
        most = max(most, psutil.Process().memory_info().rss - before)
        return 204, {}, b""

    partner.answer, partner.keeps = answer, False
    with dispatching(dispatcher(inbox, partner, max_in_flight=2)):
        until(lambda: partner.answered == 40, 60)
        until(lambda: unfinished(inbox) == 0)
        # with what the partner holds of two requests
        assert most < 450 << 20


@pytest.mark.full
def test_of_all_dispatchers_one_sends_a_probe_and_an_endpoint_down_for_long_is_disabled(
    inbox: Dsn, partner: Partner
) -> None:
    partner.always(503)
    store(inbox, keys=200, each=1)
    more = {"breaker_failures": 2, "disable_after_seconds": 60.0, "max_in_flight": 1}
    with dispatching(*(dispatcher(inbox, partner, **more) for _ in range(2))):
        until(lambda: members(inbox) == [32, 32])
        until(lambda: state(inbox) == "open")
        time.sleep(LOOK_SECONDS + 0.5)  # by then, the other one has looked
        until(lambda: partner.in_flight == 0)
        partner.after(3)
        sent = len(partner.begun)
        let_probes_be_due(inbox)
        until(lambda: len(partner.begun) > sent)
        # while it is under way, it is nobody's turn
        time.sleep(2)
        assert len(partner.begun) == sent + 1
        partner.after(0.1)
        until(lambda: state(inbox) == "closed")
        partner.always(503)
        until(lambda: state(inbox) == "open")
        with connect(inbox) as connection:
            connection.execute("UPDATE saf.breaker SET failing_since = now() - interval '2 min'")
        let_probes_be_due(inbox)
        until(lambda: state(inbox) == "disabled")
        sent = len(partner.begun)
        with connect(inbox) as connection:
            number = fetch(connection, "SELECT subscription_id FROM saf.breaker")[0][0]
            Book(subscription_id=number, endpoint="partner").resume(connection)
        partner.answer = None
        until(lambda: len(partner.accepted) == 200)
        assert len(partner.begun) > sent


def test_a_run_without_loop_sends_a_probe_once_it_is_due_and_goes_on_if_it_is_accepted(
    inbox: Dsn, partner: Partner
) -> None:
    partner.always(503)
    store(inbox, keys=10, each=2)
    assert dispatch(inbox, partner, breaker_failures=2, max_in_flight=1).exit_code == 75
    assert state(inbox) == "open"
    sent = len(partner.begun)
    assert dispatch(inbox, partner, max_in_flight=1).exit_code == 75
    assert len(partner.begun) == sent
    let_probes_be_due(inbox)
    assert dispatch(inbox, partner, max_in_flight=1).exit_code == 75
    assert (len(partner.begun), state(inbox)) == (sent + 1, "open")
    partner.answer = None
    let_probes_be_due(inbox)
    let_lanes_be_due(inbox)
    assert dispatch(inbox, partner, max_in_flight=1).exit_code == 0
    assert state(inbox) == "closed"
    assert partner.by_key() == {f"k{k}": [1, 2] for k in range(1, 11)}


def test_a_probe_is_sent_though_what_is_read_before_it_waits_for_its_time(
    inbox: Dsn, partner: Partner
) -> None:
    delayed, plain = keys_of_one_shard(2)
    put(inbox, *["0"] * 25, key=delayed, deliver_at="2999-01-01")
    put(inbox, "1", key=plain)
    with connect(inbox) as connection:
        number = subscription(connection, SUBSCRIPTION).subscription_id
        Book(subscription_id=number, endpoint="partner").down(connection, "HTTP 503", 0.0)
    assert dispatch(inbox, partner, max_in_flight=1).exit_code == 0
    assert partner.by_key() == {plain: [1]}
    assert state(inbox) == "closed"


def test_while_a_probe_may_be_under_way_no_other_one_is_due(inbox: Dsn, partner: Partner) -> None:
    answer = held(partner, 204)
    put(inbox, "1", key="a")
    with connect(inbox) as connection:
        number = subscription(connection, SUBSCRIPTION).subscription_id
        Book(subscription_id=number, endpoint="partner").down(connection, "HTTP 503", 0.0)
        ((before,),) = fetch(connection, "SELECT clock_timestamp()")
        with dispatching(dispatcher(inbox, partner, timeout_seconds=30)):
            until(lambda: partner.in_flight == 1)
            ((after,),) = fetch(connection, "SELECT next_probe_at FROM saf.breaker")
            answer()
            until(lambda: state(inbox) == "closed")
    assert after - before >= timedelta(seconds=30)


def test_a_worker_that_takes_over_handles_only_what_no_endpoint_has_answered(
    inbox: Dsn, partner: Partner
) -> None:
    slow, accepts, rejects, fails = keys_of_one_shard(4)
    answers: dict[str | None, Reply] = {rejects: (422, {}, b"no"), fails: (503, {}, b"")}

    async def answer(got: Got) -> Reply:
        if got.key == slow:
            await asyncio.sleep(60)
        return answers.get(got.key, (204, {}, b""))

    partner.answer = answer
    for number, key in enumerate((slow, accepts, rejects, fails, slow)):
        put(inbox, str(number), key=key)
    one = dispatcher(inbox, partner, timeout_seconds=60)
    one.stop_seconds = 0.0
    with dispatching(one):
        until(lambda: unread(inbox) == 2)
    assert out_of_order(inbox) > 0
    assert (len(dead(inbox)), waiting(inbox)) == (1, [fails])
    put(inbox, "5", key=accepts)
    handled = []
    worker = saf.Worker(inbox, SUBSCRIPTION)

    @worker.handler()
    def handle(message: saf.Received, _: object) -> None:
        handled.append(message.text())

    worker.drain()
    assert sorted(handled) == ["0", "4", "5"]
    assert (len(dead(inbox)), waiting(inbox), unfinished(inbox)) == (1, [fails], 0)


@pytest.mark.parametrize(
    "more",
    [{}, {"mode": "batch"}, {"mode": "batch", "batch_of": "key"}],
    ids=["alone", "of keys", "of a key"],
)
def test_a_message_that_expires_in_memory_is_not_sent(
    inbox: Dsn, partner: Partner, more: dict[str, Any]
) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=1)
    partner.after(1.5)
    put(inbox, "1", key="a")
    with dispatching(dispatcher(inbox, partner, max_in_flight=1, **more)):
        until(lambda: len(partner.begun) == 1)
        put(inbox, "2", "3", key="a", expires_at=soon)
        put(inbox, "4", key="b", expires_at=soon)
        put(inbox, "5", key="b")
        until(lambda: unfinished(inbox) == 0 and unread(inbox) == 0, 30)
    assert sorted(dead(inbox)) == [("2", "expired"), ("3", "expired"), ("4", "expired")]
    sent = [[one.get_data() for one in batch(got)] if more else [got.body] for got in partner.begun]
    assert sent == [[b"1"], [b"5"]]


def test_an_expired_message_is_no_probe(inbox: Dsn, partner: Partner) -> None:
    partner.always(503)
    put(inbox, "1", key="a", expires_at=datetime.now(UTC) + timedelta(seconds=2))
    put(inbox, "2", key="b")
    with dispatching(dispatcher(inbox, partner, breaker_failures=1, max_in_flight=1)):
        until(lambda: state(inbox) == "open")
        sent = len(partner.begun)
        time.sleep(2)
        let_probes_be_due(inbox)
        until(lambda: len(partner.begun) > sent)
    assert partner.begun[-1].body == b"2"


@pytest.mark.parametrize("loop", [False, True])
def test_a_dispatcher_that_cannot_go_on_stops_no_other_one(
    inbox: Dsn, partner: Partner, monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    monkeypatch.setattr(running, "FIND_SECONDS", 0.1)
    partner.after(1)
    put(inbox, "1", "2", "3", key="a")
    none = Dispatcher("none", Endpoint(url=partner.url), inbox)

    def stop() -> None:
        until(lambda: len(partner.accepted) == 3, 20)
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as threads:
        if loop:
            stopping = threads.submit(stop)
            running.run([none, dispatcher(inbox, partner)])
            stopping.result()
        else:
            with pytest.raises(ConfigurationError, match="none"):
                running.run([none, dispatcher(inbox, partner)], drain=True)
    assert partner.by_key() == {"a": [1, 2, 3]}


def test_a_run_without_loop_that_meets_a_lock_is_unavailable(inbox: Dsn, partner: Partner) -> None:
    there = replace(inbox, bounds=replace(inbox.bounds, lock_seconds=0.5))
    one = dispatcher(there, partner)
    one.lease_seconds = 1.5  # a lock is waited for no longer
    for table in ("member", "cursor", "breaker"):
        with connect(inbox) as holder, holder.transaction():
            holder.execute(f"LOCK TABLE saf.{table} IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(Unavailable, match=r"(lock|statement) timeout"):
                running.run([one], drain=True)


def test_messages_of_a_batch_that_is_refused_are_as_many_requests_as_may_be_in_flight(
    inbox: Dsn, partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = 0  # a request may also wait for a connection, where the partner does not see it

    async def post(client: Client, request: Request) -> Answer:
        nonlocal waiting
        waiting += 1
        assert waiting == 1
        answer = await client._attempt(request)
        waiting -= 1
        return answer

    async def answer(got: Got) -> Reply:
        if len(batch(got)) > 1:
            return 422, {}, b"too many"
        await asyncio.sleep(0.1)
        return 204, {}, b""

    partner.answer = answer
    store(inbox, keys=8, each=1)
    monkeypatch.setattr(Client, "post", post)
    done = dispatch(inbox, partner, mode="batch", max_in_flight=1)
    assert (done.summary.handled, done.exit_code) == (8, 0)


def test_a_key_that_a_worker_has_left_for_a_handler_is_sent(inbox: Dsn, partner: Partner) -> None:
    put(inbox, "1", "2", key="a", message_type="OrderPlaced")
    worker = saf.Worker(inbox, SUBSCRIPTION)

    @worker.handler("OrderPaid")
    def handle(message: saf.Received, _: object) -> None:
        raise AssertionError(message)

    with suppress(saf.SafError):
        worker.drain()
    assert waiting(inbox) == ["a"]
    assert dispatch(inbox, partner).exit_code == 0
    assert partner.by_key() == {"a": [1, 2]}
    assert waiting(inbox) == []


def test_a_later_run_says_too_that_messages_wait_for_another_attempt(
    inbox: Dsn, partner: Partner
) -> None:
    partner.always(503)
    put(inbox, "1", key="a")
    assert dispatch(inbox, partner).exit_code == 75
    assert dispatch(inbox, partner).exit_code == 75
    partner.answer = None
    let_lanes_be_due(inbox)
    assert dispatch(inbox, partner).exit_code == 0


def test_a_delayed_message_that_expires_leaves_no_lane_behind(inbox: Dsn, partner: Partner) -> None:
    put(inbox, "1", key="a", deliver_at="2999-01-01", expires_at="2999-01-02")
    dispatch(inbox, partner)
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.parked SET deliver_at = now(), expires_at = now()")
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    dispatch(inbox, partner)
    assert dead(inbox) == [("1", "expired")]
    with connect(inbox) as connection:
        assert fetch(connection, "SELECT kind, subject FROM saf.backoff") == []


def test_a_delayed_message_that_is_too_large_to_be_read_is_a_dead_letter(
    inbox: Dsn, partner: Partner
) -> None:
    unbounded(inbox)
    put(inbox, "1", key="a", deliver_at="2999-01-01")
    put(inbox, "2", key="a")
    dispatch(inbox, partner)
    with connect(inbox) as connection:
        connection.execute(
            "UPDATE saf.parked SET deliver_at = now(), message_type = repeat('x', 100000)"
        )
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    assert dispatch(inbox, partner).exit_code == 1
    assert dead(inbox) == [("1", "over_size")]
    assert partner.by_key() == {"a": [2]}


def test_what_is_logged_of_a_message_names_its_trace(inbox: Dsn, partner: Partner) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = json.dumps({"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    put(inbox, "1", key="a", headers=headers)
    partner.always(422)
    with capture_logs() as lines:
        dispatch(inbox, partner)
    (line,) = [line for line in lines if line["event"] == "dead_letter"]
    assert (line["key"], line["trace_id"]) == ("a", trace)


def test_a_success_while_shards_leave_counts_no_attempt_in_them() -> None:
    window = Window()
    window.own([InHand(shard=1, epoch=1, batch=1, done="1:1:", open=None, position=0)])
    window.leaving = frozenset({1})
    window.count([FailedAttempt(lane="a", shard=1, id=1, attempts=1, error="HTTP 503")])
    assert window.busy() == set()
    assert window.own([]) == [1]


def test_retry_after_is_honoured(inbox: Dsn, partner: Partner) -> None:
    partner.always(429, b"slowly", retry_after="1000")
    put(inbox, "1", key="a")
    put(inbox, "1", key="b")
    assert dispatch(inbox, partner, max_in_flight=1).exit_code == 75
    assert len(partner.begun) == 1
    with connect(inbox) as connection:
        ((seconds,),) = fetch(
            connection, "SELECT extract(epoch FROM next_probe_at - now()) FROM saf.breaker"
        )
    assert 900 < seconds <= 1000


def test_a_fault_with_retry_after_makes_its_message_wait_for_this_time(
    inbox: Dsn, partner: Partner
) -> None:
    partner.always(200, dumps(Fault(1, "busy"), methodresponse=True).encode(), retry_after="1000")
    put(inbox, "[]", key="a")
    dispatch(inbox, partner, mode="xmlrpc", method="order")
    with connect(inbox) as connection:
        ((seconds,),) = fetch(
            connection, "SELECT extract(epoch FROM next_attempt_at - now()) FROM saf.backoff"
        )
    assert 900 < seconds <= 1000
    assert state(inbox) == "closed"


# What is written, as it is


def joined(connection: psycopg.Connection[Any]) -> Reader:
    """A member that owns all shards, as a reader."""
    found = subscription(connection, SUBSCRIPTION)
    member = Member(subscription_id=found.subscription_id, lease_seconds=30)
    member.join(connection)
    assert member.balance(connection) == 64
    return Reader(
        subscription_id=found.subscription_id,
        name=found.name,
        service=found.service,
        owner=member.member_id,
    )


def marks_of_one_rejected(connection: psycopg.Connection[Any], reader: Reader) -> Marks:
    """What a dispatcher would write that has read one message, and was answered."""
    window = Window()
    window.own(source.owned(connection, reader))
    (batch,) = source.open_batches(connection, reader)
    window.shards[batch.shard].begin(batch)
    rows, whole = reading.next_messages(connection, reader, [window.shards[batch.shard].place], 10)
    assert whole == {batch.shard}
    for row in rows:
        window.add(saf.Received(row))
    message = window.next()
    assert message is not None
    window.reject(message, "rejected", "no")
    marks = window.marks()
    assert marks is not None
    return marks


def test_marks_of_a_shard_that_another_member_has_taken_over_write_nothing(inbox: Dsn) -> None:
    put(inbox, "1", key="a")
    with connect(inbox) as connection, connect(inbox) as other:
        reader = joined(connection)
        marks = marks_of_one_rejected(connection, reader)
        outlive_lease(inbox)
        joined(other)
        with pytest.raises(Fenced):
            marking.mark(connection, reader, marks)
        assert fetch(connection, "SELECT max(position) FROM saf.cursor") == [(0,)]
    assert dead(inbox) == []


@pytest.mark.parametrize("changed", ["epoch = epoch + 1", "batch = batch + 1", "owner = NULL"])
def test_marks_of_a_shard_that_went_and_came_back_write_nothing(inbox: Dsn, changed: str) -> None:
    """Whoever had it in between may have sent what these marks call complete."""
    put(inbox, "1", key="a")
    with connect(inbox) as connection:
        reader = joined(connection)
        marks = marks_of_one_rejected(connection, reader)
        connection.execute(f"UPDATE saf.cursor SET {changed}")
        with pytest.raises(Fenced):
            marking.mark(connection, reader, marks)
    assert dead(inbox) == []


def test_ids_that_are_complete_are_of_one_batch_and_beyond_its_position(inbox: Dsn) -> None:
    """A message of the next batch, which committed late, may have an id among those of this one."""
    ids = "SELECT d.batch, d.ids::text FROM saf.dispatched d"
    put(inbox, "1", key="a")
    with connect(inbox) as connection:
        reader = joined(connection)
        (hand,) = source.open_batches(connection, reader)

        def mark(position: int, ids: str) -> None:
            one = Mark(
                shard=hand.shard,
                epoch=hand.epoch,
                batch=hand.batch,
                position=position,
                closed=False,
                ids=ids,
                new=True,
            )
            marking.mark(connection, reader, Marks(cursors=[one]))

        mark(3, "{[5,9)}")
        mark(3, "{[20,21)}")
        assert fetch(connection, ids) == [(hand.batch, "{[5,9),[20,21)}")]
        mark(6, "{[30,31)}")
        assert fetch(connection, ids) == [(hand.batch, "{[7,9),[20,21),[30,31)}")]
        connection.execute("UPDATE saf.cursor SET batch = batch + 1")
        hand.batch += 1
        mark(6, "{[8,9)}")
        assert fetch(connection, ids) == [(hand.batch, "{[8,9)}")]


def test_where_the_inbox_notifies_a_message_is_sent_at_once_however_seldom_polls_are(
    inbox: Dsn, partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(inbox) as connection:
        link.switch(connection, True)
    monkeypatch.setattr(pauses, "SHORTEST_SECONDS", 3600.0)
    monkeypatch.setattr(source, "LISTENING_PAUSE_SECONDS", 3600.0)
    with dispatching(dispatcher(inbox, partner)):
        for number in range(3):
            time.sleep(1)  # by then, nothing polls
            put(inbox, str(number))
            until(partial(accepted, partner, number + 1), seconds=20)


def accepted(partner: Partner, count: int) -> bool:
    return len(partner.accepted) == count
