"""The history of the figures: the last hour, by service, in a bounded memory."""

from __future__ import annotations

import re
from collections.abc import Mapping

from saf.telemetry import metrics as m
from saf.telemetry.metrics import OTHER, Metric, Sample
from saf.ui import history
from saf.ui.beat import Beat
from saf.ui.charts import CHARTS, chart
from saf.ui.history import HOUR_SECONDS, MOST_POINTS, MOST_SERVICES, STEP_SECONDS, History

NOON = 1_800_000_000.0


def beat(at: float, **values: Mapping[str, float]) -> Beat:
    """Figures of a shop and its store: by the name of a number, its values by service."""
    metrics: dict[str, tuple[Metric, tuple[str, ...]]] = {
        "pending": (m.PENDING, ("shop", "mom")),
        "oldest": (m.OLDEST_PENDING, ("shop", "mom")),
        "unread": (m.UNREAD, ("mom",)),
        "lag": (m.LAG, ("mom", "inbox")),
        "sent": (history.SENT, ("shop",)),
        "stored": (history.STORED, ("mom",)),
        "parked": (history.PARKED, ("shop",)),
        "dead": (history.DEAD, ("shop",)),
    }
    samples = [
        Sample(metric=metrics[name][0], labels=(*metrics[name][1], service), value=value)
        for name, by_service in values.items()
        for service, value in by_service.items()
    ]
    return Beat(samples=tuple(samples), at=NOON + at)


def test_states_are_those_of_a_times_end_and_counts_are_those_of_all_of_it() -> None:
    kept = History()
    kept.add(beat(0, pending={"billing": 9}))
    for second in (3, 6, 9):
        kept.add(beat(second, pending={"billing": second}, sent={"billing": 2}))
    (point,) = kept.points()
    billing = point.numbers("billing")
    assert (billing.pending, billing.sent, point.begin, point.end) == (9, 6, NOON, NOON + 9)
    assert kept.since == NOON
    assert point.per_minute(billing.sent) is None, "nine seconds tell no rate"


def test_a_rate_is_that_of_the_time_which_was_counted() -> None:
    kept = History()
    for second in range(0, 121, 60):
        kept.add(beat(second, sent={"billing": 30 if second else 0}))
    _, last = kept.points()
    assert last.per_minute(last.numbers("billing").sent) == 30


def test_an_hour_is_kept_and_no_more_however_often_figures_are_taken() -> None:
    kept = History()
    for second in range(0, 2 * round(HOUR_SECONDS), 3):
        kept.add(beat(second, pending={"billing": second}))
    points = kept.points()
    assert len(points) <= MOST_POINTS
    assert points[-1].end - points[0].end <= HOUR_SECONDS
    assert points[-1].end - points[0].begin >= HOUR_SECONDS - 2 * STEP_SECONDS
    assert kept.since == NOON


def test_many_services_take_no_more_memory_than_some_and_none_is_lost() -> None:
    kept = History()
    for minute in range(5):
        names = {f"service {minute} {n}": 1.0 for n in range(MOST_SERVICES)}
        kept.add(beat(minute * 60, pending={"billing": 5, **names}))
    assert len({name for point in kept.points() for name in point.services}) <= MOST_SERVICES + 1
    for point in kept.points():
        assert point.numbers("billing").pending == 5, "a service with a curve keeps it"
        assert point.numbers(None).pending == MOST_SERVICES + 5
    assert kept.points()[-1].numbers(OTHER).pending == MOST_SERVICES


def test_services_with_failures_come_first_and_then_those_that_wait_longest() -> None:
    kept = History()
    kept.add(
        beat(
            0,
            pending={"a": 1, "b": 1, "c": 1, "": 0},
            oldest={"a": 5, "b": 50, "c": 1},
            dead={"c": 1},
        )
    )
    assert kept.services() == ["c", "b", "a"]


def test_a_clock_that_is_set_back_breaks_nothing() -> None:
    kept = History()
    for second in (0, 60, -600, 3, 60):
        kept.add(beat(second, sent={"billing": 1}))
    for point in kept.points():
        assert point.begin <= point.end
    drawn = [chart(kind, kept.points(), None, NOON + 60) for kind in CHARTS]
    assert all("<svg" in one.svg for one in drawn)


def test_a_chart_says_in_words_what_it_draws() -> None:
    kept = History()
    kept.add(beat(-60))
    for minute, pending in enumerate((7, 40, 3)):
        kept.add(beat(60 * minute, pending={"billing": pending}, dead={"billing": 2}))
    waiting, _, _, failures = (chart(kind, kept.points(), None, NOON + 120) for kind in CHARTS)
    assert "not forwarded: 3 now, at most 40" in waiting.svg
    assert "dead letters: 6 in all" in failures.svg
    assert [(one.label, one.last) for one in failures.legend] == [
        ("parked", "0"),
        ("dead letters", "6"),
    ]
    assert [values[0] for _, values in waiting.rows] == ["3", "40", "7"]


def test_a_curve_has_a_gap_where_there_were_no_figures() -> None:
    kept = History()
    for minute in (0, 1, 2, 20, 21):
        kept.add(beat(60 * minute, pending={"billing": 1}))
    svg = chart(CHARTS[0], kept.points(), None, NOON + 21 * 60).svg
    assert len(re.findall(r'<polyline class="line a"', svg)) == 2


def test_charts_draw_nothing_outside_of_their_frame_and_no_name_as_markup() -> None:
    kept = History()
    name = "<script>"
    kept.add(beat(0, pending={name: 1e12}))
    kept.add(beat(60, pending={name: 1}, dead={name: 10**9}, parked={name: 3}))
    for kind in CHARTS:
        svg = chart(kind, kept.points(), name, NOON + 60).svg
        assert "<script>" not in svg
        for y in re.findall(r'(?:y1?|cy)="([-\d.]+)"', svg):
            assert 0 <= float(y) <= 150


def test_a_chart_without_figures_is_empty() -> None:
    waiting, _, _, failures = (chart(kind, (), None, NOON) for kind in CHARTS)
    assert "nothing is known yet" in waiting.svg
    assert failures.rows == ()
