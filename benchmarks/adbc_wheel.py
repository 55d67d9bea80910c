"""Whether a wheel of adbc-driver-postgresql was compiled with optimisation, and what it costs.

    python adbc_wheel.py URI          # in an environment with the wheel; URI of any PostgreSQL

It needs nothing of saf, so that whoever maintains the driver can run it: adbc-driver-manager,
adbc-driver-postgresql, pyarrow, and `readelf` of binutils.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import adbc_driver_postgresql
import adbc_driver_postgresql.dbapi as adbc

ROWS = 500_000
ROUNDS = 5
QUERY = f"""
SELECT n::bigint AS id, (n % 64)::smallint AS shard, gen_random_uuid() AS message_id,
       'billing' AS to_service, 'order ' || n % 5000 AS key, 'OrderPlaced' AS message_type,
       '{{"content-type": "application/json"}}' AS headers,
       convert_to(repeat('x', 200), 'UTF8') AS body, now() AS created_at
FROM generate_series(1, {ROWS}) AS n
"""

INLINE = "ArrowBufferAppendUnsafe"
"""A ``static inline`` function of nanoarrow of a few instructions, called for each value. Any
compiler that optimises puts it into its callers, so the library has no function of this name."""


def library() -> Path:
    """The driver's shared library."""
    (found,) = Path(adbc_driver_postgresql.__file__).parent.glob("libadbc_driver_postgresql*")
    return found


def functions(path: Path) -> list[str]:
    """The names of the functions that are in a library's table of symbols."""
    table = subprocess.run(["readelf", "-Ws", path], capture_output=True, text=True, check=True)
    rows = [line.split() for line in table.stdout.splitlines()]
    return [row[7] for row in rows if len(row) > 7 and row[3] == "FUNC" and row[6] != "UND"]


def microseconds(uri: str) -> float:
    """Processor time of this process for each row that it reads, without that of the server."""
    rounds = []
    with adbc.connect(uri) as connection, connection.cursor() as cursor:
        for _ in range(ROUNDS):
            began = time.process_time()
            cursor.execute(QUERY)
            read = sum(batch.num_rows for batch in cursor.fetch_record_batch())
            if read != ROWS:
                raise RuntimeError(f"{read} rows instead of {ROWS}")
            rounds.append((time.process_time() - began) * 1e6 / ROWS)
    return statistics.median(rounds)


if __name__ == "__main__":
    names = functions(library())
    copies = sum(name.startswith(INLINE) for name in names)
    readers = sum("PostgresCopy" in name for name in names)
    print(f"adbc-driver-postgresql {version('adbc-driver-postgresql')}")
    print(f"  {len(names):,} functions, {readers:,} of them with PostgresCopy in their names")
    print(f"  {copies} copies of {INLINE}: {'not optimised' if copies else 'optimised'}")
    print(f"  {microseconds(sys.argv[1]):.2f} µs of processor time for each row")
