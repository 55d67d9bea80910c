"""A deep backlog is read in windows: the same rows in the same order as if they had been sorted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from saf.database import Dsn
from saf.engine import source
from saf.engine import survey as surveying
from saf.engine.source import messages
from saf.engine.work import Work
from saf.errors import Unavailable
from saf.forwarding import broker
from saf.log.columns import UNCOMMON
from saf.log.cursor import Batch
from saf.log.ring import SLOT_ROWS
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, send
from tests.tiers import sized

INSERT = "INSERT INTO saf.outbox (to_service, key, body) VALUES ('billing', %s, %s)"
FILL = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT 'billing', n::text, convert_to(n || repeat('.', 300), 'UTF8') FROM generate_series(1, %s) n
"""
TO_THE_SLOTS_END = "SELECT setval('saf.outbox_id_seq', %s)"
LARGE = """
INSERT INTO saf.outbox (to_service, body)
SELECT 'billing', convert_to(repeat(md5(n::text), 200), 'UTF8') FROM generate_series(1, %s) AS n
"""
MAX_BYTES = 1 << 26


@pytest.fixture(autouse=True)
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few messages are a deep backlog, and some two pages a window."""
    monkeypatch.setattr(broker, "LITTLE", 0)
    monkeypatch.setattr(broker, "DEEP", 1)
    monkeypatch.setattr(surveying, "WINDOW_BYTES", 32_000)


def scatter(app: Dsn, seed: int) -> None:
    """Send in transactions at the same time, some rolled back, their pages used again."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        senders = [stack.enter_context(app.connect(role="test")) for _ in range(5)]
        for number in range(1500):
            sender = chance.choice(senders)
            body = b"." * chance.choice([10, 200, 1500, 5000])
            sender.execute(INSERT, [f"key {number % 40}", body])
            if chance.random() < 0.05:
                chance.choice([sender.commit, sender.rollback])()
            if number % 400 == 399:
                with connect(app) as connection:
                    connection.execute("VACUUM saf.outbox")
        for sender in senders:
            sender.commit()


def read(work: Work) -> pa.Table:
    return pa.Table.from_batches(list(messages(work, MAX_BYTES)))


@pytest.mark.slow
@pytest.mark.every_postgresql
@pytest.mark.parametrize("seed", range(sized(1, 3)))
def test_a_scattered_log_is_read_as_if_it_had_been_sorted(app: Dsn, mom: Dsn, seed: int) -> None:
    with connect(app) as connection, app.connect(role="test") as late:
        connection.execute(TO_THE_SLOTS_END, [SLOT_ROWS - 2200])
        scatter(app, seed)
        late.execute(INSERT, ["late", b"of a transaction that ends after the first batch"])
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.run()
            late.commit()
            scatter(app, seed + 100)
            (work,) = cycle.open()
            assert work.deep
            scatter(app, seed + 200)  # of the next batch
            whole = read(replace(work, deep=False))
            assert read(work).equals(whole)
            assert whole["id"].to_pylist() == sorted(whole["id"].to_pylist())
            middle = replace(work.batch, position=whole["id"][600].as_py())
            for part in replace(work, batch=middle).split(3):
                rows = read(part)
                assert rows.equals(read(replace(part, deep=False)))
                assert 0 < rows.num_rows < whole.num_rows - 601
            slots = {id_ // SLOT_ROWS for id_ in whole["id"].to_pylist()}
            assert slots == {0, 1}
            assert b"of a transaction that ends after the first batch" in whole["body"].to_pylist()


def test_where_too_much_would_be_held_back_the_rest_is_sorted(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "HELD_BYTES", 40_000)
    with connect(app) as connection:
        connection.execute(FILL, [400])
        # each page from the third on gets some of the last: they wait for all others
        connection.execute("DELETE FROM saf.outbox WHERE id % 2 = 0 AND id > 100")
        connection.execute("VACUUM saf.outbox")
        connection.execute(FILL, [150])
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            (work,) = cycle.open()
            scattered: list[source.NotInWindows] = []

            def noted(*args: Any) -> Iterator[pa.RecordBatch]:
                try:
                    yield from in_order(*args)
                except source.NotInWindows as error:
                    scattered.append(error)
                    raise

            in_order = source.in_order
            monkeypatch.setattr("saf.engine.source.in_order", noted)
            rows = read(work)
            assert scattered
            assert rows.equals(read(replace(work, deep=False)))
            assert rows.num_rows == 400


@pytest.mark.slow
def test_what_most_messages_do_not_have_is_read_where_some_do(app: Dsn, mom: Dsn) -> None:
    values: dict[str, object] = {
        "from_service": "shop",
        "to_broker": uuid4(),
        "conversation_id": uuid4(),
        "from_initiator": False,
        "sequence": 7,
        "deliver_at": "2013-01-01",
        "expires_at": "2999-01-01",
    }
    assert set(values) == set(UNCOMMON)
    with connect(app) as connection:
        for column, value in values.items():
            connection.execute(FILL, [100])
            connection.execute(
                f"INSERT INTO saf.outbox (to_service, body, {column}) VALUES ('x', '', %s)", [value]
            )
            with Cycle(app, forwarding_rules(mom=mom)) as cycle:
                (work,) = cycle.open()
                rows = read(work)
                assert rows.equals(read(replace(work, deep=False)))
                assert rows[column].null_count == 100
                assert rows["id"].to_pylist() == sorted(rows["id"].to_pylist())
                cycle.run()


def test_a_row_that_is_moved_while_the_log_is_read_is_read_once(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(FILL, [2000])
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            (work,) = cycle.open()
            work = replace(work, keep=True)  # the second time, on the connection of the first
            before = read(work)
            batches = messages(work, MAX_BYTES)
            first = next(batches)
            connection.execute("UPDATE saf.outbox SET headers = '{}'")
            connection.execute("VACUUM saf.outbox")
            assert pa.Table.from_batches([first, *batches]).equals(before)


def test_without_a_snapshot_to_rely_on_the_source_sorts(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saf.engine.source.ONE_SNAPSHOT", "SELECT 1")
    with connect(app) as connection:
        connection.execute(FILL, [300])
        with Cycle(app, forwarding_rules(mom=mom)) as cycle, app.connect(role="test") as one:
            (work,) = cycle.open()
            with pytest.raises(surveying.NotSurveyed):
                surveying.survey(one.cursor(), work.batch)
            assert read(work).num_rows == 300


def test_a_task_whose_shards_have_nothing_is_complete(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for number in range(300):
            send(connection, str(number), key="the only one")
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            works = [replace(work, deep=True) for work in cycle.open(parts=3)]
            assert sorted(len(list(messages(work, MAX_BYTES))) > 0 for work in works) == [
                False,
                False,
                True,
            ]
            cycle.work = works
            receipts = cycle.deliver()
            assert [one.complete for one in receipts if one.destination is None] == [True] * 3
            cycle.close(receipts)
    assert bodies(mom) == [str(number) for number in range(300)]


def test_large_bodies_make_windows_of_fewer_pages(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveying, "WINDOW_BYTES", 400_000)
    monkeypatch.setattr(source, "HELD_BYTES", 1_000_000)  # less than all, on a few pages
    with connect(app) as connection:
        connection.execute("ALTER TABLE saf.outbox ALTER body SET STORAGE EXTERNAL")
        for slot in range(8):
            connection.execute(f"ALTER TABLE saf.outbox_{slot} ALTER body SET STORAGE EXTERNAL")
        connection.execute(LARGE, [400])
        with Cycle(app, forwarding_rules(mom=mom)) as cycle, app.connect(role="test") as one:
            (work,) = cycle.open()
            one.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            found = surveying.survey(one.cursor(), work.batch)
            assert {window.end - window.first for window in found} == {1}
            monkeypatch.setattr(Batch, "select", None)  # what is sorted
            assert read(work)["id"].to_pylist() == list(range(1, 401))


@pytest.mark.every_postgresql
def test_a_window_is_read_by_its_pages_alone(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, app.connect(role="test") as open_:
        open_.execute(INSERT, ["k", b"in progress at the end of the first batch"])
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            for _ in range(2):
                connection.execute(FILL, [1000])
                (work,) = cycle.open()
                with app.connect(role="test") as one, app.connect(role="test") as another:
                    for session in (one, another):
                        session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                    (shared,) = surveying.export(one.cursor(), [work.batch])
                    window = shared.windows[3]
                    assert surveying.adopt(another.cursor(), work.batch, shared)[3] == window
                    for session in (one, another):
                        assert session.execute("SHOW enable_indexscan").fetchone() == ("off",)
                        query = f"EXPLAIN {window.rows(work.batch, ['id'])}"
                        plan = session.execute(query).fetchall()
                        scans = [line.split("->")[-1] for (line,) in plan if "Scan" in line]
                        assert len(scans) == 1
                        assert scans[0].strip().startswith("Tid Range Scan on outbox_0")
                cycle.run()


def test_nothing_is_sorted_at_the_source(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for setting in ("work_mem", "temp_file_limit"):
            connection.execute(f"ALTER DATABASE {connection.info.dbname} SET {setting} = '64kB'")
        connection.execute(FILL, [3000])
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            (work,) = cycle.open()
            assert read(work).num_rows == 3000
            with pytest.raises(Unavailable, match="temporary file size"):
                read(replace(work, deep=False))


def test_the_forwarder_reads_what_is_deep_in_windows_and_delivers_it_in_order(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    surveyed: list[int] = []

    def counted(*args: Any) -> list[surveying.Window]:
        found = survey(*args)
        surveyed.append(len(found))
        return found

    survey = surveying.survey
    monkeypatch.setattr("saf.engine.source.survey", counted)
    with connect(app) as connection:
        connection.execute(FILL, [2000])
    with Cycle(app, forwarding_rules(mom=mom, chunk_rows=300)) as cycle:
        receipts = cycle.run()
    assert sum(receipt.messages for receipt in receipts) == 2000
    assert [int(body.rstrip(".")) for body in bodies(mom)] == list(range(1, 2001))
    assert len(surveyed) == 1
    assert surveyed[0] > 10


@pytest.mark.parametrize(("at_least", "is_deep"), [(2000, False), (200, True)])
def test_how_deep_a_backlog_is_is_known_by_what_a_few_shards_hold(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch, *, at_least: int, is_deep: bool
) -> None:
    monkeypatch.setattr(broker, "LITTLE", 100)
    monkeypatch.setattr(broker, "DEEP", at_least)
    with connect(app) as connection:
        connection.execute(FILL, [1000])
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        (work,) = cycle.open()
        assert work.much
        assert work.deep is is_deep
