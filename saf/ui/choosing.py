"""The choice of a form among messages set aside, and the job for a decision about it.

A decision takes two steps. The first counts, and its page remembers the last number at each broker.
The second, a job (`begin`), covers only messages up to these numbers, so later ones are left alone.

`moment_of` and `number_of` parse the fields of a form, and those of the filter above a table. A
field that cannot be parsed, or a form without a choice, raises `UsageError`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from starlette.responses import Response

from saf.errors import UsageError
from saf.operating.decide import Decision
from saf.setaside.dead import Filter
from saf.setaside.parked_messages import ParkedFilter
from saf.ui.site import Visit

Chosen = TypeVar("Chosen", Filter, ParkedFilter)


def chosen(
    visit: Visit, wanted: Chosen, of: Callable[[list[int]], Chosen], what: str
) -> dict[str, Chosen]:
    """Return the filter for each broker that a form has chosen.

    Args:
        visit: contains the form.
        wanted: the filter above the table, if all matching messages are chosen.
        of: returns a filter for messages with these numbers.
        what: word for the messages, in error texts.

    Raises:
        UsageError: no message was chosen.
    """
    if visit.given("matching"):
        broker = visit.given("broker")
        return dict.fromkeys([broker] if broker else visit.site.brokers.names(), wanted)
    ids: dict[str, list[int]] = defaultdict(list)
    for text in visit.form.get("id", []):
        name, _, number = text.rpartition(":")
        ids[name].append(number_of(number) or 0)
    if not ids:
        raise UsageError(f"nothing was chosen: tick {what}, or choose all that match")
    return {name: of(numbers) for name, numbers in ids.items()}


def begin(
    visit: Visit,
    decision: Decision[Chosen],
    chosen: Mapping[str, Chosen],
    *,
    what: str,
    about: str,
) -> Response:
    """Begin the confirmed job, which does ``what`` with the messages named by ``about``.

    Raises:
        UsageError: no chosen message has been counted.
    """
    last_ids: dict[str, int] = {}
    for text in visit.form.get("through", []):
        name, _, number = text.rpartition(":")
        last_ids[name] = number_of(number) or 0
    counted = {}
    for name, selection in chosen.items():
        broker = visit.site.brokers.place(name)
        if broker is not None and name in last_ids:
            counted[name] = broker, replace(selection, through=last_ids[name])
    if not counted:
        raise UsageError(f"nothing was chosen: choose {about}, or all that match a filter")
    job = visit.site.jobs.begin(
        decision,
        counted,
        what=what,
        person=visit.visitor.name,
        why=visit.given("why") or "",
        expected=number_of(visit.given("expected")) or 0,
    )
    return visit.to(f"/jobs/{job.number}")


def moment_of(text: str | None) -> datetime | None:
    """Return a point in time; without an offset, it is in this machine's time zone.

    >>> moment_of("2026-01-31T13:00:00+01:00").timestamp()
    1769860800.0
    >>> moment_of(None)
    """
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise UsageError(f"{text!r} is not a time such as 2026-01-31T12:00:00Z") from None


def number_of(text: str | None) -> int | None:
    """Return a number as the pages write it.

    >>> number_of("12"), number_of(None)
    (12, None)
    """
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):  # noqa: PLR2004 - of a bigint
        raise UsageError(f"{text!r} is not a number of these pages")
    return int(text)
