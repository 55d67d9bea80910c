"""A dialog through a forwarder on a real Spark: there, back, large, and ended at both ends."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import psycopg
import pytest

import saf
from saf.database import Dsn
from saf.routing.routes import add_route
from tests import on_spark
from tests.dialogs import END, SHOP, WAREHOUSE, begin, prepare, receive, said, states
from tests.hub import DEPARTURES, Hub
from tests.pipeline import connect

pytestmark = pytest.mark.full


def forward_all(folder: Path, places: Mapping[str, Dsn]) -> None:
    """A run for some brokers, each of which is a source and a destination."""
    config = folder / "saf.toml"
    config.write_text(
        "".join(
            f"[{kind}.{name}]\ndsn = {json.dumps(dsn.conninfo)}\n"
            for name, dsn in places.items()
            for kind in ("brokers", "destinations")
        )
        + '[forwarder]\nmaster = "local[2]"\nattempts = 1\n'
    )
    on_spark.forward(config)


def test_a_dialog_and_20_mb_go_there_and_replies_find_the_initiators_broker(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    prepare(app, mom)
    with connect(app) as connection:
        ((home,),) = connection.execute("SELECT broker_id FROM saf.broker").fetchall()
        add_route(connection, "mom")
    with connect(mom) as connection:
        # a shop lives somewhere else too; what is for this one says so
        add_route(connection, "mom", service=SHOP)
        add_route(connection, "app", service=SHOP, broker=home)
    forward = partial(forward_all, tmp_path, {"app": app, "mom": mom})
    with app.connect(role="test") as connection:
        dialog = saf.begin_dialog(
            connection, from_service=SHOP, to_service=WAREHOUSE, contract="ordering", lifetime=3600
        )
        for amount in range(50):
            dialog.send(connection, {"amount": amount}, message_type="order")
        dialog.end(connection)
    forward()

    def deliver(connection: psycopg.Connection[object], message: saf.Received) -> None:
        assert message.dialog is not None
        if message.message_type == END:
            message.dialog.end(connection)

    received = receive(mom, WAREHOUSE, deliver)
    assert [one.json()["amount"] for one in received[:-1]] == list(range(50))
    assert states(mom) == ["closed"]
    drawing = random.Random(7).randbytes(20_000_000)
    with app.connect(role="test") as connection:
        large = saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)
        large.send(connection, io.BytesIO(drawing))
    forward()
    with saf.receive(mom, WAREHOUSE) as delivery:
        (message,) = delivery
        assert message.open().read() == drawing
    with app.connect(role="test") as connection:
        other = saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)
        other.send(connection, "?")
    forward()

    def answer(connection: psycopg.Connection[object], message: saf.Received) -> None:
        assert message.dialog is not None
        message.dialog.send(connection, "!")

    receive(mom, WAREHOUSE, answer)
    forward()
    assert said(receive(app, SHOP)) == ["!"]
    assert sorted(states(app)) == ["closed", "conversing", "conversing"]


def test_a_routing_service_passes_a_dialog_on_and_its_answers_back(
    new_broker: Callable[[str], Dsn], tmp_path: Path
) -> None:
    hub = Hub.at(new_broker)
    begin(hub.app, "EWR", "2", "3", to_service=DEPARTURES)
    failed = begin(hub.app, "nobody", to_service=DEPARTURES)

    def carry() -> None:
        for number in range(2):
            forward_all(tmp_path, hub.places)
            if not number:
                hub.service().drain()

    def answer(connection: psycopg.Connection[object], message: saf.Received) -> None:
        assert message.dialog is not None
        message.dialog.send(connection, f"got {message.text()}")
        if message.text() == "3":
            message.dialog.end(connection)

    carry()
    (error,) = receive(hub.app, SHOP)
    assert error.dialog == failed
    assert said(receive(hub.ewr, "EWR", answer)) == ["EWR", "2", "3"]
    carry()
    assert said(receive(hub.app, SHOP)) == ["got EWR", "got 2", "got 3", END]
    assert set(states(hub.hub)) == {"closed", "disconnected_outbound"}
