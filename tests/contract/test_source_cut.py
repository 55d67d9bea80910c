"""A source that goes away while it is read: it is said, nothing is lost or half-marked."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from saf.database import Dsn
from saf.engine.context import Context
from saf.engine.source import messages
from saf.engine.task import Task
from tests.pipeline import Cycle, bodies, connect, forwarding_rules

MANY = 60_000
CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'saf read'"


@pytest.mark.slow
def test_a_connection_cut_while_a_batch_is_read_is_a_source_that_is_down(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, body) SELECT 'billing', "
            "convert_to(n || repeat('.', 500), 'UTF8') FROM generate_series(1, %s) AS n",
            [MANY],
        )
        rules = forwarding_rules("exactly_once", 1000, mom=mom)
        with Cycle(app, rules) as cycle:
            (work,) = cycle.open()

            def cut_after_the_first() -> Iterator[pa.RecordBatch]:
                batches = messages(work, rules.max_bytes)
                yield next(batches)
                assert connection.execute(CUT).fetchall()
                yield from batches

            delivery = Task(Context(0, work, rules))
            receipts = delivery.run(cut_after_the_first())
            cycle.close(receipts)
            summary = next(receipt for receipt in receipts if receipt.destination is None)
            assert summary.error_kind == "Unavailable"
            assert not summary.complete
            assert 0 < len(bodies(mom)) < MANY
        with Cycle(app, rules) as cycle:
            cycle.run()
    arrived = [int(body.rstrip(".")) for body in bodies(mom)]
    assert arrived == list(range(1, MANY + 1))
