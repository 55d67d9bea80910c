"""`saf grant`: each kind of role can do its work, and nothing else, on real servers."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from structlog.testing import capture_logs

import saf
from saf import Message, Outbox
from saf.broker import services
from saf.broker.embedded import EmbeddedServer
from saf.broker.grants import Kind, grant
from saf.broker.migrate import migrate
from saf.broker.senders import add_senders
from saf.config import load
from saf.database import Dsn, fetch
from saf.dispatch import history, stored
from saf.dispatch.condition import Book
from saf.dispatch.dispatcher import Dispatcher
from saf.dispatch.running import run as run_dispatchers
from saf.errors import ConfigurationError
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.log import cursor, stream
from saf.log.shards import Member
from saf.operating import decide, decide_parked, outbox
from saf.operating.forecast import forecast
from saf.operating.identity import identity
from saf.operating.members import memberships
from saf.operating.status import broker_status
from saf.receiving.inbox import inbox_status
from saf.routing.routers import add_router
from saf.routing.routes import (
    NOTHING,
    add_route,
    add_topic,
    enable_route,
    remove_route,
    remove_topic,
)
from saf.routing_service import RoutingService
from saf.setaside import dead
from saf.setaside.parked_messages import ParkedFilter
from saf.spark.table.copying import Copy
from saf.spark.table.sink import Outgoing, Written
from saf.webhooks.event import Event
from saf.webhooks.receiver import _store
from tests import dialogs
from tests.endpoints import Got, Partner, Reply, serving
from tests.hub import DEPARTURES, Hub
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass, send
from tests.programs import configuration
from tests.programs import saf as run_saf
from tests.ring import in_slot, leave_slot
from tests.streams import query

every_postgresql = pytest.mark.every_postgresql

_number = itertools.count(1)

# Select, Insert, Update, Delete, Truncate, draw the Next value; in lower case, for the columns in
# SOME only.
# A table that is not listed here fails the test: decide who may do what with it.
KINDS = [
    *("writer", "forwarder", "receiver", "dialog", "router", "purger", "operator", "stream"),
    "sink",
]
MATRIX = {
    "alembic_version": "s      s      s      s      s      s      s      s      s",
    "broker         ": "-      S      S      S      -      S      Su     S      -",
    "outbox         ": "i      S      -      i      -      -      Si     S      i",
    "outbox_status  ": "-      -      -      -      -      -      S      -      -",
    "inbox          ": "-      i      S      i      -      -      Si     S      -",
    "subscription   ": "-      Su     Su     -      -      S      SiD    S      -",
    "member         ": "-      SiuD   SiuD   -      -      -      S      -      -",
    "cursor         ": "-      Su     Su     -      -      S      Siu    Su     -",
    "sender         ": "-      -      -      -      -      -      S      -      -",
    "route          ": "-      S      -      -      S      -      SiuD   -      -",
    "route_version  ": "-      Si     -      -      s      SD     SD     -      -",
    "topic          ": "-      S      -      -      S      -      SiD    -      -",
    "route_choice   ": "-      SiuD   -      -      -      sD     SiuD   -      -",
    "route_share    ": "-      Siu    -      -      -      -      Siu    -      -",
    "router         ": "-      S      -      -      S      -      SiuD   -      -",
    "resolved_conversation": "- Siu - S SiuD sD SiuD - -",
    "watermark      ": "-      SIu    -      -      -      -      S      -      -",
    "acknowledged   ": "-      SIu    -      -      -      -      SID    -      -",
    "cursor_key     ": "-      -      -      -      -      -      -      -      -",
    "watermark_key  ": "-      -      -      -      -      -      -      -      -",
    "timeline       ": "-      -      -      -      -      -      -      -      -",
    "parked         ": "-      SIuD   SIuD   -      -      s      SIuD   -      -",
    "backoff        ": "-      SIuD   SIuD   -      -      s      SIuD   -      -",
    "dead_letter    ": "-      sIu    sI     -      -      s      SIuD   -      -",
    "service        ": "-      S      -      S      -      -      SiD    -      -",
    "dropped        ": "-      Siu    Siu    -      -      Siu    Siu    -      -",
    "audit          ": "-      -      -      -      -      -      Si     -      -",
    "endpoint       ": "-      -      S      -      -      -      SiD    -      -",
    "dispatched     ": "-      -      SIuD   -      -      -      SIuD   -      -",
    "breaker        ": "-      S      SIu    -      -      -      SIu    -      -",
    "attempt        ": "-      -      SiD    -      -      -      SiD    -      -",
    "webhook        ": "-      SiuD   -      -      -      -      -      -      -",
    "message_type   ": "-      -      -      S      -      -      SI     -      -",
    "contract       ": "-      -      -      S      -      -      SI     -      -",
    "contract_message": "-      -      -      S      -      -      SI     -      -",
    "conversation   ": "-      s      -      Siu    -      sD     SiuD   -      -",
    "conversation_group": "- - - Siu - sD SiuD - -",
    "fragment       ": "-      -      -      SID    -      sD     SID    -      -",
    **{f"{log}_{n}": "- - - - - ST ST - -" for log in ("outbox", "inbox") for n in range(8)},
    "outbox_id_seq  ": "-      S      -      -      -      SN     SN     -      -",
    "inbox_id_seq   ": "-      -      -      -      -      SN     SN     -      -",
    "subscription_subscription_id_seq": "- - - - - - - - -",
    "route_route_id_seq": "- - - - - - - - -",
    "route_version_version_seq": "- - - - - - - - -",
    "parked_parked_id_seq": "- - - - - - - - -",
    "dead_letter_dead_letter_id_seq": "- - - - - - - - -",
    "audit_audit_id_seq": "- - - - - - - - -",
    "attempt_attempt_id_seq": "- - - - - - - - -",
    "staging        ": "-      -      -      -      -      SD     SD     -      SID",
    "staged         ": "-      -      -      -      -      sD     sD     -      SID",
    "kept_result    ": "-      SID    -      -      -      sD     sD     -      -",
    "sink           ": "-      -      -      -      -      sD     sD     -      Siu",
    "staging_attempt_seq": "- - - - - - - - -",
}
# Of an operator, who repairs what was set back, and decides about what is parked
REPAIRING = {
    ("cursor", "u"): "allowance set_aside_at",
    ("conversation", "u"): "far_service far_broker group_id send_sequence receive_sequence "
    "ended_here ended_there error_code error_text timer changed_at lineage far_lineage "
    "answered_by",
}
SOME = {
    ("alembic_version", "s"): "version_num",
    ("outbox", "i"): "message_id from_service to_service to_broker key message_type headers body "
    "deliver_at expires_at",
    ("inbox", "i"): "message_id from_service to_service to_broker key conversation_id "
    "from_initiator sequence message_type headers body created_at deliver_at expires_at source",
    ("subscription", "u"): "created_at",
    ("member", "i"): "member_id subscription_id name lease_until",
    ("member", "u"): "lease_until stopping",
    ("cursor", "u"): "owner epoch batch done open position attempted route_version opened_at "
    "allowance until cuts set_aside_at",
    ("cursor", "i"): "subscription_id shard done",
    ("subscription", "i"): "name log service stream",
    ("route", "i"): "service broker destination quality enabled expires_at comment local",
    ("route", "u"): "service broker destination quality enabled expires_at comment local",
    ("route_version", "i"): "routes topics routers brokers",
    ("route_version", "s"): "version brokers",
    ("dropped", "i"): "subscription_id shard reason messages last_message_id",
    ("dropped", "u"): "messages last_message_id last_at",
    ("router", "i"): "service kind expression once_per enabled comment mode",
    ("router", "u"): "service kind expression once_per enabled comment mode",
    ("resolved_conversation", "i"): "router key service broker to_key",
    ("resolved_conversation", "u"): "used_at",
    ("resolved_conversation", "s"): "key service used_at",
    ("topic", "i"): "name",
    ("route_choice", "i"): "service broker key destination",
    ("route_choice", "u"): "used_at",
    ("route_choice", "s"): "service key destination used_at",
    ("route_share", "i"): "service broker keys",
    ("route_share", "u"): "keys",
    ("broker", "u"): "incarnation",
    ("watermark", "u"): "epoch batch position opened_at acknowledged set_aside_at",
    ("acknowledged", "u"): "batch position opened_at",
    ("parked", "u"): "destination deliver_at kind subject broker",
    ("backoff", "s"): "destination subject",
    ("backoff", "u"): "attempts next_attempt_at error awaits_handler message_type",
    ("dead_letter", "s"): "subscription_id destination shard id dead_letter_at",
    ("dead_letter", "u"): "error",
    ("service", "i"): "name",
    ("audit", "i"): "action message_ids why person",
    ("endpoint", "i"): "name subscription_id url settings",
    ("dispatched", "u"): "batch ids",
    ("breaker", "u"): "endpoint state failures failing_since next_probe_at error paused_at "
    "paused_by changed_at",
    ("attempt", "i"): "subscription_id message_id key status seconds outcome error",
    ("staged", "s"): "attempt",
    ("sink", "s"): "version sent_at",
    ("kept_result", "s"): "subscription_id shard id",
    ("parked", "s"): "subscription_id id",
    ("sink", "i"): "application version messages",
    ("sink", "u"): "version messages sent_at",
    ("webhook", "i"): "digest",
    ("webhook", "u"): "stored_at",
    ("conversation", "i"): "handle conversation_id is_initiator monolog service far_service "
    "far_broker contract contract_version group_id expires_at lineage",
    (
        "conversation",
        "u",
    ): "far_service far_broker group_id send_sequence receive_sequence ended_here ended_there "
    "error_code error_text timer changed_at far_lineage answered_by",
    ("conversation", "s"): "handle conversation_id is_initiator state service group_id "
    "receive_sequence ended_here error_code changed_at",
    ("fragment", "s"): "conversation_id from_initiator sequence",
    ("conversation_group", "i"): "group_id",
    ("conversation_group", "u"): "state",
    ("conversation_group", "s"): "group_id",
}
# What is said in a dialog has more columns; other kinds may see or write others, or fewer
SPOKEN = {
    ("outbox", "i"): "message_id from_service to_service to_broker key conversation_id "
    "from_initiator sequence message_type headers body deliver_at expires_at",
    ("conversation", "s"): "conversation_id is_initiator service ended_here error_code",
    ("resolved_conversation", "i"): "router key service broker to_key handle",
    ("dead_letter", "s"): "subscription_id id",
    ("resolved_conversation", "u"): "used_at handle",
    ("cursor", "u"): "epoch batch done open position opened_at",
}

ALL_RIGHTS = """
SELECT c.relname, p.privilege,
       CASE WHEN p.privilege <> 'USAGE' THEN has_table_privilege(%(role)s, c.oid, p.privilege)
            WHEN c.relkind = 'S' THEN has_sequence_privilege(%(role)s, c.oid, p.privilege)
            ELSE false END,
       ARRAY(SELECT a.attname::text FROM pg_attribute a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
               AND p.privilege IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES')
               AND has_column_privilege(%(role)s, c.oid, a.attnum, p.privilege)
             ORDER BY a.attnum)
FROM pg_class c, unnest(%(privileges)s::text[]) WITH ORDINALITY AS p (privilege, number)
WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind NOT IN ('i', 'I', 'c', 't')
ORDER BY p.number
"""
LETTERS = {
    "SELECT": "S",
    "INSERT": "I",
    "UPDATE": "U",
    "DELETE": "D",
    "TRUNCATE": "T",
    "USAGE": "N",
}

STATEMENTS = {
    "S": "SELECT FROM {table} LIMIT 0",
    "I": "INSERT INTO {table} DEFAULT VALUES",
    "U": "UPDATE {table} SET {column} = DEFAULT",
    "D": "DELETE FROM {table}",
    "T": "TRUNCATE {table}",
}


ASIDE = """
INSERT INTO saf.{} (subscription_id, shard, id, to_service, body, {}) VALUES (1, 1, 1, 'a', '', {})
"""


@pytest.fixture(autouse=True)
def new_role(server: EmbeddedServer) -> Iterator[Callable[..., str]]:
    """Creates roles; they go after the databases in which they have rights."""
    roles = []

    def create(name: str = "") -> str:
        role = name or f"role_{next(_number)}"
        with connect(server.dsn("postgres")) as connection:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        roles.append(role)
        return role

    yield create
    with connect(server.dsn("postgres")) as connection:
        for role in roles:
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


@pytest.fixture
def granted(new_role: Callable[..., str]) -> Callable[..., Dsn]:
    """Logs in to a broker as a new role that has the rights of some kinds."""

    def login(dsn: Dsn, *kinds: str) -> Dsn:
        role = new_role()
        with connect(dsn) as connection:
            grant(connection, role, map(Kind, kinds))
        return as_user(dsn, role)

    return login


def as_user(dsn: Dsn, role: str) -> Dsn:
    return Dsn(make_conninfo(dsn.conninfo, user=role))


def expected(kind: str) -> dict[str, str]:
    column = KINDS.index(kind)
    return {table.strip(): cells.split()[column].strip("-") for table, cells in MATRIX.items()}


def rights(dsn: Dsn, role: str) -> dict[str, str]:
    """What the server says that a role may do, in the letters of MATRIX."""
    with connect(dsn) as connection:
        others = ["REFERENCES", "TRIGGER"]
        if connection.info.server_version >= 170000:
            others.append("MAINTAIN")
        rows = fetch(connection, ALL_RIGHTS, {"role": role, "privileges": [*LETTERS, *others]})
    found: dict[str, str] = {}
    for table, privilege, whole, columns in rows:
        letter = LETTERS.get(privilege, f"({privilege})")
        if columns and not whole:
            letter = letter.lower()
            place = table, letter
            assert " ".join(columns) in (SOME[place], SPOKEN.get(place), REPAIRING.get(place))
        found[table] = found.get(table, "") + (letter if whole or columns else "")
    return found


def denied(dsn: Dsn, statement: str | sql.Composed) -> bool:
    """Whether the server forbids a statement; what it does otherwise is rolled back."""
    with connect(dsn) as connection:
        return _denied(connection, statement)


def _denied(connection: psycopg.Connection[Any], statement: str | sql.Composed) -> bool:
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement)
    except psycopg.errors.InsufficientPrivilege:  # SQLSTATE 42501
        return True
    except psycopg.Error:
        return False  # allowed, though it cannot be
    return False


# What each kind cannot do


@every_postgresql
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_exactly_the_rights_that_are_listed(
    kind: str, app: Dsn, granted: Callable[..., Dsn]
) -> None:
    role = granted(app, kind).parts["user"]
    assert rights(app, role) == expected(kind)
    with connect(app) as connection:
        assert fetch(
            connection,
            "SELECT has_schema_privilege(%(r)s, 'saf', 'USAGE'), "
            "has_schema_privilege(%(r)s, 'saf', 'CREATE'), "
            "has_database_privilege(%(r)s, current_database(), 'CREATE')",
            {"r": role},
        ) == [(True, False, False)]


@every_postgresql
@pytest.mark.parametrize("kind", KINDS)
def test_each_statement_on_each_table_is_allowed_or_refused_as_listed(
    kind: str, app: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        columns = fetch(
            connection,
            "SELECT c.relname, array_agg(a.attname::text) FROM pg_class c "
            "JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 "
            "WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind IN ('r', 'p') GROUP BY 1",
        )
    assert len(columns) == 57
    listed = expected(kind)
    with connect(granted(app, kind)) as connection:
        for table, names in columns:
            for letter, statement in STATEMENTS.items():
                allowed = not all(
                    _denied(
                        connection,
                        sql.SQL(statement).format(
                            table=sql.Identifier("saf", table), column=sql.Identifier(name)
                        ),
                    )
                    for name in (names if letter == "U" else names[:1])
                )
                assert allowed == (letter in listed[table].upper()), (table, letter)


# Of each function: whether it runs with its owner's rights, and whether everybody may execute it.
# One that is not listed here fails the test: decide who may.
FUNCTIONS = {
    "accept": (False, True),  # a CHECK of the outbox: executed as whoever inserts
    "examine": (False, True),  # the same, called by it
    "check_sender": (True, True),  # a policy of the outbox: the same
    "notify_inbox": (False, True),
    "cursor_is_one": (True, False),
    "watermark_is_one": (True, False),
    "store_locally": (True, False),
}
ALL_FUNCTIONS = """
SELECT proname, prosecdef, has_function_privilege('public', oid, 'EXECUTE'), proconfig
FROM pg_proc WHERE pronamespace = 'saf'::regnamespace ORDER BY 1
"""
MAY_EXECUTE = """
SELECT proname FROM pg_proc
WHERE pronamespace = 'saf'::regnamespace AND has_function_privilege(%(role)s, oid, 'EXECUTE')
"""


@every_postgresql
def test_each_function_is_listed_and_whoever_executes_it_has_only_the_rights_meant(
    app: Dsn,
) -> None:
    with connect(app) as connection:
        found = fetch(connection, ALL_FUNCTIONS)
    assert {name: (as_owner, everybody) for name, as_owner, everybody, _ in found} == FUNCTIONS
    for name, as_owner, _, settings in found:
        assert not as_owner or settings == ["search_path=pg_catalog, pg_temp"], name


@every_postgresql
@pytest.mark.parametrize("kind", ["writer", "dialog", "sink", "operator"])
def test_who_sends_may_execute_what_checks_it_where_functions_are_for_nobody_by_default(
    kind: str, new_database: Callable[[str], Dsn], new_role: Callable[..., str]
) -> None:
    dsn, name = new_database("hardened"), new_role()
    with connect(dsn) as owner:
        owner.execute("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
        migrate(dsn)
        assert not any(everybody for _, _, everybody, _ in fetch(owner, ALL_FUNCTIONS))
        grant(owner, name, [Kind(kind)])
        with connect(as_user(dsn, name)) as connection:
            outbox_ = Outbox(from_service="shop", allow_autocommit=True)
            outbox_.send(connection, "billing", b"")
            outbox_.send(connection, "billing", b"", headers={"large": "x" * 1000})
            add_senders(owner, name, "shop")
            outbox_.send(connection, "billing", b"")
        ((sent,),) = fetch(owner, "SELECT count(*) FROM saf.outbox")
        grant(owner, name, [])
        assert fetch(owner, MAY_EXECUTE, {"role": name}) == []
    assert sent == 3


def test_what_nobody_has_decided_about_is_noticed(app: Dsn, granted: Callable[..., Dsn]) -> None:
    role = granted(app, "operator").parts["user"]
    assert rights(app, role) == expected("operator")
    with connect(app) as connection:
        connection.execute("CREATE TABLE saf.new (id int GENERATED ALWAYS AS IDENTITY)")
        connection.execute("CREATE VIEW saf.new_view AS SELECT 1")
        connection.execute("CREATE FUNCTION saf.new() RETURNS int LANGUAGE sql RETURN 1")
        functions = {name for name, *_ in fetch(connection, ALL_FUNCTIONS)}
    undecided = {"new", "new_id_seq", "new_view"}
    assert rights(app, role).keys() - expected("operator").keys() == undecided
    assert functions - FUNCTIONS.keys() == {"new"}


@every_postgresql
@pytest.mark.parametrize("function", [name for name, (_, all_) in FUNCTIONS.items() if not all_])
def test_no_role_makes_a_trigger_of_its_own_of_a_function_that_runs_as_the_owner(
    function: str, app: Dsn, granted: Callable[..., Dsn]
) -> None:
    for kind in KINDS:
        with (
            connect(granted(app, kind)) as connection,
            connection.transaction(force_rollback=True),
        ):
            connection.execute("CREATE TEMPORARY TABLE mine (subscription_id int, shard smallint)")
            assert _denied(
                connection,
                "CREATE TRIGGER mine AFTER TRUNCATE ON mine "
                f"FOR EACH STATEMENT EXECUTE FUNCTION saf.{function}()",
            ), kind


@every_postgresql
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_may_change_the_schema_or_the_brokers_identity(
    kind: str, app: Dsn, granted: Callable[..., Dsn]
) -> None:
    role = granted(app, kind)
    for statement in (
        "CREATE TABLE saf.mine ()",
        "CREATE FUNCTION saf.mine() RETURNS int LANGUAGE sql RETURN 1",
        "ALTER TABLE saf.outbox ADD COLUMN mine text",
        "ALTER TABLE saf.outbox DETACH PARTITION saf.outbox_1",
        "ALTER TABLE saf.cursor DISABLE TRIGGER ALL",
        "DROP TABLE saf.dead_letter",
        "DROP SCHEMA saf CASCADE",
        "CREATE INDEX ON saf.outbox (key)",
        "UPDATE saf.alembic_version SET version_num = '0'",
        "UPDATE saf.broker SET broker_id = gen_random_uuid()",
        "SELECT nextval('saf.route_route_id_seq')",
        "LOCK TABLE saf.outbox IN ACCESS EXCLUSIVE MODE",
    ):
        assert denied(role, statement), statement


@every_postgresql
def test_a_writer_reads_no_message_and_says_nothing_that_is_the_brokers_to_say(
    app: Dsn, granted: Callable[..., Dsn]
) -> None:
    writer = granted(app, "writer")
    for statement in (
        "SELECT body FROM saf.outbox",
        "SELECT count(*) FROM saf.outbox",
        "COPY saf.outbox TO STDOUT",
        "INSERT INTO saf.outbox (to_service, body) VALUES ('a', '') RETURNING body",
        "INSERT INTO saf.outbox (id, to_service, body) OVERRIDING SYSTEM VALUE VALUES (1, 'a', '')",
        "INSERT INTO saf.outbox (txid, to_service, body) VALUES ('3', 'a', '')",
        "INSERT INTO saf.outbox (created_at, to_service, body) VALUES (now(), 'a', '')",
        "INSERT INTO saf.outbox_0 (to_service, body) VALUES ('a', '')",
        "INSERT INTO saf.inbox (to_service, body) VALUES ('a', '')",
        "SELECT nextval('saf.outbox_id_seq')",
        "SELECT setval('saf.outbox_id_seq', 1)",
        "SELECT done FROM saf.cursor",
        "TABLE saf.outbox_status",
    ):
        assert denied(writer, statement), statement


@every_postgresql
def test_public_has_no_rights_in_the_schema(app: Dsn, new_role: Callable[..., str]) -> None:
    with connect(app) as connection:
        public = fetch(
            connection,
            "SELECT n.nspname FROM pg_namespace n, aclexplode(n.nspacl) a "
            "WHERE n.nspname = 'saf' AND a.grantee = 0 UNION ALL "
            "SELECT c.relname FROM pg_class c, aclexplode(c.relacl) a "
            "WHERE c.relnamespace = 'saf'::regnamespace AND a.grantee = 0 UNION ALL "
            "SELECT attname FROM pg_attribute, aclexplode(attacl) a "
            "WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'saf'::regnamespace) "
            "AND a.grantee = 0",
        )
    assert public == []
    anyone = new_role()
    assert set(rights(app, anyone).values()) == {""}
    assert denied(as_user(app, anyone), "SELECT FROM saf.broker")


def test_nobody_can_pass_a_right_on(app: Dsn, granted: Callable[..., Dsn]) -> None:
    """The server ignores it, with a warning."""
    with connect(granted(app, "operator")) as connection:
        connection.execute("GRANT SELECT ON saf.outbox TO PUBLIC")
    with connect(granted(app, "writer")) as connection:
        assert _denied(connection, "SELECT FROM saf.outbox")


# What each kind can do: the real code, as that role


@every_postgresql
def test_a_writer_sends_by_psycopg_and_sqlalchemy(app: Dsn, granted: Callable[..., Dsn]) -> None:
    writer = granted(app, "writer")
    outbox = Outbox()
    with writer.connect(role="test") as connection:
        outbox.send(connection, "billing", b"one", key="A", headers={"h": 1})
        outbox.send_many(connection, [Message(service="billing", body=b"two")])
    engine = writer.engine()
    with engine.begin() as alchemy:
        outbox.send(alchemy, "billing", b"three")
        outbox.send_many(alchemy, [Message(service="billing", body=b"four")])
    engine.dispose()
    with connect(writer) as connection:
        send(connection, "by hand", key="A")
    with connect(app) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.outbox") == [(5,)]


@every_postgresql
def test_a_stream_that_an_operator_has_registered_reads_and_commits_and_registers_none(
    app: Dsn, tmp_path: Path, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key="k")
    config = configuration(tmp_path / "saf.toml", {"app": granted(app, "stream")}, {"mom": app})
    read = query(config, maxRowsPerTrigger=4)
    with pytest.raises(ConfigurationError, match="saf subscription create lake --stream outbox"):
        read.step()
    with connect(granted(app, "operator")) as connection:
        assert stream.create(connection, "app", "outbox", "lake", "beginning")
    read.drain()
    assert read.bodies == [str(number) for number in range(10)]
    with connect(granted(app, "operator")) as connection:
        assert stream.drop(connection, "outbox", "lake")


@every_postgresql
def test_a_sink_stages_and_sends_as_the_rules_for_senders_say(
    app: Dsn, granted: Callable[..., Dsn]
) -> None:
    theirs = granted(app, "sink")
    one = pa.RecordBatch.from_pydict({"service": ["billing"], "body": [b"x"]})

    def stage() -> Written:
        with Copy("broker 'app'", theirs) as copy:
            copy.add(one)
        return Written(partition=0, attempt=copy.attempt, messages=copy.messages, query=None)

    to = Outgoing(what="broker 'app'", dsn=theirs)
    assert to.send("scoring", 1, [stage()], stream=False)
    assert not to.send("scoring", 1, [stage()], stream=False)
    to.discard([stage()])
    with connect(app) as connection:
        add_senders(connection, theirs.parts["user"], "shop", refuse_others=True)
    with pytest.raises(ConfigurationError, match=r"may not send this.*saf sender list"):
        to.send("scoring", 2, [stage()], stream=False)
    with connect(app) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.outbox") == [(1,)]
    writer = Outgoing(what="broker 'app'", dsn=granted(app, "writer"))
    with pytest.raises(ConfigurationError, match="saf grant --role sink"):
        writer.send("scoring", 3, [], stream=False)


@every_postgresql
@pytest.mark.parametrize("quality", ["at_most_once", "at_least_once", "exactly_once"])
def test_a_forwarder_forwards_from_source_to_destination(
    quality: str, app: Dsn, mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('x', 'mom')")
        for number in range(10):
            send(connection, str(number), key="k")
    source, destination = granted(app, "forwarder"), granted(mom, "forwarder")
    rules = forwarding_rules(quality, 3, mom=destination)
    with Cycle(source, rules) as one, Cycle(source, rules) as two:
        one.run()
        for cycle in (two, one, two):  # the one gives half of its shards to the other
            cycle.broker._renewed = 0
            cycle.run()
        assert (one.broker.shards, two.broker.shards) == (32, 32)
        with connect(app) as connection:
            send(connection, "10", key="k")
            connection.execute("UPDATE saf.route SET service = 'y'")
        for cycle in (one, two):
            cycle.open()
            cycle.broker.renew()
            cycle.broker.stop()
            cycle.run()
    assert bodies(mom) == [str(number) for number in range(11)]


def test_a_receiver_runs_processors_and_takes_over_from_one_that_is_gone(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    handled: list[str] = []

    class Noting(saf.Processor):
        @saf.handles()
        def note(self, message: saf.Received, _: object) -> None:
            handled.append(f"{self.key} {message.text()}")

        def passivate(self, _: object) -> None:
            handled.append(f"{self.key} goes")

    with connect(mom) as connection, connect(mom) as gone:
        services.create_service(connection, "billing")
        ((subscription,),) = fetch(
            connection, "SELECT subscription_id FROM saf.subscription WHERE name = 'billing'"
        )
        member = Member(subscription_id=subscription, lease_seconds=30)
        member.join(gone)
        assert member.balance(gone) == 64
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'k', 'x')"
        )
    assert saf.Processors(granted(mom, "receiver"), "billing", Noting).drain() == 1
    assert handled == ["k x", "k goes"]


@every_postgresql
def test_a_receiver_dispatches_and_an_operator_looks_after_endpoints(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    operator, login = granted(mom, "operator"), granted(mom, "receiver")
    with serving(Partner()) as partner, connect(operator) as connection:
        services.create_service(connection, "billing")
        stored.add(connection, "partner", partner.url, subscription="billing", settings={})
        number = services.subscription(connection, "billing").subscription_id
        book = Book(subscription_id=number, endpoint="partner")
        book.pause(connection)
        book.resume(connection)

        async def answer(got: Got) -> Reply:
            return {b"1": 204, b"2": 422, b"3": 500}[got.body], {}, b""

        partner.answer = answer
        with connect(mom) as owner:
            for body in ("1", "2", "3"):
                owner.execute(
                    "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', %s, %s)",
                    [body, body.encode()],
                )
        with connect(login) as there:
            networks = ["127.0.0.0/8"]
            (endpoint,) = stored.stored(there, "mom", networks).values()
        dispatched = Dispatcher("partner", endpoint, login)
        run_dispatchers([dispatched], drain=True)
        assert dispatched.summary.handled == 1
        assert len(history.attempts(connection, number, 10)) == 2
        partner.always(410)
        let_time_pass(mom)
        run_dispatchers([dispatched], drain=True)
        assert history.state(connection, number).state == "disabled"
        assert stored.remove(connection, "partner")


@every_postgresql
def test_an_inbox_behind_a_url_is_a_forwarder(mom: Dsn, granted: Callable[..., Dsn]) -> None:
    event = Event(id="1", source="/", type="t", body=b"", content_type=None, key=None)
    for _ in range(2):
        assert _store(granted(mom, "forwarder"), "billing", event, 60)
    with connect(mom) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.inbox") == [(1,)]


@every_postgresql
def test_a_receiver_reads_the_inbox_as_a_member_of_its_subscription(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(mom) as connection:
        connection.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('billing', 'x')")
        ((subscription,),) = fetch(
            connection,
            "INSERT INTO saf.subscription (name, log) VALUES ('billing', 'inbox') "
            "RETURNING subscription_id",
        )
        connection.execute(
            "INSERT INTO saf.cursor (subscription_id, shard) SELECT %s, generate_series(0, 63)",
            [subscription],
        )
    member = Member(subscription_id=subscription, lease_seconds=30)
    with connect(granted(mom, "receiver")) as connection:
        member.join(connection)
        assert member.balance(connection) == 64
        assert cursor.anything_new(connection, "inbox", member)
        cursor.open_batch(connection, "inbox", member)
        (batch,) = cursor.in_hand(connection, "inbox", member)
        ((number, body),) = fetch(connection, batch.select(["id", "body"]))
        with connection.transaction():
            cursor.advance(connection, batch, number)
        cursor.close(connection, [batch])
        member.leave(connection)
    assert body == b"x"


@every_postgresql
def test_a_receiver_receives_parks_and_buries_for_a_service_that_an_operator_created(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    operator, receiver = granted(mom, "operator"), granted(mom, "receiver")
    with connect(operator) as connection:
        services.create_service(connection, "billing")
    later = datetime.now(UTC) + timedelta(hours=1)
    for number, (deliver_at, expires_at) in enumerate(
        [(None, None), (None, None), (None, None), (later, None), (None, datetime.now(UTC))]
    ):
        with connect(mom) as connection:
            connection.execute(
                "INSERT INTO saf.inbox (to_service, key, body, deliver_at, expires_at) "
                "VALUES ('billing', %s, 'x', %s, %s)",
                [str(number), deliver_at, expires_at],
            )
    with saf.receive(receiver, "billing") as delivery:
        assert len(delivery) == 3
        delivery.park(delivery[0], "not now")
        delivery.reject(delivery[1], "never")
    with connect(operator) as connection:
        (status,) = inbox_status(connection)
        assert (status.unread, status.parked, status.dead_letters) == (0, 2, 2)
        decide.retry(connection, dead.Filter(reason="failed"), "mended")
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    for _ in range(2):
        with saf.receive(receiver, "billing") as delivery:
            assert len(delivery) == 1
    with pytest.raises(ZeroDivisionError), failing(receiver):
        pass
    with connect(operator) as connection:
        services.remove_service(connection, "billing", discard=True)


PARKED = """
INSERT INTO saf.parked (subscription_id, destination, kind, subject, shard, id, batch, position,
                        to_service, key, body)
SELECT subscription_id, CASE log WHEN 'inbox' THEN '' ELSE 'mom' END,
       CASE log WHEN 'inbox' THEN 'key' ELSE 'main' END, CASE log WHEN 'inbox' THEN 'k' ELSE '' END,
       n, n, 1, n, 'billing', 'k', ''
FROM saf.subscription, generate_series(1, 2) AS n
"""


def test_an_operator_decides_about_what_forwarders_and_receivers_have_parked(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
        connection.execute(PARKED)
    with connect(granted(mom, "operator")) as connection:
        sent = ParkedFilter(subscription="forwarder")
        assert len(decide_parked.redirect(connection, sent, "", limit=1, to="other")) == 1
        assert len(decide_parked.discard(connection, ParkedFilter(), "")) == 4


@contextmanager
def failing(receiver: Dsn) -> Iterator[None]:
    """A delivery that is tried alone, and fails."""
    with connect(receiver) as connection:
        connection.execute("UPDATE saf.cursor SET allowance = 1 WHERE shard = 0")
    with saf.receive(receiver, "billing"):
        yield
        raise ZeroDivisionError


@every_postgresql
def test_a_receiver_replies_only_if_it_is_a_writer_too(
    mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    reply = "INSERT INTO saf.outbox (to_service, body) VALUES ('a', '')"
    read = "SELECT body FROM saf.inbox"
    assert denied(granted(mom, "receiver"), reply)
    both = granted(mom, "receiver", "writer")
    assert not denied(both, reply)
    assert not denied(both, read)
    assert denied(both, "SELECT body FROM saf.outbox")


def test_a_router_that_is_a_receiver_and_a_dialog_too_serves_a_router_that_forwards(
    new_broker: Callable[[str], Dsn], granted: Callable[..., Dsn]
) -> None:
    hub = Hub.at(new_broker)
    dialog = dialogs.begin(hub.app, "EWR", to_service=DEPARTURES)
    failed = dialogs.begin(hub.app, "nobody", to_service=DEPARTURES)
    with connect(hub.app) as connection, connection.transaction():
        Outbox().send(connection, DEPARTURES, "JFK", key="N1")
    serving = RoutingService(granted(hub.hub, "receiver", "dialog", "router"), DEPARTURES)
    hub.forward()
    assert serving.drain() == 2
    dialogs.end(hub.app, dialog)
    hub.forward()
    serving.drain()
    hub.forward()
    assert bodies(hub.jfk) == ["JFK"]
    assert dialogs.said(dialogs.receive(hub.ewr, "EWR")) == ["EWR", dialogs.END]
    (error,) = dialogs.receive(granted(hub.app, "receiver", "dialog"), dialogs.SHOP)
    assert error.dialog == failed


def test_a_forwarder_tells_a_dialog_that_leads_nowhere_and_who_answers_is_learned_by_a_dialog(
    app: Dsn, mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    dialogs.prepare(app, mom)
    with connect(app) as connection:
        add_router(connection, "departures", "python", "tests.classifiers:by_text")
    dialogs.begin(app, "nobody", to_service="departures")
    dialogs.begin(app, dialogs.WAREHOUSE, to_service="departures")
    with Cycle(granted(app, "forwarder"), forwarding_rules(mom=mom)) as cycle:
        cycle.run()

    def answer(connection: psycopg.Connection[Any], message: saf.Received) -> None:
        assert message.dialog is not None
        message.dialog.send(connection, "yes")

    assert len(dialogs.receive(mom, dialogs.WAREHOUSE, answer)) == 1
    dialogs.forward(mom, app)
    shop = granted(app, "receiver", "dialog")
    assert sorted(dialogs.said(dialogs.receive(shop, dialogs.SHOP))) == [dialogs.ERROR, "yes"]
    with connect(app) as connection:
        far = [one.far_service for one in saf.conversations(connection)]
    assert far == ["departures", dialogs.WAREHOUSE]


@every_postgresql
@pytest.mark.parametrize("kind", ["purger", "operator"])
def test_a_purger_and_an_operator_may_empty_a_slot_and_a_forwarder_may_not(
    kind: str, app: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        send(connection, "old")
    slot = ["LOCK TABLE saf.outbox_0 IN ACCESS EXCLUSIVE MODE", "TRUNCATE saf.outbox_0"]
    forwarder = granted(app, "forwarder")
    assert all(denied(forwarder, statement) for statement in slot)
    with connect(granted(app, kind)) as connection, connection.transaction():
        connection.execute(slot[0])
        assert fetch(connection, "SELECT count(*) FROM saf.outbox_0") == [(1,)]
        connection.execute(slot[1])
        connection.execute(
            "SELECT max(nextval('saf.outbox_id_seq')) FROM generate_series(2, 1 << 20)"
        )
    with connect(app) as connection:
        send(connection, "new")
        assert fetch(connection, "SELECT tableoid::regclass::text, body FROM saf.outbox") == [
            ("saf.outbox_1", b"new")
        ]


def test_a_forwarder_that_is_no_purger_does_not_purge_and_warns_of_nothing(
    app: Dsn, mom: Dsn, granted: Callable[..., Dsn], tmp_path: Path
) -> None:
    with connect(app) as connection:
        send(connection, "kept")
        leave_slot(connection)
        source = granted(app, "forwarder")
        config = configuration(tmp_path / "saf.toml", {"app": source}, {"mom": mom})
        config.write_text(config.read_text() + "[purge]\nretention_seconds = 0\n")
        with capture_logs() as lines:
            Forwarder(load(config), InProcess()).drain()
        assert bodies(mom) == ["kept"]
        assert in_slot(connection, "outbox_0") == ["kept"]
    assert {line["log_level"] for line in lines} <= {"debug", "info"}


@every_postgresql
def test_an_operator_sees_the_state_of_things_and_mends_routes_and_what_was_set_aside(
    app: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        send(connection, "pending")
        connection.execute(ASIDE.format("dead_letter", "reason, error", "'expired', ''"))
    with connect(granted(app, "operator")) as connection:
        status = broker_status(connection)
        assert (status.pending, status.parked, status.dead_letters) == (1, 0, 1)
        assert [one.state for one in outbox.messages(connection, outbox.Wanted()).shown] == [
            "pending"
        ]
        assert [one.backlog.messages for one in memberships(connection)] == [1]
        assert forecast(connection, "mom", NOTHING).by_route() == {"the default destination": 1}
        assert str(identity(connection).broker_id)
        connection.execute("SELECT system_identifier FROM pg_control_system()")
        connection.execute("TABLE saf.outbox_status")
        connection.execute("TABLE saf.watermark")
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('a', 'mom')")
        connection.execute("UPDATE saf.route SET enabled = false WHERE service = 'a'")
        connection.execute("DELETE FROM saf.route WHERE service = 'a'")
        assert add_route(connection, "mom", service="a", comment="for a while")
        enable_route(connection, "mom", service="a", enabled=False)
        remove_route(connection, "mom", service="a")
        assert add_topic(connection, "a")
        remove_topic(connection, "a")
        (found,) = dead.dead_letters(connection, dead.Filter())
        assert decide.retry(connection, dead.Filter(), "the cause is mended") == [found.message_id]
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
        connection.execute("DELETE FROM saf.parked")


# A right that is missing


def test_a_forwarder_without_rights_is_told_the_command_and_gives_no_message_up(
    app: Dsn, mom: Dsn, granted: Callable[..., Dsn]
) -> None:
    with connect(app) as connection:
        send(connection, "kept")
    with (
        Cycle(granted(app, "writer"), forwarding_rules(mom=mom)) as cycle,
        pytest.raises(ConfigurationError, match=r"permission denied for table.*saf grant --role"),
    ):
        cycle.run()
    with Cycle(app, forwarding_rules(mom=granted(mom, "writer"))) as cycle:
        receipts = cycle.run()
    assert {r.error_kind for r in receipts if r.error} == {"ConfigurationError"}
    assert any("saf grant --role" in r.error for r in receipts if r.error)
    let_time_pass(app)
    with Cycle(app, forwarding_rules(mom=granted(mom, "forwarder"))) as cycle:
        cycle.run()
    assert bodies(mom) == ["kept"]


def test_a_forwarder_sees_the_status_of_its_source_without_what_is_in_the_inbox(
    app: Dsn, mom: Dsn, granted: Callable[..., Dsn], tmp_path: Path
) -> None:
    configuration(tmp_path / "saf.toml", {"app": granted(app, "forwarder")}, {"mom": mom})
    with connect(app) as connection:
        send(connection, "pending")
        stream.create(connection, "app", "outbox", "lake", "beginning")
    done = run_saf("status", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(done.stdout)["brokers"]
    assert shown["pending"] == 1
    assert [(one["stream"], one["pending"]) for one in shown["streams"]] == [("lake", 1)]
    with connect(app) as connection:
        stream.create(connection, "app", "inbox", "seen", "beginning")
        everything = broker_status(connection).streams
    assert [(one.stream, one.pending) for one in everything] == [("lake", 1), ("seen", 0)]
    done = run_saf("status", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(done.stdout)["brokers"]
    assert [(one["stream"], one["pending"]) for one in shown["streams"]] == [
        ("lake", 1),
        ("seen", None),
    ]
    assert re.search(r"seen +inbox +may not be read ", run_saf("status", cwd=tmp_path).stdout)


def test_status_ends_with_2_and_one_sentence_for_a_user_without_rights(
    tmp_path: Path, app: Dsn, new_role: Callable[..., str]
) -> None:
    configuration(tmp_path / "saf.toml", {"app": as_user(app, new_role())}, {"mom": app})
    done = run_saf("status", cwd=tmp_path)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert "permission denied for schema saf" in said
    assert "saf grant --role" in said


@pytest.mark.parametrize("command", ["pause", "resume", "history"])
def test_an_endpoint_is_refused_with_one_sentence_to_a_user_without_rights(
    command: str, mom: Dsn, granted: Callable[..., Dsn], tmp_path: Path
) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
    config = configuration(tmp_path / "saf.toml", {"app": mom}, {"mom": granted(mom, "forwarder")})
    config.write_text(config.read_text() + '[endpoints.billing]\nurl = "https://example.com"\n')
    done = run_saf("endpoint", command, "billing", cwd=tmp_path)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert "the database of endpoint 'billing' refuses this user: permission denied" in said


# The command


def test_granting_again_changes_nothing_and_another_duty_leaves_nothing_of_the_old_one(
    app: Dsn, new_role: Callable[..., str]
) -> None:
    role = new_role()
    for _ in range(2):
        done = run_saf("grant", "--role", "operator", role, "--dsn", app.conninfo)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{app.database}: {role} is operator\n"
        assert rights(app, role) == expected("operator")
    with connect(app) as connection:
        connection.execute(f"GRANT DELETE ON saf.outbox TO {role}")
    done = run_saf("grant", "--role", "writer", role, env={"SAF_DSN": app.conninfo})
    assert done.returncode == 0, done.stderr
    assert rights(app, role) == expected("writer")


def test_revoke_takes_everything_back(app: Dsn, new_role: Callable[..., str]) -> None:
    role = new_role()
    arguments = ["--dsn", app.conninfo, role]
    before = rights(app, role)
    assert run_saf("grant", "--role", "receiver", "--role", "writer", *arguments).returncode == 0
    assert rights(app, role) != before
    done = run_saf("grant", "--revoke", *arguments)
    assert done.returncode == 0, done.stderr
    assert rights(app, role) == before
    with connect(app) as connection:
        assert fetch(
            connection, "SELECT has_schema_privilege(%(r)s, 'saf', 'USAGE')", {"r": role}
        ) == [(False,)]


def test_a_dry_run_prints_the_sql_and_changes_nothing(
    app: Dsn, new_role: Callable[..., str]
) -> None:
    role = new_role('dry "run"; --')
    before = rights(app, role)
    done = run_saf("grant", "--role", "forwarder", role, "--dsn", app.conninfo, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert rights(app, role) == before
    with connect(app) as connection:
        connection.execute(done.stdout)
    assert rights(app, role) == expected("forwarder")


def test_a_role_that_does_not_exist_is_named_with_the_command_that_creates_it(app: Dsn) -> None:
    long = "r" * 70
    for name in ("nobody here", "public", long):
        done = run_saf("grant", "--role", "writer", name, "--dsn", app.conninfo)
        assert done.returncode == 2
        (said,) = done.stderr.splitlines()
        assert f"no role {name!r}" in said
        assert f'CREATE ROLE "{name}" LOGIN' in said


def test_a_longer_name_is_not_taken_for_the_role_that_it_would_be_cut_to(
    app: Dsn, new_role: Callable[..., str]
) -> None:
    longest = new_role("ü" * 31 + "r")
    with connect(app) as connection:
        with pytest.raises(ConfigurationError, match="has no role"):
            grant(connection, longest + "r", [Kind.WRITER])
        grant(connection, longest, [Kind.WRITER])
    assert rights(app, longest) == expected("writer")


def test_who_owns_the_schema_or_does_not_own_it_is_told_so(
    app: Dsn, granted: Callable[..., Dsn], new_role: Callable[..., str]
) -> None:
    done = run_saf("grant", "--role", "writer", "postgres", "--dsn", app.conninfo)
    assert done.returncode == 2
    assert "may do everything" in done.stderr
    operator = granted(app, "operator")
    done = run_saf("grant", "--role", "writer", new_role(), "--dsn", operator.conninfo)
    assert done.returncode == 2
    assert "let 'postgres', who owns schema saf, do it" in done.stderr


def test_rights_that_were_passed_on_are_named_and_nothing_changes(
    app: Dsn, new_role: Callable[..., str]
) -> None:
    role, other = new_role(), new_role()
    with connect(app) as connection:
        connection.execute(f"GRANT USAGE ON SCHEMA saf TO {role} WITH GRANT OPTION")
        with connect(as_user(app, role)) as theirs:
            theirs.execute(f"GRANT USAGE ON SCHEMA saf TO {other}")
        with pytest.raises(ConfigurationError, match="has passed rights"):
            grant(connection, role, [Kind.WRITER])
    assert set(rights(app, role).values()) == {""}


def test_what_is_not_said_or_contradicts_itself_is_refused(app: Dsn) -> None:
    for arguments, named in (
        ([], "forwarder"),
        (["--role", "writer", "--revoke"], "--revoke"),
        (["--role", "king"], "'king' is not one of"),
    ):
        done = run_saf("grant", *arguments, "someone", "--dsn", app.conninfo)
        assert done.returncode == 2
        assert named in " ".join(done.stderr.split())


def test_grants_at_the_same_time_wait_for_each_other(
    app: Dsn, new_role: Callable[..., str]
) -> None:
    roles = [new_role() for _ in range(4)]

    def repeatedly(role: str) -> None:
        with connect(app) as connection:
            for kind in Kind:
                grant(connection, role, [kind])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(repeatedly, roles))
    assert all(rights(app, role) == expected("operator") for role in roles)
