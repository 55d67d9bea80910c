"""Whoever meets a broker asks all that a healthy one is, of the log that it reads or fills."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.errors import Restored, RowsGone
from saf.log import lineage
from saf.operating.repair.rebase import rebase
from saf.receiving.dispatch.dispatcher import Dispatcher
from saf.receiving.dispatch.dispatcher import run as run_dispatchers
from saf.receiving.dispatch.settings import Endpoint
from saf.spark.table import part
from tests.pipeline import bodies, connect, forward, let_time_pass, run, send
from tests.receivers import DOUBLE
from tests.restored import burn_transaction_ids

every_postgresql = pytest.mark.every_postgresql

SET_BACK = "SELECT setval('saf.inbox_id_seq', 3)"
BRING = "UPDATE saf.inbox SET txid = (txid::text::bigint + 1000000)::text::xid8"
DAMAGE = {
    "set back": (SET_BACK, Restored, r"saf\.inbox has ids up to 10, and its next id is 4.*rebase"),
    "doubled": (DOUBLE, Restored, r"saf\.inbox has \d+ messages twice.*saf rebase"),
    "brought": (BRING, Restored, r"newest messages of saf\.inbox.*written here before.*saf rebase"),
    "timeline": ("TRUNCATE saf.timeline", RowsGone, "saf.timeline is empty"),
}
"""What other tools do to a store, and what is said of it by whoever meets it."""


def store(mom: Dsn) -> None:
    with closing(PostgresInbox("mom", mom)) as inbox:
        inbox.connect()


def receive(mom: Dsn) -> None:
    with saf.receive(mom, "billing"):
        pass


def work(mom: Dsn) -> None:
    worker = saf.Worker(mom, "billing")
    worker.handler()(lambda _message, _connection: None)
    worker.run(drain=True)


class Idle(saf.Processor):
    @saf.handles()
    def take(self, message: saf.Received, connection: object) -> None:
        pass


def process(mom: Dsn) -> None:
    saf.Processors(mom, "billing", Idle).drain()


def dispatch(mom: Dsn) -> None:
    endpoint = Endpoint(url="http://127.0.0.1:1/", subscription="billing")
    run_dispatchers([Dispatcher("partner", endpoint, mom)], drain=True)


def read(mom: Dsn) -> None:
    part.take("broker 'mom'", mom, "inbox")


MEETINGS: list[Callable[[Dsn], None]] = [store, receive, work, process, dispatch, read]


@pytest.fixture
def stored(app: Dsn, mom: Dsn) -> Dsn:
    """A store that has got ten messages."""
    with connect(app) as connection, connect(mom) as there:
        create_service(there, "billing")
        for number in range(10):
            send(connection, str(number), key=str(number))
    run(app, mom=mom)
    return mom


@pytest.mark.parametrize("meet", MEETINGS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_whoever_meets_a_store_refuses_one_that_is_not_healthy_by_name(
    stored: Dsn, meet: Callable[[Dsn], None], damage: str
) -> None:
    statement, error, said = DAMAGE[damage]
    with connect(stored) as connection:
        connection.execute(statement.encode())
    with pytest.raises(error, match=said):
        meet(stored)


@pytest.mark.parametrize("meet", [receive, work, process, dispatch])
def test_a_reader_that_lacks_a_cursor_is_refused_and_what_does_not_need_it_is_not(
    stored: Dsn, meet: Callable[[Dsn], None]
) -> None:
    with connect(stored) as connection:
        connection.execute("DELETE FROM saf.cursor WHERE shard = 7")
    with pytest.raises(RowsGone, match="63 of the 64 rows of subscription 'billing'"):
        meet(stored)
    store(stored)
    read(stored)


@every_postgresql
def test_a_store_whose_sequence_was_set_back_gets_nothing_until_it_is_repaired(
    app: Dsn, stored: Dsn
) -> None:
    with connect(stored) as connection, connect(app) as source:
        send(source, "more")
        connection.execute(SET_BACK)
        errors = [str(one.error) for one in forward(app, mom=stored) if one.error]
        assert errors
        assert all("its sequence was set back" in one and "saf rebase" in one for one in errors)
        assert len(bodies(stored)) == 10
        assert rebase(connection, {}) is not None
    let_time_pass(app)
    run(app, mom=stored)
    assert bodies(stored)[10:] == ["more"]


def test_nothing_is_found_at_a_store_whose_receiver_has_begun_before_it_read(mom: Dsn) -> None:
    """Its cursor looks older than the messages that it counts as complete."""
    with connect(mom) as receiver, connect(mom) as sender:
        create_service(sender, "billing")
        with receiver.transaction():
            receiver.execute("SELECT pg_current_xact_id()")
            sender.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('billing', 'x')")
            receiver.execute("UPDATE saf.cursor SET done = pg_current_snapshot()")
        assert lineage.problems(sender, ("inbox",)) == []
        assert lineage.problems(sender, ("inbox",), whole=True) == []


def test_a_source_of_another_cluster_is_refused_though_its_numbers_look_right(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        send(connection, "x")
        connection.execute("UPDATE saf.broker SET system_identifier = system_identifier + 1")
    with pytest.raises(Restored, match=r"restored into another cluster.*saf rebase"):
        run(app, mom=mom)
    assert bodies(mom) == []


def test_a_source_whose_cursors_are_older_than_what_they_count_as_complete_is_refused(
    app: Dsn, mom: Dsn
) -> None:
    """As a copy is that caught up with another cluster's cursors, and has overtaken them since."""
    with connect(app) as connection:
        send(connection, "before")
        ((next_,),) = fetch(connection, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
        later = int(next_) + 50
        connection.execute("UPDATE saf.cursor SET done = %s", [f"{later}:{later}:"])
        send(connection, "x")
        send(connection, "y")
    burn_transaction_ids(app, 60)
    with pytest.raises(
        Restored,
        match=r"saf\.outbox has 2 messages, the first with id 2, which.* were written here after "
        r"the cursors were.*saf rebase",
    ):
        run(app, mom=mom)
    assert bodies(mom) == []
