"""Hubs: routing services between the application and the MOM store, which some talks go by.

A talk begins with the counter, whose routes share it among the hubs. Each hub sends it on to the
stock; what comes back finds its way by itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import saf
from saf.broker.services import create_service
from saf.database import Dsn
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.routing_service import RoutingService
from tests.crash.consumers import POLICY
from tests.crash.talks import COUNTER, STOCK
from tests.pipeline import connect

HUBS = ("hub0", "hub1", "hub2")
TO_THE_STOCK = "tests.crash.hubs:to_the_stock"


def to_the_stock(message: saf.Received) -> str:  # noqa: ARG001 - a classifier's
    """Who the counter asks."""
    return STOCK


def join(app: Dsn, hub: Dsn, name: str) -> None:
    """A hub beside those that there are."""
    with connect(hub) as connection:
        create_service(connection, COUNTER)
        add_router(connection, COUNTER, "python", TO_THE_STOCK, mode="forward")
        add_route(connection, "mom", service=STOCK)
    with connect(app) as connection:
        add_route(connection, name, service=COUNTER)


def router(hub: Dsn) -> None:
    """`saf router serve counter`, started again whenever it ends."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    while True:
        with contextlib.suppress(saf.SafError):
            RoutingService(hub, COUNTER, max_messages=7, policy=POLICY).run()
        time.sleep(0.05)
