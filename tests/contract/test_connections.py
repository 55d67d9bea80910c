"""What a process keeps of its connections from one task to the next, and when it does not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import adbc_driver_manager.dbapi as adbc
import pytest

from saf import Unavailable
from saf.database import REVISION, Dsn, bulk, connections
from saf.engine import source
from saf.engine.source_session import SourceSession
from saf.engine.work import ForwardingRules, Receipt
from tests.kept import _nothing_stays
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass, send

__all__ = ["_nothing_stays"]

SESSIONS = """
SELECT replace(application_name, 'saf ', ''), pid, state, backend_xmin IS NOT NULL
FROM pg_stat_activity WHERE application_name IN ('saf read', 'saf mark', 'saf deliver')
  AND datname IN (%s, %s) ORDER BY 1
"""
CUT = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE application_name IN ('saf read', 'saf mark', 'saf deliver') AND datname IN (%s, %s)
"""


def forward(app: Dsn, rules: ForwardingRules, *, keep: bool = True) -> list[Receipt]:
    """A cycle of a loop."""
    with Cycle(app, rules) as cycle:
        cycle.open()
        cycle.work = [replace(item, keep=keep) for item in cycle.work]
        receipts = cycle.deliver()
        cycle.close(receipts)
    return receipts


def sessions(app: Dsn, mom: Dsn) -> list[tuple[str, int, str, bool]]:
    """Purpose, process, state, and whether rows stay for it that nobody else sees."""
    with connect(app) as connection:
        return connection.execute(SESSIONS, [app.database, mom.database]).fetchall()


def sent(app: Dsn, body: str) -> None:
    with connect(app) as connection:
        send(connection, body)


def test_the_next_task_goes_on_with_the_connections_of_the_one_before(app: Dsn, mom: Dsn) -> None:
    rules = forwarding_rules(mom=mom)
    sent(app, "first")
    forward(app, rules)
    first = sessions(app, mom)
    assert [session[0] for session in first] == ["deliver", "mark", "read"]
    sent(app, "second")
    forward(app, rules)
    assert sessions(app, mom) == first
    assert {session[2:] for session in first} == {("idle", False)}, "in no transaction"
    assert bodies(mom) == ["first", "second"]


def test_a_run_that_ends_keeps_nothing(app: Dsn, mom: Dsn) -> None:
    sent(app, "only")
    forward(app, forwarding_rules(mom=mom), keep=False)
    assert not connections._kept
    assert bodies(mom) == ["only"]


@pytest.mark.parametrize("quality", ["exactly_once", "at_least_once", "at_most_once"])
def test_what_the_server_has_cut_meanwhile_costs_no_message(
    app: Dsn, mom: Dsn, quality: str
) -> None:
    rules = forwarding_rules(quality, mom=mom)  # which does not try anything twice
    sent(app, "first")
    forward(app, rules)
    before = {pid for _, pid, *_ in sessions(app, mom)}
    with connect(app) as connection:
        connection.execute(CUT, [app.database, mom.database])
    sent(app, "second")
    assert [receipt.error for receipt in forward(app, rules) if receipt.error] == []
    assert bodies(mom) == ["first", "second"]
    assert not before & {pid for _, pid, *_ in sessions(app, mom)}


def test_a_schema_that_has_changed_meanwhile_is_noticed(app: Dsn, mom: Dsn) -> None:
    rules = forwarding_rules(mom=mom)
    sent(app, "first")
    forward(app, rules)
    with connect(mom) as connection:
        connection.execute("UPDATE saf.alembic_version SET version_num = '9999'")
    sent(app, "second")
    errors = [receipt.error for receipt in forward(app, rules) if receipt.error]
    assert "9999" in errors[0]
    with connect(mom) as connection:
        connection.execute("UPDATE saf.alembic_version SET version_num = %s", [REVISION])
    let_time_pass(app)
    forward(app, rules)
    assert bodies(mom) == ["first", "second"]


def test_a_reader_that_was_left_in_the_middle_is_not_kept(app: Dsn, mom: Dsn) -> None:
    for body in ("first", "second", "third"):
        sent(app, body)
    with Cycle(app, forwarding_rules(chunk_rows=1, mom=mom)) as cycle:
        (work,) = cycle.open()
        cycle.broker.stop()
        cycle.work = [replace(work, keep=True)]
        (receipt,) = [r for r in cycle.deliver() if r.destination is None]
    assert receipt.stopped
    assert bodies(mom) == ["first"]
    assert [purpose for purpose, *_ in sessions(app, mom)] == ["deliver", "mark"]


def test_those_that_were_used_last_are_kept(app: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_most", connections.MOST)

    def connected(role: str) -> int:
        taken = connections.take(
            role, app, lambda: app.connect(role=role), lambda c: c.execute("SELECT 1")
        )
        taken.rollback()
        connections.put(True, role, app, taken)
        return taken.info.backend_pid

    roles = [f"role {number}" for number in range(connections.MOST)]
    pids = [connected(role) for role in roles]
    assert connected(roles[0]) == pids[0]
    connected("one more")
    assert connected(roles[0]) == pids[0]
    assert len(connections._kept) == connections.MOST
    with connect(app) as connection:
        still = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'saf role %'"
        assert {pid for (pid,) in connection.execute(still)} == {pids[0], *pids[2:]}


def test_a_process_that_deals_with_many_sources_keeps_more(
    app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_most", connections.MOST)
    connections.make_room(4)
    connections.make_room(1)
    most = connections.MOST + 6
    for number in range(most + 1):
        taken = connections.take(
            f"role {number}", app, lambda: app.connect(role="one"), lambda c: c.execute("SELECT 1")
        )
        taken.rollback()
        connections.put(True, f"role {number}", app, taken)
    assert len(connections._kept) == most


def test_what_cannot_be_connected_to_is_named_as_people_know_it(app: Dsn, mom: Dsn) -> None:
    sent(app, "first")
    nowhere = Dsn("postgresql://localhost:1/nothing")
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        (work,) = cycle.open()
        work = replace(work, dsn=nowhere)
        for ask in (
            lambda: list(source.read(work, "SELECT 1")),
            lambda: SourceSession(work, 1)(lambda _: None),
        ):
            with pytest.raises(Unavailable, match=rf"^broker '{work.broker}' is .* port 1 failed"):
                ask()
    (receipt,) = [one for one in forward(app, forwarding_rules(mom=nowhere)) if one.error]
    assert (receipt.error or "").startswith("destination 'mom' is unavailable")


def test_one_that_is_not_used_for_a_while_is_closed_though_others_are(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_broker("other")
    sent(app, "first")
    forward(app, forwarding_rules(mom=mom))
    assert len(sessions(app, app)) == 2
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.0)
    sent(other, "second")
    forward(other, forwarding_rules(mom=mom))
    assert sessions(app, app) == []
    assert bodies(mom) == ["first", "second"]


def test_a_broker_that_has_become_another_one_meanwhile_is_noticed(app: Dsn, mom: Dsn) -> None:
    """What the source remembers of the one says nothing of the other."""
    rules = forwarding_rules(mom=mom)
    sent(app, "first")
    forward(app, rules)
    with connect(mom) as connection:
        connection.execute("UPDATE saf.broker SET broker_id = gen_random_uuid()")
        connection.execute("TRUNCATE saf.watermark")
    sent(app, "second")
    (error,) = {receipt.error for receipt in forward(app, rules) if receipt.error}
    assert error == "destination 'mom' is unavailable: it is another broker than before"
    let_time_pass(app)
    assert [receipt.error for receipt in forward(app, rules) if receipt.error] == []
    assert bodies(mom) == ["first", "second"]


def test_a_connection_that_was_quiet_for_a_while_is_asked_before_it_is_used(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall forgets it, and says so to nobody."""
    rules = forwarding_rules("at_most_once", mom=mom)  # which does not try anything twice
    sent(app, "first")
    forward(app, rules)
    monkeypatch.setattr(bulk, "TRUSTED_SECONDS", -1.0)
    monkeypatch.setattr(bulk, "hung_up", lambda _: False)
    with connect(app) as connection:
        connection.execute(CUT, [app.database, mom.database])
    sent(app, "second")
    assert [receipt.error for receipt in forward(app, rules) if receipt.error] == []
    assert bodies(mom) == ["first", "second"]


def test_a_connection_that_was_opened_beside_another_one_is_asked_before_it_is_used(
    mom: Dsn,
) -> None:
    """Sockets that threads open at the same time cannot be told apart."""
    here, there = socket.socketpair()
    with here, there, closing(bulk.connect(mom, "deliver", "mom")) as connection:
        connection._descriptors.add(here.fileno())
        there.send(b"what another thread waits for")
        connection.refuse_lost()
        here.recv(100)
        with connect(mom) as one:
            one.execute(CUT, [mom.database, mom.database])
        connection._descriptors = {here.fileno(), there.fileno()}  # which say nothing of it
        with pytest.raises(adbc.Error):
            connection.refuse_lost()


def test_connections_that_are_made_at_once_lead_to_the_databases_that_were_meant(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    def reached(dsn: Dsn) -> str:
        with closing(bulk.connect(dsn, "read", "it")) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT current_database()")
            return str(cursor.fetchall()[0][0])

    wanted = [app, mom, other] * 6
    assert [reached(dsn) for dsn in wanted[:3]] == [dsn.database for dsn in wanted[:3]]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(reached, wanted)) == [dsn.database for dsn in wanted]
