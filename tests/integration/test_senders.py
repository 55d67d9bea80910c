"""`saf sender`: who may send as whom is a rule that the server enforces, where there is one."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import saf
from saf import Message, Outbox
from saf.broker import services
from saf.broker.grants import Kind, grant
from saf.broker.senders import add_senders, remove_senders, senders, vouched_since
from saf.database import Dsn
from saf.errors import ConfigurationError, InvalidMessage, UsageError
from saf.log import ring
from tests import dialogs
from tests.pipeline import bodies, connect, forward, let_time_pass, run
from tests.programs import BIN, ROOT, configuration
from tests.programs import run as run_program
from tests.programs import saf as run_saf

every_postgresql = pytest.mark.every_postgresql

Role = Callable[..., str]


@pytest.fixture
def role(app: Dsn) -> Iterator[Role]:
    """Creates roles of a kind, or of none; they end with the test."""
    roles: list[str] = []

    def create(*kinds: str) -> str:
        name = f"sender_{app.database}_{len(roles)}"
        with connect(app) as owner:
            owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
            roles.append(name)
            if kinds:
                grant(owner, name, map(Kind, kinds))
        return name

    yield create
    with connect(app) as owner:
        for name in roles:
            owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
            owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def login(dsn: Dsn, name: str) -> Dsn:
    return Dsn(make_conninfo(dsn.conninfo, user=name))


def send(dsn: Dsn, from_service: str | None, service: str = "billing") -> None:
    with connect(dsn) as connection, connection.transaction():
        Outbox().send(connection, service, b"sent", from_service=from_service)


def raw(dsn: Dsn, statement: str) -> None:
    with connect(dsn) as connection:
        connection.execute(statement.encode())


PLAIN = "INSERT INTO saf.outbox (from_service, to_service, body) VALUES ({}, 'billing', 'sent')"


@every_postgresql
def test_a_role_sends_only_as_whom_and_to_whom_its_rules_say(
    app: Dsn, mom: Dsn, role: Role
) -> None:
    name = role("writer")
    shop = login(app, name)
    send(shop, "anybody")  # without rules
    with connect(app) as owner:
        assert add_senders(owner, name, "shop", ["billing", "stock"]) == 2
    send(shop, "shop")
    send(shop, "shop", "stock")
    with connect(shop) as connection, connection.transaction():
        Outbox(from_service="shop").send_many(
            connection, [Message(service="billing", body=b"sent") for _ in range(103)]
        )
    for sender, service in (("bank", "billing"), ("shop", "bank"), (None, "billing")):
        with pytest.raises(ConfigurationError, match=rf"role {name} may not send"):
            send(shop, sender, service)
    with pytest.raises(ConfigurationError, match=rf"`?saf sender add {name} --from bank"):
        send(shop, "bank")
    with pytest.raises(ConfigurationError, match=r"Set from_service"):
        send(shop, None)
    for forged in ("'bank'", "NULL"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused:
            raw(shop, PLAIN.format(forged))
        assert refused.value.diag.constraint_name == "sender_allowed"
    raw(shop, PLAIN.format("'shop'"))
    run(app, mom=mom)  # as the owner
    assert len(bodies(mom)) == 107


LATER = datetime(2199, 1, 1, tzinfo=UTC)
DUE = "UPDATE saf.held SET due = now() WHERE due IS NOT NULL"
HELD = "SELECT convert_from(body, 'UTF8'), sender, refused FROM saf.held ORDER BY held_id"


def hold(dsn: Dsn, from_service: str | None, name: str, **more: Any) -> saf.Sent:
    with connect(dsn) as connection, connection.transaction():
        return Outbox(from_service=from_service).send(
            connection, "billing", name, name=name, **{"deliver_at": LATER, **more}
        )


TAKEN = r"name: '.*' to service 'billing' is taken by another sender: choose a name of your own$"


@every_postgresql
def test_rules_hold_for_what_is_held_cancelled_replaced_and_moved_to_another_time(
    app: Dsn, role: Role
) -> None:
    name, bank = role("writer"), role("writer")
    with connect(app) as owner:
        add_senders(owner, name, "shop", ["billing"], refuse_others=True)
        add_senders(owner, bank, "bank", ["billing"])
    shop = login(app, name)
    hold(shop, "shop", "of the shop")
    hold(login(app, bank), "bank", "of the bank")
    hold(app, "bank", "of the owner")
    for sender in ("bank", None):
        for more in ({}, {"deliver_at": None}):
            with pytest.raises(ConfigurationError, match=rf"role {name} may not send"):
                hold(shop, sender, "another", **more)
    for if_there in ("replace", "later"):
        with pytest.raises(InvalidMessage, match=TAKEN):
            hold(shop, "shop", "of the bank", if_there=if_there)
    with connect(shop) as connection, connection.transaction():
        for call in ("cancel('billing', {})", "reschedule('billing', {}, now())"):
            with (
                pytest.raises(psycopg.errors.InsufficientPrivilege) as refused,
                connection.transaction(),
            ):
                connection.execute(("SELECT saf." + call.format("'of the bank'")).encode())
            assert refused.value.diag.constraint_name == "name_taken"
            assert refused.value.diag.message_hint is None
    for act in (Outbox().cancel, partial(Outbox().reschedule, deliver_at=LATER)):
        with (
            pytest.raises(InvalidMessage, match=TAKEN) as taken,
            connect(shop) as connection,
            connection.transaction(),
        ):
            act(connection, "billing", "of the bank")
        assert (taken.value.field, "saf sender" in str(taken.value)) == ("name", False)
    with connect(shop) as connection, connection.transaction():
        assert Outbox().reschedule(connection, "billing", "of the shop", LATER)
        assert Outbox().cancel(connection, "billing", "of the shop")
    assert [body for body, *_ in rows(app)] == ["of the bank", "of the owner"]
    assert rows(app)[0][1:] == (bank, None)


def rows(dsn: Dsn) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return connection.execute(HELD).fetchall()


@every_postgresql
@pytest.mark.parametrize("deliver_at", [None, LATER])
def test_a_name_that_another_sender_has_taken_is_an_error_and_not_a_silence(
    app: Dsn, role: Role, deliver_at: datetime | None
) -> None:
    name, bank = role("writer"), role("writer")
    with connect(app) as owner:
        add_senders(owner, name, "shop", refuse_others=True)
        add_senders(owner, bank, "bank")
    hold(login(app, name), "shop", "n", deliver_at=deliver_at)
    assert not hold(login(app, name), "shop", "n").is_new
    with pytest.raises(InvalidMessage, match=TAKEN):
        hold(login(app, bank), "bank", "n")


def test_a_sender_whose_own_rule_is_gone_is_told_so(app: Dsn, role: Role) -> None:
    name = role("writer")
    hold(login(app, name), "shop", "n")
    with connect(app) as owner:
        add_senders(owner, name, "bank", refuse_others=True)
    with (
        pytest.raises(ConfigurationError, match=rf"role {name} may not send as service 'shop'"),
        connect(login(app, name)) as connection,
        connection.transaction(),
    ):
        Outbox().cancel(connection, "billing", "n")


@every_postgresql
def test_the_role_that_is_set_counts_as_it_does_for_an_insert(app: Dsn, role: Role) -> None:
    name, group = role("writer"), role("writer")
    with connect(app) as owner:
        owner.execute(f"GRANT {group} TO {name}".encode())
        add_senders(owner, group, "shop")
        owner.execute(f"REVOKE {group} FROM {name}".encode())
    with pytest.raises(ConfigurationError, match=rf"role {name} may not send"):
        hold(login(app, name), "shop", "n")
    with connect(app) as owner:
        owner.execute(f"GRANT {group} TO {name}".encode())
    with connect(login(app, name)) as connection, connection.transaction():
        connection.execute(f"SET ROLE {group}".encode())
        Outbox(from_service="shop").send(connection, "billing", "n", deliver_at=LATER)
    assert rows(app) == [("n", group, None)]


@every_postgresql
def test_rules_that_have_come_since_hold_when_the_message_is_due(
    app: Dsn, mom: Dsn, role: Role
) -> None:
    name, bank, gone = role("writer"), role("writer"), role("writer")
    hold(login(app, name), "shop", "first")
    hold(login(app, bank), "bank", "second")
    hold(login(app, gone), "bank", "third")
    with connect(app) as owner:
        add_senders(owner, name, "shop", refuse_others=True)
        owner.execute(f"ALTER ROLE {gone} RENAME TO {gone}_x".encode())
        try:
            owner.execute(DUE)
            run(app, mom=mom)
        finally:
            owner.execute(f"ALTER ROLE {gone}_x RENAME TO {gone}".encode())
    assert bodies(mom) == ["first"]
    (_, (body, sender, refused), (_, _, unknown)) = rows(app)
    assert (body, sender) == ("second", bank)
    assert f"role {bank} may not send as service 'bank'" in refused
    assert unknown == f"role {gone}, which sent the message, does not exist"
    run(app, mom=mom)
    assert bodies(mom) == ["first"]
    with connect(app) as owner:
        add_senders(owner, bank, "bank")
    run(app, mom=mom)
    assert bodies(mom) == ["first", "second"]
    with connect(app) as owner:
        remove_senders(owner, bank)
        remove_senders(owner, name, allow_others=True)
    run(app, mom=mom)
    assert bodies(mom) == ["first", "second", "third"]


@every_postgresql
def test_a_rule_that_comes_while_a_message_moves_waits_for_it(app: Dsn, role: Role) -> None:
    name = role("writer")
    hold(login(app, role("writer")), "bank", "moves")
    with connect(app) as owner:
        owner.execute(DUE)
        with app.connect(role="test") as mover:
            mover.execute("SELECT saf.move_held(10)")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                add_senders(owner, name, "shop", refuse_others=True)
        add_senders(owner, name, "shop", refuse_others=True)
        ((vouched,),) = owner.execute(
            "SELECT bool_or(id > senders_since) FROM saf.outbox, saf.broker"
        ).fetchall()
        assert not vouched


@every_postgresql
def test_what_sql_sends_is_what_python_sends(app: Dsn, role: Role) -> None:
    writer = login(app, role("writer"))
    columns = "from_service, to_service, to_broker, key, message_type, headers, body, expires_at, "
    bodies_: list[tuple[object, str]] = [
        (7, "'7'::jsonb"),
        ("grüezi", "'grüezi'"),
        (b"\x00\xff", "'\\x00ff'::bytea"),
    ]
    options: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"name": "n"}, "name => 'n'"),
        ({"name": "n", "deliver_at": LATER}, "name => 'n', deliver_at => '2199-01-01 UTC'"),
        ({"deliver_at": LATER, "key": "k"}, "deliver_at => '2199-01-01 UTC', key => 'k'"),
        (
            {
                "headers": {"Content-Type": "x", "A": 1},
                "message_type": "t",
                "from_service": "shop",
                "to_broker": UUID(int=7),
                "expires_at": LATER,
                "deliver_at": datetime(2001, 1, 1, tzinfo=UTC),
                "once_for": timedelta(days=1),
                "name": "all",
            },
            """headers => '{"Content-Type": "x", "A": 1}', message_type => 't',
            from_service => 'shop', to_broker => '00000000-0000-0000-0000-000000000007',
            expires_at => '2199-01-01 UTC', deliver_at => '2001-01-01 UTC', once_for => '1 day',
            name => 'all'""",
        ),
    ]
    for body, literal in bodies_:
        for given, arguments in options:
            found = []
            for by in ("Python", "SQL"):
                with connect(writer) as connection, connection.transaction():
                    for _ in range(2):
                        if by == "Python":
                            Outbox().send(connection, "billing", body, **given)
                        else:
                            call = ", ".join(filter(None, ("'billing'", literal, arguments)))
                            connection.execute(f"SELECT saf.send({call})".encode())
                with connect(app) as owner:
                    read = (
                        f"SELECT {columns} deliver_at FROM saf.outbox",
                        f"SELECT {columns} due, name, once_for, sender FROM saf.held",
                    )
                    found.append([owner.execute(one.encode()).fetchall() for one in read])
                    owner.execute("TRUNCATE saf.outbox")
                    owner.execute("DELETE FROM saf.held")
            assert found[0] == found[1], arguments
            assert any(found[0])


@every_postgresql
def test_sql_cancels_and_moves_to_another_time_as_python_does(app: Dsn, role: Role) -> None:
    with connect(login(app, role("writer"))) as connection:

        def ask(call: str) -> object:
            ((answer, *_),) = connection.execute(f"SELECT * FROM saf.{call}".encode()).fetchall()
            return answer

        first = ask("send('billing', 'a', name => 'n', deliver_at => now() + interval '1 day')")
        assert ask("send('billing', 'b', name => 'n')") == first
        assert ask("reschedule('billing', 'n', now() + interval '2 days')") is True
        assert ask("reschedule('billing', 'm', now())") is False
        assert ask("cancel('billing', 'n')") is True
        assert ask("cancel('billing', 'n')") is False
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="'replace', 'later', got"):
            ask("send('billing', 'b', name => 'n', if_there => 'other')")
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="to send the message now"):
            ask("reschedule('billing', 'n', NULL)")


def test_under_asyncio_and_sqlalchemy_the_refusal_is_the_same(app: Dsn, role: Role) -> None:
    name = role("writer")
    with connect(app) as owner:
        add_senders(owner, name, "shop", ["billing"])
    shop = login(app, name)

    async def business(driver: str) -> None:
        url = make_url("postgresql://").set(
            drivername=f"postgresql+{driver}",
            username=name,
            database=app.database,
            query={"host": app.parts["host"]},
        )
        engine = create_async_engine(url)
        try:
            async with AsyncSession(engine) as session, session.begin():
                await Outbox().asend(session, "billing", b"sent", from_service="bank")
        finally:
            await engine.dispose()

    for driver in ("psycopg", "asyncpg"):
        with pytest.raises(
            ConfigurationError, match=rf"{name} may not send as service 'bank'.*--fr"
        ):
            asyncio.run(business(driver))
    engine = shop.engine()
    with engine.begin() as connection:
        Outbox().send(connection, "billing", b"sent", from_service="shop")
    engine.dispose()


@every_postgresql
def test_no_other_way_into_the_outbox_is_open_to_a_restricted_role(app: Dsn, role: Role) -> None:
    name = role("writer")
    with connect(app) as owner:
        add_senders(owner, name, "shop", ["billing"])
    with connect(login(app, name)) as shop:
        with pytest.raises(psycopg.errors.FeatureNotSupported, match=r"row-level security"):
            shop.execute("COPY saf.outbox (from_service, to_service, body) FROM STDIN")
        for statement in (
            "INSERT INTO saf.outbox_0 (from_service, to_service, body) VALUES ('bank', 'b', '')",
            "DELETE FROM saf.sender",
            "INSERT INTO saf.sender (role, from_service) VALUES (current_user, 'bank')",
            "SELECT FROM saf.sender",
            "ALTER TABLE saf.outbox DISABLE ROW LEVEL SECURITY",
            "UPDATE saf.broker SET senders_since = 0",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                shop.execute(statement.encode())


@every_postgresql
def test_members_of_a_role_may_what_it_may_and_a_dropped_role_stops_nobody(
    app: Dsn, role: Role
) -> None:
    group, one, gone = role(), role("writer"), role()
    with connect(app) as owner:
        owner.execute(f"GRANT {group} TO {one}")
        add_senders(owner, group, "shop")
        add_senders(owner, gone, "shop")
        owner.execute(f"ALTER ROLE {gone} RENAME TO {gone}_x")
        try:
            send(login(app, one), "shop", "anybody")
            assert [(rule.role, rule.known) for rule in senders(owner)] == [
                (group, True),
                (gone, False),
            ]
        finally:
            owner.execute(f"ALTER ROLE {gone}_x RENAME TO {gone}")


@every_postgresql
def test_those_who_read_and_empty_the_outbox_do_so_under_rules_as_without(
    app: Dsn, mom: Dsn, role: Role
) -> None:
    writer, forwarder, purger = role("writer"), role("forwarder"), role("purger")
    with connect(app) as owner:
        before = _plan(owner, forwarder)
        add_senders(owner, writer, "shop")
        assert _plan(owner, forwarder) == before
    with connect(mom) as owner:
        grant(owner, forwarder, [Kind.FORWARDER])
    send(login(app, writer), "shop")
    run(login(app, forwarder), mom=login(mom, forwarder))
    assert bodies(mom) == ["sent"]
    with connect(mom) as owner:
        owner.execute(f"DROP OWNED BY {forwarder}")
    with connect(login(app, purger)) as connection:
        ring.purge(connection, "outbox", retention_seconds=0)


def _plan(owner: psycopg.Connection[Any], name: str) -> list[Any]:
    with owner.transaction():
        owner.execute(f"SET LOCAL ROLE {name}")
        query = "EXPLAIN (COSTS OFF) SELECT id, body FROM saf.outbox WHERE shard = 3 AND txid > '9'"
        return owner.execute(query.encode()).fetchall()


@every_postgresql
def test_without_rules_nothing_is_checked_and_after_the_last_one_nothing_is_again(
    app: Dsn, role: Role
) -> None:
    name = role("writer")
    with connect(app) as owner:
        add_senders(owner, name, "shop")
        assert _calls(owner, name) == 1
        with pytest.raises(UsageError, match=r"last rule.*--allow-others"):
            remove_senders(owner, name)
        assert remove_senders(owner, name, allow_others=True) == 1
        assert vouched_since(owner) is None
        assert _calls(owner, name) == 0
    send(login(app, name), "anybody")


def _calls(owner: psycopg.Connection[Any], name: str) -> int:
    """How often one insert of a role calls the function that checks senders."""
    query = (
        "SELECT coalesce(sum(calls), 0) FROM pg_stat_xact_user_functions "
        "WHERE funcname = 'check_sender'"
    )
    with owner.transaction(force_rollback=True):
        owner.execute("SET LOCAL track_functions = 'all'")
        ((before,),) = owner.execute(query).fetchall()
        owner.execute(f"SET LOCAL ROLE {name}")
        owner.execute(PLAIN.format("'shop'").encode())
        owner.execute("RESET ROLE")
        ((after,),) = owner.execute(query).fetchall()
    return int(after - before)


def test_a_check_costs_a_small_part_of_an_insert(app: Dsn, role: Role) -> None:
    name = role("writer")
    many = """
        INSERT INTO saf.outbox (from_service, to_service, body)
        SELECT 'shop', 'billing', '' FROM generate_series(1, 5000)
    """

    def seconds(connection: psycopg.Connection[Any]) -> float:
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            connection.execute(many.encode())
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    with connect(app) as owner, connect(login(app, name)) as shop:
        free = seconds(shop)
        add_senders(owner, name, "shop", ["billing"])
        checked = seconds(shop)
    print(f"\nper message: {free / 5000 * 1e6:.1f} us, checked {checked / 5000 * 1e6:.1f} us")
    assert checked - free < 5000 * 200e-6  # 200 microseconds a message, on a machine under load


@every_postgresql
def test_the_first_rule_is_refused_while_other_writers_would_have_none(
    app: Dsn, role: Role
) -> None:
    shop, other, _reader = role("writer"), role("writer"), role("receiver")
    with connect(app) as owner:
        with pytest.raises(UsageError, match=rf"'{other}' would have none.*--refuse-others") as no:
            add_senders(owner, shop, "shop")
        assert _reader not in str(no.value)
        assert senders(owner) == []
        assert _calls(owner, shop) == 0
        add_senders(owner, shop, "shop", refuse_others=True)
        with pytest.raises(ConfigurationError, match=r"no role 'nobody'"):
            add_senders(owner, "nobody", "shop")
        with pytest.raises(ConfigurationError, match=r"no such rule"):
            remove_senders(owner, other)
        with pytest.raises(UsageError, match=r"not a service name"):
            add_senders(owner, other, "")
    with pytest.raises(ConfigurationError, match=rf"{other} may not send"):
        send(login(app, other), "shop")


def test_rules_are_not_made_while_the_outbox_is_in_use_for_long(app: Dsn, role: Role) -> None:
    name = role("writer")
    with connect(app) as owner, connect(app) as other, other.transaction():
        other.execute(PLAIN.format("'shop'").encode())
        with pytest.raises(psycopg.errors.LockNotAvailable):
            add_senders(owner, name, "shop")
        assert senders(owner) == []


def test_the_commands_add_list_and_remove_rules(
    app: Dsn, mom: Dsn, role: Role, tmp_path: Path
) -> None:
    name = role("writer")
    dsn = ("--dsn", app.conninfo)
    config = ("--config", configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}))
    added = run_saf("sender", "add", name, "--from", "shop", "--to", "billing", *dsn)
    assert f"{name} may send as shop to billing" in added.stdout
    assert "nobody but the owner sends without a rule" in added.stdout
    run_saf("sender", "add", name, "--from", "shop-2", *dsn)
    rules = json.loads(run_saf("sender", "list", "--json", *config).stdout)["senders"]
    assert [(one["from"], one["to"]) for one in rules] == [("shop", "billing"), ("shop-2", None)]
    assert "any" in run_saf("sender", "list", *config).stdout
    run_saf("sender", "remove", name, "--from", "shop", "--to", "billing", *dsn)
    left = run_saf("sender", "remove", name, *dsn)
    assert left.returncode == 2
    assert "--allow-others" in left.stderr
    gone = run_saf("sender", "remove", name, "--allow-others", *dsn)
    assert "any writer may send as any service" in gone.stdout


# What a receiver knows of the sender

FORGED = {"broker": "00000000-0000-4000-8000-000000000000", "service": "bank"}


def known(mom: Dsn) -> dict[str | None, Any]:
    """By key, what a receiver is told of the sender."""
    with connect(mom) as owner:
        services.create_service(owner, "billing", start="beginning")
    engine = mom.engine()
    with saf.receive(engine, "billing") as delivery:
        found = {message.key: (message.verified_from, message.headers) for message in delivery}
    engine.dispose()
    return found


def write(dsn: Dsn, key: str, from_service: str | None, headers: str | None = None) -> None:
    """A plain INSERT, in which a sender may say anything."""
    with connect(dsn) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, from_service, key, headers, body) "
            "VALUES ('billing', %s, %s, CAST(%s AS jsonb), 'sent')",
            (from_service, key, headers),
        )


@every_postgresql
def test_a_receiver_is_told_the_sender_that_its_source_has_checked_and_no_other(
    app: Dsn, mom: Dsn, role: Role
) -> None:
    name = role("writer")
    shop = login(app, name)
    forged = json.dumps({"saf-verified-from": FORGED, "a": {"b": 1}})
    write(shop, "before", "shop")
    write(shop, "forged before", "bank", forged)
    with connect(app) as owner:
        add_senders(owner, name, 'shop "Ü" \\', ["billing"])
        ((broker,),) = owner.execute("SELECT broker_id FROM saf.broker").fetchall()
    for key, headers in {
        "plain": None,
        "empty": "{}",
        "own": '{"trace": "ü"}',
        "forged": forged,
        "shouted": json.dumps({"SAF-Verified-From": FORGED}),
    }.items():
        write(shop, key, 'shop "Ü" \\', headers)
    write(app, "of nobody", None, forged)  # by the owner, who needs no rule
    write(app, "a list", "shop", '["saf-verified-from"]')
    run(app, mom=mom)
    told = known(mom)
    for key in ("before", "forged before", "of nobody", "a list"):
        assert told[key][0] is None, key
    for key in ("plain", "empty", "own", "forged", "shouted"):
        assert (told[key][0].broker, told[key][0].service) == (broker, 'shop "Ü" \\'), key
    assert told["own"][1]["trace"] == "ü"
    assert dict(told["forged before"][1]) == {"saf-claimed-from": FORGED, "a": {"b": 1}}
    assert told["forged"][1]["a"] == {"b": 1}
    assert told["before"][1] == {}


def test_what_had_to_wait_for_its_service_is_vouched_for_too(
    app: Dsn, mom: Dsn, role: Role
) -> None:
    name = role("writer")
    forged = json.dumps({"saf-verified-from": FORGED})
    with connect(mom) as owner:
        services.create_service(owner, "stock")  # billing has to wait
    write(app, "before", "shop", forged)
    with connect(app) as owner:
        add_senders(owner, name, "shop")
    write(login(app, name), "after", "shop", forged)
    forward(app, mom=mom)
    assert bodies(mom) == []
    with connect(mom) as owner:
        services.create_service(owner, "billing")
    let_time_pass(app)
    forward(app, mom=mom)
    told = known(mom)
    assert told["before"][0] is None
    assert told["after"][0].service == "shop"


def test_what_is_said_in_dialogs_needs_rules_and_is_vouched_for(
    app: Dsn, mom: Dsn, role: Role
) -> None:
    dialogs.prepare(app, mom)
    name = role("dialog", "receiver")
    with connect(app) as owner:
        services.create_service(owner, "bank")
        add_senders(owner, name, dialogs.SHOP, [dialogs.WAREHOUSE])
    speaker = login(app, name)
    dialogs.begin(speaker, "said", "and again")
    with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused:
        dialogs.begin(speaker, "said", from_service="bank")
    assert refused.value.diag.constraint_name == "sender_allowed"
    dialogs.forward(app, mom)
    told = [message.verified_from for message in dialogs.receive(mom, dialogs.WAREHOUSE)]
    assert [sender and sender.service for sender in told] == [dialogs.SHOP] * 2


def test_a_sender_is_vouched_for_no_longer_than_there_are_rules(
    app: Dsn, mom: Dsn, role: Role
) -> None:
    name = role("writer")
    shop = login(app, name)
    with connect(app) as owner:
        add_senders(owner, name, "shop")
        write(shop, "checked", "shop")
        remove_senders(owner, name, allow_others=True)
        write(shop, "anybody", "bank")
        add_senders(owner, name, "shop")
        write(shop, "checked again", "shop")
    run(app, mom=mom)
    told = known(mom)
    assert {key: bool(sender) for key, (sender, _) in told.items()} == {
        "checked": False,  # the rules that had let it pass are gone
        "anybody": False,
        "checked again": True,
    }


@pytest.mark.full
def test_the_page_on_receiving_shows_a_handler_that_believes_the_verified_sender_only(
    app: Dsn, mom: Dsn, role: Role, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "receiving.md").read_text()
    (code,) = re.findall(r"<!-- test: verified -->\n```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "consumers.py").write_text(code)
    name = role("writer")
    insert = (
        "INSERT INTO saf.outbox (to_service, from_service, key, message_type, body) "
        "VALUES ('billing', 'shop', '{}', 'OrderPaid', '')"
    )
    raw(app, insert.format("said"))
    with connect(app) as owner:
        add_senders(owner, name, "shop", ["billing"])
        ((broker,),) = owner.execute("SELECT broker_id FROM saf.broker").fetchall()
    raw(login(app, name), insert.format("checked"))
    run(app, mom=mom)
    with connect(mom) as owner:
        services.create_service(owner, "billing", start="beginning")
        owner.execute("CREATE TABLE invoice (number text PRIMARY KEY, paid bool)")
        done = run_program(
            [BIN / "saf", "worker", "consumers:worker", "--drain"],
            env={"INBOX": mom.conninfo, "SHOP": str(broker)},
            cwd=tmp_path,
            tracebacks=True,
        )
        assert "PermissionError" in done.stderr
        assert owner.execute("SELECT number FROM invoice").fetchall() == [("checked",)]
