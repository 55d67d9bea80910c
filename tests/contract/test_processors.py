"""Processors: one instance per key, whose memory is never ahead of the database."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

import saf
from saf.broker.migrate import migrate
from saf.database import Dsn, fetch
from saf.errors import UsageError
from saf.receiving import loop, processors
from saf.receiving.membership import Membership
from tests.pipeline import connect
from tests.processes import start, wait
from tests.processors import Counter, Poisoned, Unlucky, lives, member, prepare_processors, stale
from tests.programs import ROOT, environment
from tests.receivers import (
    SUBSCRIPTION,
    by_key,
    dead,
    effects,
    let_keys_be_due,
    let_the_server_notice,
    put,
    running,
    store,
    waiting,
    writes_nothing,
)
from tests.tiers import sized
from tests.waits import until

every_postgresql = pytest.mark.every_postgresql

POINTS = ("receive_read", "receive_handled", "receive_settled", "receive_committed")


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare_processors(mom)
    return mom


def tried_again(inbox: Dsn) -> bool:
    let_keys_be_due(inbox)
    return True


@contextmanager
def members(
    inbox: Dsn, count: int, processor: type[saf.Processor] = Counter, **options: Any
) -> Iterator[list[BaseProcess]]:
    """In processes of their own; those still there are stopped in order."""
    processes = [start(member, inbox, processor, options) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            wait(process)


def owned(inbox: Dsn) -> dict[int, set[int]]:
    """The shards of each member, by process."""
    with connect(inbox) as connection:
        rows = fetch(
            connection,
            "SELECT split_part(name, ':', 2)::int, array_remove(array_agg(shard), NULL) "
            "FROM saf.member LEFT JOIN saf.cursor ON owner = member_id GROUP BY member_id, name",
        )
    return {pid: set(shards) for pid, shards in rows}


# Instances


def test_an_instance_is_activated_by_its_first_message_and_remembers(inbox: Dsn) -> None:
    store(inbox, 5, 20, transactions=4)
    runner = saf.Processors(inbox, SUBSCRIPTION, Counter, max_messages=7)
    assert runner.drain() == 100
    assert by_key(inbox) == {f"k{key}": list(range(1, 21)) for key in range(1, 6)}
    assert sorted(key for key, _ in lives(inbox, "activate")) == [f"k{n}" for n in range(1, 6)]
    assert stale(inbox) == []


def test_shutdown_passivates_every_instance_and_frees_the_shards(inbox: Dsn) -> None:
    store(inbox, 30, 1)
    runner = saf.Processors(inbox, SUBSCRIPTION, Counter, max_messages=7)
    with running(runner):
        until(lambda: len(effects(inbox)) == 30)
        assert lives(inbox, "passivate") == []
    assert len(lives(inbox, "passivate")) == 30
    assert owned(inbox) == {}


def test_an_idle_instance_is_passivated_and_the_others_are_not(inbox: Dsn) -> None:
    put(inbox, "1", key="idle")
    with running(saf.Processors(inbox, SUBSCRIPTION, Counter, idle_seconds=1)):
        for number in range(1, 31):
            put(inbox, str(number), key="busy")
            time.sleep(0.05)
        assert [key for key, _ in lives(inbox, "passivate")] == ["idle"]
        put(inbox, "2", key="idle")
        until(lambda: len(lives(inbox, "activate", "idle")) == 2)
    assert len(lives(inbox, "activate", "busy")) == 1
    assert stale(inbox) == []


def test_of_too_many_instances_those_used_least_recently_are_passivated(inbox: Dsn) -> None:
    store(inbox, 40, 3)
    runner = saf.Processors(inbox, SUBSCRIPTION, Counter, max_messages=5, max_instances=10)
    with running(runner):
        until(lambda: len(effects(inbox)) == 120)
        until(lambda: len(lives(inbox, "activate")) - len(lives(inbox, "passivate")) <= 10)
    assert by_key(inbox) == {f"k{key}": [1, 2, 3] for key in range(1, 41)}
    assert stale(inbox) == []


def test_a_message_without_key_has_an_instance_of_its_own(inbox: Dsn) -> None:
    put(inbox, "1", "1", "1")
    saf.Processors(inbox, SUBSCRIPTION, Counter).drain()
    assert effects(inbox) == ["1", "1", "1"]
    with connect(inbox) as connection:
        ids = {str(one) for (one,) in fetch(connection, "SELECT message_id FROM saf.inbox")}
    assert {key for key, _ in lives(inbox, "activate")} == ids
    assert {key for key, _ in lives(inbox, "passivate")} == ids


# What fails


def test_an_instance_of_a_message_without_key_is_passivated_once(inbox: Dsn) -> None:
    passivated: list[saf.Processor] = []

    class Alone(saf.Processor):
        @saf.handles()
        def handle(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            """Nothing to do."""

        def passivate(self, connection: psycopg.Connection[Any]) -> None:  # noqa: ARG002 - a processor's signature
            passivated.append(self)

    put(inbox, "1", "2")
    assert saf.Processors(inbox, SUBSCRIPTION, Alone).drain() == 2
    assert len(passivated) == len({id(one) for one in passivated}) == 2


def test_what_an_instance_remembers_of_a_handler_that_failed_is_thrown_away(inbox: Dsn) -> None:
    put(inbox, "1", "2", "3", key="k")
    put(inbox, "1", "2", "3", key="other")

    class Picky(Counter):
        bad = True

        @saf.handles()
        def count(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            super().count(message, connection)
            if (self.key, self.last) == ("k", 2) and Picky.bad:
                raise ValueError("2 will not do")

    runner = saf.Processors(inbox, SUBSCRIPTION, Picky)
    with running(runner):
        until(lambda: waiting(inbox))
        assert by_key(inbox) == {"k": [1], "other": [1, 2, 3]}
        Picky.bad = False
        let_keys_be_due(inbox)
        until(lambda: not waiting(inbox))
    assert by_key(inbox) == {"k": [1, 2, 3], "other": [1, 2, 3]}
    # what handled 1 may have been undone with 2, and done again by the instance that goes on
    assert len(lives(inbox, "activate", "k")) in (1, 2)
    assert len(lives(inbox, "activate", "other")) == 1
    assert stale(inbox) == []


def test_a_transaction_that_is_lost_takes_along_the_instances_that_were_called_in_it(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "RECONNECT_SECONDS", 0.1)
    put(inbox, "1", key="untouched")

    class Cut(Counter):
        left = 1

        @saf.handles()
        def count(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            super().count(message, connection)
            if (self.key, self.last) == ("k", 3) and Cut.left:
                Cut.left -= 1
                connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    with running(saf.Processors(inbox, SUBSCRIPTION, Cut)):
        until(lambda: len(effects(inbox)) == 1)
        put(inbox, "1", key="k")
        until(lambda: len(effects(inbox)) == 2)
        with connect(inbox) as connection, connection.transaction():
            for number in (2, 3, 4):
                connection.execute(
                    "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'k', %s)",
                    [str(number).encode()],
                )
        until(lambda: len(effects(inbox)) >= 3 or waiting(inbox))
        until(lambda: tried_again(inbox) and len(effects(inbox)) == 5)
        put(inbox, "2", key="untouched")
        until(lambda: len(effects(inbox)) == 6)
    assert by_key(inbox) == {"k": [1, 2, 3, 4], "untouched": [1, 2]}
    assert len(lives(inbox, "activate", "k")) == 2
    assert len(lives(inbox, "activate", "untouched")) == 1
    assert stale(inbox) == []


def test_an_instance_that_cannot_be_made_or_activated_fails_its_message_only(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    put(inbox, "1", key="unmade")
    put(inbox, "1", key="other")

    class Unready(Counter):
        made = 0

        def __init__(self) -> None:
            Unready.made += 1
            if Unready.made == 2:
                raise ValueError("not me")

        def activate(self, connection: psycopg.Connection[Any]) -> None:
            super().activate(connection)
            if self.key == "k":
                raise ValueError("not yet")

    policy = saf.Policy(max_attempts=1)
    saf.Processors(inbox, SUBSCRIPTION, Unready, policy=policy).drain()
    assert len(dead(inbox)) == 2
    assert by_key(inbox) == {"other": [1]}


def test_a_passivation_that_fails_is_undone_and_the_instance_goes_all_the_same(inbox: Dsn) -> None:
    store(inbox, 3, 1)

    class Clinging(Counter):
        def passivate(self, connection: psycopg.Connection[Any]) -> None:
            super().passivate(connection)
            if self.key == "k2":
                raise ValueError("no")

    saf.Processors(inbox, SUBSCRIPTION, Clinging).drain()
    assert {key for key, _ in lives(inbox, "passivate")} == {"k1", "k3"}
    put(inbox, "2", key="k2")
    saf.Processors(inbox, SUBSCRIPTION, Clinging).drain()
    assert by_key(inbox)["k2"] == [1, 2]


@pytest.mark.slow
@every_postgresql
def test_under_kills_and_rollbacks_each_key_is_counted_in_order_and_once(inbox: Dsn) -> None:
    keys, each = 20, sized(30, 60)
    chance = random.Random(11)
    store(inbox, keys, each, transactions=20)
    options = {"max_messages": 10, "idle_seconds": 0.3, "max_instances": 5}

    def another() -> BaseProcess:
        point = (
            f"{chance.choice((*POINTS, 'processors_passivate'))}:{chance.randint(3, sized(10, 20))}"
        )
        return start(member, inbox, Unlucky, options, failpoint=point)

    processes = [another() for _ in range(3)]
    killed = 0
    deadline = time.monotonic() + 90
    while len(effects(inbox)) < keys * each and time.monotonic() < deadline:
        for number, process in enumerate(processes):
            if not process.is_alive():
                assert wait(process) == -signal.SIGKILL
                killed += 1
                processes[number] = another()
        time.sleep(0.05)
    for process in processes:
        process.terminate()
        wait(process)
    assert killed > 3
    assert by_key(inbox) == {f"k{key}": list(range(1, each + 1)) for key in range(1, keys + 1)}
    assert (stale(inbox), dead(inbox), waiting(inbox)) == ([], [], [])


def test_a_message_that_kills_its_member_is_a_dead_letter_although_its_shard_moves_each_time(
    inbox: Dsn,
) -> None:
    put(inbox, "1", "poison", "2", key="k")
    put(inbox, "1", key="other")
    kills = 0
    while len(effects(inbox)) < 3:
        let_keys_be_due(inbox)
        process = start(member, inbox, Poisoned, {"policy": saf.Policy()})
        until(lambda p=process: not p.is_alive() or len(effects(inbox)) == 3)  # type: ignore[misc]
        process.terminate()
        kills += wait(process) == -signal.SIGKILL
        let_the_server_notice(inbox)
        assert kills < 10
    assert dead(inbox) == [("poison", "failed")]
    assert by_key(inbox) == {"k": [1, 2], "other": [1]}


# Members


def activated(inbox: Dsn) -> int:
    """How many processes have had an instance."""
    return len({pid for _, pid in lives(inbox, "activate")})


@pytest.mark.full
@pytest.mark.slow
def test_while_members_come_and_go_no_instance_is_ever_behind_the_database(inbox: Dsn) -> None:
    """Three stay; memory is checked at each message."""
    keys, number = 40, 0
    with members(inbox, 3, max_messages=5):
        for _ in range(3):
            before = activated(inbox)
            with members(inbox, 2, max_messages=5):
                moved, patience = time.monotonic() + 1, time.monotonic() + 60
                # until one of them has had an instance: that is what comes and goes
                while time.monotonic() < moved or activated(inbox) <= before:
                    assert time.monotonic() < patience
                    number += 1
                    store_more(inbox, keys, number, number)
                    time.sleep(0.02)
        until(lambda: len(effects(inbox)) == keys * number)
    assert by_key(inbox) == {f"k{key}": list(range(1, number + 1)) for key in range(1, keys + 1)}
    assert (stale(inbox), waiting(inbox)) == ([], [])
    assert activated(inbox) >= 4, "instances have moved to members that came"


def store_more(inbox: Dsn, keys: int, first: int, last: int) -> None:
    with connect(inbox) as connection:
        for number in range(first, last + 1):
            connection.execute(
                "INSERT INTO saf.inbox (to_service, key, body) "
                "SELECT 'billing', 'k' || k, %s FROM generate_series(1, %s::int) k",
                [str(number).encode(), keys],
            )


@pytest.mark.slow
def test_a_sixth_member_takes_sixteen_of_a_hundred_shards_and_gives_them_back(
    new_database: Callable[[str], Dsn],
) -> None:
    """ACCEPTANCE 18 and 19, and that what lives in the other shards is not touched."""
    inbox = new_database("hundred")
    migrate(inbox, shards=100)
    prepare_processors(inbox)
    keys = 300

    def sizes(expected: list[int]) -> bool:
        return sorted(map(len, owned(inbox).values())) == expected

    def activations() -> dict[str, int]:
        counts = dict.fromkeys((f"k{key}" for key in range(1, keys + 1)), 0)
        for key, _ in lives(inbox, "activate"):
            counts[key] += 1
        return counts

    def passivated() -> set[str]:
        return {key for key, _ in lives(inbox, "passivate")}

    def send_and_wait(number: int) -> None:
        store_more(inbox, keys, number, number)
        until(lambda: len(effects(inbox)) == keys * number)

    with connect(inbox) as connection, members(inbox, 5):
        until(lambda: sizes([20] * 5))
        send_and_wait(1)
        shard = dict(fetch(connection, "SELECT DISTINCT key, shard FROM saf.inbox"))
        before = owned(inbox)
        assert set(activations().values()) == {1}
        with members(inbox, 1) as (sixth,):
            until(lambda: sizes([16, 16, 17, 17, 17, 17]))
            during = owned(inbox)
            send_and_wait(2)
            assert sixth.pid is not None
            moved = during[sixth.pid]
            assert len(moved) == 16
            assert all(before[pid] == during[pid] | before[pid] & moved for pid in before)
            expected = {key: 1 + (shard[key] in moved) for key in shard}
            assert activations() == expected
            assert passivated() == {key for key in shard if shard[key] in moved}
        until(lambda: sizes([20] * 5))
        after = owned(inbox)
        assert all(during[pid] <= after[pid] for pid in before)
        send_and_wait(3)
        assert activations() == {key: 1 + 2 * (shard[key] in moved) for key in shard}
        assert passivated() == {key for key in shard if shard[key] in moved}
    assert stale(inbox) == []


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "within a transaction"])
@every_postgresql
def test_a_member_that_sleeps_past_its_lease_writes_nothing_when_it_wakes(
    inbox: Dsn, busy: bool
) -> None:
    put(inbox, "1", key="k")
    with members(inbox, 1, Sleeper, lease_seconds=1, idle_seconds=2) as (sleeper,):
        assert sleeper.pid is not None
        until(lambda: len(effects(inbox)) == 1)
        if busy:
            put(inbox, "2", key="k")
            with connect(inbox) as connection:
                until(lambda: fetch(connection, SLEEPING))
        os.kill(sleeper.pid, signal.SIGSTOP)
        try:
            with members(inbox, 1, Counter, lease_seconds=1):
                if not busy:
                    put(inbox, "2", key="k")
                until(lambda: tried_again(inbox) and len(effects(inbox)) == 2)
                assert len(lives(inbox, "activate", "k")) == 2
                os.kill(sleeper.pid, signal.SIGCONT)
                time.sleep(3)
                assert effects(inbox) == ["1", "2"]
                assert sleeper.pid not in {pid for _, pid in lives(inbox, "passivate")}
                put(inbox, "3", key="k")
                until(lambda: len(effects(inbox)) == 3)
                until(lambda: sorted(map(len, owned(inbox).values())) == [32, 32])
        finally:
            os.kill(sleeper.pid, signal.SIGCONT)
    assert by_key(inbox) == {"k": [1, 2, 3]}
    assert stale(inbox) == []


@pytest.mark.parametrize("call", ["passivate", "output", "count"])
def test_one_who_does_not_know_yet_that_it_was_taken_over_calls_nothing_on_its_instances(
    inbox: Dsn, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "LOOK_SECONDS", 60)

    class Noting(Counter):
        def output(self, connection: psycopg.Connection[Any]) -> None:
            self.note(connection, "output")

    put(inbox, "1", key="k")
    idle, often = (0.5 if call == one else 60 for one in ("passivate", "output"))
    runner = saf.Processors(
        inbox, SUBSCRIPTION, Noting, idle_seconds=idle, output_seconds=often, lease_seconds=60
    )
    with running(runner):
        until(lambda: effects(inbox) == ["1"])
        with connect(inbox) as connection, connection.transaction():
            connection.execute("DELETE FROM saf.member")
            connection.execute("UPDATE saf.cursor SET epoch = epoch + 1")
            before = fetch(connection, "SELECT what FROM life")
        if call == "count":
            put(inbox, "2", key="k")
        time.sleep(1.2)
    assert effects(inbox) == ["1"]
    with connect(inbox) as connection:
        assert fetch(connection, "SELECT what FROM life") == before


SLEEPING = "SELECT FROM pg_locks WHERE relation = 'effect'::regclass AND pid <> pg_backend_pid()"


class Sleeper(Counter):
    @saf.handles()
    def count(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        super().count(message, connection)
        if message.body == b"2":
            time.sleep(0.7)  # less than the lease; it is stopped meanwhile


def joins(inbox: Dsn) -> None:
    Membership(inbox, 1, 60.0)


def test_a_member_that_never_leaves_does_not_keep_its_process_from_ending(inbox: Dsn) -> None:
    process = start(joins, inbox)
    process.join(20)
    process.kill()
    assert process.exitcode == 0


def test_a_member_that_has_lost_its_session_joins_anew_and_remembers_nothing(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "LOOK_SECONDS", 600.0)
    put(inbox, "1", key="k")
    runner = saf.Processors(inbox, SUBSCRIPTION, Counter, lease_seconds=1.5)
    with running(runner):
        until(lambda: effects(inbox) == ["1"])
        first = runner._membership
        assert first is not None
        with connect(inbox) as connection:
            pid = first._link.raw.info.backend_pid
            connection.execute("SELECT pg_terminate_backend(%s)", [pid])
        until(lambda: first.lost)
        put(inbox, "2", key="k")  # which ends its wait
        until(lambda: runner._membership not in (first, None))
        put(inbox, "3", key="k")
        until(lambda: effects(inbox) == ["1", "2", "3"])
    assert len(lives(inbox, "activate", "k")) == 2
    assert stale(inbox) == []


# Output


@pytest.mark.slow
def test_output_comes_on_schedule_for_live_instances_only(inbox: Dsn) -> None:
    store(inbox, 3, 1)

    class Loud(Counter):
        def output(self, connection: psycopg.Connection[Any]) -> None:
            self.note(connection, "output")
            if self.key == "k3":
                raise ValueError("no")

    runner = saf.Processors(
        inbox, SUBSCRIPTION, Loud, max_messages=2, output_seconds=0.5, idle_seconds=1.4
    )
    with running(runner):
        until(lambda: len(effects(inbox)) == 3)
        time.sleep(1.2)
        put(inbox, "2", key="k1")
        put(inbox, "2", key="k3")
        time.sleep(1)
        outputs = [key for key, _ in lives(inbox, "output")]
    assert outputs.count("k1") >= 3
    assert 1 <= outputs.count("k2") <= 3
    assert outputs.count("k3") == 0, "it was undone"
    assert len(lives(inbox, "activate", "k3")) == 2, "and its instance thrown away"
    assert len(lives(inbox, "activate", "k1")) == 1


@pytest.mark.slow
def test_idle_processors_write_nothing_but_their_lease(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    with running(saf.Processors(inbox, SUBSCRIPTION, Counter)):
        until(lambda: effects(inbox) == ["1"])
        time.sleep(1.5)
        assert writes_nothing(inbox, lambda: time.sleep(2.5))


# Beside others


def test_it_runs_on_an_engine_of_sqlalchemy(inbox: Dsn) -> None:
    class Alchemist(saf.Processor):
        def activate(self, connection: sa.Connection) -> None:
            query = sa.text("SELECT last FROM balance WHERE key = :key")
            self.last = connection.execute(query, {"key": self.key}).scalar() or 0

        @saf.handles()
        def handle(self, message: saf.Received, connection: sa.Connection) -> None:
            self.last += 1
            connection.execute(
                sa.text("INSERT INTO effect (key, body) VALUES (:key, :last)"),
                {"key": message.key, "last": str(self.last)},
            )

        def passivate(self, connection: sa.Connection) -> None:
            connection.execute(
                sa.text(
                    "INSERT INTO balance VALUES (:key, :last) "
                    "ON CONFLICT (key) DO UPDATE SET last = :last"
                ),
                {"key": self.key, "last": self.last},
            )

    store(inbox, 5, 3)
    engine = inbox.engine()
    with running(saf.Processors(engine, SUBSCRIPTION, Alchemist, idle_seconds=0.3)):
        until(lambda: len(effects(inbox)) == 15)
        time.sleep(0.6)
        put(inbox, "", key="k1")
        until(lambda: len(effects(inbox)) == 16)
    engine.dispose()
    assert by_key(inbox) == {"k1": [1, 2, 3, 4], **{f"k{key}": [1, 2, 3] for key in range(2, 6)}}
    assert owned(inbox) == {}


@pytest.mark.full
@pytest.mark.slow
def test_saf_worker_runs_processors_until_sigterm(inbox: Dsn, tmp_path: Path) -> None:
    (tmp_path / "consumers.py").write_text(
        "import os, saf\n"
        "from tests.processors import Counter\n"
        "runner = saf.Processors(os.environ['INBOX'], 'billing', Counter)\n"
    )
    store(inbox, 30, 2)
    process = subprocess.Popen(
        [sys.executable, "-m", "saf", "worker", "consumers:runner", "--processes", "2"],
        cwd=tmp_path,
        env=environment(INBOX=inbox.conninfo, PYTHONPATH=str(ROOT)),
    )
    try:
        until(lambda: sorted(map(len, owned(inbox).values())) == [32, 32])
        store_more(inbox, 30, 3, 3)
        until(lambda: len(effects(inbox)) == 90)
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    assert owned(inbox) == {}
    assert len(lives(inbox, "passivate")) == len(lives(inbox, "activate"))


def test_who_receives_from_what_processors_own_is_refused_or_gets_nothing(inbox: Dsn) -> None:
    worker = saf.Worker(inbox, SUBSCRIPTION)
    handled: list[str] = []

    @worker.handler()
    def handle(message: saf.Received, _: object) -> None:
        handled.append(message.text())

    with running(worker):
        put(inbox, "0", key="w")
        until(lambda: handled == ["0"])
        with running(saf.Processors(inbox, SUBSCRIPTION, Counter)):
            until(lambda: sum(map(len, owned(inbox).values())) == 64)
            store(inbox, 20, 2)
            until(lambda: len(effects(inbox)) == 40)
            refusal = "processors own the shards of subscription 'billing'"
            with pytest.raises(UsageError, match=refusal), saf.receive(inbox, SUBSCRIPTION):
                pass
        assert handled == ["0"]
        put(inbox, "after", key="w")
        until(lambda: handled == ["0", "after"])


def test_processors_that_were_killed_do_not_keep_others_from_receiving(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    process = start(member, inbox, Counter, {}, failpoint="receive_handled")
    assert wait(process) == -signal.SIGKILL
    let_the_server_notice(inbox)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert [message.text() for message in delivery] == ["1"]


def test_a_class_or_a_number_that_will_not_do_is_refused_by_name(inbox: Dsn) -> None:
    with pytest.raises(UsageError, match=r"'A' has a handler already: .*Twice\.one"):

        class Twice(saf.Processor):
            @saf.handles("A")
            def one(self, message: object, connection: object) -> None: ...

            @saf.handles("B", "A")
            def two(self, message: object, connection: object) -> None: ...

    with pytest.raises(UsageError, match=r"expected \(self, message, connection\)"):

        class Few(saf.Processor):
            @saf.handles()
            def one(self, message: object) -> None: ...

    with pytest.raises(UsageError, match=r"Waits\.passivate is async"):

        class Waits(saf.Processor):
            async def passivate(self, connection: object) -> None: ...  # type: ignore[override]

    with pytest.raises(
        UsageError, match=r"is text, such as 'OrderPlaced', or an event's class, and not 7"
    ):
        saf.handles("A", 7)  # type: ignore[call-overload]

    class Nothing(saf.Processor): ...

    with pytest.raises(UsageError, match=r"Nothing has no method with @saf\.handles"):
        saf.Processors(inbox, SUBSCRIPTION, Nothing).drain()
    with pytest.raises(UsageError, match=r"idle_seconds \(0\)"):
        saf.Processors(inbox, SUBSCRIPTION, Counter, idle_seconds=0)


def test_a_type_that_no_method_is_for_is_a_dead_letter_if_so_said(inbox: Dsn) -> None:
    class Placed(Counter):
        count = None  # type: ignore[assignment]

        @saf.handles("Placed")
        def placed(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            Counter.count(self, message, connection)

    put(inbox, "1", key="k", message_type="Placed")
    put(inbox, "x", key="k", message_type="Paid")
    put(inbox, "2", key="k", message_type="Placed")
    saf.Processors(inbox, SUBSCRIPTION, Placed, unhandled="dead").drain()
    assert effects(inbox) == ["1", "2"]
    with connect(inbox) as connection:
        ((error,),) = fetch(connection, "SELECT error FROM saf.dead_letter")
    assert error == "no handler for message type 'Paid', only for 'Placed'"
