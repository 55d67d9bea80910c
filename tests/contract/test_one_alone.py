"""What goes wrong at one database is that one's: the others go on, and its messages wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from saf.config import load
from saf.database import Dsn
from saf.forwarding import runner
from saf.forwarding.broker import SourceBroker
from saf.forwarding.forwarder import Forwarder
from saf.setaside.selection import DeadLetters
from tests.driver import InProcess, forwarder
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, send
from tests.programs import configuration

READ_ONLY = "-c default_transaction_read_only=on"


@pytest.fixture
def two(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], tmp_path: Path
) -> Callable[..., Path]:
    """saf.toml for two sources with a message each, ``bad`` and ``good``, the first as given."""
    bad = new_broker("bad")
    for dsn, body in ((bad, "waits"), (app, "arrives")):
        with connect(dsn) as connection:
            send(connection, body)

    def write(change: Callable[[Dsn], Dsn]) -> Path:
        brokers = {"bad": change(bad), "good": app}
        return configuration(tmp_path / "saf.toml", brokers, {"mom": mom})

    return write


def read_only(dsn: Dsn) -> Dsn:
    return Dsn(make_conninfo(dsn.conninfo, options=READ_ONLY))


def without(table: str) -> Callable[[Dsn], Dsn]:
    def change(dsn: Dsn) -> Dsn:
        with connect(dsn) as connection:
            connection.execute(f"DROP TABLE saf.{table} CASCADE")
        return dsn

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [(read_only, "is read-only"), (without("backoff"), "its schema saf is incomplete")],
)
def test_a_source_that_a_person_has_to_mend_is_named_and_the_other_is_forwarded(
    two: Callable[..., Path], mom: Dsn, change: Callable[[Dsn], Dsn], says: str
) -> None:
    summary = forwarder(load(two(change)), InProcess()).drain()
    assert [one["broker"] for one in summary.problems] == ["bad"]
    assert says in summary.problems[0]["error"]
    assert (summary.forwarded, summary.exit_code) == (1, 2)
    assert bodies(mom) == ["arrives"]


def test_an_error_that_nobody_knows_is_one_sources_and_the_other_is_forwarded(
    two: Callable[..., Path], mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit = SourceBroker.visit

    def strange(self: SourceBroker, *arguments: object, **more: bool) -> object:
        if self.name == "bad":
            raise ZeroDivisionError("division by zero")
        return visit(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SourceBroker, "visit", strange)
    summary = forwarder(load(two(lambda dsn: dsn)), InProcess()).drain()
    (problem,) = summary.problems
    assert (problem["broker"], problem["kind"]) == ("bad", "Unexpected")
    assert "ZeroDivisionError: division by zero" in problem["error"]
    assert summary.exit_code == 1
    assert bodies(mom) == ["arrives"]


def test_a_task_that_raises_what_nobody_knows_leaves_its_batch_open_and_others_complete(
    two: Callable[..., Path], mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_item = runner.run_item

    def strange(number: int, item: object, rules: object, **options: object) -> object:
        if item.broker == "bad":  # type: ignore[attr-defined]
            raise ZeroDivisionError("division by zero")
        return run_item(number, item, rules, **options)  # type: ignore[arg-type]

    settings = load(two(lambda dsn: dsn))
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_item", strange)
        summary = Forwarder(settings, runner.InProcess()).drain()
    assert [(one["broker"], one["kind"]) for one in summary.problems] == [("bad", "Unexpected")]
    assert bodies(mom) == ["arrives"]
    assert forwarder(settings, InProcess()).drain().forwarded == 1
    assert sorted(bodies(mom)) == ["arrives", "waits"]


def test_what_a_server_says_of_its_watermarks_makes_no_dead_letters(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "good")
    with connect(mom) as connection:
        connection.execute(
            "ALTER TABLE saf.watermark ADD CONSTRAINT nobodys CHECK (position < 0) NOT VALID"
        )
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        errors = [receipt.error or "" for receipt in cycle.run()]
        assert any("nobodys" in error for error in errors)
        with connect(app) as connection:
            assert DeadLetters().rows(connection) == []
        with connect(mom) as connection, connection.transaction():
            connection.execute("ALTER TABLE saf.watermark DROP CONSTRAINT nobodys")
        with connect(app) as connection:
            connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
        cycle.run()
    assert bodies(mom) == ["good"]


def test_a_login_that_is_refused_is_for_a_person_and_its_messages_wait(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    with connect(app) as connection:
        send(connection, "waits")
    nobody = Dsn(make_conninfo(mom.conninfo, user="nobody_of_this_name"))
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": nobody})
    summary = forwarder(load(file), InProcess()).drain()
    assert [one["kind"] for one in summary.problems] == ["Refused"]
    assert "destination 'mom' refuses the login" in summary.problems[0]["error"]
    assert "CREATE ROLE" in summary.problems[0]["error"]
    assert summary.exit_code == 2
    with connect(app) as connection:
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    mended = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    assert forwarder(load(mended), InProcess()).drain().forwarded == 1
    assert bodies(mom) == ["waits"]
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(nobody.conninfo)
