"""Rates of destinations: how much the forwarders of a source store there in a time."""

from __future__ import annotations

import time
from pathlib import Path

import psycopg
import pytest

from saf.config import load
from saf.database import Dsn, fetch
from saf.destinations.postgresql import Postgresql
from saf.errors import ConfigurationError
from saf.log import rates
from saf.setaside import backoff
from saf.testing.cycle import Cycle
from tests.destinations import route, send_to
from tests.driver import InProcess, forwarder
from tests.pipeline import bodies, connect, forward, forwarding_rules, send
from tests.programs import configuration


def slow(dsn: Dsn, rate: str) -> Postgresql:
    return Postgresql(dsn=dsn, rate=rate)


def test_the_only_destination_gets_its_messages_at_its_rate_and_in_order(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        for number in range(60):
            send(connection, str(number))
        began = time.monotonic()
        (receipt, *_) = forward(app, mom=slow(mom, "50/s"))
        took = time.monotonic() - began
        assert receipt.error is None
        assert bodies(mom) == [str(number) for number in range(60)]
        assert took > (60 - 50 * rates.SAVED_SECONDS - 3) / 50
        assert fetch(connection, "SELECT destination FROM saf.allotment") == [("mom",)]
        assert fetch(connection, "SELECT count(*) FROM saf.parked") == [(0,)]


def test_a_slow_destination_delays_no_other_and_gets_all_in_order(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        for number in range(60):
            send_to(connection, "shipping", str(number))
            send_to(connection, "billing", str(number))
        began = time.monotonic()
        forward(app, mom=mom, other=slow(other, "20/s"))
        assert bodies(mom) == [str(number) for number in range(60)]
        assert 0 < len(bodies(other)) < 60
        rules = forwarding_rules("exactly_once", 1000, mom=mom, other=slow(other, "20/s"))
        while len(bodies(other)) < 60:
            with Cycle(app, rules) as cycle:
                cycle.run()
        assert bodies(other) == [str(number) for number in range(60)]
        assert time.monotonic() - began > (60 - 20 * rates.SAVED_SECONDS - 3) / 20
        assert fetch(
            connection, "SELECT count(*), coalesce(sum(attempts), 0) FROM saf.backoff"
        ) in (
            [(0, 0)],
            [(1, 0)],
        )


def test_little_work_keeps_the_rate_too(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    text = file.read_text().replace("[destinations.mom]", "[destinations.mom]\nrate = '20/s'")
    file.write_text(text)
    with connect(app) as connection:
        for number in range(30):
            send(connection, str(number))
    began = time.monotonic()
    forwarder(load(file), InProcess()).drain()
    assert len(bodies(mom)) == 30
    assert time.monotonic() - began > (30 - 20 * rates.SAVED_SECONDS - 3) / 20


def test_a_pause_ends_the_wait_for_permits(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saf.engine.context.ASK_SECONDS", 0.05)
    take, taken = rates.take, [0]

    def pausing(connection: psycopg.Connection[object], *arguments: object) -> rates.Share:
        taken[0] += 1
        if taken[0] == 3:
            with connect(app) as other:
                backoff.pause(other, "mom")
        return take(connection, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rates, "take", pausing)
    with connect(app) as connection:
        for number in range(60):
            send(connection, str(number))
        forward(app, mom=slow(mom, "100/s"))
        assert 0 < len(bodies(mom)) < 60
        assert backoff.resume(connection, "mom")
        for _ in range(3):
            forward(app, mom=slow(mom, "1000/s"))
    assert bodies(mom) == [str(number) for number in range(60)]


def test_a_rate_that_is_none_is_refused(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    file.write_text(
        file.read_text().replace("[destinations.mom]", "[destinations.mom]\nrate = '1'")
    )
    with pytest.raises(ConfigurationError, match="'1' is not a rate such as '100/s'"):
        load(file)
