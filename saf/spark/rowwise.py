"""Row-wise: which router expressions Spark may evaluate, and why it must not evaluate others.

An expression comes from saf.toml, or from a source's saf.router, which users other than the
forwarder's owner may write. Spark evaluates it in the forwarder's processes, and again whenever a
batch is read again. So it may use the columns of one message, and nothing else:

- no other messages (aggregates, windows, queries), and no extra rows (generators);
- nothing that changes between evaluations (the clock, random numbers, the number of a task);
- nothing outside the row (Java by reflection, files, the user, the session), and no functions that
  users added to Spark: such a classifier is a function in Python or Arrow.

Allowed expressions are listed by the names of Spark's functions and the classes of its parsed
syntax. So additions of another Spark version are rejected until a developer has examined them. An
expression is rejected before Spark looks up a function or loads a class for it. An allowed
expression is checked again after Spark's analysis, because names can be given another meaning.

One case cannot be detected from an expression: a text in a message may be a time of day without a
date. Cast to a timestamp, it becomes a time of the current day.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from saf.spark.plans import items, kind_of, nodes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


def refusal(spark: SparkSession, expression: str, columns: Collection[str]) -> str | None:
    """Return why the syntax of an expression forbids its evaluation; None if it is allowed.

    Raise PySparkException if the text is not an expression at all.
    """
    if len(expression) > LONGEST:
        return f"it has {len(expression):,} characters, and {LONGEST:,} are looked at"
    session: Any = spark._jsparkSession
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


def _of_now(spark: SparkSession, expression: str) -> str | None:
    """Return a literal such as DATE 'today', which the parser turns into the current day."""
    jvm: Any = spark._jvm
    parser = getattr(jvm, f"{CATALYST}parser")
    stream = parser.UpperCaseCharStream(jvm.org.antlr.v4.runtime.CharStreams.fromString(expression))
    tokens = parser.SqlBaseLexer(stream).getAllTokens()
    texts = [str(token.getText()) for token in tokens if token.getChannel() == 0]
    for kind, literal in pairwise(texts):
        if kind.upper() in TYPES and OF_NOW.match(literal.lstrip("rR").strip("'\"")):
            return f"{kind} {literal}"
    return None
