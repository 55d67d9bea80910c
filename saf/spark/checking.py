"""Whether Spark could start on this machine, for the doctor.

`saf forward` starts Spark only for more than little work. So what Spark lacks would come to light
with the first deep backlog, and not before.
"""

from __future__ import annotations

from importlib.util import find_spec

from saf.errors import ConfigurationError
from saf.operating.doctor import Finding
from saf.spark import java

WHERE, CHECK = "this machine", "spark"


def examine_machine() -> list[Finding]:
    """Look for what Spark needs here; nothing is found where PySpark is not installed."""
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
