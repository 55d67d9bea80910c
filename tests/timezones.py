"""Time zones that ``datetime`` allows and nobody expects."""

from __future__ import annotations

from datetime import datetime, tzinfo


class Nowhere(tzinfo):
    """A time zone that does not know how far it is from UTC."""

    def utcoffset(self, _moment: datetime | None) -> None:
        return None

    def dst(self, _moment: datetime | None) -> None:
        return None

    def tzname(self, _moment: datetime | None) -> str:
        return "nowhere"
