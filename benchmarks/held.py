"""A million held messages: what they cost those that are not held.

From end to end, messages take their usual way at their usual rate, at first alone, and then beside
a million held ones, of which a hundredth becomes due each minute and moves into the outbox. Those
go to a service of their own, so that the worker's time is the same.
"""

from __future__ import annotations

from benchmarks.end_to_end import RATE, _empty, _handled, _send, _waits, running
from benchmarks.receive import BOOKED
from benchmarks.stage import Stage, execute, percentile
from saf.broker.services import create_service

HELD, MINUTES = 1_000_000, 100
ROUNDS = 3

HOLD = """
INSERT INTO saf.held (to_service, key, body, name, due, once_for, sender)
SELECT 'reports', 'key ' || i %% 5000, decode(repeat('78', 200), 'hex'), 'name ' || i,
       clock_timestamp() + random() * make_interval(mins => %s), '1 h', current_user
FROM generate_series(1, %s) AS i
"""
MOVED = "SELECT count(*) FROM saf.held WHERE due IS NULL"


def run(stage: Stage) -> None:
    """Notes held_p50_ratio and held_p99_ratio: with a million held, over without."""
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        create_service(connection, "billing")
        create_service(connection, "reports")
        connection.execute(BOOKED.replace("TABLE", "TABLE IF NOT EXISTS"))
    ratios: dict[str, list[float]] = {"p50": [], "p99": []}
    moved = 0
    with running(stage):
        _handled(stage.mom, _send([stage.app], RATE, RATE))
        for _ in range(ROUNDS):
            _empty(stage)
            alone = _waits(stage, RATE, stage.mom)
            with stage.app.connect(role="bench", autocommit=True) as connection:
                connection.execute(HOLD, [MINUTES, HELD])
                connection.execute("VACUUM ANALYZE saf.held")
                _empty(stage)
                beside = _waits(stage, RATE, stage.mom)
                ((count,),) = connection.execute(MOVED).fetchall()
            moved += count
            execute(stage.app, "TRUNCATE saf.held")
            for which, share in (("p50", 0.5), ("p99", 0.99)):
                ratios[which].append(percentile(beside, share) / percentile(alone, share))
    stage.note("held_p50_ratio", ratios["p50"], "to none held", "<= 1.1")
    stage.note("held_p99_ratio", ratios["p99"], "to none held", "<= 1.1")
    stage.note("held_moved_meanwhile", float(moved), "messages")
