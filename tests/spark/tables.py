"""What tests of the format ``saf`` share: the session, and reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from saf import spark as saf_spark
from saf.database import Dsn
from tests import on_spark
from tests.programs import configuration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def session() -> SparkSession:
    """The shared session, with the format registered."""
    spark = on_spark.spark()
    saf_spark.register(spark)
    return spark


class Tables:
    """Reads of brokers, which a saf.toml names."""

    def __init__(self, folder: Path, mom: Dsn, **brokers: Dsn) -> None:
        self.config = configuration(folder / "saf.toml", brokers, {"mom": mom})
        self.spark = session()

    def __call__(
        self, broker: str = "app", log: str = "outbox", schema: str | None = None, **options: object
    ) -> DataFrame:
        """A log as a DataFrame."""
        given = {"broker": broker, "config": self.config, "log": log, **options}
        reader = self.spark.read.format("saf")
        for name, value in given.items():
            reader = reader.option(name, str(value))
        return (reader.schema(schema) if schema else reader).load()
