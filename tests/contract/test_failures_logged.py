"""What the log says when a handler fails: all that helps, and nothing that is secret."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa
from structlog.testing import capture_logs

import saf
from saf.database import Dsn
from saf.receiving.failures import exception
from tests.pipeline import connect
from tests.programs import BIN, run
from tests.receivers import SUBSCRIPTION, dead, let_keys_be_due, put

NOTHING: dict[str, str] = {}
SECRET = '{"card": "4111 1111 1111 1111"}'


def failing(inbox: Dsn, **options: Any) -> saf.Worker:
    worker = saf.Worker(inbox, SUBSCRIPTION, **options)

    @worker.handler()
    def handle(_: object, __: object) -> None:
        NOTHING["nothing"]

    return worker


def logged(worker: saf.Worker) -> list[Any]:
    with capture_logs() as logs:
        worker.drain()
    return logs


def test_a_failure_is_a_warning_that_says_which_message_why_where_and_what_is_next(
    inbox: Dsn,
) -> None:
    put(inbox, "x", key="k", message_type="Placed")
    (one,) = logged(failing(inbox))
    assert (one["log_level"], one["event"]) == ("warning", "message_failed")
    assert (one["subscription"], one["key"], one["message_type"]) == (SUBSCRIPTION, "k", "Placed")
    assert len(one["message_id"]) == 36
    assert one["attempt"] == "1 of 5"
    assert one["error"] == "KeyError: 'nothing'"
    assert 'in handle\n    NOTHING["nothing"]' in one["stack"]
    assert one["next_attempt"].startswith("in 4 s, at ")
    at = datetime.fromisoformat(one["next_attempt"].removeprefix("in 4 s, at "))
    assert -5 < (at - datetime.now(UTC)).total_seconds() <= 4


def test_the_last_attempt_is_an_error_that_says_dead_letter(inbox: Dsn) -> None:
    put(inbox, "x", key="k")
    worker = failing(inbox, policy=saf.Policy(max_attempts=2))
    (first,) = logged(worker)
    let_keys_be_due(inbox)
    (last,) = logged(worker)
    assert (first["log_level"], first["attempt"]) == ("warning", "1 of 2")
    assert (last["log_level"], last["event"]) == ("error", "dead_letter")
    assert last["attempt"] == "2 of 2"
    assert last["next_attempt"] == "none: it is a dead letter, because this was the last attempt"
    assert dead(inbox) == [("x", "failed")]


def test_an_exception_that_is_permanent_says_so(inbox: Dsn) -> None:
    put(inbox, "x")
    (one,) = logged(failing(inbox, policy=saf.Policy(permanent=(LookupError,))))
    assert one["log_level"] == "error"
    assert "dead letter, because no further attempt helps" in one["next_attempt"]


def test_a_batch_that_fails_is_a_warning_and_so_is_each_message_that_does(inbox: Dsn) -> None:
    put(inbox, "1", "2")
    worker = saf.Worker(inbox, SUBSCRIPTION)

    @worker.batch_handler()
    def handle(messages: Sequence[saf.Received], _: object) -> None:
        raise ValueError(len(messages))

    logs = logged(worker)
    assert [(one["log_level"], one["event"]) for one in logs] == [
        ("warning", "batch_failed"),
        ("warning", "message_failed"),
        ("warning", "message_failed"),
    ]
    assert logs[0]["error"] == "ValueError: 2"
    assert "in handle" in logs[0]["stack"]


def test_neither_bodies_nor_rows_nor_passwords_are_logged(inbox: Dsn) -> None:
    put(inbox, SECRET, key="k")
    secret = Dsn(inbox.conninfo + " password=geheim-123")
    worker = saf.Worker(secret, SUBSCRIPTION)

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        try:
            connection.execute("CREATE TEMP TABLE one (body text UNIQUE CHECK (body = ''))")
            connection.execute("INSERT INTO one VALUES (%s)", [message.text()])
        except psycopg.Error as error:
            raise ValueError(
                f"cannot {message.text()} {message.body!r} {message.json()} with "
                f"{connection.info.password}"
            ) from error

    (one,) = logged(worker)
    assert "CheckViolation" in one["stack"]
    assert one["error"].startswith("ValueError: cannot ***")
    for text in map(str, one.values()):
        assert "4111 1111" not in text
        assert "geheim" not in text


def test_sqlalchemys_parameters_are_not_logged(inbox: Dsn) -> None:
    put(inbox, SECRET, key="k")
    engine = inbox.engine()
    worker = saf.Worker(engine, SUBSCRIPTION)

    @worker.handler()
    def handle(message: saf.Received, connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT 1/0, :body"), {"body": f"of {message.text()[:30]}"})

    (one,) = logged(worker)
    engine.dispose()
    assert "DivisionByZero" in one["error"]
    assert "4111 1111" not in str(one)


def test_a_message_with_which_nothing_commits_is_logged_and_counted_as_a_dead_letter(
    inbox: Dsn,
) -> None:
    with connect(inbox) as connection:
        connection.execute("CREATE TABLE once (body text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        connection.execute("INSERT INTO once VALUES ('x')")
    put(inbox, "x", key="k")
    worker = saf.Worker(inbox, SUBSCRIPTION, policy=saf.Policy(max_attempts=2))

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO once VALUES (%s)", [message.text()])

    with capture_logs() as logs:
        for _ in range(6):
            with suppress(psycopg.errors.UniqueViolation):
                worker.drain()
            let_keys_be_due(inbox)
    (one,) = logs
    assert (one["log_level"], one["event"], one["key"]) == ("error", "dead_letter", "k")
    assert one["attempt"] == "2 of 2"
    assert one["error"].startswith("UniqueViolation")
    assert dead(inbox) == [("x", "failed")]
    assert (worker.summary.handled, worker.summary.buried) == (0, 1)


def test_a_message_whose_last_attempt_ended_its_process_is_logged_too(inbox: Dsn) -> None:
    put(inbox, "x", key="k")
    worker = failing(inbox, policy=saf.Policy(max_attempts=3))
    logged(worker)
    with connect(inbox) as connection:
        # as if the process had died in its last attempt
        connection.execute("UPDATE saf.backoff SET attempts = 3, next_attempt_at = now()")
    (one,) = logged(worker)
    assert (one["log_level"], one["event"], one["key"]) == ("error", "dead_letter", "k")
    assert worker.summary.buried == 1


MODULE = """
import os
import saf

worker = saf.Worker(os.environ["INBOX"], "billing")

@worker.handler()
def handle(message, connection):
    {}["nothing"]
"""


def test_the_parameters_of_a_statement_are_hidden_in_a_cause_that_was_given_by_hand() -> None:
    error = ValueError("no")
    error.__cause__ = sa.exc.StatementError("no", "SELECT :x", {"x": SECRET}, Exception())
    fields = exception(error)
    assert "SELECT :x" in fields["stack"]
    assert SECRET not in fields["stack"]


def test_in_a_file_a_failure_is_one_line_of_json(inbox: Dsn, tmp_path: Path) -> None:
    put(inbox, SECRET, key="k")
    (tmp_path / "consumers.py").write_text(MODULE)
    done = run(
        [BIN / "saf", "worker", "consumers:worker", "--drain"],
        env={"INBOX": inbox.conninfo},
        cwd=tmp_path,
        tracebacks=True,
    )
    (line,) = done.stderr.splitlines()
    one = json.loads(line)
    assert (one["level"], one["error"]) == ("warning", "KeyError: 'nothing'")
    assert "Traceback (most recent call last)" in one["stack"]
    assert "4111 1111" not in line


def test_the_parameters_of_a_cause_that_was_kept_and_given_later_are_hidden() -> None:
    """It is no context of the error, because the error was not raised while it was handled."""
    error = LookupError("no card")
    error.__cause__ = sa.exc.StatementError("refused", "INSERT", {"card": SECRET}, ValueError("no"))
    fields = exception(error)
    assert "StatementError" in fields["stack"]
    assert "4111 1111" not in fields["stack"]
