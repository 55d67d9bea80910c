"""Charts in the browser: what the process has seen since it began, without a Prometheus."""

from __future__ import annotations

import re

import pytest

from saf.config import Settings
from saf.database import Dsn
from saf.ui import history
from tests.dashboard import Dashboard, dashboard
from tests.pipeline import connect, run, send
from tests.ui.dead_letters import LETTER
from tests.waits import until


@pytest.fixture(autouse=True)
def fine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a point cover as little time as there is between two figures."""
    monkeypatch.setattr(history, "STEP_SECONDS", 0.5)


def test_figures_are_taken_from_the_start_on_though_nobody_looks(given: Settings) -> None:
    with dashboard(given) as there:
        until(lambda: there.site.pulse.history.since is not None)
        assert there.site.pulse.number > 0
        page = there.client().get("/charts").text
    assert re.search(r"Since \d\d:\d\d, when this dashboard started", page)


def test_traffic_and_failures_are_shown_by_service(there: Dashboard, app: Dsn, mom: Dsn) -> None:
    visitor = there.client()
    until(lambda: "The brokers are being asked" not in visitor.get("/charts").text)
    with connect(app) as connection:
        for _ in range(5):
            send(connection, "x", key="k")
        connection.execute(LETTER.replace("'billing'", "'mail'"), [3])
    until(lambda: "dead letters: 3 in all" in visitor.get("/charts").text)
    page = visitor.get("/charts").text
    assert "not forwarded: 5 now" in page
    assert page.index(">mail<") < page.index(">billing<"), "failures come first"
    run(app, mom=mom)
    until(lambda: "not forwarded: 0 now" in visitor.get("/charts").text)
    billing = visitor.get("/charts", params={"service": "billing"}).text
    assert "dead letters: 0 in all" in billing
    assert re.search(r"sent: \S+ now, at most [1-9]", billing)
    table = visitor.get("/charts", params={"table": "yes"}).text
    assert '<svg class="chart"' not in table
    assert re.search(r'<th scope="row">\d\d:\d\d</th><td class="n">5</td>', table)


def test_a_service_that_was_never_seen_has_empty_charts(there: Dashboard) -> None:
    page = there.client().get("/charts", params={"service": "<b>nobody"})
    assert page.status_code == 200
    assert "<b>nobody" not in page.text
