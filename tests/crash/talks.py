"""Talks: dialogs between the application and the MOM store, while all goes wrong.

A writer says 1, 2, 3 … in a talk, some in each of its transactions. A listener at the MOM store
notes what it hears and says it again; one at the application notes what comes back. Who says the
last number says so: then the listener at the MOM store ends the dialog, and the other one too. So
each talk has to be heard in full, in order and once, at both sides, and be closed if it was ended.
Where a side was set back, a talk may fail instead, at both sides.

A talk may go by a hub: then it is two dialogs, of which the application knows the first. So what is
said has the talk's name, which is the id of that one.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

import psycopg

import saf
from saf.broker import services
from saf.database import Dsn
from tests.dialogs import END, ERROR
from tests.pipeline import connect
from tests.receivers import consume

DESK, STOCK = "desk", "stock"
COUNTER = "counter"
"""Where a talk begins that goes by a hub."""

TALKS = """
CREATE TABLE talk (handle uuid PRIMARY KEY, conversation uuid NOT NULL, n int NOT NULL,
                   ended bool NOT NULL, by_hub bool NOT NULL)
"""
HEARD = """
CREATE TABLE heard (number bigint GENERATED ALWAYS AS IDENTITY, talk uuid NOT NULL,
                    conversation uuid NOT NULL, n int NOT NULL)
"""
SOME_TALK = """
SELECT handle, n FROM talk JOIN saf.conversation c USING (handle)
WHERE NOT ended AND c.state IN ('started_outbound', 'conversing')
ORDER BY random() LIMIT 1 FOR UPDATE OF talk SKIP LOCKED
"""
ROUTE = "INSERT INTO saf.route (service, destination, quality) VALUES (%s, %s, %s)"
BEGIN = "INSERT INTO talk VALUES (%s, %s, 0, false, %s)"
SAID = "UPDATE talk SET n = %s, ended = %s WHERE handle = %s"
HEAR = "INSERT INTO heard (talk, conversation, n) VALUES (%s, %s, %s)"


def introduce(app: Dsn, mom: Dsn) -> None:
    """Each service where it lives, and a route to it from the other side."""
    for here, service, there, route in (
        (app, DESK, STOCK, ("mom", "at_least_once")),
        (mom, STOCK, DESK, ("app", "exactly_once")),
    ):
        with connect(here) as connection:
            connection.execute(HEARD)
            services.create_service(connection, service)
            connection.execute(ROUTE, [there, *route])
    with connect(app) as connection:
        connection.execute(TALKS)


def talk(
    connection: psycopg.Connection[Any], chance: random.Random, *, by_hub: bool = False
) -> None:
    """Go on with some talk, or begin one, in the caller's transaction."""
    found = connection.execute(SOME_TALK).fetchone()
    if found is None or chance.random() < 0.1:
        to = COUNTER if by_hub else STOCK
        dialog, said = saf.begin_dialog(connection, from_service=DESK, to_service=to), 0
        connection.execute(BEGIN, [dialog.handle, dialog.conversation_id, by_hub])
    else:
        dialog, said = saf.open_dialog(connection, found[0]), found[1]
    numbers = range(said + 1, said + 1 + chance.randint(1, 3))
    ended = chance.random() < 0.05
    for number in numbers:
        last = " last" if ended and number == numbers[-1] else ""
        dialog.send(connection, f"{dialog.conversation_id} {number}{last}")
    connection.execute(SAID, [numbers[-1], ended, dialog.handle])


def listener(dsn: Dsn, service: str, seed: str) -> None:
    """Hear all that is said to a service, for ever, whatever the server does."""
    handle = hear_and_answer if service == STOCK else hear
    while True:
        with suppress(psycopg.Error, saf.SafError):
            consume(dsn, seed, service, handle)
        time.sleep(0.05)


def hear(connection: psycopg.Connection[Any], message: saf.Received) -> bool:
    """Note what is said, or that it is over; return whether it was the last."""
    assert message.dialog is not None
    if message.message_type in (END, ERROR):
        message.dialog.end(connection)
        return False
    name, number, *last = message.text().split()
    connection.execute(HEAR, [name, message.conversation_id, int(number)])
    return bool(last)


def hear_and_answer(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    """The same, and say it again."""
    last = hear(connection, message)
    assert message.dialog is not None
    if message.message_type not in (END, ERROR):
        message.dialog.send(connection, " ".join(message.text().split()[:2]))
    if last:
        message.dialog.end(connection)
