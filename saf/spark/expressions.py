"""Expressions: the classifiers in SQL, which Spark itself evaluates.

A run without such classifiers skips all of this. With them, an extra step reads the messages for
routers once more, with only the columns that the expressions use. It runs ahead of the delivering
task, in parallel:

    read (mapInArrow) -> the expressions -> deliver (mapInArrow)

The answers stream into the delivery in the order of the ids, because batches never change. Answers
about parked messages come first (`saf.engine.in_step`).

An expression sees the columns of a message (`saf.columns`); ``text``, the body as text; and
``json``, the body as a VARIANT, or NULL if the body is not valid JSON. The values are those of the
message as sent, even if another router came first. The expression returns the name of a service, or
a struct with the field service, and optionally broker and key. A forbidden expression, or one that
Spark does not understand, is a problem of its router, and the router's messages wait.

*Failures.* If an expression raised for one message, Spark would fail the task for all. So Spark
evaluates a safe form of the expression: it returns NULL where the expression raises, and an empty
text where the expression returns nothing. Spark keeps no reason for the NULL; `saf.spark.answers`
finds it.

*Forbidden expressions.* An expression comes from saf.toml, or from a source's saf.router, which
users other than the forwarder's owner may write. Spark evaluates it in the forwarder's processes,
and again whenever a batch is read again. So it may use the columns of one message, and nothing
else:

- no other messages (aggregates, windows, queries), and no extra rows (generators);
- nothing that changes between evaluations (the clock, random numbers, the number of a task);
- nothing outside the row (Java by reflection, files, the user, the session), and no functions that
  users added to Spark: such a classifier is a function in Python or Arrow.

Allowed expressions are listed by the names of Spark's functions (`FUNCTIONS`) and the classes of
its parsed syntax (`SYNTAX`). So additions of another Spark version are rejected until a developer
has examined them. An expression is rejected before Spark looks up a function or loads a class for
it (`refusal`). An allowed expression is checked again after Spark's analysis, because names can be
given another meaning (`refusal_of_analyzed`).

One case cannot be detected from an expression: a text in a message may be a time of day without a
date. Cast to a timestamp, it becomes a time of the current day.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from psycopg import sql

from saf.columns import EXPRESSED
from saf.database import pinned
from saf.engine.in_step import ENDED, LAST
from saf.engine.work import Work
from saf.routing.matching import SQL, Router, Routes
from saf.setaside import parking
from saf.spark.plans import as_spark_sees, items, kind_of, messages_of, nodes
from saf.spark.session import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CATALYST = "org.apache.spark.sql.catalyst."

FUNCTION_NAMES = """
    abs acos acosh add_months aggregate and array array_append array_compact array_contains
    array_distinct array_except array_insert array_intersect array_join array_max array_min
    array_position array_prepend array_remove array_repeat array_size array_sort array_union
    arrays_overlap arrays_zip ascii asin asinh assert_true atan atan2 atanh base64 between bigint
    bin binary bit_count bit_get bit_length bitmap_bit_position bitmap_bucket_number bitmap_count
    boolean bround btrim cardinality cast cbrt ceil ceiling char char_length character_length chr
    coalesce collate collation concat concat_ws contains conv convert_timezone cos cosh cot crc32
    csc date date_add date_diff date_format date_from_unix_date date_part date_sub date_trunc
    dateadd datediff datepart day dayname dayofmonth dayofweek dayofyear decimal decode degrees div
    double e element_at elt encode endswith equal_null exists exp expm1 extract factorial filter
    find_in_set flatten float floor forall format_number format_string from_base32 from_csv
    from_json from_unixtime from_utc_timestamp get get_json_object getbit greatest hash hex hour
    hypot if ifnull ilike in initcap instr int is_valid_utf8 is_valid_variant is_variant_null isnan
    isnotnull isnull jaro_winkler_similarity json_array_length json_object_keys last_day lcase
    least left len length levenshtein like ln locate log log10 log1p log2 lower lpad ltrim
    luhn_check make_date make_dt_interval make_interval make_time make_timestamp make_timestamp_ltz
    make_timestamp_ntz make_valid_utf8 make_ym_interval map map_concat map_contains_key map_entries
    map_filter map_from_arrays map_from_entries map_keys map_values map_zip_with mask md5 minute
    mod month monthname months_between named_struct nanvl negative next_day not nullif nullifzero
    nvl nvl2 octet_length or overlay parse_json parse_url pi pmod position positive pow power
    printf quarter quote radians raise_error reduce regexp regexp_count regexp_extract
    regexp_extract_all regexp_instr regexp_like regexp_replace regexp_substr repeat replace reverse
    right rint rlike round rpad rtrim schema_of_csv schema_of_json schema_of_variant sec second
    sentences sequence sha sha1 sha2 shiftleft shiftright shiftrightunsigned sign signum sin sinh
    size slice smallint sort_array soundex space split split_part sqrt startswith str_to_map string
    struct substr substring substring_index tan tanh time time_bucket time_diff time_from_micros
    time_from_millis time_from_seconds time_to_micros time_to_millis time_to_seconds time_trunc
    timestamp timestamp_micros timestamp_millis timestamp_nanos timestamp_seconds tinyint to_base32
    to_binary to_char to_csv to_date to_json to_number to_time to_timestamp to_timestamp_ltz
    to_timestamp_ntz to_unix_timestamp to_utc_timestamp to_varchar to_variant_object transform
    transform_keys transform_values translate trim trunc try_add try_divide try_element_at
    try_make_interval try_make_timestamp try_make_timestamp_ltz try_make_timestamp_ntz try_mod
    try_multiply try_parse_json try_parse_url try_subtract try_to_binary try_to_date try_to_number
    try_to_time try_to_timestamp try_url_decode try_validate_utf8 try_variant_array_append
    try_variant_get try_variant_insert try_variant_set typeof ucase unbase64 unhex unix_date
    unix_micros unix_millis unix_nanos unix_seconds upper url_decode url_encode validate_utf8
    variant_array_append variant_delete variant_get variant_insert variant_set variant_strip_nulls
    weekday weekofyear when width_bucket xxhash64 year zeroifnull zip_with
"""
FUNCTIONS = frozenset(FUNCTION_NAMES.split())
"""Spark's functions of one row that always return the same result for the same arguments."""

SYNTAX_CLASSES = """
    Add Alias And BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CaseWhen Cast Collate Concat
    CreateNamedStruct CreateStruct Divide EqualNullSafe EqualTo GreaterThan GreaterThanOrEqual
    If ILike In IntegralDivide IsNotNull IsNull LambdaFunction LessThan LessThanOrEqual Like LikeAll
    LikeAny Literal Lower Multiply NamePlaceholder$ Not NotLikeAll NotLikeAny Or Overlay
    RLike Remainder SemiStructuredExtract ShiftLeft ShiftRight ShiftRightUnsigned StringLocate
    StringTrim StringTrimBoth StringTrimLeft StringTrimRight Substring Subtract TimestampAdd
    TimestampDiff UnaryMinus UnaryPositive UnresolvedAttribute UnresolvedCollation
    UnresolvedExtractValue UnresolvedFunction UnresolvedNamedLambdaVariable UnresolvedStar
"""
SYNTAX = frozenset(SYNTAX_CLASSES.split())
"""The other syntax classes that an expression may contain."""

FOREIGN = re.compile(
    r"UDF|UserDefined|^Aggregate|Aggregator|Subquery|Reflection|^Current|^Now$|^Local"
)
"""Classes in Spark's own package that run foreign code, or read outside the row."""

LONGEST = 10_000
"""Maximum length of an expression, in characters: the driver checks each of its parts."""
TYPES = {"DATE", "TIME", "TIMESTAMP", "TIMESTAMP_NTZ", "TIMESTAMP_LTZ"}
OF_NOW = re.compile(r"\s*(now|today|tomorrow|yesterday|T?\d{1,2}:)", re.IGNORECASE)
"""Texts for a moment that depends on the current time."""

DERIVED = {"text": "CAST(body AS STRING)", "json": "try_parse_json(CAST(body AS STRING))"}
FIELDS = ("service", "broker", "key")
OF_NONE = -1
"""Number for routers without an expression."""
QUOTED = 500
"""Maximum length, in characters, of an expression quoted in an error."""
REFUSED = "{expression} is refused: {why}. Replace it by `saf router add`, or disable it"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """An expression that Spark understands."""

    text: str
    """SQL text that returns the expression's answer, or raises."""
    safe: str
    """SQL text that returns the answer in UTF-8: empty if the expression returns nothing, NULL if
    it raises.
    """
    structured: bool
    """True if the answer is the JSON of a struct, False if it is just a name."""
    columns: frozenset[str]
    """The columns that the expression may refer to."""
    number: int = 0

    @property
    def column(self) -> str:
        """Name of the column with the expression's answers."""
        return f"answer_{self.number}"


def compiled_of(
    spark: SparkSession, all_routes: Sequence[Routes]
) -> tuple[list[Routes], dict[str, Compiled]]:
    """Compile the expressions of routes.

    Return the routes, with problems set on their routers in SQL, and the compiled expressions by
    text.
    """
    wanted = {
        router.expression
        for routes in all_routes
        for router in routes.in_sql
        if router.problem is None
    }
    found = {expression: _compiled(spark, expression) for expression in sorted(wanted)}
    usable = {e: one for e, one in found.items() if isinstance(one, Compiled)}
    problems = {e: one for e, one in found.items() if isinstance(one, str)}
    numbered = {e: replace(one, number=n) for n, (e, one) in enumerate(usable.items())}
    return [with_problems(routes, problems) for routes in all_routes], numbered


@lru_cache(maxsize=1024)
def _compiled(spark: SparkSession, expression: str) -> Compiled | str:
    """Compile an expression; return the reason if that fails."""
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        return _understood(spark, expression)
    except Py4JNetworkError:
        raise  # Spark has ended
    except (PySparkException, Py4JError) as error:
        return f"Spark does not understand {quoted(expression)}: {first_line(error)}"


def _understood(spark: SparkSession, expression: str) -> Compiled | str:
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
    from pyspark.sql.types import StringType, StructType

    if why := refusal(spark, expression, {*EXPRESSED, *DERIVED}):
        return REFUSED.format(expression=quoted(expression), why=why)
    schema = ", ".join(f"{name} {kind}" for name, kind in EXPRESSED.items())
    rows = with_derived(spark.createDataFrame([], schema))
    answers = rows.select(F.expr(expression).alias("answer"))
    if why := refusal_of_analyzed(_analyzed(answers), _analyzed(rows)):
        return REFUSED.format(expression=quoted(expression), why=why)
    kind = answers.schema["answer"].dataType
    if isinstance(kind, StructType) and not {"service"} <= set(kind.names) <= set(FIELDS):
        return f"a struct has the fields {', '.join(FIELDS)}, and not {', '.join(kind.names)}"
    text = f"(\n{expression}\n)"  # it may end with a comment
    if isinstance(kind, StructType):
        text = f"to_json{text}"
    elif not isinstance(kind, StringType):
        text = f"CAST({text} AS STRING)"
    safe = f"try_to_binary(coalesce({text}, ''), 'utf-8')"
    rows.select(F.expr(safe))
    words = set(re.findall(r"\w+", expression.lower()))
    columns = set(EXPRESSED) if "*" in expression else words & set(EXPRESSED)
    if words & set(DERIVED):
        columns.add("body")
    return Compiled(
        text=text,
        safe=safe,
        structured=isinstance(kind, StructType),
        columns=frozenset(columns),
    )


def quoted(expression: str) -> str:
    """Return an expression, shortened if necessary, for an error."""
    return f"{expression!r:.{QUOTED}}"


def _analyzed(rows: DataFrame) -> Any:
    return pinned.jvm_frame(rows).queryExecution().analyzed()


def refusal(spark: SparkSession, expression: str, columns: Collection[str]) -> str | None:
    """Return why the syntax of an expression forbids its evaluation; None if it is allowed.

    Raise PySparkException if the text is not an expression at all.
    """
    if len(expression) > LONGEST:
        return f"it has {len(expression):,} characters, and {LONGEST:,} are looked at"
    session = pinned.jvm_session(spark)
    for node in nodes(session.sessionState().sqlParser().parseExpression(expression)):
        kind = kind_of(node)
        if kind == "UnresolvedFunction":
            name = ".".join(items(node.nameParts()))
            if name.lower() not in FUNCTIONS:
                return f"it calls {name}, which is not a function of one row alone"
        elif kind == "UnresolvedAttribute":
            name = next(items(node.nameParts()))
            if name.lower() not in columns:
                return f"it uses {name}, which is not a column of a message"
        elif kind not in SYNTAX:
            return f"it has a {kind.rstrip('$')}, which does not look at one row alone"
    if (literal := _of_now(spark, expression)) is not None:
        return f"it uses {literal}, which is another time at each reading"
    return None


def _of_now(spark: SparkSession, expression: str) -> str | None:
    """Return a literal such as DATE 'today', which the parser turns into the current day."""
    jvm = pinned.jvm(spark)
    parser = getattr(jvm, f"{CATALYST}parser")
    stream = parser.UpperCaseCharStream(jvm.org.antlr.v4.runtime.CharStreams.fromString(expression))
    tokens = parser.SqlBaseLexer(stream).getAllTokens()
    texts = [str(token.getText()) for token in tokens if token.getChannel() == 0]
    for kind, literal in pairwise(texts):
        if kind.upper() in TYPES and OF_NOW.match(literal.lstrip("rR").strip("'\"")):
            return f"{kind} {literal}"
    return None


def refusal_of_analyzed(plan: Any, before: Any) -> str | None:
    """Return why Spark's analysis of an expression forbids its evaluation; None if it is allowed.

    ``plan`` selects only the expression from the plan ``before``.
    """
    if kind_of(plan) != "Project" or not plan.child().sameResult(before):
        return "it looks at other rows, or makes several of one"
    for node in nodes(plan.projectList().apply(0)):
        kind = kind_of(node)
        own = node.getClass().getName().startswith(f"{CATALYST}expressions.")
        if not own or FOREIGN.search(kind):
            return f"Spark plans a {kind} for it, which is not Spark's own or reads other data"
        if not node.deterministic():
            return f"Spark plans a {kind} for it, which differs each time"
        if kind in ("Cast", "ParseToDate", "ParseToTimestamp", "ParseToTime"):
            for child in items(node.children()):
                if kind_of(child) == "Literal" and OF_NOW.match(text := str(child.toString())):
                    return f"it uses {text!r}, which is another time at each reading"
    return None


def answers_of(
    spark: SparkSession,
    item: Work,
    compiled: Mapping[str, Compiled],
    max_bytes: int,
    *,
    last: int = LAST,
    only: str | None = None,
) -> DataFrame:
    """Return the answers for messages to an item's routers, with the messages' numbers.

    Messages with ids after ``last`` get no answers. With ``only``, answer only for messages to
    routers with this expression.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    routers = [entry for entry in item.routes.routers if only in (None, entry.expression)]
    columns = frozenset[str]().union(*(entry.columns for entry in compiled.values()))
    kinds = {"id": "long"} | {name: kind for name, kind in EXPRESSED.items() if name in columns}
    asked = []
    if len(compiled) > 1:
        kinds["asked"] = "int"
        asked.append(_asked(routers, compiled))
    selected = columns | {"to_service"}
    condition = f"to_service = ANY ({sql.Literal([r.service for r in routers]).as_string(None)})"
    queries = [
        f"SELECT {', '.join(kinds)} FROM ({messages}) AS m "
        f"WHERE {condition} AND id <= {last} ORDER BY id"
        for messages in (
            *_parked(item, [*as_spark_sees(selected, max_bytes), *asked]),
            item.batch.rows(["id", *as_spark_sees(selected, max_bytes, item.batch.log), *asked]),
        )
    ]
    rows = messages_of(spark, item, kinds, queries)
    if "body" in columns:
        rows = with_derived(rows)
    answer_columns = [
        (entry.number, entry.column, F.expr(entry.safe)) for entry in compiled.values()
    ]
    if len(answer_columns) == 1:
        answers = [answer.alias(column) for _, column, answer in answer_columns]
    else:
        own = reduce(
            lambda o, entry: F.when(F.col("asked") == entry[0], entry[2]).otherwise(o),
            answer_columns,
            F.lit(None).cast("binary"),
        )
        rows = rows.withColumn("own", own)
        # the other columns are needed only if a router passes a message on to another router
        text = F.col("own").cast("string")
        named = F.coalesce(F.get_json_object(text, "$.service"), text)
        handed_on = named.isin(*{entry.service for entry in item.routes.routers})
        answers = [
            F.when(F.col("asked") == number, F.col("own"))
            .when((F.col("asked") == OF_NONE) | handed_on, answer)
            .alias(column)
            for number, column, answer in answer_columns
        ]
    return rows.select("id", F.lit(None).cast("boolean").alias(ENDED), *answers)


def _asked(routers: Sequence[Router], compiled: Mapping[str, Compiled]) -> sql.Composable:
    """Return the column with the number of the expression of each message's router."""
    of = [compiled[r.expression].number if r.expression in compiled else OF_NONE for r in routers]
    return sql.SQL("({}::int[])[array_position({}::text[], to_service)] AS asked").format(
        sql.Literal(of), sql.Literal([router.service for router in routers])
    )


def _parked(item: Work, columns: Sequence[str | sql.Composable]) -> Iterator[str]:
    """Yield the query for parked messages that are due, by number; nothing if none are due."""
    lanes = [lane for lane in item.waiting if lane.due and not lane.destination]
    if lanes:
        yield parking.in_lanes(item.batch, "", lanes, [sql.SQL("-parked_id AS id"), *columns])


def with_derived(rows: DataFrame) -> DataFrame:
    """Add the columns that expressions see besides those of a message."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    return rows.withColumns({name: F.expr(text) for name, text in DERIVED.items()})


def with_problems(routes: Routes, problems: Mapping[str, str]) -> Routes:
    """Return the routes, with problems set on routers in SQL, looked up by expression."""
    if not problems:
        return routes
    routers = tuple(
        replace(router, problem=f"router {router.service!r}: {problems[router.expression]}")
        if router.kind == SQL and not router.problem and router.expression in problems
        else router
        for router in routes.routers
    )
    return replace(routes, routers=routers)


def without_sql(item: Work, problem: str) -> Work:
    """Return the item with this problem set on all of its routers in SQL."""
    problems = {router.expression: problem for router in item.routes.in_sql}
    return replace(item, routes=with_problems(item.routes, problems))
