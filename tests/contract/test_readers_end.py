"""A task's connections end with it, however it ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from saf.database import Dsn, fetch
from tests.destinations import NOWHERE
from tests.pipeline import Cycle, connect, forwarding_rules, send
from tests.waits import until

READING = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'saf read' AND state <> 'idle'
"""


@pytest.fixture
def _nothing_is_collected() -> Iterator[None]:
    """As if it took long until the interpreter looks for cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_nothing_is_collected")
def test_a_task_that_ends_in_the_middle_of_its_batch_holds_no_snapshot_at_the_source(
    app: Dsn,
) -> None:
    with connect(app) as connection:
        for number in range(5):
            send(connection, str(number), key="k")
    with Cycle(app, forwarding_rules("exactly_once", 1, mom=NOWHERE)) as cycle:
        (receipt,) = [one for one in cycle.run() if one.error_kind]
        assert receipt.error_kind == "Unavailable"
        with connect(app) as connection:
            until(lambda: fetch(connection, READING) == [], seconds=5)
