"""`saf sender`: who may send as whom is a rule that the server enforces, where there is one."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from saf.errors import ConfigurationError, UsageError
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
        services.create_service(owner, "billing")
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
        services.create_service(owner, "billing")
        owner.execute("CREATE TABLE invoice (number text PRIMARY KEY, paid bool)")
        done = run_program(
            [BIN / "saf", "worker", "consumers:worker", "--drain"],
            env={"INBOX": mom.conninfo, "SHOP": str(broker)},
            cwd=tmp_path,
            tracebacks=True,
        )
        assert "PermissionError" in done.stderr
        assert owner.execute("SELECT number FROM invoice").fetchall() == [("checked",)]
