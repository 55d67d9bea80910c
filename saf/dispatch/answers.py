"""The meaning of an endpoint's answer, for the message and for the endpoint. Pure policy.

    2xx                     the message is done
    410                     the endpoint is gone: it is disabled, the message waits
    408, 425, 429, 5xx      the message waits, as it does without an answer
    3xx                     the message waits: a redirect is not followed
    any other 4xx           the message is rejected: a dead letter, or it waits, as configured
    a fault of a call       the message has failed, and waits; the endpoint is up
    a reply over the limit  as for a fault

If a message waits, the endpoint may be down; see `saf.dispatch.breaker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum

from saf.dispatch.replies import Reply

KEPT = 200
"""Bytes of an answer that are kept with the attempt."""

LONGEST_RETRY_AFTER = 86400.0
"""Longest wait that an endpoint may ask for, in seconds."""


class Meaning(StrEnum):
    """The meaning of an answer."""

    DONE = "done"
    WAITS = "waits"
    FAILED = "failed"
    REJECTED = "rejected"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of one request."""

    meaning: Meaning
    seconds: float
    """Time until the answer came, or the request was given up."""
    status: int | None = None
    """HTTP status; None without an answer."""
    error: str = ""
    """The error, with the first bytes of the answer."""
    retry_after: float | None = None
    """Seconds for which the endpoint asks to receive no requests."""
    reply: Reply | None = None
    """Reply to send back."""


LATER = frozenset({408, 425, 429})


def meaning_of(status: int, *, rejects: bool = True) -> Meaning:
    """Return the meaning of an HTTP status. ``rejects``: other 4xx reject the message.

    >>> [str(meaning_of(status)) for status in (200, 204, 302, 404, 410, 429, 503)]
    ['done', 'done', 'waits', 'rejected', 'gone', 'waits', 'waits']
    >>> str(meaning_of(404, rejects=False))
    'waits'
    """
    if status // 100 == 2:  # noqa: PLR2004 - as HTTP counts
        return Meaning.DONE
    if status == 410:  # noqa: PLR2004 - Gone
        return Meaning.GONE
    if status // 100 == 4 and status not in LATER and rejects:  # noqa: PLR2004 - as HTTP counts
        return Meaning.REJECTED
    return Meaning.WAITS


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Return the seconds that the header Retry-After asks for, given as seconds or as a date.

    >>> retry_after({"Retry-After": "120"}), retry_after({"Retry-After": "soon"}), retry_after({})
    (120.0, None, None)
    >>> now = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
    >>> retry_after({"Retry-After": "Sat, 31 Jan 2026 12:00:30 GMT"}, now)
    30.0
    >>> print(retry_after({"Retry-After": "Sat, 31 Jan 2026 12:00:30 +99999999999999999999"}))
    None
    """
    value = headers.get("Retry-After", "").strip()
    if not value:
        return None
    if value.isascii() and value.isdigit():
        return min(float(value[:10]), LONGEST_RETRY_AFTER)
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # OverflowError for an offset of many digits
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)
