"""What routes cost: a drain with one, ten and a thousand of them, of messages for 1,000 services.

One is the wildcard. Of ten or a thousand, each is for a service, and what is for none of them goes
by the wildcard. All lead to the same store, so that nothing but the routing differs.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks.drain import forward
from benchmarks.stage import Stage, execute
from saf.config import load

MESSAGES = 300_000
SERVICES = 1000
COUNTS = (1, 10, 1000)
ROUNDS = 2
WARM_UP = 2  # rounds until the JVM has compiled what is hot

FILL = f"""
INSERT INTO saf.outbox (to_service, key, message_type, headers, body)
SELECT 'service ' || i % {SERVICES}, 'order ' || i % 5000, 'OrderPlaced',
       '{{"content-type": "application/json"}}',
       convert_to(rpad('{{"order": ' || i, 200, 'x'), 'UTF8')
FROM generate_series(1, {MESSAGES}) AS i
"""
ROUTES = """
INSERT INTO saf.route (service, destination)
SELECT 'service ' || n, 'mom' FROM generate_series(0, {count} - 2) AS n
UNION ALL SELECT NULL, 'mom'
"""


def run(stage: Stage, spark: SparkSession) -> None:
    """Notes routes_10_ratio and routes_1000_ratio, of the messages a second with one route."""
    settings = load(stage.settings_file(Path(stage.server.data_dir).parent / "routing.toml"))
    execute(stage.app, "TRUNCATE saf.outbox", FILL, "VACUUM ANALYZE saf.outbox")
    seconds: dict[int, list[float]] = {count: [] for count in COUNTS}
    for number in range(WARM_UP + ROUNDS):
        # each has each place in a round: what goes first finds a quieter server
        for count in COUNTS[number % len(COUNTS) :] + COUNTS[: number % len(COUNTS)]:
            stage.rewind()
            execute(stage.app, "DELETE FROM saf.route", ROUTES.format(count=count))
            seconds[count].append(forward(spark, settings, MESSAGES))
            if stage.stored() != MESSAGES:
                raise RuntimeError(f"stored {stage.stored()} messages with {count} routes")
    execute(stage.app, "DELETE FROM saf.route", "TRUNCATE saf.outbox")
    of_one = seconds[COUNTS[0]][WARM_UP:]
    for count in COUNTS[1:]:
        ratios = [o / n for o, n in zip(of_one, seconds[count][WARM_UP:], strict=True)]
        stage.note(f"routes_{count}_ratio", ratios, "of one route", ">= 0.95")
