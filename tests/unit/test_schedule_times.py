"""Times of schedules, over the days on which clocks change, in a virtual clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

import saf
from saf.schedules.times import LATE, MOST_SKIPPED, Step, Times, in_units, period, step

YEAR = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
CHANGES = {
    # the zone, its offset in winter, and when its clocks go forward and back, in UTC
    "Europe/Berlin": (
        HOUR,
        datetime(2026, 3, 29, 1, tzinfo=UTC),
        datetime(2026, 10, 25, 1, tzinfo=UTC),
    ),
    "America/New_York": (
        -5 * HOUR,
        datetime(2026, 3, 8, 7, tzinfo=UTC),
        datetime(2026, 11, 1, 6, tzinfo=UTC),
    ),
}


def runs(times: Times, since: datetime = YEAR[0], until: datetime = YEAR[1]) -> list[datetime]:
    """Due times from a moment on, each computed anew from the one before, as forwarders do."""
    found, at = [], since - timedelta(seconds=1)
    while (at := times.after(at)) < until:
        found.append(at)
    return found


@pytest.mark.parametrize("zone", CHANGES)
def test_half_past_two_runs_once_a_day_all_year(zone: str) -> None:
    winter, forward, back = CHANGES[zone]
    expected = []
    for number in range(365):
        in_winter = YEAR[0] + number * DAY + 2.5 * HOUR - winter
        in_summer = in_winter - HOUR
        if forward <= in_summer < back:
            expected.append(in_summer)  # on the last day in Berlin, too: the first of two times
        elif in_summer < forward <= in_winter < back:
            expected.append(forward)  # right after the gap
        else:
            expected.append(in_winter)
    assert runs(Times(cron="30 2 * * *", zone=zone)) == expected
    assert len(set(expected)) == 365


@pytest.mark.parametrize("zone", CHANGES)
@pytest.mark.parametrize(
    ("cron", "gap"), [("0 * * * *", HOUR), ("*/15 * * * *", 15 * MINUTE), ("* * * * *", MINUTE)]
)
def test_what_runs_all_day_runs_by_the_time_that_passes(
    zone: str, cron: str, gap: timedelta
) -> None:
    for moment in CHANGES[zone][1:]:
        found = runs(Times(cron=cron, zone=zone), moment - DAY, moment + DAY)
        assert found == [moment - DAY + n * gap for n in range(int(2 * DAY / gap))]


def test_the_days_on_which_clocks_change_in_berlin_are_these() -> None:
    def on(day: datetime, cron: str) -> list[str]:
        found = runs(Times(cron=cron, zone="Europe/Berlin"), day - 2 * HOUR, day + 5 * HOUR)
        return [f"{at:%H:%M}" for at in found]

    forward, back = datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC)
    assert on(forward, "30 2 * * *") == ["01:00"]
    assert on(back, "30 2 * * *") == ["00:30"]
    hours = ["22:00", "23:00", "00:00", "01:00", "02:00", "03:00", "04:00"]
    assert on(forward, "0 * * * *") == on(back, "0 * * * *") == hours
    # several times in the gap become one
    assert on(forward, "15,45 2 * * *") == ["01:00"]
    assert on(back, "15,45 2 * * *") == ["00:15", "00:45"]
    # a minute that begins with * runs at the times that pass
    assert on(forward, "*/30 2 * * *") == []
    assert on(back, "*/30 2 * * *") == ["00:00", "00:30", "01:00", "01:30"]


def test_the_hour_that_comes_twice_in_new_york_runs_once() -> None:
    since = datetime(2026, 11, 1, 4, tzinfo=UTC)
    found = runs(Times(cron="30 1 * * *", zone="America/New_York"), since, since + DAY)
    assert found == [datetime(2026, 11, 1, 5, 30, tzinfo=UTC)]


def test_a_schedule_that_begins_in_an_hour_that_comes_twice_runs_the_next_day() -> None:
    second = datetime(2026, 10, 25, 1, 15, tzinfo=UTC)  # 02:15 in Berlin, for the second time
    found = Times(cron="30 2 * * *", zone="Europe/Berlin").after(second)
    assert found == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)


ZONES = st.sampled_from(
    ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "Asia/Kathmandu"]
)
CRONS = st.sampled_from(
    ["30 2 * * *", "0 * * * *", "*/15 * * * *", "0 0 * * *", "59 23 28-31 * *", "15,45 1-3 * * 0"]
)
MOMENTS = st.datetimes(datetime(2025, 1, 1), datetime(2028, 1, 1), timezones=st.just(UTC))


@given(CRONS, ZONES, MOMENTS)
def test_the_next_time_is_later_whole_seconds_and_next_until_it_comes(
    cron: str, zone: str, moment: datetime
) -> None:
    times = Times(cron=cron, zone=zone)
    found = times.after(moment)
    assert found > moment
    assert found.microsecond == 0
    assert times.after(found - timedelta(seconds=1)) == found
    assert times.after(moment + (found - moment) / 2) == found


@given(st.timedeltas(timedelta(seconds=1), timedelta(days=40)), MOMENTS, MOMENTS)
def test_every_counts_from_its_anchor(every: timedelta, anchor: datetime, at: datetime) -> None:
    times = Times.of(cron=None, every=period(every - every % timedelta(seconds=1)), anchor=anchor)
    found = times.after(at)
    assert times.every is not None
    assert at < found
    assert (found - times.anchor) % times.every == timedelta(0)
    assert found == times.anchor or found - at <= times.every


def test_every_is_counted_in_time_that_passes_not_by_clocks() -> None:
    times = Times.of(cron=None, every="1d", anchor=datetime(2026, 3, 28, 12, tzinfo=UTC))
    after = times.next_runs(datetime(2026, 3, 28, 12, tzinfo=UTC), 2)
    assert after == [datetime(2026, 3, day, 12, tzinfo=UTC) for day in (29, 30)]
    assert Times.of(cron=None, every="7d").after(YEAR[0]).weekday() == 0


def test_an_anchor_that_is_to_come_is_the_first_run() -> None:
    anchor = datetime(2030, 1, 1, tzinfo=UTC)
    assert Times.of(cron=None, every="15m", anchor=anchor).after(YEAR[0]) == anchor


@given(st.integers(1, 10**8))
def test_a_time_between_runs_is_written_as_it_is_read(seconds: int) -> None:
    every = timedelta(seconds=seconds)
    assert period(in_units(every)) == every


@pytest.mark.parametrize("missed", ["none", "one", "all"])
def test_a_run_that_is_due_now_is_sent_whatever_happens_to_missed_ones(missed: str) -> None:
    due = YEAR[0]
    expected = Step(due=due, skipped=0, next_run=due + HOUR)
    times = Times(every=HOUR)
    assert step(times, missed, due, due) == expected
    assert step(times, missed, due, due + LATE) == expected


@pytest.mark.parametrize("times", [Times(every=HOUR), Times(cron="0 * * * *", zone="Asia/Tokyo")])
def test_of_missed_runs_none_the_last_or_each_is_sent(times: Times) -> None:
    due = YEAR[0]
    now = due + 2 * HOUR + LATE + timedelta(seconds=1)
    later = due + 3 * HOUR
    assert step(times, "none", due, now) == Step(due=None, skipped=3, next_run=later)
    assert step(times, "one", due, now) == Step(due=due + 2 * HOUR, skipped=2, next_run=later)
    assert step(times, "all", due, now) == Step(due=due, skipped=0, next_run=due + HOUR)
    # the last one is not too late
    in_time = step(times, "none", due, due + 2 * HOUR + LATE)
    assert in_time == Step(due=due + 2 * HOUR, skipped=2, next_run=later)


def test_very_many_missed_runs_are_skipped_in_several_steps() -> None:
    times, due = Times(cron="* * * * *"), YEAR[0]
    now = due + 3000 * MINUTE
    first = step(times, "one", due, now)
    assert first == Step(due=None, skipped=MOST_SKIPPED, next_run=due + MOST_SKIPPED * MINUTE)
    steps, total = 1, first.skipped
    while first.due is None:
        first, steps = step(times, "one", first.next_run, now), steps + 1
        total += first.skipped
    assert (first.due, first.next_run) == (now, now + MINUTE)
    assert total == 3000
    assert steps == 3
    # of times between runs, they need not be counted one by one
    often = step(Times(every=timedelta(seconds=1)), "one", due, now)
    assert often.skipped == 180_000


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"cron": "* * *"}, "expected five fields"),
        ({"cron": "0 0 2 * * *"}, "expected five fields"),
        ({"cron": "61 * * * *"}, "the minute, '61', is not valid: 0 to 59"),
        ({"cron": "0 24 * * *"}, "the hour, '24', is not valid"),
        ({"cron": "0 0 x * *"}, "the day of month, 'x', is not valid"),
        ({"cron": "0 0 * FOO *"}, "the month, 'FOO', is not valid: 1 to 12, or JAN to DEC"),
        ({"cron": "0 0 * * 8"}, "the day of week, '8', is not valid"),
        ({"cron": "0 0 30 2 *"}, "the day of month, '30', is not valid"),
        ({"cron": "0 2 * * *", "zone": "Europe/Belin"}, "did you mean 'Europe/Berlin'"),
        ({"cron": "0 2 * * *", "zone": "../etc"}, "no time zone '../etc'"),
        ({"cron": "0 2 * * *", "anchor": YEAR[0]}, "an anchor is for `every`"),
        ({"every": "0s"}, "every 0s: expected whole seconds, from 1 s"),
        ({"every": timedelta(seconds=0.5)}, "expected whole seconds"),
        ({"every": timedelta(seconds=1.5)}, "expected whole seconds"),
        ({"every": "40000d"}, "to 36,525 days"),
        ({"every": "99999999999999d"}, "to 36,525 days"),
        ({"every": "often"}, "expected a time such as 30s"),
        ({"every": 15}, "expected a time such as 30s"),
        ({"every": "1h", "anchor": datetime(2026, 1, 1)}, "expected a datetime with a time zone"),
        ({}, "give one of both"),
        ({"cron": "0 2 * * *", "every": "1h"}, "give one of both"),
    ],
    ids=str,
)
def test_a_mistake_is_named(given: dict[str, object], problem: str) -> None:
    with pytest.raises(saf.UsageError) as raised:
        Times.of(**{"cron": None, "every": None, **given})  # type: ignore[arg-type]
    assert problem in str(raised.value)
