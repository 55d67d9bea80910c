"""A monolog whose subscribers were set back has no gap that nobody tells them of."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import saf
from saf import Outbox
from saf.database import Dsn, fetch
from saf.dialogs.statements import Code
from saf.log.shards import shard_of
from saf.testing.clock import let_time_pass
from tests.conftest import Prepared
from tests.dialogs import END, ERROR, WAREHOUSE, end, receive, said
from tests.pipeline import connect
from tests.programs import configuration
from tests.programs import saf as run_saf
from tests.set_backs import Two, begin_monolog, publish

NOW = 0.0
"""Everything that is completed may have been purged, by this retention."""
AN_AGE = timedelta(days=2)


@pytest.fixture
def two(app: Dsn, mom: Dsn, migrated: Prepared) -> Iterator[Two]:
    made = Two.at(app, mom, migrated.databases)
    yield made
    for place in (made.shop, made.warehouse):
        for copy in place.copies:
            migrated.databases.drop(copy)


def purge(dsn: Dsn, log: str) -> None:
    """As the purge does it, of the first slot."""
    with connect(dsn) as connection:
        connection.execute(f"TRUNCATE saf.{log}_0")


def may_be_purged(dsn: Dsn) -> None:
    """A purge was here; it found nothing in this slot."""
    with connect(dsn) as connection:
        connection.execute("TRUNCATE saf.inbox_7")


def hear(two: Two) -> list[saf.Received]:
    return receive(two.warehouse.dsn, WAREHOUSE)


def text(error: saf.Received) -> str:
    assert error.json()["code"] == Code.SET_BACK
    return str(error.json()["text"])


def test_where_nothing_is_left_of_a_monolog_its_subscribers_are_told_that_some_may_be_lost(
    two: Two,
) -> None:
    monolog = begin_monolog(two, "1", "2")
    two.carry()
    assert said(hear(two)) == ["1", "2"]
    purge(two.warehouse.dsn, "inbox")
    backup = two.warehouse.backup()
    publish(two, monolog, "3", "4")
    two.carry()
    purge(two.shop.dsn, "outbox")
    two.warehouse.go_back(backup)
    two.repair(two.warehouse, retention_seconds=NOW)
    publish(two, monolog, "5")
    two.carry()
    error, after = hear(two)
    assert (error.sequence, after.text()) == (4, "5")
    assert "of messages 1 to 4, some may be lost" in text(error)


def test_a_monolog_that_was_silent_since_long_before_the_backup_gets_no_error(two: Two) -> None:
    silent = begin_monolog(two, "long ago")
    two.carry()
    hear(two)
    purge(two.warehouse.dsn, "inbox")
    for place in (two.shop, two.warehouse):
        let_time_pass(place.dsn, AN_AGE)
    shard = shard_of(str(silent.conversation_id), 64)
    key = next(str(n) for n in range(10_000) if shard_of(str(n), 64) == shard)
    with two.shop.dsn.connect(role="test") as connection:
        Outbox().send(connection, WAREHOUSE, "before", key=key)
    two.carry()
    backup = two.warehouse.backup()
    with two.shop.dsn.connect(role="test") as connection:
        Outbox().send(connection, WAREHOUSE, "lost", key=key)
    two.carry()
    two.warehouse.go_back(backup)
    two.repair(two.warehouse, retention_seconds=NOW)
    publish(two, silent, "at last")
    two.carry()
    assert said(hear(two)) == ["before", "at last"]


def test_what_the_outbox_still_has_and_is_too_old_to_be_compared_is_told_of_as_lost(
    two: Two,
) -> None:
    monolog = begin_monolog(two, "1", "2")
    two.carry()
    may_be_purged(two.warehouse.dsn)
    backup = two.warehouse.backup()
    publish(two, monolog, "3", "4")
    two.carry()
    two.warehouse.go_back(backup)
    for _ in range(2):
        two.repair(two.warehouse, retention_seconds=NOW)
        publish(two, monolog, "more")
        two.carry()
    heard = hear(two)
    assert said(heard) == ["1", "2", ERROR, "more", "more"]
    assert "of messages 3 to 4, some are lost there" in text(heard[2])


def test_the_end_of_a_monolog_that_its_publisher_has_forgotten_since_is_told_of_as_lost(
    two: Two,
) -> None:
    monolog = begin_monolog(two, "1", "2")
    two.carry()
    backup = two.warehouse.backup()
    publish(two, monolog, "3")
    end(two.shop.dsn, monolog)
    two.carry()
    assert said(hear(two)) == ["1", "2", "3", END]
    purge(two.shop.dsn, "outbox")
    with connect(two.shop.dsn) as connection:
        connection.execute("DELETE FROM saf.conversation")
    two.warehouse.go_back(backup)
    two.repair(two.warehouse, retention_seconds=NOW)
    two.carry()
    *heard, error = hear(two)
    assert said(heard) == ["1", "2"]
    assert error.sequence == 3
    assert "messages from 3 on are lost" in text(error)


def test_what_is_on_its_way_again_is_not_told_of_as_lost(two: Two) -> None:
    monolog = begin_monolog(two, "1")
    two.carry()
    backup = two.warehouse.backup()
    publish(two, monolog, "2")
    two.carry()
    publish(two, monolog, "3")
    two.warehouse.go_back(backup)
    two.repair(two.warehouse)
    two.carry()
    assert said(hear(two)) == ["1", "2", "3"]
    with connect(two.shop.dsn) as connection:
        assert fetch(connection, "SELECT error_text FROM saf.conversation") == [(None,)]


def test_the_repair_of_a_publisher_says_where_a_forgotten_monolog_may_have_been_purged(
    two: Two, tmp_path: Path
) -> None:
    """Nobody remembers the monolog: neither the publisher's broker nor the inbox."""
    begin_monolog(two, "1")
    two.carry()
    hear(two)
    backup = two.shop.backup()
    begin_monolog(two, "of this one, nobody knows")
    two.carry()
    hear(two)
    purge(two.warehouse.dsn, "inbox")
    two.shop.go_back(backup)
    with connect(two.shop.dsn) as connection:
        connection.execute("UPDATE saf.cursor SET opened_at = opened_at - interval '2 days'")
    file = configuration(tmp_path / "saf.toml", {"shop": two.shop.dsn}, {"mom": two.warehouse.dsn})
    file.write_text(file.read_text() + "[purge]\nretention_seconds = 3600\n")
    said_ = run_saf("rebase", "--broker", "shop", cwd=tmp_path)
    assert said_.returncode == 0, said_.stderr
    words = " ".join(said_.stdout.split())
    assert "mom may have purged later messages: if a monolog began after the backup" in words
