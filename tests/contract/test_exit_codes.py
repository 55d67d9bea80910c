"""What the exit code of a run of the forwarder tells whoever has started it."""

from __future__ import annotations

from pathlib import Path

from psycopg.conninfo import make_conninfo

from saf.broker import services
from saf.config import load
from saf.database import Dsn
from saf.forwarding.summary import Summary
from saf.routing.routes import add_route
from tests.destinations import NOWHERE, route, send_to
from tests.driver import InProcess, forwarder
from tests.pipeline import bodies, connect
from tests.programs import configuration

DONE, MEND, TRY_AGAIN = 0, 2, 75


def drained(tmp_path: Path, app: Dsn, **stores: Dsn) -> Summary:
    file = configuration(tmp_path / "saf.toml", {"app": app}, stores, attempts=1)
    return forwarder(load(file), InProcess()).drain()


def test_a_message_for_an_unknown_service_waits_for_a_person_and_the_run_is_done(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    with connect(mom) as store, connect(app) as source:
        services.create_service(store, "billing")
        send_to(source, "biling", "misspelt")
        send_to(source, "billing", "arrives")
    for _ in range(2):  # also while its next attempt is later
        summary = drained(tmp_path, app, mom=mom)
        assert (summary.exit_code, summary.waiting_lanes, summary.down) == (DONE, 1, [])
        assert "has no service 'biling'" in summary.waiting[0]["error"]
    assert bodies(mom) == ["arrives"]


def test_a_message_without_a_route_or_for_a_destination_not_in_the_file_is_for_a_person_too(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    file.write_text(file.read_text().replace('default_destination = "mom"', ""))
    with connect(app) as source:
        add_route(source, "nowhere", service="shipping")
        send_to(source, "shipping", "to a destination that nobody knows")
        send_to(source, "billing", "no route")
    for _ in range(2):
        summary = forwarder(load(file), InProcess()).drain()
        assert (summary.exit_code, summary.waiting_lanes) == (DONE, 2)


def test_a_destination_that_is_down_is_tried_again_for_as_long_as_it_is(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    with connect(app) as source:
        route(source, "shipping", "away")
        send_to(source, "shipping", "waits")
        send_to(source, "billing", "arrives")
    for _ in range(2):  # also while its next attempt is later
        summary = drained(tmp_path, app, mom=mom, away=NOWHERE)
        assert (summary.exit_code, summary.down) == (TRY_AGAIN, ["away"])
    assert bodies(mom) == ["arrives"]


def test_the_only_destination_is_down_and_nothing_is_copied_and_it_is_tried_again(
    app: Dsn, tmp_path: Path
) -> None:
    with connect(app) as source:
        send_to(source, "billing", "stays in its batch")
    for _ in range(2):
        assert drained(tmp_path, app, mom=NOWHERE).exit_code == TRY_AGAIN


def test_a_destination_that_is_down_for_messages_that_had_waited_for_a_route(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom, "away": NOWHERE})
    file.write_text(file.read_text().replace('default_destination = "mom"', "attempts = 1"))
    with connect(app) as source:
        send_to(source, "billing", "had no route")
        assert forwarder(load(file), InProcess()).drain().exit_code == DONE
        add_route(source, "away", service="billing")
        source.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    summary = forwarder(load(file), InProcess()).drain()
    assert (summary.exit_code, summary.down) == (TRY_AGAIN, ["away"])


def test_a_destination_that_refuses_the_login_is_for_a_person(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    with connect(app) as source:
        route(source, "shipping", "closed")
        send_to(source, "shipping", "waits")
    closed = Dsn(make_conninfo(mom.conninfo, user="nobody_of_this_name"))
    assert drained(tmp_path, app, mom=mom, closed=closed).exit_code == MEND


def test_a_source_that_is_down_is_tried_again_and_nothing_is_known_to_wait_there(
    mom: Dsn, tmp_path: Path
) -> None:
    summary = drained(tmp_path, NOWHERE, mom=mom)
    assert (summary.exit_code, summary.waiting_lanes) == (TRY_AGAIN, 0)
