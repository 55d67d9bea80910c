"""Grants: each kind of role has exactly the rights that are listed, on real servers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from psycopg import sql

from saf import Outbox
from saf.broker.grants import Kind, grant
from saf.broker.migrate import migrate
from saf.broker.senders import add_senders
from saf.database import Dsn, fetch
from tests.pipeline import connect
from tests.rights import KINDS, expected, rights
from tests.roles import as_user, denied, forbidden

every_postgresql = pytest.mark.every_postgresql
pytestmark = pytest.mark.usefixtures("new_role")

STATEMENTS = {
    "S": "SELECT FROM {table} LIMIT 0",
    "I": "INSERT INTO {table} DEFAULT VALUES",
    "U": "UPDATE {table} SET {column} = DEFAULT",
    "D": "DELETE FROM {table}",
    "T": "TRUNCATE {table}",
}


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
    assert len(columns) == 69
    listed = expected(kind)
    with connect(granted(app, kind)) as connection:
        for table, names in columns:
            for letter, statement in STATEMENTS.items():
                allowed = not all(
                    forbidden(
                        connection,
                        sql.SQL(statement).format(
                            table=sql.Identifier("saf", table), column=sql.Identifier(name)
                        ),
                    )
                    for name in (names if letter == "U" else names[:1])
                )
                assert allowed == (letter in listed[table].upper()), (table, letter)


SCHEDULING = (
    *("put_schedule", "remove_schedule", "pause_schedule", "resume_schedule", "send_schedule"),
)
SPEAKING = (
    *("utter", "tell_oneself", "expire_later", "contract_fault", "header_fault", "refuse_dialog"),
    "refuse_handle",
)
RECEIVING = (
    *("is_failed", "without_own", "in_hand", "newest_cursors", "refuse_receiver"),
    *("reader", "wait_after", "set_aside", "wait_in_lane", "time_late", "bury"),
    *("drop_message", "fail_dialog", "begin_target", "find_end", "judge", "make_due"),
    *("follow_routers", "redirecting_router", "go_direct", "arrive", "dispose", "take_shard"),
    *("keep_copy", "open_lane"),
    *("count_failed", "give_up", "note_failure", "take_shards", "take_lane"),
    *("out_of_hand", "take_back", "has_seat", "chosen", "unread", "extend_batch", "read_on"),
    "take_ahead",
)
# Of each function: whether it runs with its owner's rights, and whether everybody may execute it.
# One that is not listed here fails the test: decide who may.
FUNCTIONS = {
    "accept": (False, True),  # a CHECK of the outbox: executed as whoever inserts
    "examine": (False, True),  # the same, called by it
    "check_sender": (True, True),  # a policy of the outbox: the same
    "notify_inbox": (False, True),
    "keep_key": (True, False),
    "store_locally": (True, False),
    "send": (False, True),  # with the rights of whoever calls it
    "with_content_type": (False, True),
    "session_role": (False, True),
    # what holds, cancels and moves, as nobody may write to the table
    "hold": (True, False),
    "cancel": (True, False),
    "reschedule": (True, False),
    "move_held": (True, False),
    "forget_names": (True, False),
    # called by those
    "vouch": (False, False),
    "schedule_to_change": (False, False),
    "never_read": (False, False),
    "refuse_argument": (False, False),
    "text_fault": (False, False),
    "time_fault": (False, False),
    "vouch_for": (False, False),
    "pass_on": (False, False),
    "lock_overdue": (False, False),
    # what changes and runs schedules
    **dict.fromkeys(("lock_schedule", *SCHEDULING, "run_schedule"), (True, False)),
    # dialogs: with the rights of whoever calls them
    **dict.fromkeys(("begin_dialog", "say", "end_dialog"), (False, False)),
    **dict.fromkeys(SPEAKING, (False, False)),
    # receiving: the same
    **dict.fromkeys(("receive", "reject", "retry_later"), (False, False)),
    **dict.fromkeys(RECEIVING, (False, False)),
    "send_scheduled": (False, False),
    "note_run": (False, False),
}
TRIGGERS = ("keep_key", "store_locally")
MAY_CALL = {
    "writer": {"hold", "cancel", "reschedule", "lock_schedule", *SCHEDULING},
    "forwarder": {"move_held", "run_schedule"},
    "receiver": {"receive", "reject", "retry_later", "refuse_argument", *RECEIVING},
    "dialog": {
        *("begin_dialog", "say", "end_dialog", "text_fault", "refuse_argument", *SPEAKING),
    },
    "purger": {"forget_names"},
    "operator": {"forget_names", "lock_schedule", *SCHEDULING},
}
"""Who may execute what not everybody may."""
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
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_may_call_exactly_the_functions_that_are_listed(
    kind: str, app: Dsn, granted: Callable[..., Dsn]
) -> None:
    role = granted(app, kind).parts["user"]
    with connect(app) as connection:
        found = {name for (name,) in fetch(connection, MAY_EXECUTE, {"role": role})}
    everybodys = {name for name, (_, everybody) in FUNCTIONS.items() if everybody}
    assert found - everybodys == MAY_CALL.get(kind, set())


@every_postgresql
@pytest.mark.parametrize("function", TRIGGERS)
def test_no_role_makes_a_trigger_of_its_own_of_a_function_that_runs_as_the_owner(
    function: str, app: Dsn, granted: Callable[..., Dsn]
) -> None:
    for kind in KINDS:
        with (
            connect(granted(app, kind)) as connection,
            connection.transaction(force_rollback=True),
        ):
            connection.execute("CREATE TEMPORARY TABLE mine (subscription_id int, shard smallint)")
            assert forbidden(
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
        "SELECT key FROM saf.outbox",
        "SELECT FROM saf.held",
        *(f"SELECT {column} FROM saf.schedule" for column in ("body", "key", "headers")),
        "UPDATE saf.schedule SET paused = true",
        "DELETE FROM saf.schedule",
        "INSERT INTO saf.held (to_service, body, due, sender) VALUES ('a', '', now(), 'b')",
        "DELETE FROM saf.held",
        "SELECT saf.move_held(1)",
        "SELECT saf.forget_names(1)",
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
def test_a_writer_learns_the_id_of_what_it_inserts(app: Dsn, granted: Callable[..., Dsn]) -> None:
    with connect(granted(app, "writer")) as connection:
        inserted = fetch(
            connection,
            "INSERT INTO saf.outbox (to_service, body) VALUES ('a', '') RETURNING message_id",
        )
    with connect(app) as connection:
        assert fetch(connection, "SELECT message_id FROM saf.outbox") == inserted


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
    with connect(granted(app, "receiver")) as connection:
        assert forbidden(connection, "SELECT FROM saf.outbox")
