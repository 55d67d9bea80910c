"""Results: what transforms make of messages, as DataFrames.

A function sees the messages of its service in one DataFrame: ``id``, which tells them apart, the
columns that expressions see (`saf.columns.EXPRESSED`), and ``text``, the body as text. It returns a
DataFrame with ``id``, ``body`` and the other columns of `GIVEN` that it changes; columns that it
does not return keep their values. If it makes several rows of a message, it numbers them in the
column ``part``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saf.columns import EXPRESSED
from saf.engine.in_step import ENDED
from saf.engine.transforming import GIVEN
from saf.errors import ConfigurationError
from saf.routing.routers import imported
from saf.spark.plans import changing
from saf.spark.session import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
