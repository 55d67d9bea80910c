"""The times of a schedule's runs, and what to do about runs that are due.

A schedule runs by cron text in a time zone, or at equal distances.

*Cron.* Five fields: minute, hour, day of the month, month, day of the week. cronsim evaluates them,
which follows Debian's cron, also where clocks change:

- A time that does not exist, such as 02:30 when clocks go from 02:00 to 03:00, runs once, right
  after the gap, at 03:00.
- A time that exists twice runs once, the first time.
- If the minute or the hour begins with ``*``, there is a run at each matching minute that really
  passes: both times in an hour that exists twice, and not in an hour that does not exist.

*Every.* Runs are ``anchor`` + n times ``every``, in time that really passes, whatever clocks show.
The default anchor is a Monday, midnight in UTC.

Due times are whole seconds. Nothing here reads a clock.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from cronsim import CronSim, CronSimError

from saf.errors import UsageError

ANCHOR = datetime(2001, 1, 1, tzinfo=UTC)
"""Default anchor of ``every``: a Monday."""
LONGEST = timedelta(days=36525)
LATE = timedelta(minutes=5)
"""How late a run may be sent that is skipped if it was missed."""
MOST_SKIPPED = 1000
"""Runs of a cron text that one transaction skips."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
PERIOD = re.compile(r"(?:\d+[smhdw])+")
FIELDS = {
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day-of-month": "1 to 31",
    "month": "1 to 12, or JAN to DEC",
    "day-of-week": "0 to 7, or SUN to SAT",
}
"""The fields of cron text, as cronsim names them, and their values."""
SECOND = timedelta(seconds=1)


def period(text: str | timedelta) -> timedelta:
    """Return a time between runs, such as ``15m`` or ``1h30m``.

    >>> period("15m"), period("1h30m").total_seconds()
    (datetime.timedelta(seconds=900), 5400.0)

    Raises:
        UsageError: it is not such a time, shorter than a second, or not whole seconds.
    """
    if isinstance(text, timedelta):
        found = text
    elif not isinstance(text, str) or not PERIOD.fullmatch(text):
        raise UsageError(f"every {text!r}: expected a time such as 30s, 15m, 1h30m, 1d or 1w")
    else:
        parts = re.findall(r"(\d+)([smhdw])", text)
        seconds = sum(int(number) * UNITS[unit] for number, unit in parts)
        found = timedelta(seconds=min(seconds, LONGEST.total_seconds() + 1))
    if not SECOND <= found <= LONGEST or found % SECOND:
        raise UsageError(
            f"every {text if isinstance(text, str) else found}: expected whole seconds, from 1 s "
            f"to {LONGEST.days:,} days"
        )
    return found


def in_units(every: timedelta) -> str:
    """Return a time between runs as text; the inverse of `period`.

    >>> in_units(timedelta(minutes=90)), in_units(timedelta(days=14)), in_units(timedelta(days=1))
    ('1h30m', '2w', '1d')
    """
    left, parts = int(every.total_seconds()), []
    for unit, seconds in reversed(UNITS.items()):
        if unit == "w" and left % seconds:
            continue  # 8d, not 1w1d
        number, left = divmod(left, seconds)
        parts += [f"{number}{unit}"] if number else []
    return "".join(parts)


def zone_named(name: str) -> ZoneInfo:
    """Return a time zone.

    >>> zone_named("Europe/Berln")
    Traceback (most recent call last):
    saf.errors.UsageError: no time zone 'Europe/Berln' (did you mean 'Europe/Berlin'?)

    Raises:
        UsageError: no time zone has this name here.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        near = difflib.get_close_matches(str(name), available_timezones(), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ", such as Europe/Berlin or UTC"
        raise UsageError(f"no time zone {name!r}{hint}") from None


def cron_text(text: str) -> str:
    """Return cron text with single spaces, after checking its fields.

    >>> cron_text("0  2 * * MON-FRI")
    '0 2 * * MON-FRI'
    >>> cron_text("0 25 * * *")
    Traceback (most recent call last):
    saf.errors.UsageError: cron '0 25 * * *': the hour, '25', is not valid: 0 to 23

    Raises:
        UsageError: names the field at fault.
    """
    if not isinstance(text, str) or len(parts := text.split()) != len(FIELDS):
        raise UsageError(
            f"cron {text!r}: expected five fields, minute, hour, day of the month, month and day "
            "of the week, such as '0 2 * * *'"
        )
    try:
        CronSim(text, ANCHOR)
    except CronSimError as error:
        field = str(error).removeprefix("Bad ")
        part = parts[[*FIELDS].index(field)]
        raise UsageError(
            f"cron {text!r}: the {field.replace('-', ' ')}, {part!r}, is not valid: {FIELDS[field]}"
        ) from None
    return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Times:
    """When a schedule runs: by cron text, or at equal distances."""

    cron: str | None = None
    every: timedelta | None = None
    anchor: datetime = ANCHOR
    zone: str = "UTC"

    @classmethod
    def of(
        cls,
        *,
        cron: str | None,
        every: str | timedelta | None,
        anchor: datetime | None = None,
        zone: str = "UTC",
    ) -> Times:
        """Check what a user gives, and return it.

        Raises:
            UsageError: names the value at fault.
        """
        if (cron is None) == (every is None):
            raise UsageError("a schedule runs either by cron or every so often: give one of both")
        if anchor is not None and cron is not None:
            raise UsageError("an anchor is for `every`: cron has its own times")
        if anchor is not None and (not isinstance(anchor, datetime) or anchor.tzinfo is None):
            raise UsageError(f"anchor {anchor!r}: expected a datetime with a time zone")
        times = cls(
            cron=None if cron is None else cron_text(cron),
            every=None if every is None else period(every),
            anchor=(anchor or ANCHOR).astimezone(UTC).replace(microsecond=0),
            zone=zone,
        )
        zone_named(zone)
        times.after(ANCHOR)
        return times

    @cached_property
    def _zone(self) -> ZoneInfo:
        return zone_named(self.zone)

    def after(self, moment: datetime) -> datetime:
        """Return the first due time that is later than a moment, in UTC.

        >>> berlin = Times(cron="30 2 * * *", zone="Europe/Berlin")
        >>> print(berlin.after(datetime(2026, 3, 28, 12, tzinfo=UTC)))
        2026-03-29 01:00:00+00:00

        Raises:
            UsageError: no run follows within 50 years, or the zone is unknown here.
        """
        if self.every is not None:
            passed = (moment - self.anchor) // self.every
            return self.anchor + max(0, passed + 1) * self.every
        return next(self._by_cron(moment))

    def _by_cron(self, moment: datetime) -> Iterator[datetime]:
        for found in CronSim(str(self.cron), moment.astimezone(self._zone)):
            at = found.astimezone(UTC)
            # in an hour that exists twice, cronsim may begin with the first one
            if at > moment:
                yield at
        raise UsageError(f"cron {self.cron!r} has no run within 50 years")

    def skipping(self, due: datetime, now: datetime) -> tuple[int, datetime]:
        """Return how many due times follow ``due`` up to now, and the last one.

        Of cron text, at most `MOST_SKIPPED`.
        """
        if self.every is not None:
            number = max(0, (now - due) // self.every)
            return number, due + number * self.every
        number = 0
        while number < MOST_SKIPPED and (following := self.after(due)) <= now:
            number, due = number + 1, following
        return number, due

    def next_runs(self, moment: datetime, number: int) -> list[datetime]:
        """Return the next due times after a moment."""
        found: list[datetime] = []
        while len(found) < number:
            found.append(self.after(found[-1] if found else moment))
        return found

    def __str__(self) -> str:
        if self.every is not None:
            return f"every {in_units(self.every)}"
        return str(self.cron)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one transaction does about a schedule that is due."""

    due: datetime | None
    """Due time of the run to send; None: only skip."""
    skipped: int
    """Missed runs that are skipped."""
    next_run: datetime
    """Due time of the run after those."""


def step(times: Times, missed: str, due: datetime, now: datetime) -> Step:
    """Return what to do at ``now`` about a schedule whose next run is ``due``, which is past.

    >>> hourly, at = Times(every=timedelta(hours=1)), datetime(2026, 1, 1, 12, tzinfo=UTC)
    >>> for missed in ("none", "one", "all"):
    ...     done = step(hourly, missed, at, at + timedelta(hours=2, minutes=30))
    ...     print(missed, done.due and done.due.hour, done.skipped, done.next_run.hour)
    none None 3 15
    one 14 2 15
    all 12 0 13
    """
    if missed == "all":
        return Step(due=due, skipped=0, next_run=times.after(due))
    skipped, last = times.skipping(due, now)
    following = times.after(last)
    if following <= now:  # more than one transaction skips
        return Step(due=None, skipped=skipped, next_run=last)
    if missed == "none" and now - last > LATE:
        return Step(due=None, skipped=skipped + 1, next_run=following)
    return Step(due=last, skipped=skipped, next_run=following)
