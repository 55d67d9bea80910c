"""The vigil over the tasks of a job: whom it takes for silent, and whom not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from saf.config import load
from saf.database import Dsn
from saf.engine.pulse import BEGIN
from saf.engine.work import Work
from saf.forwarding.broker import SourceBroker
from saf.forwarding.runner import Vigil
from saf.routing.routes import add_route
from tests.driver import InProcess, forwarder
from tests.kept import _nothing_stays
from tests.pipeline import bodies, connect, send
from tests.programs import configuration
from tests.waits import until

__all__ = ["_nothing_stays"]

LEASE = 1.0
PATIENT = 3.0
"""Another lease, for tasks that are really at work."""


def test_a_task_that_has_ended_is_not_taken_for_a_silent_one_while_others_work(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], tmp_path: Path
) -> None:
    brokers, far = {"app": app, "other": new_broker("other")}, new_broker("far")
    file = configuration(
        tmp_path / "saf.toml",
        brokers,
        {"mom": mom, "far": far},
        lease_seconds=PATIENT,
        interval_seconds=0.1,
    )
    one = forwarder(load(file), InProcess(parallel=2))
    one.roster.once = False
    found: dict[str, Work] = {}
    with connect(brokers["other"]) as other, connect(app) as source, connect(far) as holder:
        add_route(other, "far")
        send(other, "far")
        send(source, "near")
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE saf.inbox IN ACCESS EXCLUSIVE MODE")
        while len(found) < 2:  # one job for both
            found |= {item.broker: item for item in one.roster.visit("mom")}
        work = [found["app"], found["other"]]
        cycle = threading.Thread(target=one._work, args=[work, 2], kwargs={"cap": None})
        cycle.start()
        until(lambda: bodies(mom) == ["near"], 20)
        vigil = one.roster.brokers["app"].vigil
        assert vigil is not None
        until_then = time.monotonic() + 2 * PATIENT
        while time.monotonic() < until_then:
            time.sleep(0.1)
            assert vigil.given_up is None
        assert cycle.is_alive()
        holder.execute("ROLLBACK")
        cycle.join(20)
    assert bodies(far) == ["far"]
    assert vigil.brokers == ["app", "other"]
    one._leave()


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
        assert vigil.silence("app", connection) < LEASE
        time.sleep(2.5 * LEASE)  # both are stopped
        assert vigil.given_up is None
        assert vigil.silence("app", connection) < LEASE
        assert vigil.given_up is None
        awake = time.monotonic()
        while vigil.given_up is None:
            vigil.silence("app", connection)
            time.sleep(LEASE / 10)
        assert 0.9 * LEASE < time.monotonic() - awake < 10 * LEASE
        assert "a task for 'app' is unavailable" in str(vigil.given_up)
    broker.leave()
