"""`import saf` is light: an application that only sends pays for nothing else."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

HEAVY = {"pyspark", "pyarrow", "sqlalchemy", "adbc_driver_postgresql", "alembic", "pandas", "numpy"}

IMPORT = """
import json, resource, sys

def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

before = cpu()
import saf
print(json.dumps([cpu() - before, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def fresh_import() -> tuple[float, set[str]]:
    out = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    seconds, modules = json.loads(out)
    return float(seconds), set(modules)


def test_importing_saf_takes_less_than_three_tenths_of_a_second() -> None:
    # processor time, because a busy machine stretches the clock's
    assert statistics.median(fresh_import()[0] for _ in range(5)) < 0.3


def test_importing_saf_imports_no_spark_no_arrow_and_no_sqlalchemy() -> None:
    assert fresh_import()[1] & HEAVY == set()
