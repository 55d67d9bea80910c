"""Captures: each change of a row is a message, in order, whatever statement makes it."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import sql

from saf.broker.grants import Kind, grant
from saf.broker.services import create_service
from saf.capture import stored
from saf.capture.drift import drift
from saf.capture.stored import Declaration, named, remove, review
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, Unavailable, UsageError
from saf.routing.routes import add_route
from tests.captures import SENT, capture, ops, sent
from tests.pipeline import connect
from tests.roles import as_user, forbidden

every_postgresql = pytest.mark.every_postgresql

ORDERS = """
CREATE TABLE orders (number bigint PRIMARY KEY, customer text, status text, total numeric(10, 2))
"""
PARTITIONED = """
CREATE TABLE orders (number bigint, region text, total int, PRIMARY KEY (number, region))
    PARTITION BY LIST (region);
CREATE TABLE orders_eu PARTITION OF orders FOR VALUES IN ('eu');
CREATE TABLE orders_us PARTITION OF orders FOR VALUES IN ('us');
"""


def differences(connection: psycopg.Connection[Any], table: str = "orders") -> list[str]:
    return [found.what for found in drift(connection, named(connection, table))]


@pytest.fixture
def orders(source: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    source.execute(ORDERS)
    return source


@every_postgresql
def test_an_insert_an_update_and_a_delete_are_messages_with_before_and_after(
    orders: psycopg.Connection[Any],
) -> None:
    assert capture(orders, columns=("total", "number")) == "added"
    orders.execute("INSERT INTO orders VALUES (1, 'a', 'open', 9.50), (2, 'b', 'open', NULL)")
    orders.execute("UPDATE orders SET total = total + 1 WHERE number = 1")
    orders.execute("DELETE FROM orders WHERE number = 2")
    assert sent(orders) == [
        ("1", "insert", None, {"total": 9.5, "number": 1}),
        ("2", "insert", None, {"total": None, "number": 2}),
        ("1", "update", {"total": 9.5, "number": 1}, {"total": 10.5, "number": 1}),
        ("2", "delete", {"total": None, "number": 2}, None),
    ]
    ((text, headers, service),) = fetch(
        orders,
        "SELECT convert_from(body, 'UTF8'), headers, to_service FROM saf.outbox LIMIT 1",
    )
    assert text == '{"op": "insert", "before": null, "after": {"total":9.50,"number":1}}'
    assert (headers, service) == ({"content-type": "application/json"}, "billing")


def test_a_rollback_sends_nothing_nor_does_a_savepoint_that_is_rolled_back(
    orders: psycopg.Connection[Any],
) -> None:
    capture(orders)
    with orders.transaction(force_rollback=True):
        orders.execute("INSERT INTO orders VALUES (1)")
    with orders.transaction():
        orders.execute("INSERT INTO orders VALUES (2)")
        with orders.transaction(force_rollback=True):
            orders.execute("UPDATE orders SET status = 'x'")
        orders.execute("DELETE FROM orders")
    assert ops(orders) == [("2", "insert"), ("2", "delete")]


def test_an_update_that_changes_nothing_it_sends_is_not_sent(
    orders: psycopg.Connection[Any],
) -> None:
    capture(orders, columns=("number", "total"))
    orders.execute("INSERT INTO orders VALUES (1, 'a', 'open', 1), (2, 'b', 'open', 2)")
    orders.execute("UPDATE orders SET total = total")
    orders.execute("UPDATE orders SET status = 'paid'")
    orders.execute("UPDATE orders SET total = 3")
    assert ops(orders)[2:] == [("1", "update"), ("2", "update")]


def test_the_condition_chooses_rows_and_a_column_that_it_reads_counts_as_changed(
    orders: psycopg.Connection[Any],
) -> None:
    capture(orders, columns=("number", "total"), condition="new.status = 'paid' -- only these")
    orders.execute("INSERT INTO orders VALUES (1, 'a', 'open', 1), (2, 'b', 'paid', 2)")
    orders.execute("UPDATE orders SET status = 'paid' WHERE number = 1")
    orders.execute("UPDATE orders SET customer = 'c'")
    orders.execute("DELETE FROM orders")
    assert ops(orders) == [("2", "insert"), ("1", "update")]


def test_the_row_that_does_not_exist_is_null_in_the_condition(
    orders: psycopg.Connection[Any],
) -> None:
    capture(orders, columns=("number",), condition="old.number IS NULL OR new IS NULL")
    orders.execute("INSERT INTO orders VALUES (1, 'a', 'open', 1)")
    orders.execute("UPDATE orders SET total = 2")
    orders.execute("DELETE FROM orders")
    assert ops(orders) == [("1", "insert"), ("1", "delete")]


@every_postgresql
def test_a_changed_key_is_a_delete_and_an_insert_and_deletes_come_first(
    orders: psycopg.Connection[Any],
) -> None:
    orders.execute("ALTER TABLE orders ADD CONSTRAINT one UNIQUE (customer) DEFERRABLE")
    capture(orders, key="customer", columns=("number",))
    orders.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b'), (3, 'c')")
    orders.execute(
        "UPDATE orders SET customer = CASE number WHEN 1 THEN 'b' WHEN 2 THEN 'a' ELSE 'c' END"
    )
    found = sent(orders)[3:]
    assert [op for _, op, _, _ in found] == ["delete", "delete", "insert", "insert"]
    assert sorted(
        (key or "", op, *(before or after).values()) for key, op, before, after in found
    ) == [
        ("a", "delete", 1),
        ("a", "insert", 2),
        ("b", "delete", 2),
        ("b", "insert", 1),
    ]


@every_postgresql
def test_rows_are_matched_by_their_primary_key(orders: psycopg.Connection[Any]) -> None:
    capture(orders, columns=("total",))
    orders.execute("INSERT INTO orders (number, total) SELECT n, n FROM generate_series(1, 4) AS n")
    orders.execute("UPDATE orders SET number = number + 10 WHERE number < 3")
    assert sent(orders)[4:6] == [
        (key, "delete", {"total": int(key)}, None) for key in ("1", "2")
    ] or sorted(ops(orders)[4:6]) == [("1", "delete"), ("2", "delete")]
    assert sorted(ops(orders)[6:]) == [("11", "insert"), ("12", "insert")]
    orders.execute("UPDATE orders SET total = total * 10 WHERE number IN (3, 4)")
    assert sorted(sent(orders)[8:]) == [
        ("3", "update", {"total": 3.0}, {"total": 30.0}),
        ("4", "update", {"total": 4.0}, {"total": 40.0}),
    ]


def test_a_null_key_has_no_order_but_is_sent(orders: psycopg.Connection[Any]) -> None:
    capture(orders, key="customer", columns=("number",))
    orders.execute("INSERT INTO orders VALUES (1, NULL), (2, 'a')")
    orders.execute("UPDATE orders SET customer = 'b', status = 'x'")
    assert sorted(ops(orders), key=str) == sorted(
        [
            *[(None, "insert"), ("a", "insert"), (None, "delete"), ("a", "delete")],
            *[("b", "insert"), ("b", "insert")],
        ],
        key=str,
    )


VALUES = """
CREATE TABLE orders (
    number int PRIMARY KEY, a numeric, b double precision, c bytea, d timestamptz, e timestamp,
    f interval, g json, h jsonb, i text[], j point, k uuid, l boolean, m int4range);
INSERT INTO orders SELECT 0;
"""
ONE = r"""
INSERT INTO orders VALUES (
    1, 'NaN', 'Infinity', '\x00ff', '2026-03-29 01:30:00+00', '2026-03-29 02:30:00', '1 day 2 h',
    '{"a": "\u0000", "a": 1e400000}', '{"b": 1.10}', '{x,"y z"}', '(1,2)',
    '00000000-0000-0000-0000-000000000001', true, '[1,3)')
"""
SETTINGS = {
    "TimeZone": "America/New_York",
    "DateStyle": "German",
    "IntervalStyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
}


@every_postgresql
def test_values_are_written_the_same_whatever_the_session_has_set(
    source: psycopg.Connection[Any],
) -> None:
    source.execute(VALUES)
    capture(source, key="d")
    source.execute(ONE)
    for name, value in SETTINGS.items():
        source.execute("SELECT set_config(%s, %s, false)", (name, value))
    source.execute("DELETE FROM orders WHERE number = 1")
    (_, _, first), (key, _, second) = fetch(source, SENT)
    assert key == "2026-03-29 01:30:00+00"
    texts = (first.partition('"after": ')[2], second.partition('"before": ')[2])
    assert texts[0].removesuffix("}") == texts[1].removesuffix(', "after": null}')
    assert texts[0] == (
        '{"number":1,"a":"NaN","b":"Infinity","c":"\\\\x00ff","d":"2026-03-29T01:30:00+00:00",'
        '"e":"2026-03-29T02:30:00","f":"1 day 02:00:00","g":{"a": "\\u0000", "a": 1e400000},'
        '"h":{"b": 1.10},"i":["x","y z"],"j":"(1,2)",'
        '"k":"00000000-0000-0000-0000-000000000001","l":true,"m":"[1,3)"}}'
    )


@every_postgresql
def test_an_upsert_sends_what_it_inserts_and_what_it_updates(
    orders: psycopg.Connection[Any],
) -> None:
    capture(orders, columns=("status",))
    orders.execute("INSERT INTO orders VALUES (1, 'a', 'old')")
    orders.execute(
        "INSERT INTO orders VALUES (1, 'a', 'new'), (2, 'b', 'new') "
        "ON CONFLICT (number) DO UPDATE SET status = excluded.status"
    )
    orders.execute("INSERT INTO orders VALUES (2), (3) ON CONFLICT DO NOTHING")
    assert sorted(sent(orders)[1:], key=str) == [
        ("1", "update", {"status": "old"}, {"status": "new"}),
        ("2", "insert", None, {"status": "new"}),
        ("3", "insert", None, {"status": None}),
    ]


@every_postgresql
def test_a_merge_sends_each_row_once(orders: psycopg.Connection[Any]) -> None:
    capture(orders, columns=("total",))
    orders.execute("INSERT INTO orders (number, total) VALUES (1, 1), (2, 2), (3, 3)")
    orders.execute(
        "MERGE INTO orders AS o USING (VALUES (1, 10), (2, 0), (4, 4)) AS v (number, total) "
        "ON o.number = v.number WHEN MATCHED AND v.total = 0 THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET total = v.total "
        "WHEN NOT MATCHED THEN INSERT (number, total) VALUES (v.number, v.total)"
    )
    assert sorted(ops(orders)[3:]) == [("1", "update"), ("2", "delete"), ("4", "insert")]


@every_postgresql
def test_copy_sends_each_row(orders: psycopg.Connection[Any]) -> None:
    capture(orders, columns=("number",))
    with orders.cursor() as cursor, cursor.copy("COPY orders (number) FROM STDIN") as copy:
        for number in range(500):
            copy.write_row((number,))
    assert ops(orders) == [(str(number), "insert") for number in range(500)]


def test_a_truncate_is_refused_and_says_what_to_do(orders: psycopg.Connection[Any]) -> None:
    capture(orders)
    orders.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="TRUNCATE of public") as why:
        orders.execute("TRUNCATE orders")
    assert "DELETE sends a message for each row" in str(why.value.diag.message_hint)
    assert fetch(orders, "SELECT count(*) FROM orders") == [(1,)]


@every_postgresql
def test_changes_of_partitions_are_sent_whatever_table_the_statement_names(
    source: psycopg.Connection[Any],
) -> None:
    source.execute(PARTITIONED)
    capture(source, key="number", columns=("region", "total"))
    source.execute("INSERT INTO orders VALUES (1, 'eu', 1), (2, 'us', 2)")
    source.execute("INSERT INTO orders_eu VALUES (3, 'eu', 3)")
    source.execute("UPDATE orders_us SET total = 20")
    source.execute("UPDATE orders SET region = 'us' WHERE number = 1")
    source.execute("DELETE FROM orders WHERE number = 3")
    assert sent(source) == [
        ("1", "insert", None, {"region": "eu", "total": 1}),
        ("2", "insert", None, {"region": "us", "total": 2}),
        ("3", "insert", None, {"region": "eu", "total": 3}),
        ("2", "update", {"region": "us", "total": 2}, {"region": "us", "total": 20}),
        # the region is part of the primary key
        ("1", "delete", {"region": "eu", "total": 1}, None),
        ("1", "insert", None, {"region": "us", "total": 1}),
        ("3", "delete", {"region": "eu", "total": 3}, None),
    ]
    source.execute("CREATE TABLE orders_asia PARTITION OF orders FOR VALUES IN ('asia')")
    assert "table public.orders_asia: trigger saf_capture_insert is missing" in str(
        differences(source)
    )
    capture(source, key="number", columns=("region", "total"))
    assert differences(source) == []


@every_postgresql
def test_cascades_of_foreign_keys_are_sent(orders: psycopg.Connection[Any]) -> None:
    orders.execute(
        "CREATE TABLE lines (id int PRIMARY KEY, number bigint REFERENCES orders ON DELETE CASCADE "
        "ON UPDATE CASCADE)"
    )
    capture(orders, "lines", key="number")
    orders.execute("INSERT INTO orders VALUES (1), (2)")
    orders.execute("INSERT INTO lines VALUES (10, 1), (20, 2)")
    orders.execute("DELETE FROM orders WHERE number = 1")
    orders.execute("UPDATE orders SET number = 3")
    assert ops(orders) == [
        *(("1", "insert"), ("2", "insert"), ("1", "delete")),
        *(("2", "delete"), ("3", "insert")),
    ]


def test_replicated_changes_fire_no_trigger_and_are_not_sent(
    orders: psycopg.Connection[Any],
) -> None:
    capture(orders)
    orders.execute("SET session_replication_role = replica")
    orders.execute("INSERT INTO orders VALUES (1)")
    assert ops(orders) == []


def test_statements_of_one_transaction_are_sent_in_their_order(
    orders: psycopg.Connection[Any],
) -> None:
    capture(orders, columns=("status",))
    with orders.transaction():
        orders.execute("INSERT INTO orders VALUES (1)")
        for status in "abc":
            orders.execute("UPDATE orders SET status = %s", (status,))
        orders.execute(
            "WITH gone AS (DELETE FROM orders RETURNING *) INSERT INTO orders "
            "SELECT number, customer, 'again' FROM gone"
        )
    assert ops(orders) == [
        ("1", op) for op in ("insert", "update", "update", "update", "delete", "insert")
    ]


@every_postgresql
def test_messages_of_a_row_are_in_the_order_of_its_changes_whoever_makes_them(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("CREATE TABLE orders (number int PRIMARY KEY, version int)")
        connection.execute("INSERT INTO orders SELECT n, 0 FROM generate_series(1, 5) AS n")
        capture(connection)

    def change(_: int) -> None:
        with connect(app) as writer:
            for number in range(60):
                if number % 7 == 0:
                    writer.execute(
                        "INSERT INTO orders VALUES (%s, 1) ON CONFLICT (number) DO UPDATE "
                        "SET version = orders.version + 1",
                        (number % 5 + 1,),
                    )
                else:
                    writer.execute(
                        "UPDATE orders SET version = version + 1 WHERE number = %s",
                        (number % 5 + 1,),
                    )

    with ThreadPoolExecutor(4) as threads:
        [*threads.map(change, range(4))]
    with connect(app) as connection:
        versions: dict[str | None, list[int]] = defaultdict(list)
        for key, _, before, after in sent(connection):
            versions[key].append(after["version"])
            assert after["version"] == before["version"] + 1
    assert {len(found) for found in versions.values()} == {48}
    assert all(found == sorted(found) for found in versions.values())


HOSTILE = 'we"ird %s {x} $saf$'


def test_names_with_any_characters_are_names(source: psycopg.Connection[Any]) -> None:
    schema, table, column = (
        sql.Identifier(HOSTILE),
        sql.Identifier(HOSTILE),
        sql.Identifier(HOSTILE),
    )
    source.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
    name = sql.SQL("{}.{}").format(schema, table)
    source.execute(
        sql.SQL("CREATE TABLE {} (id int, {} text, PRIMARY KEY ({}, id))").format(
            name, column, column
        )
    )
    called = name.as_string(source)
    capture(
        source,
        called,
        key=HOSTILE,
        service="it's\n$saf$ %s",
        message_type="{t} %s '",
        from_service="'",
        condition=f"new.{column.as_string(source)} <> '{{}} %s $saf$'",
    )
    source.execute(sql.SQL("INSERT INTO {} VALUES (1, 'a''b')").format(name))
    assert sent(source) == [("a'b", "insert", None, {"id": 1, HOSTILE: "a'b"})]
    found = fetch(source, "SELECT to_service, from_service, message_type FROM saf.outbox")
    assert found == [("it's\n$saf$ %s", "'", "{t} %s '.insert")]
    assert differences(source, called) == []
    remove(source, named(source, called))


def test_writers_need_no_right_in_schema_saf_and_get_none(
    orders: psycopg.Connection[Any], app: Dsn
) -> None:
    orders.execute("CREATE ROLE app_writer LOGIN")
    try:
        orders.execute("GRANT ALL ON orders TO app_writer")
        orders.execute("GRANT CREATE ON SCHEMA public TO app_writer")
        capture(orders, columns=("number",), condition="new.status = 'paid'")
        function = sql.Identifier("saf", named(orders, "orders").function)
        with connect(as_user(app, "app_writer")) as writer:
            # its own operator comes first in its path, but not in the function's
            writer.execute(
                "CREATE FUNCTION public.yes(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ "
                "BEGIN RAISE EXCEPTION 'as %', current_user; END $$; "
                "CREATE OPERATOR public.= (LEFTARG = text, RIGHTARG = text, FUNCTION = yes); "
                "SET search_path = public, pg_catalog"
            )
            writer.execute("INSERT INTO orders (number, status) VALUES (1, 'paid'), (2, 'open')")
            assert forbidden(writer, "SELECT FROM saf.outbox")
            # not even with the right to use the schema, as senders have
            orders.execute("GRANT USAGE ON SCHEMA saf TO app_writer")
            assert forbidden(writer, sql.SQL("SELECT {}()").format(function))
            writer.execute("CREATE TABLE forged (number bigint PRIMARY KEY, status text)")
            assert forbidden(
                writer,
                sql.SQL(
                    "CREATE TRIGGER forged AFTER INSERT ON forged REFERENCING NEW TABLE AS saf_new "
                    "FOR EACH STATEMENT EXECUTE FUNCTION {}()"
                ).format(function),
            )
        assert ops(orders) == [("1", "insert")]
    finally:
        orders.execute("DROP OWNED BY app_writer; DROP ROLE app_writer")


def test_rows_that_policies_hide_from_nobody_who_writes_them_are_sent(
    orders: psycopg.Connection[Any], app: Dsn
) -> None:
    orders.execute("CREATE ROLE tenant LOGIN")
    try:
        orders.execute("GRANT ALL ON orders TO tenant")
        orders.execute("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
        orders.execute("CREATE POLICY own ON orders USING (customer = current_user)")
        orders.execute("INSERT INTO orders VALUES (1, 'tenant', 'x'), (2, 'other', 'x')")
        capture(orders, columns=("status",))
        with connect(as_user(app, "tenant")) as writer:
            writer.execute("UPDATE orders SET status = 'y'")
        assert ops(orders) == [("1", "update")]
    finally:
        orders.execute("DROP OWNED BY tenant; DROP ROLE tenant")


def test_a_local_route_takes_the_messages_into_the_inbox(orders: psycopg.Connection[Any]) -> None:
    create_service(orders, "billing")
    add_route(orders, "app", service="billing", local=True)
    capture(orders, columns=("number",))
    orders.execute("INSERT INTO orders VALUES (1)")
    assert fetch(orders, "SELECT key, message_type FROM saf.inbox") == [("1", "orders.insert")]


def test_a_key_that_is_too_long_fails_the_statement_and_not_silently(
    orders: psycopg.Connection[Any],
) -> None:
    capture(orders, key="customer")
    with pytest.raises(psycopg.errors.CheckViolation):
        orders.execute("INSERT INTO orders VALUES (1, repeat('x', 1025))")


@pytest.mark.parametrize(
    ("made", "table", "problem"),
    [
        ("SELECT", "orders2", "no table 'orders2' in database"),
        ("SELECT", "a b c", "'a b c'"),
        ("SELECT", "other.public.orders", "no table"),
        ("CREATE VIEW v AS SELECT 1", "v", "only tables have triggers"),
        ("CREATE TABLE t (a int)", "t", "it has no primary key"),
        ("CREATE TABLE t (a int PRIMARY KEY DEFERRABLE)", "t", "its primary key is deferrable"),
        ("CREATE UNLOGGED TABLE t (a int PRIMARY KEY)", "t", "temporary or unlogged"),
        ("CREATE TEMP TABLE t (a int PRIMARY KEY)", "t", "temporary or unlogged"),
        ("CREATE TABLE t (a int PRIMARY KEY); CREATE TABLE u () INHERITS (t)", "t", "inherit"),
        (PARTITIONED.replace("orders", "p"), "p_eu", "it is a partition"),
        (PARTITIONED.replace("orders", "p"), "p", "has several columns: choose the one"),
        ("SELECT", "saf.outbox", "does not belong to the application"),
    ],
)
def test_a_table_that_cannot_be_captured_is_refused_with_the_reason(
    orders: psycopg.Connection[Any], made: str, table: str, problem: str
) -> None:
    orders.execute(made)
    with pytest.raises(UsageError, match=problem):
        capture(orders, table)
    assert stored.listed(orders) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"key": "numer"}, r"--key 'numer': no column .*did you mean 'number'\?"),
        ({"columns": ("number", "x")}, "--columns 'x': no column"),
        ({"columns": ("number", "number")}, "'number' appears twice"),
        ({"condition": "status = 'paid'"}, 'column reference "status" is ambiguous'),
        ({"condition": "new.total"}, "argument of WHERE must be type boolean"),
        ({"condition": "new.state = 'paid'"}, "column new.state does not exist"),
        (
            {"condition": "true); DROP TABLE orders; SELECT (true"},
            "cannot insert multiple commands",
        ),
        ({"condition": "true) --"}, "syntax error"),
        ({"condition": "count(*) > 1"}, "aggregate functions are not allowed"),
        ({"condition": " "}, "expected an SQL expression"),
        ({"service": ""}, "service: is empty"),
        ({"message_type": "x" * 250}, "message_type: 250 bytes are more than"),
    ],
)
def test_a_declaration_that_would_fail_at_the_first_change_is_refused(
    orders: psycopg.Connection[Any], given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        capture(orders, **given)
    orders.execute("INSERT INTO orders VALUES (1)")
    assert ops(orders) == []


def test_a_virtual_column_is_refused(source: psycopg.Connection[Any]) -> None:
    source.execute(
        "CREATE TABLE orders (number int PRIMARY KEY, net int, gross int GENERATED ALWAYS AS "
        "(net * 2) VIRTUAL, vat int GENERATED ALWAYS AS (net / 5) STORED)"
    )
    for given in ({"columns": ("gross",)}, {"key": "gross"}, {"condition": "new.gross > 1"}):
        with pytest.raises(ConfigurationError, match="'gross': a virtual generated column"):
            capture(source, **given)
    capture(source)
    source.execute("INSERT INTO orders VALUES (1, 5)")
    assert sent(source) == [("1", "insert", None, {"number": 1, "net": 5, "vat": 1})]


def test_a_condition_may_not_call_what_another_role_can_change(
    orders: psycopg.Connection[Any],
) -> None:
    orders.execute("CREATE ROLE stranger")
    try:
        orders.execute(
            "CREATE FUNCTION public.is_fine(text) RETURNS boolean LANGUAGE sql AS 'SELECT true'; "
            "ALTER FUNCTION public.is_fine OWNER TO stranger"
        )
        with pytest.raises(ConfigurationError, match=r"--when calls public.is_fine\(text\), which"):
            capture(orders, condition="public.is_fine(new.status)")
        orders.execute("ALTER FUNCTION public.is_fine OWNER TO CURRENT_USER")
        capture(orders, condition="public.is_fine(new.status)")
        orders.execute(
            "CREATE TYPE odd AS (a int); CREATE FUNCTION public.odd_json(odd) RETURNS json "
            "LANGUAGE sql AS $$ SELECT '1'::json $$; CREATE CAST (odd AS json) WITH FUNCTION "
            "public.odd_json(odd); ALTER TABLE orders ADD odd odd; "
            "ALTER FUNCTION public.odd_json OWNER TO stranger"
        )
        with pytest.raises(ConfigurationError, match="its type is cast to json by"):
            capture(orders)
        orders.execute("DROP CAST (odd AS json)")
    finally:
        orders.execute("DROP OWNED BY stranger CASCADE; DROP ROLE stranger")


def test_only_the_owner_of_the_schema_captures(orders: psycopg.Connection[Any], app: Dsn) -> None:
    orders.execute("CREATE ROLE clerk LOGIN")
    try:
        orders.execute("ALTER TABLE orders OWNER TO clerk")
        grant(orders, "clerk", [Kind.OPERATOR])
        capture(orders)
        with connect(as_user(app, "clerk")) as clerk:
            with pytest.raises(ConfigurationError, match="may not change captures in database"):
                capture(clerk)
            assert [found.called for found in stored.listed(clerk)] == ["public.orders"]
            assert differences(clerk) == []
            with pytest.raises(ConfigurationError, match="may not change captures in database"):
                remove(clerk, named(clerk, "orders"))
    finally:
        orders.execute("DROP OWNED BY clerk CASCADE; DROP ROLE clerk")


def test_the_function_belongs_to_the_owner_of_the_outbox_and_not_to_a_superuser(
    orders: psycopg.Connection[Any],
) -> None:
    orders.execute("CREATE ROLE saf_owner")
    try:
        orders.execute("ALTER TABLE saf.outbox OWNER TO saf_owner")
        orders.execute("GRANT USAGE ON SCHEMA saf TO saf_owner")
        orders.execute("GRANT ALL ON ALL FUNCTIONS IN SCHEMA saf TO saf_owner")
        capture(orders)
        owners = fetch(
            orders,
            "SELECT pg_get_userbyid(proowner)::text FROM pg_proc WHERE proname LIKE 'capture_%'",
        )
        assert owners == [("saf_owner",)]
        orders.execute("INSERT INTO orders VALUES (1)")
        assert ops(orders) == [("1", "insert")]
        orders.execute(
            sql.SQL("ALTER FUNCTION {} OWNER TO CURRENT_USER").format(
                sql.Identifier("saf", named(orders, "orders").function)
            )
        )
        assert "who owns saf.outbox" in str(differences(orders))
    finally:
        orders.execute("REASSIGN OWNED BY saf_owner TO CURRENT_USER")
        orders.execute("DROP OWNED BY saf_owner; DROP ROLE saf_owner")


def test_a_capture_that_is_written_again_is_changed_unchanged_or_repaired(
    orders: psycopg.Connection[Any],
) -> None:
    assert capture(orders, columns=("number",)) == "added"
    assert capture(orders, columns=("number",)) == "unchanged"
    assert capture(orders, columns=("number", "total")) == "changed"
    orders.execute("ALTER TABLE orders DISABLE TRIGGER saf_capture_update")
    assert capture(orders, columns=("number", "total")) == "changed"
    orders.execute("DROP TRIGGER saf_capture_delete ON orders")
    assert capture(orders, columns=("number", "total")) == "changed"
    assert differences(orders) == []
    orders.execute("INSERT INTO orders VALUES (1)")
    orders.execute("UPDATE orders SET total = 1")
    orders.execute("DELETE FROM orders")
    assert [op for _, op in ops(orders)] == ["insert", "update", "delete"]
    capture(orders, columns=("number", "total"), service="other")
    assert len(stored.listed(orders)) == 1


LONG_SECONDS = 15


def test_a_table_that_is_locked_is_not_waited_for(
    orders: psycopg.Connection[Any], app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "LOCK_SECONDS", 0.1)
    started = time.monotonic()
    with connect(app) as writer, writer.transaction():
        writer.execute("INSERT INTO orders VALUES (1)")
        with pytest.raises(Unavailable, match=r"other sessions had it locked for 0\.1 s"):
            capture(orders)
        assert stored.listed(orders) == []
    capture(orders)
    with connect(app) as writer, writer.transaction():
        writer.execute("INSERT INTO orders VALUES (2)")
        with pytest.raises(Unavailable, match="try again"):
            remove(orders, named(orders, "orders"))
    assert time.monotonic() - started < LONG_SECONDS
    assert differences(orders) == []


def test_a_removed_capture_leaves_nothing_behind(orders: psycopg.Connection[Any]) -> None:
    capture(orders)
    remove(orders, named(orders, "orders"))
    orders.execute("INSERT INTO orders VALUES (1)")
    orders.execute("TRUNCATE orders")
    assert ops(orders) == []
    left = "SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid WHERE relname = %s"
    assert orders.execute(left, ("orders",)).fetchall() == [(0,)]
    with pytest.raises(ConfigurationError, match="table 'orders' has no capture, only none"):
        named(orders, "orders")


DRIFTS = [
    ("ALTER TABLE orders DISABLE TRIGGER saf_capture_insert", "saf_capture_insert is disabled"),
    ("ALTER TABLE orders DISABLE TRIGGER ALL", "saf_capture_truncate is disabled"),
    ("ALTER TABLE orders ENABLE REPLICA TRIGGER saf_capture_update", "replicated changes only"),
    ("DROP TRIGGER saf_capture_delete ON orders", "saf_capture_delete is missing"),
    ("DROP FUNCTION {} CASCADE", "does not exist"),
    (
        "CREATE OR REPLACE FUNCTION {} RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN RETURN NULL; END'",
        "has another source than was written",
    ),
    ("ALTER FUNCTION {} SECURITY INVOKER", "does not run with its owner's rights"),
    ("ALTER FUNCTION {} SET \"TimeZone\" = 'Europe/Berlin'", "has other settings"),
    ("GRANT EXECUTE ON FUNCTION {} TO PUBLIC", "may be used by others than its owner"),
    ("ALTER TABLE orders DROP total", "column 'total' of table public.orders was dropped"),
    ("ALTER TABLE orders RENAME status TO state", "column 'status' of table public.orders was"),
    ("ALTER TABLE orders RENAME TO bills", "does not exist: it was renamed to public.bills"),
    ("DROP TABLE orders", "table public.orders does not exist"),
    (
        "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (number, customer)",
        "the primary key of table public.orders is number, customer, and was number",
    ),
]


@pytest.mark.parametrize(("change", "difference"), DRIFTS)
def test_what_differs_from_what_was_written_is_noticed(
    orders: psycopg.Connection[Any], change: str, difference: str
) -> None:
    capture(orders, columns=("number", "total"), condition="new.status = 'paid'")
    (item,) = stored.listed(orders)
    assert drift(orders, item) == []
    orders.execute(change.replace("{}", f"saf.{item.function}()"))
    assert difference in str([found.what for found in drift(orders, item)])
    remove(orders, item)


def test_triggers_of_the_application_that_may_change_rows_again_are_named(
    orders: psycopg.Connection[Any],
) -> None:
    orders.execute(
        "CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; "
        "CREATE TRIGGER recount AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION again(); "
        "CREATE TRIGGER before BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION again()"
    )
    assert review(orders, Declaration(table="orders", service="s")).others == ("recount",)
