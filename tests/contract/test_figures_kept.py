"""Figures of a broker in which nothing is committed are worked out, not asked for; others never."""

from __future__ import annotations

import os
from typing import Any

import psycopg

from saf.config import Broker, Settings
from saf.database import Dsn
from saf.destinations.postgresql import Postgresql
from saf.operating.figures import Ask, asker
from saf.telemetry.metrics import PENDING
from tests.destinations import NOWHERE
from tests.pipeline import connect, new_member, send
from tests.waits import until

SETTINGS = Settings(
    brokers={"shop": Broker(dsn=NOWHERE)}, destinations={"mom": Postgresql(dsn=NOWHERE)}
)


def asked(ask: Ask, connection: psycopg.Connection[Any]) -> dict[str, float]:
    """The figures of the forwarder, by the metric's name."""
    return {
        one.metric.name: float(one.value)  # type: ignore[arg-type]
        for one in ask(connection, "shop")
        if "inbox" not in one.labels
    }


def questions(ask: Ask, connection: psycopg.Connection[Any]) -> int:
    """How many statements are sent to the server for the figures."""
    reading, writing = os.pipe()
    connection.pgconn.trace(writing)
    ask(connection, "shop")
    connection.pgconn.untrace()
    os.close(writing)
    with os.fdopen(reading) as trace:
        return sum("\tQuery\t" in line or "\tParse\t" in line for line in trace)


def test_a_broker_in_which_nothing_is_committed_is_asked_one_question(app: Dsn) -> None:
    ask = asker(SETTINGS)
    with connect(app) as connection:
        assert questions(ask, connection) > 1
        # others may commit in this server
        until(lambda: questions(ask, connection) == 1)


def test_what_is_committed_shows_at_once_also_of_a_transaction_that_was_open(app: Dsn) -> None:
    ask = asker(SETTINGS)
    with connect(app) as connection, connect(app) as sender, connect(app) as other:
        with sender.transaction():
            send(sender, "1")
            assert asked(ask, connection)["saf_pending_messages"] == 0
            assert asked(ask, connection)["saf_pending_messages"] == 0
        assert asked(ask, connection)["saf_pending_messages"] == 1
        with sender.transaction():
            send(sender, "2")
            with other.transaction():  # commits before one that began before it
                send(other, "3")
            assert asked(ask, connection)["saf_pending_messages"] == 2
        assert asked(ask, connection)["saf_pending_messages"] == 3


def test_ages_and_leases_go_on_although_nothing_is_committed(app: Dsn) -> None:
    ask = asker(SETTINGS)
    with connect(app) as connection:
        send(connection, "1")
        member = new_member(connection)
        for seconds in (1, 10, 100):  # long enough to be asked for, however slow the machine is
            connection.execute(
                "UPDATE saf.member SET lease_until = clock_timestamp() + make_interval(secs => %s)"
                " WHERE member_id = %s",
                [seconds, member.member_id],
            )
            first = asked(ask, connection)
            if first["saf_members"] == 1:
                break
        until(lambda: asked(ask, connection)["saf_members"] == 0, seconds=200)
        later = asked(ask, connection)
        for metric in ("saf_subscription_lag_seconds", "saf_oldest_pending_seconds"):
            assert later[metric] > first[metric]


def test_a_route_that_expires_leads_elsewhere_although_nothing_is_committed(app: Dsn) -> None:
    ask = asker(SETTINGS)
    with connect(app) as connection:
        send(connection, "1")
        connection.execute(
            "INSERT INTO saf.route (destination, expires_at) "
            "VALUES ('erp', clock_timestamp() + interval '2 seconds')"
        )

        def leads_to(destination: str) -> bool:
            figures = ask(connection, "shop")
            return any(one.metric is PENDING and destination in one.labels for one in figures)

        assert leads_to("erp")
        until(lambda: leads_to("(none)"), seconds=30)
