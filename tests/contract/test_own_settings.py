"""saf's statements run as saf's role and with its settings, whatever a handler sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

import saf
from saf.broker.grants import Kind, grant
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.testing.databases import Database
from tests.pipeline import connect
from tests.roles import as_user

ASK = "SELECT current_setting('role'), current_setting('search_path')"
SETTINGS = [
    "SET LOCAL ROLE {tenant}",
    "SET ROLE {tenant}",
    "SET search_path = tenant",
    "SET LOCAL search_path = ''",
    "SET statement_timeout = '250ms'; SELECT",
    "SET LOCAL array_nulls = off",
]


# longer than the handler's timeout, which a busy machine takes less than to set saf's own again
SLOW = """
CREATE FUNCTION tenant.slow() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN PERFORM pg_sleep(0.3); RETURN NULL; END';
CREATE TRIGGER slow AFTER INSERT OR UPDATE ON saf.cursor EXECUTE FUNCTION tenant.slow()
"""


@pytest.fixture
def inbox(mom: Dsn) -> Iterator[tuple[Dsn, str]]:
    """Twenty messages of twenty keys, a receiver's login, and a role that it may take."""
    login, tenant = f"worker_{mom.database}", f"tenant_{mom.database}"
    with connect(mom) as owner:
        owner.execute(f"CREATE ROLE {login} LOGIN; CREATE ROLE {tenant}; GRANT {tenant} TO {login}")
        owner.execute(f"CREATE SCHEMA tenant AUTHORIZATION {tenant}")
        owner.execute(f"CREATE TABLE done (number bigint, who text); GRANT ALL ON done TO {tenant}")
        owner.execute(f"GRANT ALL ON done TO {login}; CREATE TABLE tenant.done (LIKE done)")
        owner.execute(
            f"GRANT USAGE ON SCHEMA tenant TO {login}; GRANT ALL ON tenant.done TO {login}"
        )
        grant(owner, login, [Kind.RECEIVER])
        create_service(owner, "billing")
        put(owner, 20)
    yield as_user(mom, login), tenant
    with connect(mom) as owner:
        owner.execute("DROP SCHEMA tenant CASCADE")
        for name in (login, tenant):
            owner.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def put(owner: psycopg.Connection[Any], count: int) -> None:
    owner.execute(
        "INSERT INTO saf.inbox (message_id, to_service, key, body, created_at) "
        "SELECT gen_random_uuid(), 'billing', n::text, '', now() FROM generate_series(1, %s) n",
        [count],
    )


def slow_down(mom: Dsn, setting: str) -> None:
    """Let saf's statements take longer than a handler's timeout."""
    if "timeout" in setting:
        with connect(mom) as owner:
            owner.execute(SLOW)


def left(mom: Dsn) -> tuple[int, int]:
    with connect(mom) as connection:
        ((aside, dead),) = fetch(
            connection,
            "SELECT (SELECT count(*) FROM saf.parked), (SELECT count(*) FROM saf.dead_letter)",
        )
    return aside, dead


def handled(mom: Dsn) -> int:
    with connect(mom) as connection:
        ((count,),) = fetch(
            connection,
            "SELECT (SELECT count(*) FROM done) + (SELECT count(*) FROM tenant.done)",
        )
    return int(count)


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_handler_sets_is_no_matter_to_a_worker(
    mom: Dsn, inbox: tuple[Dsn, str], setting: str
) -> None:
    receiver, tenant = inbox
    slow_down(mom, setting)
    worker = saf.Worker(receiver, "billing", max_messages=7)
    begins = [True]
    found: set[tuple[str, str]] = set()

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        if begins:
            begins.clear()
            found.update(fetch(connection, ASK))
        connection.execute("INSERT INTO public.done VALUES (%s, current_user)", [message.id])
        connection.execute(setting.format(tenant=tenant).encode())

    count = 0
    for more in (0, 5):
        with connect(mom) as owner:
            put(owner, more)
        for delivery in worker.deliveries():
            count += delivery.handled
            begins.append(True)
    assert (count, handled(mom), left(mom)) == (25, 25, (0, 0))
    assert found == {("none", '"$user", public')}


@pytest.mark.parametrize("through", ["dsn", "SQLAlchemy"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_block_sets_is_no_matter_to_its_delivery(
    mom: Dsn, inbox: tuple[Dsn, str], setting: str, through: str
) -> None:
    receiver, tenant = inbox
    slow_down(mom, setting)
    engine = sa.create_engine(Database(receiver).url)
    given: Any = engine if through == "SQLAlchemy" else receiver
    count = 0
    while True:
        with saf.receive(given, "billing", max_messages=6) as delivery:
            connection = delivery.connection
            run: Callable[[str], Any] = (
                connection.exec_driver_sql if through == "SQLAlchemy" else connection.execute
            )
            for number, _ in enumerate(delivery):
                run("INSERT INTO public.done VALUES (0, current_user)")
                if number == 1:
                    run(setting.format(tenant=tenant))
                    break
        count += len(delivery)
        if not delivery:
            break
    engine.dispose()
    assert (count, left(mom)) == (20, (0, 0))


def test_a_message_is_set_aside_by_saf_s_role(mom: Dsn, inbox: tuple[Dsn, str]) -> None:
    receiver, tenant = inbox
    worker = saf.Worker(receiver, "billing", max_messages=7, policy=saf.Policy(max_attempts=1))

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        connection.execute(f"SET ROLE {tenant}".encode())
        if message.key in ("3", "4"):
            raise ValueError(message.key)

    assert worker.drain() == 18
    assert left(mom) == (0, 2)
