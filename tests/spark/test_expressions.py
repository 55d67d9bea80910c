"""Which classifiers in SQL are evaluated at all, and what becomes of those that are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saf.config import load
from saf.database import Dsn, fetch
from saf.forwarding.forwarder import Forwarder
from saf.routing.routers import add_router, remove_router
from saf.routing.routes import add_route
from saf.setaside.selection import DeadLetters
from saf.setaside.waiting import parked
from saf.spark.expressions import Compiled, _compiled
from tests import on_spark
from tests.on_spark import forward
from tests.pipeline import bodies, connect, let_time_pass
from tests.programs import configuration, saf

SEND = "INSERT INTO saf.outbox (to_service, key, body) VALUES (%s, %s, %s)"
GETENV = "('java.lang.System', 'getenv', 'SAF_TEST_SECRET')"

OF_ONE_ROW = (
    *("upper(key)", "`key`", "KEY", "'b'", "key -- and a comment", "key || 'x'", "-length(key)"),
    *("get_json_object(text, '$.origin')", "json:origin", "json:origin::string"),
    *("try_cast(key AS INT)", "hash(key) % 4", "length(key) DIV 2", "CAST(1 << 2 AS STRING)"),
    "named_struct('service', get_json_object(headers, '$.a'), 'broker', to_broker, 'key', key)",
    "struct(key AS service)",
    "CASE WHEN text = 'fail' THEN raise_error('told to fail') ELSE upper(text) END",
    "CASE key WHEN 'a' THEN 'b' END",
    "transform(split(key, ','), x -> upper(x))[0]",
    "aggregate(split(key, ','), '', (sofar, x) -> sofar || x)",
    "if(key IN ('a', 'b') OR key LIKE 'a%' AND NOT key RLIKE 'x', 'x', 'y')",
    "if(key ILIKE ANY ('a%', 'b%') AND key BETWEEN 'a' AND 'c', 'x', 'y')",
    "trim(BOTH 'x' FROM substring(key FROM 1 FOR 2))",
    "if(created_at + INTERVAL 1 DAY > TIMESTAMP '2031-01-01', 'a', 'b')",
    "date_format(date_trunc('DAY', created_at), 'yyyy')",
    "from_json(text, 'a string').a",
    "MAP('a', 'b')[key]",
    "if(key COLLATE UTF8_LCASE = 'x', 'a', 'b')",
)
OF_OTHER_ROWS = (
    *("max(key)", "count(*)", "any(key = 'a')", "lag(key) OVER (ORDER BY key)"),
    *("explode(split(key, ','))", "stack(2, 'a', 'b')", "inline(array(struct('a')))"),
    *("(SELECT 'a')", "if(EXISTS (SELECT 1), 'a', 'b')", "json_tuple(text, 'a')"),
    *("if('a' IN (SELECT key), 'a', 'b')", "key, key", "*"),
)
OF_ANOTHER_TIME = (
    *("rand()", "key || rand()", "uuid()", "randstr(3)", "shuffle(split(key, ','))[0]"),
    *("now()", "current_date", "current_date()", "current_timestamp", "localtimestamp"),
    *("curdate()", "unix_timestamp()", "current_timezone()", "DATE 'today'", "TIMESTAMP '12:30'"),
    *("timestamp /* when */ 'now'", "CAST('now' AS TIMESTAMP)", "'today'::date"),
    *("to_date('tomorrow')", "monotonically_increasing_id()", "spark_partition_id()"),
)
OF_OUTSIDE = (
    *(f"reflect{GETENV}", f"java_method{GETENV}", f"try_reflect{GETENV}", f"`JAVA_Method`{GETENV}"),
    *(f"system.builtin.reflect{GETENV}", f"IDENTIFIER('reflect'){GETENV}"),
    *("input_file_name()", "version()", "current_user()", "current_user", "user()", "session_user"),
    *("current_catalog()", "current_database()", "current_schema()", "CURRENT_PATH", "_metadata"),
    *("read_files('/etc/passwd')", "from_avro(body, '{}')", "xpath(text, '/a')", "session.x"),
    *("aes_encrypt(key, 'a')", "ours(key)", "spark_catalog.default.ours(key)", "secret('a', 'b')"),
)
NONE_AT_ALL = ("", "key), rand(", "key /* ", "raise_error(", ":x", "nothing", "a -> a")


def compiled(expression: str) -> Compiled | str:
    return _compiled(on_spark.spark(), expression)


@pytest.mark.parametrize("expression", OF_ONE_ROW)
def test_what_computes_with_the_columns_of_one_message_is_accepted(expression: str) -> None:
    assert isinstance(compiled(expression), Compiled), compiled(expression)


@pytest.mark.parametrize(
    "expression", [*OF_OTHER_ROWS, *OF_ANOTHER_TIME, *OF_OUTSIDE, *NONE_AT_ALL]
)
def test_what_looks_beyond_its_row_or_says_something_else_each_time_is_refused(
    expression: str,
) -> None:
    said = compiled(expression)
    assert isinstance(said, str)
    assert repr(expression) in said


@pytest.mark.full
def test_one_that_is_too_long_to_be_looked_at_or_nested_too_deeply_is_refused() -> None:
    assert "10,000 are looked at" in str(compiled("'a' || " * 2000 + "'b'"))
    assert "Spark does not understand" in str(compiled("(" * 4990 + "'a'" + ")" * 4990))


def test_a_function_that_somebody_has_added_to_spark_is_refused_whatever_its_name() -> None:
    spark = on_spark.spark()
    spark.udf.register("ours", lambda one: one)
    spark.sql("CREATE TEMPORARY FUNCTION theirs(x STRING) RETURNS STRING RETURN 'a'")
    try:
        for name in ("ours", "theirs"):
            assert f"calls {name}" in str(_compiled(spark, f"{name}(key || '1')"))
    finally:
        spark.sql("DROP TEMPORARY FUNCTION ours")
        spark.sql("DROP TEMPORARY FUNCTION theirs")


@pytest.fixture
def two(app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], tmp_path: Path) -> Any:
    """Two sources of one destination, both with something to forward; and their saf.toml."""
    other = new_broker("other")
    config = configuration(
        tmp_path / "saf.toml", {"app": app, "other": other}, {"mom": mom}, attempts=1
    )
    with connect(other) as connection:
        connection.execute(SEND, ["billing", "k", b"of the other"])
    return config, other


def waits(said: dict[str, Any]) -> dict[str, str]:
    return {one["lane"]: one["error"] for one in said["waiting"]}


@pytest.mark.full
@pytest.mark.parametrize(
    "expression", ["max(key)", f"java_method{GETENV}", "rand()", "explode(split(key, ','))"]
)
def test_a_refused_expression_of_a_source_parks_its_messages_and_holds_up_nobody(
    app: Dsn,
    mom: Dsn,
    two: Any,
    expression: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that the forwarder itself would never have written there."""
    monkeypatch.setenv("SAF_TEST_SECRET", "swordfish")
    config, _ = two
    with connect(app) as source:
        add_router(source, "departures", "sql", expression)
        source.execute(SEND, ["departures", "k", b"first"])
        source.execute(SEND, ["billing", "k", b"of app"])
        said = forward(config)
        assert sorted(bodies(mom)) == ["of app", "of the other"]
        assert expression in waits(said)["route for service 'departures'"]
        assert "swordfish" not in json.dumps(said)

        remove_router(source, "departures")
        source.execute(SEND, ["departures", "k", b"second"])
        let_time_pass(app)
        forward(config)
        assert bodies(mom)[-2:] == ["first", "second"]
        assert parked(source).lanes == 0
        assert DeadLetters().rows(source) == []


def test_a_batch_that_has_frozen_a_refused_expression_gets_free(
    app: Dsn, mom: Dsn, two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = two
    with connect(app) as source:
        add_router(source, "departures", "sql", "max(key)")
        source.execute(SEND, ["departures", "k", b"first"])
        with monkeypatch.context() as patched:
            patched.setattr(Forwarder, "_work", lambda *_, **__: None)
            forwarder = Forwarder(load(config), on_spark.runner())
            forwarder.cycle()  # it opens the batch, and ends
            forwarder.roster.leave()
        assert fetch(source, "SELECT shard FROM saf.cursor WHERE open IS NOT NULL")
        remove_router(source, "departures")
        forward(config)  # parked by the expression that it was opened with
        let_time_pass(app)
        forward(config)
        assert sorted(bodies(mom)) == ["first", "of the other"]


def test_an_expression_that_spark_dies_of_parks_its_messages_and_holds_up_nobody(
    app: Dsn, mom: Dsn, two: Any
) -> None:
    """A regular expression that takes more stack than there is: nothing that Spark can catch."""
    config, _ = two
    with connect(app) as source:
        add_router(source, "departures", "sql", "if(text RLIKE '(a|b)*c', 'x', 'billing')")
        source.execute(SEND, ["departures", "k", b"ab" * 100_000])
        source.execute(SEND, ["billing", "k", b"of app"])
        said = forward(config)
        assert sorted(bodies(mom)) == ["of app", "of the other"]
        assert "StackOverflowError" in waits(said)["route for service 'departures'"]

        add_router(source, "departures", "sql", "'billing'")
        let_time_pass(app)
        forward(config)
        assert len(bodies(mom)) == 3
        assert parked(source).lanes == 0


def test_the_dead_letter_says_what_its_expression_has_raised(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    with connect(app) as source:
        add_route(source, "mom", service="7")
        add_router(source, "numbers", "sql", "CAST(CAST(text AS INT) AS STRING)")
        add_router(
            source, "structs", "sql", "struct(CAST(100 / length(text) AS STRING) AS service)"
        )
        add_router(source, "nulls", "sql", "CAST(NULL AS STRING)")
        for service, body in (("numbers", b"seven"), ("numbers", b"7"), ("structs", b"")):
            source.execute(SEND, [service, "k", body])
        source.execute(SEND, ["nulls", None, b""])
        forward(config)
        errors = {one.service: one.error for one in DeadLetters().rows(source)}
    assert bodies(mom) == ["7"]
    assert "numbers': its expression raises an error: [CAST_INVALID_INPUT]" in errors["numbers"]
    assert "'seven'" in errors["numbers"]
    assert "[DIVIDE_BY_ZERO]" in errors["structs"]
    assert errors["nulls"] == "router 'nulls': its classifier returns no service"


@pytest.mark.full
def test_explain_evaluates_sql_and_says_what_it_raises_or_why_it_is_refused(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    expression = "if(key = 'clock', 'x', CAST(CAST(get_json_object(text, '$.n') AS INT) AS STRING))"
    with connect(app) as source:
        add_router(source, "numbers", "sql", expression)
        add_router(source, "clock", "sql", "current_user")

    def explained(service: str, code: int, body: str = "") -> dict[str, Any]:
        done = saf("router", "explain", service, "--config", config, "--body", body, "--json")
        assert done.returncode == code, done.stderr
        return dict(json.loads(done.stdout)["explanations"][0])

    assert explained("numbers", 0, '{"n": 7}')["resolved"]["service"] == "7"
    assert "CAST_INVALID_INPUT" in explained("numbers", 1, '{"n": "seven"}')["dead"]
    assert "current_user, which is not a column" in explained("clock", 75)["waits"]
