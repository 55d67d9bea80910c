"""Finding: search a log for a message_id, which no index has.

An index on message ids would cost every sender. But a log is appended to, so the rows of each slot
of its ring lie roughly in the order in which they were written. A log is searched from its end,
`STEP_PAGES` at a time, until the message is found, all pages were read, or the time is over. In the
last case, the answer shows how far the search got, and where to continue.

The search is faster if the caller knows roughly when the message was written: halving finds the
page of that time, and the pages after it are read first. Version 7 UUIDs contain a time. Rows of a
long transaction come later than their time suggests; a message that is not near its time is
searched for from the end, like any other.

Pages are read by their place in the table, so a step costs the same in a log of any size.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

from saf.database import fetch
from saf.errors import UsageError
from saf.log.ring import AGE_COLUMN, SLOT_ROWS, SLOTS
from saf.message import FIRST_MOMENT, LAST_DAY

STEP_PAGES = 1024
"""Pages that a statement reads: 8 MB."""

BEFORE_PAGES = 16
"""Pages to read before the page of a given time: backends fill several pages side by side."""

CLOCKS = timedelta(seconds=2)
"""Difference between the clocks of a sender and a broker that does not slow the search."""

LAST_PAGES = 8
"""Pages at a slot's end among which the newest row is; dead transactions leave pages empty."""

PAGES = f"""
SELECT log, slot, pg_relation_size(('saf.' || log || '_' || slot)::regclass)
                  / current_setting('block_size')::bigint
FROM unnest(ARRAY['outbox', 'inbox']) AS log CROSS JOIN generate_series(0, {SLOTS - 1}) AS slot
"""
IN_PAGES = f"""
id / {SLOT_ROWS} %% {SLOTS} = %(slot)s::bigint
AND ctid >= %(first)s::tid AND ctid < %(after)s::tid
"""
NEWEST = f"SELECT max(id), min({{age}}), max({{age}}) FROM {{log}} WHERE {IN_PAGES}"
LOOK = f"""
SELECT id, shard, txid::text FROM {{log}}
WHERE {IN_PAGES} AND message_id = %(message_id)s ORDER BY id DESC LIMIT 1
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A message's row in a log, as the log's index finds it."""

    id: int
    shard: int
    txid: str


@dataclass(frozen=True, kw_only=True)
class Search:
    """Result of a search for a message."""

    row: Row | None = None
    """The message's row; None: not found in the pages that were read."""
    place: str | None = None
    """Where to continue; None if the message was found, or all pages were read."""
    since: datetime | None = None
    """All messages written since then were read; None if `place` is None."""
    part: float = 1.0
    """Part of the log that was read, from 0 to 1."""

    @property
    def said(self) -> str:
        """How far the search got, in words.

        >>> Search(place="1.0", since=datetime(2026, 1, 31, tzinfo=UTC), part=0.256).said
        'since 2026-01-31 00:00:00+00:00 (26 % of it)'
        """
        since = "" if self.since is None else f"since {self.since.isoformat(' ', 'seconds')} "
        return f"{since}({self.part:.0%} of it)".replace("%", " %")


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Some pages of a slot."""

    slot: int
    first: int
    after: int
    """The page after the last."""


def written(connection: psycopg.Connection[Any]) -> dict[str, list[Pages]]:
    """Return the slots of each log that have pages, for `find`."""
    found: dict[str, list[Pages]] = defaultdict(list)
    for log, slot, pages in fetch(connection, PAGES):
        if pages:
            found[log].append(Pages(slot=slot, first=0, after=pages))
    return found


def find(
    connection: psycopg.Connection[Any],
    log: str,
    message_id: UUID,
    slots: Sequence[Pages],
    *,
    seconds: float,
    about: datetime | None = None,
    place: str | None = None,
) -> Search:
    """Search for a message, the newest with this id. Only reads.

    Args:
        connection: to the broker.
        log: outbox or inbox.
        message_id: of the message.
        slots: of this log, as `written` returns them.
        seconds: after this time no further statement begins; at least one step is made.
        about: when it was sent.
        place: where to continue an earlier search.

    Raises:
        UsageError: no search has returned this place.
    """
    until = time.monotonic() + seconds
    table = _Table(connection, log)
    slots = table.newest_first(slots)
    steps = [*_steps(slots, _place(place))]
    when = about or time_of(message_id)
    if when is not None and place is None and slots:
        for pages in _around(table, slots, when):
            if (row := table.look(message_id, pages)) is not None:
                return Search(row=row)
            if time.monotonic() > until - seconds / 2:
                break
    for number, pages in enumerate(steps, start=1):
        if (row := table.look(message_id, pages)) is not None:
            return Search(row=row)
        if number < len(steps) and time.monotonic() > until:
            left = sum(part.after - part.first for part in steps[number:])
            return Search(
                place=f"{pages.slot}.{pages.first}",
                since=table.oldest(pages),
                part=1 - left / sum(part.after for part in slots),
            )
    return Search()


def time_of(message_id: UUID) -> datetime | None:
    """Return the time that an id contains, or None.

    >>> time_of(UUID("017f22e2-79b0-7cc3-98c4-dc0c0c07398f")).isoformat()
    '2022-02-22T19:22:22+00:00'
    >>> time_of(UUID("c232ab00-9414-41ec-b3c8-9f6bdeced846"))
    """
    if message_id.version != 7:  # noqa: PLR2004 - of RFC 9562
        return None
    try:
        return datetime.fromtimestamp((message_id.int >> 80) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def first_page(pages: int, newest: Callable[[int], datetime | None], when: datetime) -> int:
    """Return the first page whose newest row is not before a time, by halving.

    A page without rows counts as before the time.

    >>> hours = [datetime(2026, 1, 1, hour) for hour in (1, 3, 3, 7)]
    >>> [first_page(4, hours.__getitem__, datetime(2026, 1, 1, hour)) for hour in (0, 3, 5, 8)]
    [0, 1, 3, 4]
    """
    low, high = 0, pages
    while low < high:
        middle = (low + high) // 2
        found = newest(middle)
        if found is None or found < when:
            low = middle + 1
        else:
            high = middle
    return low


class _Table:
    """A log, read by pages."""

    def __init__(self, connection: psycopg.Connection[Any], log: str) -> None:
        self._connection = connection
        self._log = log
        parts = {"log": sql.Identifier("saf", log), "age": sql.Identifier(AGE_COLUMN[log])}
        self._newest = sql.SQL(NEWEST).format(**parts)
        self._look = sql.SQL(LOOK).format(**parts)

    def newest_first(self, slots: Sequence[Pages]) -> Sequence[Pages]:
        """Return the slots, the most recently written first."""
        return slots if len(slots) < 2 else sorted(slots, key=self._last_id, reverse=True)  # noqa: PLR2004

    def look(self, message_id: UUID, pages: Pages) -> Row | None:
        """Search some pages for a message."""
        params = _params(pages) | {"message_id": message_id}
        for id_, shard, txid in fetch(self._connection, self._look, params):
            return Row(id=id_, shard=shard, txid=txid)
        return None

    def oldest(self, pages: Pages) -> datetime | None:
        """Return when the oldest row of the first page was written."""
        return self._ages(pages.slot, pages.first)[0]

    def newest(self, slot: int, page: int) -> datetime | None:
        """Return when the newest row of a page was written."""
        return self._ages(slot, page)[1]

    def _ages(self, slot: int, page: int) -> tuple[datetime | None, datetime | None]:
        params = _params(Pages(slot=slot, first=page, after=page + 1))
        ((_, oldest, newest),) = fetch(self._connection, self._newest, params)
        return oldest, newest

    def _last_id(self, slot: Pages) -> int:
        last = Pages(slot=slot.slot, first=max(0, slot.after - LAST_PAGES), after=slot.after)
        ((id_, _, _),) = fetch(self._connection, self._newest, _params(last))
        return -1 if id_ is None else int(id_)


def _params(pages: Pages) -> dict[str, Any]:
    return {"slot": pages.slot, "first": f"({pages.first},0)", "after": f"({pages.after},0)"}


def _steps(slots: Sequence[Pages], place: tuple[int, int] | None) -> Iterator[Pages]:
    """Yield the pages to read, newest first; with a place whose slot exists, those before it.

    >>> both = [Pages(slot=3, first=0, after=1500), Pages(slot=2, first=0, after=1024)]
    >>> [(one.slot, one.first, one.after) for one in _steps(both, None)]
    [(3, 476, 1500), (3, 0, 476), (2, 0, 1024)]
    >>> [(one.slot, one.first, one.after) for one in _steps(both, (3, 476))]
    [(3, 0, 476), (2, 0, 1024)]
    """
    rest = list(slots)
    if place is not None:
        number, page = place
        at = next((at for at, part in enumerate(slots) if part.slot == number), None)
        if at is not None:
            pages = slots[at]
            rest = [Pages(slot=number, first=0, after=min(page, pages.after)), *slots[at + 1 :]]
    for part in rest:
        for after in range(part.after, 0, -STEP_PAGES):
            yield Pages(slot=part.slot, first=max(0, after - STEP_PAGES), after=after)


def _around(table: _Table, slots: Sequence[Pages], when: datetime) -> Iterator[Pages]:
    """Yield the pages from a time on, in the newest slot that was begun before that time."""
    when = min(max(when, FIRST_MOMENT + CLOCKS), LAST_DAY).astimezone(UTC)
    since = when - CLOCKS
    chosen = slots[-1]
    for pages in slots:
        begun = table.oldest(pages)
        if begun is not None and begun <= when + CLOCKS:
            chosen = pages
            break
    first = first_page(chosen.after, lambda page: table.newest(chosen.slot, page), since)
    for page in range(max(0, first - BEFORE_PAGES), chosen.after, STEP_PAGES):
        yield Pages(slot=chosen.slot, first=page, after=min(page + STEP_PAGES, chosen.after))


def _place(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    if (match := re.fullmatch(r"([0-9]{1,2})\.([0-9]{1,10})", text)) is None:
        raise UsageError(f"{text!r} is not a place where a search ended")
    return int(match[1]), int(match[2])
