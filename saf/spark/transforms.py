"""Transforms: the functions of `[[transforms]]` for one item of work, and their messages.

A function sees the messages of its service in one DataFrame: ``id``, which tells them apart, the
columns that expressions see (`saf.columns.EXPRESSED`), and ``text``, the body as text. It returns a
DataFrame with ``id``, ``body`` and the other columns of `GIVEN` that it changes; columns that it
does not return keep their values. If it makes several rows of a message, it numbers them in the
column ``part``.

The parked messages that are due come first, as many as fit; then those of the batch, by id. If
Spark has to sort the functions' results, nothing is delivered until the sort ends. So one job
transforms at most `AT_ONCE` messages of a deep backlog.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psycopg import sql

from saf.columns import EXPRESSED
from saf.database import fetch
from saf.engine.in_step import ENDED, LAST
from saf.engine.transforming import GIVEN
from saf.engine.work import ForwardingRules, Work
from saf.errors import ConfigurationError
from saf.routing.routers import imported
from saf.setaside import parking
from saf.spark.plans import as_spark_sees, changing, columns_read, messages_of
from saf.spark.session import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEEN = {"id": "long", **EXPRESSED}
"""Message columns that a function sees, besides ``text``, with their Spark types."""
KINDS = dict(zip(("id", "part", *GIVEN), ("long", "int", *["string"] * 3, "binary"), strict=True))
"""Result columns that a function may return, with their Spark types."""


@dataclass(frozen=True, kw_only=True)
class Usable:
    """The result of a function, in the columns of `RESULT`."""

    frame: DataFrame
    given: frozenset[str]
    """The columns of `GIVEN` that the function returns."""


def transformed(
    messages: DataFrame, whose: str, name: str, *, deterministic: bool = True
) -> Usable:
    """Call the function of a transform.

    Raises:
        ConfigurationError: the function cannot be imported, raises, or returns an unusable result.
    """
    from pyspark.errors import PySparkException

    function = imported(whose, name)
    try:
        outcome = function(messages)
    except Exception as error:
        outcome = f"raises {type(error).__name__}: {first_line(error)}"
        raise ConfigurationError(f"{whose}: {name} {outcome}") from error
    try:
        usable = _usable(outcome, whose, name)
    except PySparkException as error:  # e.g. two columns with the same name
        raise ConfigurationError(
            f"{whose}: what {name} returns cannot be used: {first_line(error)}"
        ) from error
    if deterministic and (why := changing(outcome)):
        raise ConfigurationError(
            f"{whose}: {name} {why}, which differs when a batch is read again: set "
            "`deterministic = false` in saf.toml, and its results are kept before they are sent"
        )
    return usable


def _usable(result: Any, owner: str, name: str) -> Usable:
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
    from pyspark.sql.types import BinaryType, IntegralType, MapType, StringType

    if not isinstance(result, DataFrame):
        raise ConfigurationError(
            f"{owner}: {name} returns a {type(result).__name__}, and no DataFrame"
        )
    kinds = {field.name: field.dataType for field in result.schema}
    allowed: dict[str, tuple[type, ...]] = {
        "id": (IntegralType,),
        "part": (IntegralType,),
        "key": (StringType, IntegralType),
        "headers": (StringType, MapType),
        "body": (BinaryType, StringType),
    }
    for column in ("id", "body"):
        if column not in kinds:
            raise ConfigurationError(
                f"{owner}: {name} gives no column {column}, only {', '.join(kinds) or 'none'}"
            )
    for column in KINDS.keys() & kinds.keys():
        if not isinstance(kinds[column], allowed.get(column, (StringType,))):
            raise ConfigurationError(
                f"{owner}: {name} gives a column {column} of the type "
                f"{kinds[column].simpleString()}"
            )
    if isinstance(kinds.get("headers"), MapType):
        result = result.withColumn("headers", F.to_json("headers"))
    columns = [F.col(name).cast(kind).alias(name) for name, kind in KINDS.items() if name in kinds]
    frame = result.select(*columns, F.lit(False).alias(ENDED))
    return Usable(frame=frame, given=frozenset({*GIVEN} & kinds.keys()))


def as_seen(rows: DataFrame, kinds: Mapping[str, str] = SEEN) -> DataFrame:
    """Return messages as a function sees them; columns that ``kinds`` lacks are NULL."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    columns = [
        (F.col(name) if name in kinds else F.lit(None).cast(kind)).alias(name)
        for name, kind in SEEN.items()
    ]
    return rows.select(*columns).withColumn("text", F.col("body").cast("string"))


PARKED = 10_000
"""Maximum number of parked messages transformed in one job."""
AT_ONCE = 500_000
"""Maximum number of messages of a deep backlog evaluated in one job: a driver's wait is limited."""
CHOSEN_BY = {"to_service", "conversation_id", "body"}
"""The columns that select messages, besides the id."""

OF_SERVICES = """
SELECT * FROM (
    SELECT p.id, size, coalesce((SELECT o.to_service FROM saf.outbox o
                                 WHERE o.shard = p.shard AND o.id = p.id
                                   AND o.to_service = ANY ({routers})), p.to_service) AS service
    FROM ({in_lanes}) AS p) AS parked
WHERE service = ANY ({services}) LIMIT {most}
"""
# Parked messages have numbers below zero; see `saf.engine.in_step`
OF_PARKED = """
SELECT DISTINCT ON (id) -id AS id, {columns} FROM saf.parked
WHERE subscription_id = {subscription_id} AND id = ANY ({ids}::bigint[])
"""
TO_TRANSFORM = """
SELECT {columns} FROM ({messages}) AS m
WHERE conversation_id IS NULL AND body IS NOT NULL AND id BETWEEN {low} AND {high}
  AND abs(id) <> ALL ({but}::bigint[]) {more} ORDER BY id
"""
SERVICE = sql.SQL("AND to_service = {}")
NOT_KEPT = sql.SQL("""AND NOT EXISTS (
    SELECT FROM saf.kept_result k WHERE k.subscription_id = {} AND k.id = abs(m.id))""")
NTH = """
SELECT id FROM ({messages}) AS m WHERE to_service = ANY ({services}) ORDER BY id
OFFSET {before} LIMIT 1
"""


@dataclass(kw_only=True)
class Transforms:
    """The transforms of one item of work."""

    spark: SparkSession
    item: Work
    rules: ForwardingRules
    parked: Mapping[str, frozenset[int]]
    """The due parked messages of each service, by their ids in the outbox."""
    last: int
    """The greatest id to evaluate."""
    problems: dict[str, str] = field(default_factory=dict)
    """By service, the reasons why its messages cannot be transformed."""
    faults: dict[int, str] = field(default_factory=dict)
    """By the message's id in the outbox, the error that a function raises for it."""
    _columns: dict[str, frozenset[str]] = field(default_factory=dict)
    """By service, the message columns that its function needs."""

    def usable(self) -> dict[str, Usable]:
        """Return the functions' results; record a problem for functions that cannot be used."""
        found = {}
        for service in self.rules.transforms:
            if service not in self.problems:
                try:
                    found[service] = self.of(service)
                except ConfigurationError as error:
                    self.problems[service] = str(error)
        return found

    def of(self, service: str, within: tuple[int, int] = (-LAST, LAST)) -> Usable:
        """Return a function's results for all messages, or for the numbers ``within`` a range.

        Raises:
            ConfigurationError: the function cannot be used.
        """
        if service not in self._columns:
            read = columns_read(self._made_of(service, within, frozenset(SEEN)).frame)
            self._columns[service] = frozenset(SEEN) if read is None else read | {"id"}
        return self._made_of(service, within, self._columns[service])

    def _made_of(self, service: str, within: tuple[int, int], columns: frozenset[str]) -> Usable:
        return transformed(
            self.messages(service, within, columns),
            f"transform of {service!r}",
            self.rules.transforms[service],
            deterministic=service not in self.rules.not_deterministic,
        )

    def messages(
        self,
        service: str,
        within: tuple[int, int] = (-LAST, LAST),
        columns: frozenset[str] = frozenset(SEEN),
    ) -> DataFrame:
        """Return messages as a function sees them; columns not in ``columns`` are NULL."""
        kinds = {name: kind for name, kind in SEEN.items() if name in columns}
        queries = self._queries(service, within, kinds)
        return as_seen(messages_of(self.spark, self.item, kinds, queries), kinds)

    def _queries(
        self, service: str, within: tuple[int, int], names: Mapping[str, str]
    ) -> Iterator[str]:
        batch = self.item.batch
        subscription = sql.Literal(batch.subscription_id)
        selected, max_bytes = {*names, *CHOSEN_BY}, self.rules.max_bytes
        kept = service in self.rules.not_deterministic | routers_of(self.item, self.rules)
        more = NOT_KEPT.format(subscription) if kept else sql.SQL("")

        def query(messages: str, *conditions: sql.Composable) -> str:
            low, high = within
            return (
                sql.SQL(TO_TRANSFORM)
                .format(
                    columns=sql.SQL(", ").join(map(sql.Identifier, names)),
                    messages=sql.SQL(messages),
                    low=sql.Literal(low),
                    high=sql.Literal(min(high, self.last)),
                    but=sql.Literal(sorted(self.faults)),
                    more=sql.SQL(" ").join([more, *conditions]),
                )
                .as_string(None)
            )

        if parked := self.parked.get(service):
            of_parked = sql.SQL(OF_PARKED).format(
                columns=sql.SQL(", ").join(
                    sql.Identifier(column) if isinstance(column, str) else column
                    for column in as_spark_sees(selected, max_bytes)
                ),
                subscription_id=subscription,
                ids=sql.Literal(sorted(parked)),
            )
            yield query(of_parked.as_string(None))
        columns = as_spark_sees(selected, max_bytes, batch.log)
        yield query(batch.rows(["id", *columns]), SERVICE.format(sql.Literal(service)))


def routers_of(item: Work, rules: ForwardingRules) -> frozenset[str]:
    """Return the routers that have a transform."""
    return frozenset(router.service for router in item.routes.routers) & {*rules.transforms}


def last_at_once(item: Work, rules: ForwardingRules) -> int:
    """Return the id of the `AT_ONCE`-th message to evaluate in a deep backlog; else `LAST`."""
    if not item.deep:
        return LAST
    in_sql = [router.service for router in item.routes.in_sql]
    query = sql.SQL(NTH).format(
        messages=sql.SQL(item.batch.rows(["id", "to_service"])),
        services=sql.Literal([*rules.transforms, *in_sql]),
        before=sql.Literal(AT_ONCE - 1),
    )
    with item.dsn.connect(role="forward", autocommit=True) as source:
        return next((int(id_) for (id_,) in fetch(source, query)), LAST)


def parked_of(item: Work, rules: ForwardingRules) -> dict[str, frozenset[int]]:
    """Return the due parked messages by service: the first of each lane, as many as fit.

    A message that a router resolved to another service counts for the router if it was sent to a
    router with a transform, and the outbox still has it.
    """
    groups: dict[tuple[str, bool], list[parking.Backoff]] = {}
    for lane in item.waiting:
        if lane.due:
            groups.setdefault((lane.destination, lane.found), []).append(lane)
    if not groups:
        return {}
    found: dict[int, str] = {}
    size = 0
    columns: list[str | sql.Composable] = ["id", "shard", "to_service"]
    columns.append(sql.SQL("octet_length(body) AS size"))
    given = {
        "services": sql.Literal([*rules.transforms]),
        "routers": sql.Literal([*routers_of(item, rules)]),
    }
    with item.dsn.connect(role="forward", autocommit=True) as source:
        for (destination, is_found), lanes in groups.items():
            in_lanes = parking.in_lanes(item.batch, destination, lanes, columns, found=is_found)
            query = sql.SQL(OF_SERVICES).format(
                in_lanes=sql.SQL(in_lanes), most=PARKED - len(found) + 1, **given
            )
            for id_, bytes_, service in fetch(source, query):
                if found and (len(found) >= PARKED or size > rules.chunk_bytes):
                    return _by_service(found)
                found[id_] = service
                size += bytes_ or 0
    return _by_service(found)


def _by_service(found: Mapping[int, str]) -> dict[str, frozenset[int]]:
    services = set(found.values())
    return {
        name: frozenset(i for i, service in found.items() if service == name) for name in services
    }
