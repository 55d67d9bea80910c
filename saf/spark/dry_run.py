"""Dry runs of classifiers in SQL: find the service that a message would go to.

Spark starts at the first question to a router in SQL, and evaluates without a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from saf.engine.classifying import as_answers
from saf.engine.resolving import RAISED, Answers
from saf.errors import MissingExtra
from saf.routing.matching import SQL, Router, Routes
from saf.spark import session
from saf.spark.answers import Raised, answer, as_said, reason
from saf.spark.expressions import Compiled, compiled_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class DryRuns:
    """A `saf.operating.dry_run.InSql`; a context manager, because it must stop its Spark."""

    def __init__(self) -> None:
        self._spark: SparkSession | None = None
        self._lock = Lock()

    def __enter__(self) -> DryRuns:
        return self

    def __exit__(self, *_: object) -> None:
        if self._spark is not None:
            self._spark.stop()

    def __call__(self, routes: Routes) -> tuple[Routes, Answers | None]:
        """Return routes with their routers' problems, and the answers; see `InSql`.

        Return no answers if Spark's packages are not installed.
        """
        if not any(router.kind == SQL and not router.problem for router in routes.routers):
            return routes, None
        try:
            session.require_packages()
        except MissingExtra:
            return routes, None
        with self._lock:
            self._spark = session.start("local[1]", app_name="saf router")
            (routes,), compiled = compiled_of(self._spark, [routes])
        return routes, _Answers(self._spark, compiled)


class _Answers:
    def __init__(self, spark: Any, compiled: Mapping[str, Compiled]) -> None:
        self._spark = spark
        self._compiled = compiled

    def about(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        return np.ones(len(rows), np.bool_)

    def to(self, router: Router, rows: pa.Table) -> pa.Table:
        expression = self._compiled[router.expression]
        return pa.concat_tables([self._to(expression, row) for row in rows.to_pylist()])

    def _to(self, expression: Compiled, message: Mapping[str, Any]) -> pa.Table:
        why = reason(self._spark, Raised(text=expression.text, message=message))
        if why is not None:
            return as_answers([f"{RAISED}: {why}"])
        text = answer(self._spark, expression.text, message) or ""
        return as_said(expression, pa.array([text.encode()], pa.binary()))
