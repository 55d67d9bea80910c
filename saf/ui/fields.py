"""Fields of a form, or of the filter above a table, as the pages read them.

A field that cannot be parsed raises `UsageError`.
"""

from __future__ import annotations

from datetime import datetime

from saf.errors import UsageError


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
        raise UsageError(f"{text!r} is not a valid number")
    return int(text)
