"""A message whose type no handler takes waits, in order, until a worker has a handler for it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.errors import UsageError
from saf.operating import decide
from saf.receiving import retries
from saf.receiving.inbox import inbox_status
from saf.receiving.summary import MOST_TYPES
from saf.setaside.selection import DeadLetters
from saf.setaside.unhandled import unhandled
from saf.setaside.waiting import retry_now
from tests.pipeline import connect, let_time_pass
from tests.programs import BIN, configuration, run
from tests.query_plans import steps
from tests.receivers import (
    SUBSCRIPTION,
    dead,
    effect,
    effects,
    let_keys_be_due,
    put,
    running,
    waiting,
    writes_nothing,
)
from tests.sql_page import numbered
from tests.waits import until


class Of(saf.Worker):
    """A worker that has handlers for some types."""

    def __init__(self, inbox: Dsn, *types: str, **options: Any) -> None:
        super().__init__(inbox, SUBSCRIPTION, **options)
        self.attempts: set[int] = set()
        self.bad: set[str] = set()
        for one in types:
            self.handler(one)(self.handle)

    def handle(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        self.attempts.add(message.attempt)
        effect(connection, message)
        if message.text() in self.bad:
            raise ValueError


def by_type(inbox: Dsn) -> dict[str | None, tuple[int, int]]:
    """The keys and messages that wait, by the type that they wait for a handler of."""
    with connect(inbox) as connection:
        return {one.message_type: (one.keys, one.messages) for one in unhandled(connection)}


def test_a_type_without_a_handler_waits_in_order_until_there_is_one(inbox: Dsn) -> None:
    put(inbox, "1", "2", key="k", message_type="Old")
    put(inbox, "3", key="k", message_type="New")
    put(inbox, "4", key="k", message_type="Old")
    put(inbox, "a", key="other", message_type="Old")
    old = Of(inbox, "Old")
    old.drain()
    put(inbox, "5", key="k", message_type="Old")
    old.drain()
    assert sorted(effects(inbox)) == ["1", "2", "a"], "a later message of the key does not overtake"
    assert dead(inbox) == []
    assert by_type(inbox) == {"New": (1, 3)}
    both = Of(inbox, "Old", "New")
    both.drain()
    assert [one for one in effects(inbox) if one != "a"] == ["1", "2", "3", "4", "5"]
    assert both.attempts == {1}
    assert waiting(inbox) == []
    assert by_type(inbox) == {}


def test_a_key_may_wait_for_one_handler_after_the_other(inbox: Dsn) -> None:
    put(inbox, "1", key="k", message_type="A")
    put(inbox, "2", key="k", message_type="B")
    put(inbox, "3", key="k", message_type="C")
    for types in ("C", "B", "A", "C", "B", "C"):
        Of(inbox, types).drain()
    assert effects(inbox) == ["1", "2", "3"]


def test_a_message_without_a_type_waits_for_a_handler_of_all_types(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    Of(inbox, "Old").drain()
    assert by_type(inbox) == {None: (1, 1)}
    any_type = saf.Worker(inbox, SUBSCRIPTION)
    any_type.handler()(lambda message, connection: effect(connection, message))
    any_type.drain()
    assert effects(inbox) == ["1"]


def test_who_receives_without_a_worker_gets_what_waits_for_a_handler(inbox: Dsn) -> None:
    put(inbox, "1", "2", key="k", message_type="New")
    Of(inbox, "Old").drain()
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert [message.text() for message in delivery] == ["1", "2"]
    assert by_type(inbox) == {}


def test_old_and_new_workers_side_by_side_handle_all_in_order_and_do_not_loop(inbox: Dsn) -> None:
    old, new = Of(inbox, "Old"), Of(inbox, "Old", "New", max_messages=10)
    with running(old), running(new):
        for number in range(1, 41):
            kind = "New" if number % 3 == 0 else "Old"
            for key in range(5):
                put(inbox, str(number), key=f"k{key}", message_type=kind)
        until(lambda: len(effects(inbox)) == 200)
    for key in range(5):
        with connect(inbox) as connection:
            mine = fetch(
                connection,
                "SELECT body FROM effect WHERE key = %(key)s ORDER BY number",
                {"key": f"k{key}"},
            )
        assert [int(body) for (body,) in mine] == list(range(1, 41))
    assert dead(inbox) == []
    assert by_type(inbox) == {}


@pytest.mark.slow
def test_a_worker_beside_lanes_that_it_cannot_handle_writes_nothing(inbox: Dsn) -> None:
    for number in range(5):
        put(inbox, "x", key=str(number), message_type="New")
    with running(Of(inbox, "Old")):
        until(lambda: by_type(inbox) == {"New": (5, 5)})
        assert writes_nothing(inbox, lambda: time.sleep(1.5))


def test_a_new_handler_that_fails_counts_its_attempts_though_an_old_worker_meets_the_message(
    inbox: Dsn,
) -> None:
    put(inbox, "1", key="k", message_type="New")
    policy = saf.Policy(max_attempts=3)
    old, new = Of(inbox, "Old", policy=policy), Of(inbox, "New", policy=policy)
    new.bad.add("1")
    for _ in range(3):
        old.drain()
        assert dead(inbox) == []
        new.drain()
        let_keys_be_due(inbox)
    assert dead(inbox) == [("1", "failed")]
    assert new.attempts == {1, 2, 3}


def test_time_that_passes_and_an_operators_word_change_nothing_for_who_has_no_handler(
    inbox: Dsn,
) -> None:
    put(inbox, "1", key="k", message_type="New")
    old = Of(inbox, "Old")
    old.drain()
    let_time_pass(inbox)
    old.drain()
    with connect(inbox) as connection:
        assert retry_now(connection) == 0
    old.drain()
    assert by_type(inbox) == {"New": (1, 1)}
    Of(inbox, "New").drain()
    assert effects(inbox) == ["1"]


def test_what_nobody_will_handle_is_a_dead_letter_if_so_said_and_can_be_retried(
    inbox: Dsn,
) -> None:
    put(inbox, "1", key="k", message_type="New")
    put(inbox, "2", key="k", message_type="Old")
    worker = Of(inbox, "Old", unhandled="dead")
    with capture_logs() as logs:
        worker.drain()
    assert dead(inbox) == [("1", "failed")]
    assert effects(inbox) == ["2"]
    assert worker.summary.buried == 1
    assert [one["log_level"] for one in logs if one["event"] == "no_handler"] == ["warning"]
    with connect(inbox) as connection:
        decide.retry(connection, DeadLetters(), "there is a handler")
    Of(inbox, "New").drain()
    assert effects(inbox) == ["2", "1"]


def test_what_waits_already_becomes_dead_letters_once_a_worker_says_so(inbox: Dsn) -> None:
    put(inbox, "1", "2", key="k", message_type="New")
    Of(inbox, "Old").drain()
    Of(inbox, "Old", unhandled="dead").drain()
    assert dead(inbox) == [("1", "failed"), ("2", "failed")]


def test_there_is_one_warning_for_each_type(inbox: Dsn) -> None:
    for number in range(20):
        put(inbox, "x", key=str(number), message_type=f"New{number % 2}")
    worker = Of(inbox, "Old", max_messages=3)
    with capture_logs() as logs:
        worker.drain()
    told = [one for one in logs if one["log_level"] in ("warning", "error")]
    assert sorted((one["event"], one["message_type"]) for one in told) == [
        ("no_handler", "New0"),
        ("no_handler", "New1"),
    ]
    assert "saf inbox status" in told[0]["detail"]
    assert (worker.summary.handled, worker.summary.parked) == (0, 20)


def test_another_word_than_wait_or_dead_is_refused(inbox: Dsn) -> None:
    with pytest.raises(UsageError, match="unhandled: 'bury' is neither 'wait' nor 'dead'"):
        saf.Worker(inbox, SUBSCRIPTION, unhandled="bury")  # type: ignore[arg-type]


def test_a_type_of_any_length_and_an_empty_one_are_waited_for(inbox: Dsn) -> None:
    long = "New" * 10_000
    put(inbox, "1", key="a", message_type=long)
    put(inbox, "2", key="b", message_type="")
    put(inbox, "3", key="c")
    Of(inbox, "Old", long[:-1]).drain()
    assert by_type(inbox) == {None: (1, 1), "": (1, 1), long: (1, 1)}
    Of(inbox, long).drain()
    assert effects(inbox) == ["1"]
    Of(inbox, "").drain()
    assert effects(inbox) == ["1", "2"]
    assert by_type(inbox) == {None: (1, 1)}


def test_a_handler_of_a_type_that_no_message_can_have_is_no_hindrance(inbox: Dsn) -> None:
    put(inbox, "1", key="k", message_type="Old")
    Of(inbox, "Other").drain()
    Of(inbox, "Old", "a\0b", "\udc80").drain()
    assert effects(inbox) == ["1"]


def test_a_dead_letter_that_is_retried_goes_before_what_waits_for_a_handler(inbox: Dsn) -> None:
    put(inbox, "1", key="k", message_type="Old")
    put(inbox, "2", key="k", message_type="New")
    old = Of(inbox, "Old", policy=saf.Policy(max_attempts=1))
    old.bad.add("1")
    old.drain()
    assert dead(inbox) == [("1", "failed")]
    assert by_type(inbox) == {"New": (1, 1)}
    old.bad.clear()
    with connect(inbox) as connection:
        decide.retry(connection, DeadLetters(), "the handler is mended")
    old.drain()
    assert effects(inbox) == ["1"]
    assert by_type(inbox) == {"New": (1, 1)}


def test_a_dead_letter_that_is_discarded_leaves_what_waits_for_a_handler_alone(inbox: Dsn) -> None:
    put(inbox, "1", key="k", message_type="Old")
    put(inbox, "2", key="k", message_type="New")
    old = Of(inbox, "Old", policy=saf.Policy(max_attempts=1))
    old.bad.add("1")
    old.drain()
    with connect(inbox) as connection:
        decide.discard(connection, DeadLetters(), "nobody needs it")
    assert by_type(inbox) == {"New": (1, 1)}


@pytest.mark.parametrize("how", ["wait", "dead"])
def test_however_many_types_have_no_handler_a_worker_remembers_and_says_some_hundreds(
    inbox: Dsn, how: str
) -> None:
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, message_type, body) "
            "SELECT 'billing', 'Type' || n %% %s, '' FROM generate_series(0, %s) AS n",
            [MOST_TYPES + 5, 2 * MOST_TYPES + 9],
        )
    worker = Of(inbox, "Old", unhandled=how)
    with capture_logs() as lines:
        worker.drain()
    assert len(worker.summary.without_handler) == MOST_TYPES
    assert len(lines) == MOST_TYPES
    assert str(worker.summary).endswith("and 10 messages of other types")
    assert worker.summary.exit_code == 1


# How much it costs to ask

MANY = 10_000
SHARDS, PER_RETRY = 64, 100

WAITING_LANES = """
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, error,
                         next_attempt_at, awaits_handler, message_type)
SELECT subscription_id, '', 'key', 'k' || n, n %% %s, 'no handler', '9999-01-01', true, 'New'
FROM saf.subscription, generate_series(1, %s) AS n WHERE name = %s
"""


def lanes_read(
    connection: psycopg.Connection[Any], statement: str, types: list[str] | None, cache: str
) -> int:
    """How many rows of saf.backoff a statement of receivers looks at, as a server plans it."""
    ((subscription_id,),) = fetch(
        connection, "SELECT subscription_id FROM saf.subscription WHERE name = 'billing'"
    )
    values = {"subscription_id": subscription_id, "owner": None, "types": types}
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", statement)))
    connection.execute(f"SET plan_cache_mode = {cache}")
    connection.execute("DEALLOCATE ALL")
    connection.execute(f"PREPARE asked AS {numbered(statement)}".encode())
    explain = f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE asked ({', '.join(['%s'] * len(names))})"
    cursor = psycopg.ClientCursor(connection)
    found = cursor.execute(explain, [values[name] for name in names]).fetchone()
    assert found is not None
    return sum(
        one["Actual Loops"] * (one["Actual Rows"] + one.get("Rows Removed by Filter", 0))
        for one in steps(found[0][0]["Plan"])
        if one.get("Relation Name") == "backoff"
    )


@pytest.mark.every_postgresql
@pytest.mark.parametrize("cache", ["force_generic_plan", "force_custom_plan"])
def test_however_many_lanes_wait_for_a_type_to_ask_for_another_one_reads_none(
    inbox: Dsn, cache: str
) -> None:
    many = [f"Type{number}" for number in range(20)]
    with connect(inbox) as connection:
        connection.execute(WAITING_LANES, [SHARDS, MANY, SUBSCRIPTION])
        connection.execute("ANALYZE saf.backoff")
        for statement, at_most in ((retries.LOOK, 1), (retries.CHOOSE, PER_RETRY)):
            assert lanes_read(connection, statement, many, cache) == 0
            assert 1 <= lanes_read(connection, statement, ["New"], cache) <= at_most
            assert 1 <= lanes_read(connection, statement, None, cache) <= at_most


# What a processor has no method for


class Totals(saf.Processor):
    @saf.handles("Old")
    def old(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)


class MoreTotals(Totals):
    @saf.handles("New")
    def new(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)


def test_a_type_without_a_method_waits_for_processors_that_have_one(inbox: Dsn) -> None:
    put(inbox, "1", key="k", message_type="Old")
    put(inbox, "2", key="k", message_type="New")
    put(inbox, "3", key="k", message_type="Old")
    saf.Processors(inbox, SUBSCRIPTION, Totals).drain()
    assert effects(inbox) == ["1"]
    assert by_type(inbox) == {"New": (1, 2)}
    saf.Processors(inbox, SUBSCRIPTION, MoreTotals).drain()
    assert effects(inbox) == ["1", "2", "3"]


# A message of a dialog


def test_a_dialog_waits_for_a_handler_and_goes_on(app: Dsn) -> None:
    with connect(app) as connection:
        for service in ("shop", SUBSCRIPTION):
            create_service(connection, service)
    with app.connect(role="test") as connection:
        dialog = saf.begin_dialog(connection, from_service="shop", to_service=SUBSCRIPTION)
        for kind in ("Old", "New", "Old"):
            dialog.send(connection, kind, message_type=kind)
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, from_service, key, conversation_id, "
            "from_initiator, sequence, message_type, headers, body) "
            "SELECT to_service, from_service, key, conversation_id, from_initiator, sequence, "
            "message_type, headers, body FROM saf.outbox ORDER BY id"
        )
    heard: list[str] = []
    for types in (["Old"], ["Old", "New"]):
        worker = saf.Worker(app, SUBSCRIPTION)
        for kind in types:
            worker.handler(kind)(lambda message, _: heard.append(message.text()))
        worker.drain()
        assert heard == (["Old"] if types == ["Old"] else ["Old", "New", "Old"])


# The commands

MODULE = """
import os
import saf

worker = saf.Worker(os.environ["INBOX"], "billing", unhandled=os.environ["UNHANDLED"])

@worker.handler("Old")
def old(message, connection):
    if message.text() == "bad":
        raise KeyError("nothing")
"""


def worked(inbox: Dsn, folder: Path, how: str = "wait") -> tuple[int, str, str]:
    (folder / "consumers.py").write_text(MODULE)
    done = run(
        [BIN / "saf", "worker", "consumers:worker", "--drain"],
        env={"INBOX": inbox.conninfo, "UNHANDLED": how},
        cwd=folder,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_drain_says_what_it_parked_and_buried_and_so_does_its_exit_code(
    inbox: Dsn, tmp_path: Path
) -> None:
    put(inbox, "good", key="a", message_type="Old")
    assert worked(inbox, tmp_path)[:2] == (0, "handled 1 message\n")
    put(inbox, "1", "2", key="b", message_type="New")
    code, out, err = worked(inbox, tmp_path)
    assert (code, out) == (1, "handled 0 messages, parked 2; no handler for 'New'\n")
    assert len(re.findall("no_handler", err)) == 1
    assert worked(inbox, tmp_path)[:2] == (0, "handled 0 messages\n"), "nothing new waits"
    code, out, _ = worked(inbox, tmp_path, "dead")
    assert (code, out) == (1, "handled 0 messages, made 2 dead letters; no handler for 'New'\n")


def test_a_drain_after_which_a_message_waits_for_another_attempt_says_try_again_later(
    inbox: Dsn, tmp_path: Path
) -> None:
    (tmp_path / "consumers.py").write_text(MODULE)
    put(inbox, "bad", "good", key="k", message_type="Old")
    done = run(
        [BIN / "saf", "worker", "consumers:worker", "--drain"],
        env={"INBOX": inbox.conninfo, "UNHANDLED": "wait"},
        cwd=tmp_path,
        tracebacks=True,
    )
    assert (done.returncode, done.stdout) == (75, "handled 0 messages, parked 2\n")


def test_what_waits_for_a_handler_is_shown_by_type(inbox: Dsn, tmp_path: Path) -> None:
    for key in ("a", "b"):
        put(inbox, "1", "2", key=key, message_type="New")
    put(inbox, "1", key="c")
    Of(inbox, "Old").drain()
    config = configuration(tmp_path / "saf.toml", {"app": inbox}, {"mom": inbox})
    shown = run([BIN / "saf", "inbox", "status", "--config", config])
    assert shown.returncode == 0, shown.stderr
    assert "app: billing: 4 messages of type 'New' wait for a handler, since 20" in shown.stdout
    assert "app: billing: 1 message without a type waits for a handler, since 20" in shown.stdout
    at_mom = ("inbox", "status", "--broker", "mom", "--json", "--config", config)
    told = json.loads(run([BIN / "saf", *at_mom]).stdout)
    assert [(one["message_type"], one["messages"]) for one in told["unhandled"]] == [
        (None, 1),
        ("New", 4),
    ]
    listed = run([BIN / "saf", "parked", "list", "--broker", "mom", "--config", config])
    assert re.search(
        "a worker with a handler for 'New' .* once a worker handles its type +no handler for",
        listed.stdout,
    )
    examined = run([BIN / "saf", "doctor", "--config", config])
    found = " ".join(examined.stdout.split())
    assert "subscription 'billing': 4 messages of type 'New' wait" in found
    assert "[no_handler]" in found


@pytest.mark.slow
def test_many_keys_that_wait_do_not_slow_down_who_cannot_handle_them(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, message_type, body) "
            "SELECT 'billing', 'k' || n, 'New', '' FROM generate_series(1, 5000) AS n"
        )
    old = Of(inbox, "Old", max_messages=1000)
    old.drain()
    with connect(inbox) as connection:
        (status,) = inbox_status(connection)
    assert (status.parked, status.keys_waiting) == (5000, 5000)
    put(inbox, *map(str, range(20)), message_type="Old")
    began = time.process_time()
    old.drain()
    assert time.process_time() - began < 5
    assert len(effects(inbox)) == 20
