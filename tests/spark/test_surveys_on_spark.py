"""A deep batch that tasks of Spark share is surveyed once, and not by each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from saf.database import Dsn
from saf.forwarding import broker
from tests import on_spark
from tests.forwarders import configuration
from tests.pipeline import connect
from tests.waits import until

FILL = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT 'billing', n::text, convert_to(repeat('.', 200), 'UTF8') FROM generate_series(1, 20000) AS n
"""
PAGES = "SELECT pg_relation_size('saf.outbox_0') / current_setting('block_size')::int"
READ = """
SELECT heap_blks_hit + heap_blks_read FROM pg_statio_user_tables
WHERE relid = 'saf.outbox_0'::regclass
"""
OTHERS = """
SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
AND backend_type = 'client backend'
"""


def test_four_tasks_read_each_page_five_times(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "LITTLE", 0)
    monkeypatch.setattr(broker, "DEEP", 1)
    with connect(app) as connection:
        connection.execute("ALTER TABLE saf.outbox_0 SET (autovacuum_enabled = off)")
        connection.execute(FILL)
        ((pages,),) = connection.execute(PAGES).fetchall()
        connection.execute("SELECT pg_stat_force_next_flush()")
        ((before,),) = connection.execute(READ).fetchall()
        assert on_spark.forward(configuration(tmp_path, app, mom, tasks=4))["forwarded"] == 20_000
        until(lambda: not connection.execute(OTHERS).fetchall())  # they leave their counts behind
        ((after,),) = connection.execute(READ).fetchall()
    assert pages > 300
    assert 5 <= (after - before) / pages < 6
