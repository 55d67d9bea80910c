"""Finding: one message of a log by its message_id, which no index has.

An index by message ids would cost every sender. But a log is appended to, so the rows of each slot
of its ring lie about in the order in which they were written. A log is looked through from its end,
`STEP_PAGES` at a time, until the message is found, all of it was looked at, or the time is over.
Then the answer says how far that was, and where to go on.

Whoever knows about when the message was written has it found sooner: the page of that time is
looked for by halving, and what follows it is looked at first. An id of UUID's version 7 says when
by itself. Rows of a transaction that took long are later than their time says; what is not found
near its time is looked for from the end, as any other message.

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
"""How many pages a statement reads: 8 MB."""

BEFORE_PAGES = 16
"""How many pages are looked at before the one of a given time: backends fill some side by side."""

CLOCKS = timedelta(seconds=2)
"""How much the clocks of a sender and of a broker may differ before a message is found later."""

LAST_PAGES = 8
"""Of how many pages the newest row of a slot is one; those of a transaction that died have none."""

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
    """Where a message is in a log: what its index finds it by."""

    id: int
    shard: int
    txid: str


@dataclass(frozen=True, kw_only=True)
class Search:
    """What came of looking for a message."""

    row: Row | None = None
    """None: it is not in what was looked at."""
    place: str | None = None
    """Where to go on; None if it was found, or everything was looked at."""
    since: datetime | None = None
    """Everything that was written since then was looked at; None if there is no place to go on."""
    part: float = 1.0
    """How much of the log was looked at, of 1."""

    @property
    def said(self) -> str:
        """How far it came, for people.

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
    """Look for a message, the newest of this id. Only reads.

    Args:
        connection: of the broker.
        log: outbox or inbox.
        message_id: of the message.
        slots: of this log, as `written` gives them.
        seconds: after so long, no further statement begins; at least one step is made.
        about: when it was sent.
        place: where an earlier search has said to go on.

    Raises:
        UsageError: no search has said this place.
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
            left = sum(one.after - one.first for one in steps[number:])
            return Search(
                place=f"{pages.slot}.{pages.first}",
                since=table.oldest(pages),
                part=1 - left / sum(one.after for one in slots),
            )
    return Search()


def time_of(message_id: UUID) -> datetime | None:
    """Return when an id was made, if it says so.

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

    A page without rows counts as one before it.

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
    """A log, by its pages."""

    def __init__(self, connection: psycopg.Connection[Any], log: str) -> None:
        self._connection = connection
        self._log = log
        parts = {"log": sql.Identifier("saf", log), "age": sql.Identifier(AGE_COLUMN[log])}
        self._newest = sql.SQL(NEWEST).format(**parts)
        self._look = sql.SQL(LOOK).format(**parts)

    def newest_first(self, slots: Sequence[Pages]) -> Sequence[Pages]:
        """The slots, the one that was written last first."""
        return slots if len(slots) < 2 else sorted(slots, key=self._last_id, reverse=True)  # noqa: PLR2004

    def look(self, message_id: UUID, pages: Pages) -> Row | None:
        """Look for a message in some pages."""
        params = _params(pages) | {"message_id": message_id}
        for id_, shard, txid in fetch(self._connection, self._look, params):
            return Row(id=id_, shard=shard, txid=txid)
        return None

    def oldest(self, pages: Pages) -> datetime | None:
        """When the oldest row of the first page was written."""
        return self._ages(pages.slot, pages.first)[0]

    def newest(self, slot: int, page: int) -> datetime | None:
        """When the newest row of a page was written."""
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
    """Give the pages to look at, the newest first; those before a place, if its slot is there.

    >>> both = [Pages(slot=3, first=0, after=1500), Pages(slot=2, first=0, after=1024)]
    >>> [(one.slot, one.first, one.after) for one in _steps(both, None)]
    [(3, 476, 1500), (3, 0, 476), (2, 0, 1024)]
    >>> [(one.slot, one.first, one.after) for one in _steps(both, (3, 476))]
    [(3, 0, 476), (2, 0, 1024)]
    """
    rest = list(slots)
    if place is not None:
        number, page = place
        at = next((at for at, one in enumerate(slots) if one.slot == number), None)
        if at is not None:
            there = slots[at]
            rest = [Pages(slot=number, first=0, after=min(page, there.after)), *slots[at + 1 :]]
    for one in rest:
        for after in range(one.after, 0, -STEP_PAGES):
            yield Pages(slot=one.slot, first=max(0, after - STEP_PAGES), after=after)


def _around(table: _Table, slots: Sequence[Pages], when: datetime) -> Iterator[Pages]:
    """Give the pages from those of a time on, in the newest slot that was begun before it."""
    when = min(max(when, FIRST_MOMENT + CLOCKS), LAST_DAY).astimezone(UTC)
    since = when - CLOCKS
    chosen = slots[-1]
    for one in slots:
        begun = table.oldest(one)
        if begun is not None and begun <= when + CLOCKS:
            chosen = one
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
