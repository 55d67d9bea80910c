"""The wording of counts, moments and senders' texts for users, the same everywhere."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable
from datetime import datetime

SEPARATOR = "Zs"
"""Unicode category of characters that Python does not call printable, but that do no harm."""


NAMED = 3
"""How many keys or brokers a sentence names."""


def counted(count: int, thing: str, things: str = "") -> str:
    """Return a number of things in words.

    >>> counted(1, "message"), counted(1200, "message"), counted(0, "entry", "entries")
    ('1 message', '1,200 messages', '0 entries')
    """
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def first_of(names: Iterable[str], more: int = 0) -> str:
    """Return the first different names in brackets, and whether there are others.

    ``more`` is the number of things without a name here.

    >>> first_of(["A-1", "A-1", "A-2"]), first_of(["A-1"], more=2), first_of("abcd"), first_of([])
    ('(A-1, A-2)', '(A-1, …)', '(a, b, c, …)', '')
    """
    different = [*dict.fromkeys(names)]
    if not different:
        return ""
    others = ["…"] if more or different[NAMED:] else []
    return f"({', '.join([*different[:NAMED], *others])})"


def none_at(
    things: str, places: Collection[str], *, matching: bool = False, others: Collection[str] = ()
) -> str:
    """Say that nothing was found, and where; ``others`` are stores that were not asked.

    >>> none_at("dead letters", ["shop"]), none_at("dead letters", ["shop", "mom"], matching=True)
    ('No dead letters at shop.', 'No matching dead letters at shop, mom.')
    >>> none_at("routes", range(600)), none_at("routes", [])
    ('No routes at 600 brokers.', 'No routes: no broker was asked.')
    >>> none_at("routes", ["shop"], others=["mom"])
    'No routes at shop. Stores are asked only with --broker: mom.'
    """
    what = f"No {'matching ' * matching}{things}"
    where = f" at {named(places)}" if places else ": no broker was asked"
    how = f" Stores are asked only with --broker: {named(others)}." if others else ""
    return f"{what}{where}.{how}"


def named(brokers: Collection[str]) -> str:
    """Return the names of brokers, or how many they are.

    >>> named(["shop", "mom"]), named(range(600))
    ('shop, mom', '600 brokers')
    """
    return ", ".join(brokers) if len(brokers) <= MOST_PLACES else f"{len(brokers):,} brokers"


MOST_PLACES = 8
"""How many brokers are named; more are counted."""


def at(moment: datetime) -> str:
    """Return a moment to the second, with this machine's time zone.

    >>> from datetime import timezone, timedelta
    >>> shown = at(datetime(2026, 1, 31, 12, 0, 7, 500, tzinfo=timezone.utc))
    >>> datetime.fromisoformat(shown).astimezone(timezone.utc).isoformat()
    '2026-01-31T12:00:07+00:00'
    """
    return moment.astimezone().isoformat(sep=" ", timespec="seconds")


def paused(since: datetime | None, by: str | None, why: str | None) -> str:
    """Say when something was paused, by whom and why; return nothing if it is not paused.

    >>> from datetime import timezone
    >>> paused(datetime(2026, 1, 31, tzinfo=timezone.utc), "eve", "ledger closed")[:17]
    'paused by eve at '
    >>> paused(None, None, None)
    ''
    """
    if since is None:
        return ""
    return f"paused by {by} at {at(since)}" + f": {why}" * bool(why)


def age(seconds: float | None) -> str:
    """Return an age in its two leading units: users compare ages, they do not add them.

    >>> age(None), age(7.2), age(3671), age(200000)
    ('-', '7 s', '1 h 1 min', '2 d 7 h')
    """
    if seconds is None:
        return "-"
    left = round(seconds)
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def shown(text: str, *, lines: bool = False) -> str:
    r"""Return a text that cannot control a terminal.

    Characters that would move the cursor, ring, colour or reorder text become escapes.

    >>> shown("Zürich \x1b[2J\x07 \u202egnp.exe\n")
    'Zürich \\x1b[2J\\x07 \\u202egnp.exe\\n'
    >>> shown("two\nlines", lines=True)
    'two\nlines'
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        or unicodedata.category(character) == SEPARATOR
        or (lines and character in "\n\t")
        else character.encode("unicode_escape").decode()
        for character in text
    )
