"""Consumers of what the MOM stores have: processors that stay with shards, workers that read ahead.

Each notes what takes effect in the table ``effect`` beside the inbox, in the transaction in which
it is received. Now and then a handler fails, and its message comes again.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg

import saf
from saf.broker import services
from saf.database import Dsn
from tests.crash.forwarders import LEASE_SECONDS
from tests.crash.plan import Plan

EFFECT = "CREATE TABLE effect (number bigint GENERATED ALWAYS AS IDENTITY, body text NOT NULL)"
NOTE = "INSERT INTO effect (body) VALUES (%s)"
PROCESSORS, WORKER = "processors", "worker"
CONSUMERS = (("orders", PROCESSORS), ("orders", PROCESSORS), ("audit", WORKER), ("events", WORKER))
"""Each with its service, of which none goes at most once."""
CONSUMED = frozenset(service for service, _ in CONSUMERS)
FAILS = 0.01
POLICY = saf.Policy(max_attempts=1000, first_wait_seconds=0.01, longest_wait_seconds=0.05)


class Books(saf.Processor):
    """Remembers the last count of its account that has taken effect, and that none goes back."""

    last = 0

    @saf.handles()
    def enter(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        """Note a message."""
        self.last = int(message.text().split()[1])
        note(message, connection)


def note(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
    """Note a message, or fail."""
    connection.execute(NOTE, [message.text()])
    if random.random() < FAILS:
        raise ZeroDivisionError


def prepare(connection: psycopg.Connection[Any]) -> None:
    """A store whose services are received."""
    connection.execute(EFFECT)
    for service in CONSUMED:
        services.create_subscription(connection, service, service=service)


def consumer(store: Dsn, service: str, kind: str) -> None:
    """Receive for ever, whatever the server does."""
    with Path(os.devnull).open("w") as nowhere:  # it logs each failure, and there are many
        os.dup2(nowhere.fileno(), 1)
    while True:
        with contextlib.suppress(psycopg.Error, saf.SafError):
            _loop(store, service, kind).run()
        time.sleep(0.05)


def _loop(store: Dsn, service: str, kind: str) -> saf.Processors | saf.Worker:
    if kind == PROCESSORS:
        return saf.Processors(
            store, service, Books, lease_seconds=LEASE_SECONDS, policy=POLICY, max_messages=7
        )
    worker = saf.Worker(store, service, max_messages=7, policy=POLICY)
    worker.handler()(note)
    return worker


def chosen(plan: Plan, stores: Mapping[str, Dsn], places: Mapping[str, str]) -> list[Any]:
    """Of each consumer of a plan, the arguments."""
    if not plan.consumers:
        return []
    return [(stores[places[service]], service, kind) for service, kind in CONSUMERS]
