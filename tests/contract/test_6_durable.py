"""Guarantee 6: nothing is forwarded that the source could still lose, nor marked too early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.database import Dsn
from saf.log import cursor
from saf.routing.resolved import Resolved, keep
from saf.routing.route_choices import Asker, choose
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, new_member, send
from tests.programs import configuration
from tests.streams import Crash, query


@pytest.fixture
def pair(own_server: EmbeddedServer) -> tuple[Dsn, Dsn]:
    """Two brokers on a durable server of their own."""
    app, mom = own_server.create_database("app"), own_server.create_database("mom")
    migrate(app)
    migrate(mom)
    return app, mom


def test_an_asynchronous_commit_is_durable_before_it_is_forwarded(
    pair: tuple[Dsn, Dsn], own_server: EmbeddedServer
) -> None:
    """The application does not wait for the disk. The open does, and with it what it covers."""
    app, mom = pair
    with connect(app) as connection:
        # the log writer would flush by itself within 3 x this
        connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        connection.execute("SELECT pg_reload_conf()")
        connection.execute("SET synchronous_commit = off")
        for number in range(20):
            send(connection, str(number))
            row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert row is not None
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.open()
            flushed = connection.execute(
                "SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", row
            ).fetchone()
            cycle.deliver()
    assert flushed == (True,)
    own_server.stop_immediately()
    own_server.start()
    with connect(app) as connection:
        outbox = connection.execute("SELECT body FROM saf.outbox ORDER BY id").fetchall()
    assert [bytes(body).decode() for (body,) in outbox] == bodies(mom)
    assert len(outbox) == 20


def test_a_stream_reads_nothing_that_the_source_could_still_lose(
    pair: tuple[Dsn, Dsn], own_server: EmbeddedServer, tmp_path: Path
) -> None:
    """Neither the application nor the stream's login waits for the disk; to open a batch does."""
    app, mom = pair
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    stream = query(config, maxRowsPerTrigger=15)
    with connect(app) as connection:
        connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        connection.execute("ALTER SYSTEM SET synchronous_commit = off")
        connection.execute("SELECT pg_reload_conf()")
        stream.start()
        for number in range(20):
            send(connection, str(number))
    with pytest.raises(Crash):
        stream.step(crash="written")
    own_server.stop_immediately()
    own_server.start()
    stream.drain()
    assert sorted(map(int, stream.bodies)) == list(range(20))


def test_a_crash_of_the_source_after_marking_sends_nothing_twice(
    pair: tuple[Dsn, Dsn], own_server: EmbeddedServer
) -> None:
    """Marks do not wait for the disk; the watermark drops what is sent again because of that."""
    app, mom = pair
    with connect(app) as connection:
        for number in range(50):
            send(connection, str(number), key=str(number % 3))
    with Cycle(app, forwarding_rules(mom=mom, chunk_rows=7)) as cycle:
        cycle.open()
        cycle.deliver()
        own_server.stop_immediately()
    own_server.start()
    with Cycle(app, forwarding_rules(mom=mom, chunk_rows=7)) as again:
        again.run()
    assert bodies(mom) == [str(number) for number in range(50)]


@pytest.mark.parametrize("default", ["off", "local", "on", "remote_apply"])
def test_a_destination_commits_durably_whatever_its_default(
    app: Dsn, mom: Dsn, default: str
) -> None:
    with connect(mom) as connection:
        connection.execute(f"ALTER DATABASE {mom.database} SET synchronous_commit = {default}")
        connection.execute("CREATE TABLE seen (setting text)")
        connection.execute(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "INSERT INTO seen SELECT current_setting('synchronous_commit'); RETURN NULL; END $$"
        )
        connection.execute(
            "CREATE TRIGGER note AFTER INSERT ON saf.inbox FOR EACH STATEMENT "
            "EXECUTE FUNCTION note()"
        )
    with connect(app) as connection:
        send(connection, "one")
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.run()
    with connect(mom) as connection:
        (seen,) = connection.execute("SELECT setting FROM seen").fetchall()
    assert seen == ("remote_apply" if default == "remote_apply" else "on",)


def test_nothing_is_marked_while_the_destination_has_not_committed(app: Dsn, mom: Dsn) -> None:
    """A deferred constraint makes the destination's COMMIT itself fail."""
    with connect(mom) as connection:
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE EXCEPTION 'refused at commit' USING ERRCODE = '40001'; END $$"
        )
        for slot in range(8):
            connection.execute(
                f"CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON saf.inbox_{slot} "
                "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()"
            )
    with connect(app) as connection:
        send(connection, "one")
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            receipts = cycle.run()
        assert [r.error_kind for r in receipts if r.error] == ["Unavailable"]
        positions = connection.execute("SELECT DISTINCT position FROM saf.cursor").fetchall()
        assert positions == [(0,)]
    assert bodies(mom) == []


@pytest.mark.parametrize("default", ["off", "local"])
def test_what_has_to_be_known_before_anything_is_sent_is_durable_whatever_the_default(
    app: Dsn, default: str
) -> None:
    """The open, an attempt, a choice, a resolution; a mark need not be, and is not waited for."""
    with connect(app) as connection:
        connection.execute(f"ALTER DATABASE {app.database} SET synchronous_commit = {default}")
        connection.execute("CREATE TABLE seen (step text, setting text)")
        connection.execute(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO seen "
            "VALUES (current_setting('test.step'), current_setting('synchronous_commit')); "
            "RETURN NULL; END $$"
        )
        for table in ("cursor", "route_choice", "resolved_conversation"):
            connection.execute(
                f"CREATE TRIGGER note AFTER INSERT OR UPDATE ON saf.{table} FOR EACH STATEMENT "
                "EXECUTE FUNCTION note()"
            )
    with connect(app) as connection:
        send(connection, "x", key="k")
        connection.execute("SET test.step = 'balance'")
        member = new_member(connection)
        member.balance(connection)
        connection.execute("SET test.step = 'open'")
        cursor.open_batch(connection, "outbox", member)
        (batch,) = cursor.in_hand(connection, "outbox", member)
        steps: dict[str, Callable[[], object]] = {
            "attempt": lambda: cursor.attempt(connection, batch, 1),
            "choice": lambda: choose(connection, {Asker("billing", None, "k"): ["a", "b"]}),
            "resolution": lambda: keep(connection, "router", {"k": Resolved(service="billing")}),
            "mark": lambda: cursor.advance(connection, batch, 1),
        }
        for step, write in steps.items():
            connection.execute(f"SET test.step = '{step}'")
            with connection.transaction():
                write()
        rows = connection.execute("SELECT DISTINCT step, setting FROM seen").fetchall()
    durable = dict.fromkeys(("open", "attempt", "choice", "resolution"), "on")
    assert dict(rows) == {"balance": default, **durable, "mark": "off"}
