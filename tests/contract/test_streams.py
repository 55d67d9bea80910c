"""A stream reads each message once, and the same ones again until it has committed them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import saf
from saf.broker.embedded import EmbeddedServer
from saf.database import Dsn, fetch
from saf.errors import (
    ConfigurationError,
    NotThisStream,
    PurgedMeanwhile,
    Restored,
    StreamSetBack,
    StreamTakenOver,
    Unavailable,
)
from saf.log import ring
from saf.log import stream as stream_log
from saf.log.offset import Offset, between
from saf.log.stream import drop, find, open_batch, state, take_over
from tests.pipeline import connect, send
from tests.programs import configuration, last_json
from tests.programs import saf as command
from tests.restored import burn_transaction_ids, elsewhere, repair, restore
from tests.ring import leave_slot
from tests.streams import Crash, query, read
from tests.waits import until

__all__ = ["elsewhere"]

WAITS = """
SELECT FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'saf newer' AND wait_event_type = 'Lock'
"""


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    return configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})


def fill(dsn: Dsn, number: int, what: str = "m", keys: int = 7) -> None:
    with connect(dsn) as connection:
        for one in range(number):
            send(connection, f"{what} {one}", key=f"key {one % keys}")


def expected(number: int, what: str = "m") -> list[str]:
    return sorted(f"{what} {one}" for one in range(number))


def purge(dsn: Dsn, log: str = "outbox") -> set[str]:
    with connect(dsn) as connection:
        return {slot.state for slot in ring.purge(connection, log, retention_seconds=0)}


def without_forwarder(dsn: Dsn) -> None:
    """Only the stream keeps messages from being purged."""
    with connect(dsn) as connection:
        connection.execute("DELETE FROM saf.subscription WHERE name = 'forwarder'")


@pytest.mark.every_postgresql
def test_late_committers_are_read_once_and_what_was_rolled_back_is_not(
    app: Dsn, config: Path
) -> None:
    stream = query(config)
    with app.connect(role="test") as late, app.connect(role="test") as lost:
        send(late, "late", key="k")
        send(lost, "lost", key="l")
        fill(app, 20)
        stream.drain()
        assert sorted(stream.bodies) == expected(20)
        fill(app, 5, "more")
        stream.drain()
        late.commit()
        lost.rollback()
    stream.drain()
    assert sorted(stream.bodies) == sorted([*expected(20), *expected(5, "more"), "late"])
    assert not stream.step()


def test_a_past_offset_gives_the_same_rows_whatever_was_sent_since(app: Dsn, config: Path) -> None:
    stream = query(config, maxRowsPerTrigger=8)
    with app.connect(role="test") as late:
        send(late, "late", key="k")
        fill(app, 20)
        with pytest.raises(Crash):
            stream.step(crash="read")
        fill(app, 20, "meanwhile")
        late.commit()
    first = stream.rows(0)
    assert len(first) == 8
    stream.step()
    assert stream.sink[0] == first
    stream.step()
    assert stream.rows(1) == stream.sink[1]
    stream.drain()
    assert sorted(stream.bodies) == sorted([*expected(20), *expected(20, "meanwhile"), "late"])


@pytest.mark.parametrize("crash", ["asked", "written", "committed", "read"])
def test_a_driver_that_dies_anywhere_goes_on_from_its_checkpoint(
    app: Dsn, config: Path, crash: str
) -> None:
    stream = query(config, maxRowsPerTrigger=7)
    for number in range(3):
        fill(app, 10, f"{number}")
        with pytest.raises(Crash):
            stream.step(crash=crash)
        stream.step()
    stream.drain()
    assert sorted(stream.bodies) == sorted(f"{n} {one}" for n in range(3) for one in range(10))


def test_a_checkpoint_that_lacks_its_last_micro_batch_gets_that_again_as_it_was(
    app: Dsn, config: Path
) -> None:
    stream = query(config)
    for number in range(2):
        fill(app, 5, f"{number}")
        stream.step()
    written = stream.sink[1]
    # as after a power loss, or a copy of the checkpoint from between its two files
    del stream.offsets[1:]
    stream.complete = 1
    stream.die()
    fill(app, 5, "2")
    stream.drain()
    assert stream.sink[1] == written
    assert sorted(stream.bodies) == sorted(f"{n} {one}" for n in range(3) for one in range(5))


def test_a_new_checkpoint_begins_where_the_subscription_is_also_if_it_is_asked_again(
    app: Dsn, config: Path
) -> None:
    old = query(config, maxRowsPerTrigger=4)
    fill(app, 10)
    for _ in range(2):  # so that the first of them is committed
        old.step()
    fill(app, 3, "more")
    new = query(config)
    with pytest.raises(Crash):
        new.step(crash="read")
    new.drain()
    committed = {row[3].decode() for row in old.sink[0]}
    assert len(committed) == 4
    assert sorted(new.bodies) == sorted({*expected(10), *expected(3, "more")} - committed)


def test_a_subscription_that_lacks_a_cursor_is_refused(app: Dsn, config: Path) -> None:
    stream = query(config)
    fill(app, 5)
    stream.step()
    stream.die()
    with connect(app) as connection:
        connection.execute(
            "DELETE FROM saf.cursor c USING saf.subscription s "
            "WHERE c.subscription_id = s.subscription_id AND s.stream AND c.shard = 7"
        )
    fill(app, 5, "more")
    with pytest.raises(NotThisStream, match="has 63 cursors for 64 shards"):
        stream.step()


def test_the_rows_between_any_two_offsets_are_those_of_the_micro_batches_between(
    app: Dsn, config: Path
) -> None:
    stream = query(config, maxRowsPerTrigger=7)
    ends = [Offset.from_dict(stream.start()["app"])]
    for number in range(2):
        # a later batch is cut at an id below those of the earlier one
        with app.connect(role="test") as late:
            for one in range(10):
                send(late, f"late {number} {one}", key="late")
            fill(app, 10, f"{number}")
            stream.drain()
            late.commit()
    stream.drain()
    ends += [Offset.from_dict(json.loads(end)["app"]) for end in stream.offsets]
    assert any(end.open for end in ends)
    with connect(app) as connection:
        for first, last in itertools.combinations(range(len(ends)), 2):
            rows = between("outbox", ends[first], ends[last], range(64)).rows(["id"])
            assert sorted(fetch(connection, rows)) == sorted(
                (row[0],) for number in range(first, last) for row in stream.sink[number]
            )


def test_a_key_is_in_its_order_across_micro_batches(app: Dsn, config: Path) -> None:
    stream = query(config, maxRowsPerTrigger=3, partitions=2)
    fill(app, 40, keys=3)
    stream.drain()
    for key in range(3):
        mine = [int(body.split()[1]) for body in stream.bodies if int(body.split()[1]) % 3 == key]
        assert mine == sorted(mine)
    assert max(stream.sizes) == 3


def test_as_many_rows_as_are_asked_for_and_no_more(app: Dsn, config: Path) -> None:
    stream = query(config, maxRowsPerTrigger=7)
    fill(app, 30)
    stream.drain()
    assert stream.sizes == [7, 7, 7, 7, 2, 0]


def test_rows_are_cut_across_the_parts_that_are_counted(
    app: Dsn, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saf.log.offset.PART_BITS", 2)
    fill(app, 30)
    for size in (4, 7):
        stream = query(config, f"lake {size}", maxRowsPerTrigger=size)
        stream.drain()
        assert sorted(stream.bodies) == expected(30)
        assert stream.sizes == [size] * (30 // size) + [30 % size, 0]


def test_as_many_bytes_as_are_asked_for_but_at_least_one_message(app: Dsn, config: Path) -> None:
    with connect(app) as connection:
        for size in (10, 10, 100, 10, 30, 30):
            send(connection, "x" * size, key="k")
    stream = query(config, maxBytesPerTrigger=40, maxRowsPerTrigger=2)
    stream.drain()
    assert stream.sizes == [2, 1, 2, 1, 0]


def test_what_is_sent_after_the_start_of_a_run_for_what_is_there_is_left_for_the_next(
    app: Dsn, config: Path
) -> None:
    stream = query(config, maxRowsPerTrigger=4)
    fill(app, 10)
    stream.reader().prepareForTriggerAvailableNow()
    fill(app, 10, "later")
    stream.drain()
    assert sorted(stream.bodies) == expected(10)
    stream.die()
    stream.reader().prepareForTriggerAvailableNow()
    stream.drain()
    assert sorted(stream.bodies) == sorted([*expected(10), *expected(10, "later")])


def test_without_a_limit_spark_gets_all_that_is_there(app: Dsn, config: Path) -> None:
    stream = query(config, maxRowsPerTrigger=4)
    fill(app, 10)
    stream.step()
    fill(app, 10, "later")
    stream.step(limited=False)
    assert stream.sizes == [4, 16]


def test_a_purge_keeps_what_is_not_committed_and_takes_it_afterwards(
    app: Dsn, config: Path
) -> None:
    without_forwarder(app)
    stream = query(config)
    fill(app, 10)
    stream.step()
    with connect(app) as connection:
        leave_slot(connection)
    assert "needed" in purge(app)
    assert stream.rows(0) == stream.sink[0]
    stream.drain()  # a pause commits
    assert "purged" in purge(app)
    fill(app, 5, "after")
    stream.drain()
    assert sorted(stream.bodies) == sorted([*expected(10), *expected(5, "after")])


def test_a_stream_that_begins_now_leaves_out_what_was_sent_before(app: Dsn, config: Path) -> None:
    stream = query(config, start="now")
    fill(app, 5, "before")
    stream.start()
    fill(app, 5, "after")
    stream.drain()
    assert sorted(stream.bodies) == expected(5, "after")


def test_of_two_queries_of_one_subscription_the_older_ends_and_says_why(
    app: Dsn, config: Path
) -> None:
    older, newer = query(config), query(config)
    fill(app, 5)
    older.step()
    newer.step()
    fill(app, 5, "more")
    with pytest.raises(
        StreamTakenOver, match="another query has begun to read with the subscription 'lake'"
    ):
        older.step()
    newer.drain()
    assert sorted(newer.bodies) == sorted([*expected(5), *expected(5, "more")])


def test_a_query_takes_over_while_the_older_one_opens_a_batch(app: Dsn, config: Path) -> None:
    query(config).step()
    fill(app, 5)
    with connect(app) as connection, app.connect(role="older") as older:
        found = find(connection, "app", "outbox", "lake")
        assert found is not None
        known = state(connection, "app", "lake", found)
        open_batch(older, known, known.epoch, known.now)
        with ThreadPoolExecutor(1) as threads, app.connect(role="newer", autocommit=True) as newer:
            taken = threads.submit(take_over, newer, known)
            until(lambda: fetch(connection, WAITS))
            older.commit()
            assert taken.result() == known.epoch + 1
        now = state(connection, "app", "lake", found)
        assert (now.epoch, now.batch) == (known.epoch + 1, known.batch + 1)
        drop(connection, "outbox", "lake")
        with pytest.raises(NotThisStream):
            take_over(connection, known)


def test_a_checkpoint_that_is_older_than_what_was_committed_is_refused(
    app: Dsn, config: Path
) -> None:
    stream = query(config)
    for number in range(3):
        fill(app, 5, f"{number}")
        stream.step()
    del stream.offsets[1:]
    stream.complete = 1
    stream.die()
    with pytest.raises(NotThisStream, match="has committed more than the checkpoint holds"):
        stream.step()


def test_a_stream_that_was_dropped_is_not_begun_again_from_its_checkpoint(
    app: Dsn, config: Path
) -> None:
    stream = query(config)
    fill(app, 5)
    stream.step()
    with connect(app) as connection:
        connection.execute("DELETE FROM saf.subscription WHERE name = 'lake'")
    with pytest.raises(NotThisStream, match="was dropped"):
        stream.step()
    query(config).drain()  # one of the same name
    stream.die()
    with pytest.raises(NotThisStream, match="is not the checkpoint's subscription"):
        stream.step()


def test_a_purge_of_what_was_committed_before_fails_no_task(app: Dsn, config: Path) -> None:
    without_forwarder(app)
    stream = query(config)
    fill(app, 5)
    stream.step()
    with connect(app) as connection:
        leave_slot(connection)
    fill(app, 5, "more")
    with pytest.raises(Crash):
        stream.step(crash="committed")
    start, end = (json.loads(one) for one in stream.offsets)
    planned = stream.reader().partitions(start, end)
    assert "purged" in purge(app)
    rows = [row for part in planned for row in read(stream.reader(), part)]
    assert sorted(row[3].decode() for row in rows) == expected(5, "more")


def test_rows_that_a_purge_takes_after_a_drop_are_missed_by_the_task(
    app: Dsn, config: Path
) -> None:
    stream = query(config)
    fill(app, 5)
    with pytest.raises(Crash):
        stream.step(crash="written")
    planned = stream.reader().partitions(stream.start(), json.loads(stream.offsets[0]))
    with connect(app) as connection:
        connection.execute("DELETE FROM saf.subscription WHERE name = 'lake'")
        connection.execute("UPDATE saf.cursor SET done = pg_current_snapshot()")
    with connect(app) as connection:
        leave_slot(connection)
    assert "purged" in purge(app)
    for part in planned:
        with pytest.raises(PurgedMeanwhile):
            list(stream.reader().read(part))


def test_the_forwarders_subscription_is_not_a_streams(config: Path) -> None:
    with pytest.raises(NotThisStream, match="'forwarder' of the outbox is not a stream's"):
        query(config, "forwarder").step()


# Set back


def point_to(config: Path, app: Dsn, mom: Dsn) -> None:
    configuration(config, {"app": app}, {"mom": mom})


def test_a_database_that_was_set_back_is_refused_and_a_new_checkpoint_goes_on(
    app: Dsn, mom: Dsn, config: Path, backup: Callable[[Dsn], Dsn]
) -> None:
    stream = query(config)
    fill(app, 5)
    stream.drain()
    older = backup(app)
    fill(app, 5, "lost")
    stream.step()
    point_to(config, older, mom)
    fill(older, 5, "new")
    for _ in range(2):
        with pytest.raises(
            StreamSetBack, match=r"knows 1 batches, and the checkpoint 2.*saf rebase"
        ):
            stream.step()
        stream.die()
    again = query(config)
    again.drain()
    assert sorted(again.bodies) == expected(5, "new")
    # the numbers of batches have grown together again
    fill(older, 5, "newer")
    again.drain()
    with pytest.raises((StreamSetBack, NotThisStream)):
        stream.step()


def test_a_backup_that_knows_all_of_the_checkpoint_is_no_set_back(
    app: Dsn, mom: Dsn, config: Path, backup: Callable[[Dsn], Dsn]
) -> None:
    stream = query(config)
    fill(app, 5)
    stream.step()
    point_to(config, backup(app), mom)
    stream.drain()
    assert sorted(stream.bodies) == expected(5)


def test_a_database_in_another_cluster_is_refused_until_it_is_rebased_and_then_by_its_checkpoint(
    app: Dsn, mom: Dsn, config: Path, elsewhere: EmbeddedServer
) -> None:
    stream = query(config, maxRowsPerTrigger=3)
    fill(app, 5)
    burn_transaction_ids(app)
    stream.step()
    stream.step()
    copy = restore(app, elsewhere)
    point_to(config, copy, mom)
    with pytest.raises(Restored, match="saf rebase"):
        stream.step()
    assert repair(copy, mom)
    fill(copy, 5, "new")
    with pytest.raises(StreamSetBack, match="was repaired after it was set back"):
        stream.step()
    again = query(config)
    again.drain()
    # of what was read before, what was not committed comes again
    assert set(expected(5, "new")) <= set(again.bodies)
    assert sorted({*stream.bodies, *again.bodies}) == sorted([*expected(5), *expected(5, "new")])


# Many brokers


def test_several_brokers_are_one_stream_and_share_a_limit(
    app: Dsn, other: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app, "other": other}, {"mom": mom})
    stream = query(config, broker="app, other", maxRowsPerTrigger=4)
    fill(app, 10)
    fill(other, 3, "other")
    stream.drain()
    assert sorted(stream.bodies) == sorted([*expected(10), *expected(3, "other")])
    assert max(stream.sizes) == 4
    (names,) = {tuple(json.loads(end)) for end in stream.offsets}
    assert names == ("app", "other")


def test_a_broker_that_is_down_is_passed_by_and_its_messages_come_later(
    app: Dsn, other: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app, "other": other}, {"mom": mom})
    stream = query(config, broker="app,other")
    fill(app, 3)
    fill(other, 3, "other")
    stream.drain()
    allow = f'ALTER DATABASE "{other.database}" ALLOW_CONNECTIONS {{}}'
    fill(app, 3, "more")
    fill(other, 3, "later")
    with connect(mom) as connection:
        connection.execute(allow.format("false").encode())
        try:
            stream.drain()
            alone = query(config, "alone", broker="other")
            with pytest.raises(Unavailable, match=other.database):
                alone.step()
        finally:
            connection.execute(allow.format("true").encode())
    assert "later 0" not in stream.bodies
    assert "more 0" in stream.bodies
    stream.drain()
    assert sorted(stream.bodies) == sorted(
        [*expected(3), *expected(3, "other"), *expected(3, "more"), *expected(3, "later")]
    )


def test_a_broker_that_is_new_in_the_stream_begins_where_its_subscription_does(
    app: Dsn, other: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app, "other": other}, {"mom": mom})
    stream = query(config)
    fill(app, 3)
    fill(other, 3, "other")
    stream.drain()
    stream.options["broker"] = "app,other"
    stream.die()
    with pytest.raises(Crash):
        stream.step(crash="read")
    fill(other, 3, "more")
    stream.drain()
    assert sorted(stream.bodies) == sorted(
        [*expected(3), *expected(3, "other"), *expected(3, "more")]
    )
    stream.options["broker"] = "other"
    stream.die()
    with pytest.raises(NotThisStream, match="the checkpoint has broker 'app'"):
        stream.step()


def test_a_fleet_is_one_stream_whoever_joins_and_leaves(
    app: Dsn, other: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    with connect(mom) as connection:
        connection.execute("CREATE TABLE tenant (name text, dsn text)")
        connection.execute("INSERT INTO tenant VALUES ('app', %s)", [app.conninfo])
    config = tmp_path / "saf.toml"
    config.write_text(
        f"[fleets.tenants]\ndsn = {json.dumps(mom.conninfo)}\n"
        'query = "SELECT name, dsn FROM tenant ORDER BY name"\n'
        f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
        '[forwarder]\ndefault_destination = "mom"\n'
    )
    stream = query(config, broker="tenants")
    fill(app, 3)
    fill(other, 3, "other")
    stream.drain()
    assert sorted(stream.bodies) == expected(3)
    with connect(mom) as connection:
        connection.execute("INSERT INTO tenant VALUES ('other', %s)", [other.conninfo])
    stream.drain()
    assert sorted(stream.bodies) == sorted([*expected(3), *expected(3, "other")])
    with connect(mom) as connection:
        connection.execute("DELETE FROM tenant WHERE name = 'app'")
    fill(app, 3, "gone")
    fill(other, 3, "more")
    stream.drain()
    assert stream.sizes[-2:] == [3, 0]
    with connect(mom) as connection:
        connection.execute("INSERT INTO tenant VALUES ('app', %s)", [app.conninfo])
    stream.drain()
    assert sorted(stream.bodies) == sorted(
        [*expected(3), *expected(3, "other"), *expected(3, "more"), *expected(3, "gone")]
    )


def test_rows_say_which_broker_they_are_of_where_there_are_several(
    app: Dsn, other: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app, "other": other}, {"mom": mom})
    fill(app, 2)
    fill(other, 3, "other")
    stream = query(config, broker="app,other")
    reader = stream.reader()
    assert stream.step()
    planned = reader.partitions(reader.initialOffset(), json.loads(stream.offsets[0]))
    names = [name for part in planned for rows in reader.read(part) for name in names_of(rows)]
    assert sorted(names) == ["app"] * 2 + ["other"] * 3


def names_of(rows: pa.RecordBatch) -> list[str]:
    return [str(name) for name in rows["broker"].to_pylist()]


# What people see of it


def test_no_receiver_takes_a_streams_subscription_for_its_own(mom: Dsn, config: Path) -> None:
    with connect(mom) as connection:
        connection.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('a', 'one')")
    stream = query(config, broker="mom", log="inbox")
    stream.drain()
    assert stream.bodies == ["one"]
    engine = mom.engine()
    with (
        pytest.raises(ConfigurationError, match="subscription 'lake' belongs to a stream"),
        saf.receive(engine, "lake"),
    ):
        raise AssertionError
    engine.dispose()


def test_a_stream_is_registered_shown_and_dropped_on_the_command_line(
    app: Dsn, config: Path, tmp_path: Path
) -> None:
    fill(app, 5)
    asked = ("subscription", "create", "lake", "--stream", "outbox", "--broker", "app")
    assert command(*asked, cwd=tmp_path).stdout == "app: stream lake registered\n"
    assert command(*asked, cwd=tmp_path).stdout == "app: stream lake already exists\n"
    stream = query(config, maxRowsPerTrigger=2)
    stream.step()
    stream.step()
    shown = last_json(command("status", "--json", cwd=tmp_path).stdout)["brokers"][0]["streams"]
    assert [(one["stream"], one["log"], one["pending"]) for one in shown] == [("lake", "outbox", 3)]
    stream.drain()
    shown = last_json(command("status", "--json", cwd=tmp_path).stdout)["brokers"][0]["streams"]
    assert [(one["pending"], one["lag_seconds"]) for one in shown] == [(0, None)]
    unsure = command("subscription", "drop", "lake", cwd=tmp_path)
    assert (unsure.returncode, "Add --yes to confirm" in unsure.stderr) == (2, True)
    dropped = command("subscription", "drop", "lake", "--yes", cwd=tmp_path)
    assert dropped.stdout == "app: stream lake of the outbox dropped\n"
    missing = command("subscription", "drop", "lake", cwd=tmp_path)
    assert (missing.returncode, "no stream 'lake'" in missing.stderr) == (2, True)
    nobody = command("subscription", "drop", "forwarder", cwd=tmp_path)
    assert nobody.returncode == 2, "the forwarder's is not a stream's"


def test_of_several_streams_of_a_name_none_is_dropped_until_one_is_named(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    for dsn, log in ((app, "outbox"), (mom, "outbox"), (mom, "inbox")):
        with connect(dsn) as connection:
            stream_log.create(connection, "it", log, "lake", "beginning")

    def drop(*more: str) -> tuple[int, str]:
        done = command("subscription", "drop", "lake", "--yes", *more, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    def left() -> list[list[str]]:
        found = []
        for dsn in (app, mom):
            with connect(dsn) as connection:
                found.append(stream_log.logs(connection, "lake"))
        return found

    code, said = drop()
    assert (code, "at mom, app, so none is dropped" in said, "--broker NAME" in said) == (
        2,
        True,
        True,
    )
    code, said = drop("--broker", "mom")
    assert (code, "of both logs exists at mom, so none is dropped" in said) == (2, True)
    code, said = drop("--stream", "outbox")
    assert (code, "at mom, app, so none is dropped" in said) == (2, True)
    assert left() == [["outbox"], ["outbox", "inbox"]]
    assert drop("--stream", "inbox") == (0, "mom: stream lake of the inbox dropped\n")
    assert drop("--broker", "mom") == (0, "mom: stream lake of the outbox dropped\n")
    assert left() == [["outbox"], []]

    file.write_text(file.read_text().replace(f"dbname={mom.database}", "dbname=nowhere"))
    code, said = drop()
    assert "not every broker answers, so nothing is dropped: add --broker NAME" in said
    assert (code, left()) == (2, [["outbox"], []])
    assert drop("--broker", "app") == (0, "app: stream lake of the outbox dropped\n")
