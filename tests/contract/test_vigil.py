"""The vigil over the tasks of a job: whom it takes for silent, and whom not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from saf.config import load
from saf.database import Dsn
from saf.engine.pulse import BEGIN
from saf.forwarding.broker import SourceBroker
from saf.forwarding.vigil import Vigil
from saf.routing.routes import add_route
from tests.driver import InProcess, forwarder, looping
from tests.kept import _nothing_stays
from tests.pipeline import bodies, connect, send
from tests.programs import configuration
from tests.waits import until

__all__ = ["_nothing_stays"]

LEASE = 1.0
LEASE_IS_OVER = "SELECT lease_until < clock_timestamp() FROM saf.member"


def test_a_task_that_has_ended_is_not_taken_for_a_silent_one_while_others_work(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], tmp_path: Path
) -> None:
    brokers, far = {"app": app, "other": new_broker("other")}, new_broker("far")
    file = configuration(
        tmp_path / "saf.toml",
        brokers,
        {"mom": mom, "far": far},
        lease_seconds=LEASE,
        interval_seconds=0.1,
    )
    one = forwarder(load(file), InProcess(parallel=2))
    with connect(brokers["other"]) as other, connect(app) as source, connect(far) as holder:
        add_route(other, "far")
        send(other, "far")
        send(source, "near")
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE saf.inbox IN ACCESS EXCLUSIVE MODE")
        with looping(one):
            until(lambda: bodies(mom) == ["near"], 20)
            ended = time.monotonic()
            while time.monotonic() < ended + 3 * LEASE:
                time.sleep(LEASE / 10)
                vigil = one.roster.brokers["app"].vigil
                assert vigil is not None
                assert vigil.given_up is None
                for connection in (source, other):
                    assert connection.execute(LEASE_IS_OVER).fetchall() == [(False,)]
            holder.execute("ROLLBACK")
            until(lambda: bodies(far) == ["far"], 20)


def test_what_the_driver_has_slept_through_counts_for_nothing_and_then_a_silence_counts(
    app: Dsn,
) -> None:
    broker = SourceBroker("app", app, lease_seconds=LEASE)
    with connect(app) as connection, connect(app) as task:
        send(connection, "hello")
        broker.tend()
        (item,) = broker.open_work("mom")
        vigil = Vigil([item])
        task.execute(BEGIN, {"life": item.life})
        assert vigil.look("app", connection) < LEASE
        time.sleep(2.5 * LEASE)  # both are stopped
        assert vigil.given_up is None
        assert vigil.look("app", connection) < LEASE
        assert vigil.given_up is None
        awake = time.monotonic()
        while vigil.given_up is None:
            vigil.look("app", connection)
            time.sleep(LEASE / 10)
        assert 0.9 * LEASE < time.monotonic() - awake < 2 * LEASE
        assert "a task for 'app' is unavailable" in str(vigil.given_up)
    broker.leave()
