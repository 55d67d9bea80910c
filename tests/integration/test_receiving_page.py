"""The examples of docs/receiving.md do what the page says; and ``saf inbox``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import saf
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from saf.receiving.inbox import GUARD, inbox_once, inbox_status, peek
from tests.pipeline import connect
from tests.programs import BIN, ROOT, activated, configuration, run, url
from tests.receivers import prepare, put

PAGE = (ROOT / "docs" / "receiving.md").read_text()
INVOICE = "CREATE TABLE invoice (number text PRIMARY KEY, total int, paid bool DEFAULT false)"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare(mom)
    with connect(mom) as connection:
        connection.execute(INVOICE)
    return mom


def invoices(dsn: Dsn) -> list[tuple[object, ...]]:
    with connect(dsn) as connection:
        return fetch(connection, "SELECT number, total, paid FROM invoice ORDER BY 1")


def test_the_commands_work_in_their_order(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    done = run(
        ["bash", "-euxc", "".join(blocks("shell"))],
        env={"PATH": activated()},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_the_block_handles_what_is_there(inbox: Dsn) -> None:
    put(inbox, json.dumps({"order": "A-1", "total": 90}), key="A-1")
    (code,) = blocks("python")
    done = run([sys.executable, "-c", code], env={"DATABASE_URL": url(inbox)})
    assert done.returncode == 0, done.stderr
    assert invoices(inbox) == [("A-1", 90, False)]


def test_the_worker_handles_what_is_there(inbox: Dsn, tmp_path: Path) -> None:
    for number in ("A-1", "A-2"):
        put(inbox, json.dumps({"order": number}), key=number, message_type="OrderPlaced")
    put(inbox, json.dumps({"order": "A-1"}), key="A-1", message_type="OrderPaid")
    (code,) = blocks("worker")
    (tmp_path / "consumers.py").write_text(code)
    done = run(
        [BIN / "saf", "worker", "consumers:worker", "--drain"],
        env={"INBOX": inbox.conninfo},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "handled 3 messages\n"
    assert invoices(inbox) == [("A-1", None, True), ("A-2", None, False)]


def test_the_worker_whose_handlers_wait_handles_what_is_there(inbox: Dsn, tmp_path: Path) -> None:
    for number in range(40):
        put(inbox, json.dumps({"order": str(number)}), message_type="OrderPlaced")
    (code,) = blocks("async worker")
    (tmp_path / "consumers.py").write_text(code)
    done = run(
        [BIN / "saf", "worker", "consumers:worker", "--drain"],
        env={"INBOX": inbox.conninfo},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "handled 40 messages\n"
    assert len(invoices(inbox)) == 40


def test_the_worker_whose_handlers_take_a_role_handles_what_is_there(
    inbox: Dsn, tmp_path: Path
) -> None:
    for number in range(3):
        put(inbox, "", key=str(number), message_type="OrderPlaced")
    tenant = f"tenant_{inbox.database}"
    (code,) = blocks("tenant worker")
    (tmp_path / "consumers.py").write_text(code.replace("ROLE tenant", f"ROLE {tenant}"))
    with connect(inbox) as owner:
        owner.execute(f"CREATE ROLE {tenant}; GRANT ALL ON invoice TO {tenant}")
        try:
            done = run(
                [BIN / "saf", "worker", "consumers:worker", "--drain"],
                env={"INBOX": inbox.conninfo},
                cwd=tmp_path,
            )
        finally:
            owner.execute(f"DROP OWNED BY {tenant}; DROP ROLE {tenant}")
    assert done.stdout == "handled 3 messages\n", done.stderr
    assert len(invoices(inbox)) == 3


def test_the_block_under_asyncio_handles_what_is_there(inbox: Dsn) -> None:
    put(inbox, json.dumps({"order": "A-1", "total": 90}), key="A-1")
    (code,) = blocks("asyncio")
    done = run([sys.executable, "-c", code], env={"DATABASE_URL": url(inbox)})
    assert done.returncode == 0, done.stderr
    assert invoices(inbox) == [("A-1", 90, False)]


def test_the_processors_handle_what_is_there_and_go_on_from_there(
    inbox: Dsn, tmp_path: Path
) -> None:
    (code,) = blocks("processors")
    (tmp_path / "consumers.py").write_text(code)
    for amounts, total in (((90, 10), 100), ((-30,), 70)):
        for amount in amounts:
            put(inbox, json.dumps({"amount": amount}), key="A-1", message_type="OrderChanged")
        done = run(
            [BIN / "saf", "worker", "consumers:runner", "--drain"],
            env={"INBOX": inbox.conninfo},
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"handled {len(amounts)} message{'s' * (len(amounts) != 1)}\n"
        assert invoices(inbox) == [("A-1", total, False)]


def test_the_guard_lets_work_elsewhere_be_done_once(
    inbox: Dsn, new_database: Callable[[str], Dsn]
) -> None:
    elsewhere = new_database("elsewhere")
    with connect(elsewhere) as connection:
        connection.execute(INVOICE)
        connection.execute(GUARD)
    put(inbox, "", key="A-1")
    put(inbox, "", key="A-2")
    with saf.receive(inbox, "billing") as delivery, connect(elsewhere) as connection:
        first = delivery[0]
        with connection.transaction():
            assert inbox_once(connection, "billing", first)
            connection.execute("INSERT INTO invoice (number) VALUES ('A-1')")
        assert not inbox_once(connection, "billing", first)
        assert inbox_once(connection, "audit", first)
        delivery.park(first, "as if the process had died here")
        delivery.park(delivery[1], "and here")
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    (code,) = blocks("once")
    for _ in range(2):
        done = run(
            [sys.executable, "-c", code],
            env={"INBOX": inbox.conninfo, "ELSEWHERE": elsewhere.conninfo},
        )
        assert done.returncode == 0, done.stderr
    assert [number for number, *_ in invoices(elsewhere)] == ["A-1", "A-2"]


def test_status_and_peek_show_what_is_left_and_take_nothing(inbox: Dsn) -> None:
    put(inbox, "1", "2", "3", key="k")
    with connect(inbox) as connection:
        (before,) = inbox_status(connection)
        assert (before.subscription, before.unread) == ("billing", 3)
        assert [one.bytes for one in peek(connection, "billing", limit=2)] == [1, 1]
        with saf.receive(inbox, "billing", max_messages=1) as delivery:
            delivery.park(delivery[0], "not now")
        (after,) = inbox_status(connection)
        assert (after.unread, after.parked, after.keys_waiting) == (2, 1, 1)
        with pytest.raises(ConfigurationError, match="has no subscription 'bill'"):
            peek(connection, "bill")
