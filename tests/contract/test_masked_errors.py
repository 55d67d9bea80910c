"""What an error quotes of a message is shown nowhere: no log, command or page has it."""

from __future__ import annotations

from typing import Any

import psycopg
import pydantic
import pytest
import structlog

import saf
from saf.database import Dsn, fetch
from saf.errors import HIDDEN, Rejected
from saf.ui import redaction
from tests.destinations import run
from tests.pipeline import connect, send
from tests.receivers import SUBSCRIPTION, prepare, put

SECRET = "4111 1111 1111 1111"


class Order(pydantic.BaseModel):
    card: int


def dead_letter(dsn: Dsn) -> str:
    with connect(dsn) as connection:
        ((error,),) = fetch(connection, "SELECT error FROM saf.dead_letter")
    return str(error)


def test_a_row_that_a_store_quotes_is_not_in_the_dead_letter(app: Dsn, mom: Dsn) -> None:
    with connect(mom) as store:
        store.execute("ALTER TABLE saf.inbox ADD CONSTRAINT none CHECK (body <> '\\x') NOT VALID")
        store.execute(
            "ALTER TABLE saf.inbox ADD CONSTRAINT short CHECK (length(key) < 9) NOT VALID"
        )
    with connect(app) as connection:
        send(connection, "body", key=SECRET)
    run(app, mom=mom)
    error = dead_letter(app)
    assert f"Failing row contains ({HIDDEN})" in error
    assert SECRET not in error


def test_a_value_that_a_model_quotes_is_neither_in_the_dead_letter_nor_in_the_log(mom: Dsn) -> None:
    prepare(mom)
    put(mom, f'{{"card": "{SECRET}"}}', key="k")
    policy = saf.Policy(max_attempts=1)
    worker = saf.Worker(mom, SUBSCRIPTION, policy=policy)

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        del connection
        Order.model_validate_json(message.body)

    with structlog.testing.capture_logs() as lines:
        worker.drain()
    error = dead_letter(mom)
    for said in (error, str(lines)):
        assert f"input_value={HIDDEN}" in said
        assert SECRET not in said


@pytest.mark.parametrize(
    "text",
    [
        f"DETAIL:  Failing row contains (1, {SECRET}).",
        f"DETAIL:  Key (card, (lower(name)))=({SECRET}, x) already exists.",
        f'CONTEXT:  COPY inbox, line 1, column body: "{SECRET}"',
        f"[type=int_parsing, input_value='{SECRET}', input_type=str]",
        f"[type=int_parsing, input_value=', input_type=str {SECRET}', input_type=str]",
        f"Failing row contains (a) CONTEXT: {SECRET}).",
    ],
)
def test_an_error_of_saf_and_the_page_that_shows_an_older_one_hide_the_same(text: str) -> None:
    for said in (str(Rejected("destination 'mom'", text)), redaction.error(text)):
        assert SECRET not in said
        assert HIDDEN in said
