"""Progress is for those who watch: what befalls it does not befall the forwarder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from saf.config import Settings, load
from saf.database import Dsn, fetch
from saf.forwarding.broker import LITTLE
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.summary import Progress
from tests.driver import InProcess
from tests.pipeline import bodies, connect
from tests.programs import configuration, send
from tests.waits import until

WATCHING = "SELECT pid FROM pg_stat_activity WHERE application_name = 'saf watch'"
MESSAGES = 400


@pytest.fixture
def settings(app: Dsn, mom: Dsn, tmp_path: Path) -> Settings:
    send(app, MESSAGES)
    return load(configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}))


def drained(
    settings: Settings, progress: Callable[[Progress], None], meanwhile: Callable[[], object]
) -> Forwarder:
    """A run that is watched, in which something happens while its task is at work."""
    tasks = InProcess(before_task=lambda *_: meanwhile())
    one = Forwarder(settings, tasks, progress=progress)
    one.drain()
    return one


def test_who_watches_sees_how_many_messages_there_are_and_none_done_before_they_are(
    settings: Settings, mom: Dsn
) -> None:
    seen: list[Progress] = []
    drained(settings, seen.append, lambda: until(lambda: bool(seen)))
    assert seen[0] == Progress(done=0, total=MESSAGES)
    assert seen[-1] == Progress(done=MESSAGES, total=MESSAGES)
    assert len(bodies(mom)) == MESSAGES


def test_who_watches_sees_the_end_also_if_messages_are_parked_and_tasks_end_at_different_ids(
    settings: Settings, app: Dsn, mom: Dsn
) -> None:
    send(app, LITTLE)
    count = LITTLE + MESSAGES
    with connect(app) as connection, connect(mom) as store:
        store.execute("INSERT INTO saf.service (name) VALUES ('billing')")
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('unknown', '')")
    seen: list[Progress] = []
    tasks = InProcess(parallel=2, before_task=lambda *_: until(lambda: bool(seen)))
    summary = Forwarder(settings, tasks, progress=seen.append).drain()
    assert tasks.jobs == [2]
    assert (summary.forwarded, summary.parked) == (count, 1)
    assert seen[-1] == Progress(done=count + 1, total=count + 1)


def test_a_meter_whose_session_is_ended_shows_no_more_and_the_messages_arrive(
    settings: Settings, app: Dsn, mom: Dsn
) -> None:
    seen: list[Progress] = []

    def end_it() -> None:
        until(lambda: bool(seen))
        with connect(app) as connection:
            ended = fetch(connection, f"SELECT pg_terminate_backend(pid) FROM ({WATCHING}) AS w")
        assert ended == [(True,)]

    run = drained(settings, seen.append, end_it)
    assert (run.summary.problems, run.summary.forwarded) == ([], MESSAGES)
    assert len(bodies(mom)) == MESSAGES


def test_what_fails_while_it_is_shown_ends_nothing(settings: Settings, mom: Dsn) -> None:
    tried: list[Progress] = []

    def broken(progress: Progress) -> None:
        tried.append(progress)
        raise BrokenPipeError("the terminal has gone")

    run = drained(settings, broken, lambda: until(lambda: bool(tried)))
    assert (run.summary.problems, len(tried)) == ([], 1)
    assert len(bodies(mom)) == MESSAGES


def test_a_source_without_a_connection_to_spare_is_not_watched(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    send(app, MESSAGES)
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}, max_connections=4)
    sessions: list[int] = []

    def look() -> None:
        with connect(app) as connection:
            sessions.extend(pid for (pid,) in fetch(connection, WATCHING))

    drained(load(file), lambda _: None, look)
    assert sessions == []
    assert len(bodies(mom)) == MESSAGES
