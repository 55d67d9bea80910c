"""Check, for the doctor, that Spark can start on this machine.

`saf forward` starts Spark only for more than little work. Without this check, a missing
requirement would show up only at the first deep backlog.
"""

from __future__ import annotations

from importlib.util import find_spec

from saf.errors import ConfigurationError
from saf.operating.doctor import Finding
from saf.spark import java

WHERE, CHECK = "this machine", "spark"


def examine_machine() -> list[Finding]:
    """Check Spark's requirements; return no findings if PySpark is not installed."""
    if find_spec("pyspark") is None:
        return []
    try:
        java.find()
    except ConfigurationError as error:
        what = "more than little work needs Spark, which cannot start"
        return [
            Finding(check=CHECK, where=WHERE, severity="warning", what=what, cure=str(error)),
        ]
    return [Finding(check=CHECK, where=WHERE, severity="ok")]
