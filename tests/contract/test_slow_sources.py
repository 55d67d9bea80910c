"""A source that is slow to answer: it is waited for by nobody else, and its own turn comes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from saf.config import Settings, load
from saf.database import Dsn
from saf.forwarding.roster import PATIENCE_SECONDS
from tests.distant import Distance
from tests.driver import InProcess, forwarder, looping
from tests.kept import _nothing_stays
from tests.pipeline import bodies, connect, send
from tests.waits import blocked, until

__all__ = ["_nothing_stays"]

LEASE = 3.0
MEMBERS = "SELECT count(*) FROM saf.member"
STOPPING = "SELECT stopping FROM saf.member"
LEASE_IS_OVER = "SELECT lease_until < clock_timestamp() FROM saf.member"


@pytest.fixture
def far(app: Dsn) -> Iterator[Dsn]:
    with Distance(app, seconds=PATIENCE_SECONDS / 4) as distance:
        yield distance.far(app)


def settings(file: Path, brokers: Mapping[str, Dsn], mom: Dsn) -> Settings:
    tables = {"brokers": brokers, "destinations": {"mom": mom}}
    file.write_text(
        "".join(
            f"[{table}.{name}]\ndsn = {json.dumps(dsn.conninfo)}\n"
            for table, some in tables.items()
            for name, dsn in some.items()
        )
        + f'[forwarder]\ndefault_destination = "mom"\nlease_seconds = {LEASE}\n'
        + "interval_seconds = 0.1\n[bounds]\nlock_seconds = 60\n"
    )
    return load(file)


def test_a_loop_forwards_from_a_source_whose_every_look_takes_longer_than_it_waits(
    app: Dsn, mom: Dsn, far: Dsn, tmp_path: Path
) -> None:
    with connect(app) as connection:
        send(connection, "slowly")
    with looping(forwarder(settings(tmp_path / "saf.toml", {"app": far}, mom), InProcess())):
        until(lambda: bodies(mom) == ["slowly"], 60)


@pytest.mark.full
def test_a_drain_forwards_what_a_source_has_answered_while_others_were_at_work(
    app: Dsn, mom: Dsn, far: Dsn, new_broker: Callable[[str], Dsn], tmp_path: Path
) -> None:
    near = new_broker("near")
    runner = InProcess()
    runner.before_task = lambda job, _: time.sleep(5) if job == 0 else None
    for dsn, body in ((near, "near"), (app, "far")):
        with connect(dsn) as connection:
            send(connection, body)
    one = forwarder(settings(tmp_path / "saf.toml", {"near": near, "far": far}, mom), runner)
    assert one.drain().forwarded == 2
    assert bodies(mom) == ["near", "far"]
    assert len(runner.jobs) == 2


def test_a_renewal_and_a_wish_to_stop_that_take_long_are_not_the_last(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    one = forwarder(settings(tmp_path / "saf.toml", {"app": app}, mom), InProcess())
    with connect(app) as source, connect(mom) as holder, looping(one) as loop:
        until(lambda: source.execute(MEMBERS).fetchone() == (1,), 20)
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE saf.inbox IN ACCESS EXCLUSIVE MODE")
        send(source, "hello")
        until(lambda: waiting(mom) == 1, 20)  # its task is at work
        with renewals_held_up(source, app):
            time.sleep(1.2 * PATIENCE_SECONDS)
        time.sleep(1.5 * LEASE)
        assert source.execute(LEASE_IS_OVER).fetchall() == [(False,)]
        with renewals_held_up(source, app):
            one.stop()
            time.sleep(1.2 * PATIENCE_SECONDS)
        until(lambda: source.execute(STOPPING).fetchall() == [(True,)], 20)
        holder.execute("ROLLBACK")
        loop.join(20)
    assert bodies(mom) == ["hello"]


@contextmanager
def renewals_held_up(source: psycopg.Connection[Any], app: Dsn) -> Iterator[None]:
    """Begins when one waits."""
    with source.transaction():
        source.execute("SELECT FROM saf.member FOR UPDATE")
        until(lambda: waiting(app) == 1, 20)
        yield


def waiting(dsn: Dsn) -> int:
    """How many sessions wait for a lock there."""
    with connect(dsn) as connection:
        return blocked(connection)
