"""What the answer of an endpoint means for the message, and for the endpoint. Pure policy.

    2xx                     the message is done
    410                     the endpoint is gone: it is disabled, the message waits
    408, 425, 429, 5xx      the message waits; so it does where there is no answer
    3xx                     the message waits: a redirect is not followed
    any other 4xx           the message is rejected: a dead letter, or it waits, as configured
    a fault of a call       the message has failed, and waits; the endpoint is up
    a reply that is larger  the same

Where a message waits, the endpoint may be down; see `saf.dispatch.breaker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum

from saf.dispatch.replies import Reply

KEPT = 200
"""How many bytes of an answer are kept with the attempt."""

LONGEST_RETRY_AFTER = 86400.0
"""The longest time that an endpoint may ask for, in seconds."""


class Meaning(StrEnum):
    """What an answer means."""

    DONE = "done"
    WAITS = "waits"
    FAILED = "failed"
    REJECTED = "rejected"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of one request."""

    meaning: Meaning
    seconds: float
    """Until there was an answer, or the request was given up."""
    status: int | None = None
    """Of HTTP; None if there was no answer."""
    error: str = ""
    """What went wrong, with the first bytes of the answer."""
    retry_after: float | None = None
    """How many seconds the endpoint asks to be left alone."""
    reply: Reply | None = None
    """What is to be sent back."""


LATER = frozenset({408, 425, 429})


def meaning_of(status: int, *, rejects: bool = True) -> Meaning:
    """What a status of HTTP means; ``rejects``: whether other 4xx reject the message.

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
    """How many seconds the header Retry-After asks for: it has seconds, or a date.

    >>> retry_after({"Retry-After": "120"}), retry_after({"Retry-After": "soon"}), retry_after({})
    (120.0, None, None)
    >>> now = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
    >>> retry_after({"Retry-After": "Sat, 31 Jan 2026 12:00:30 GMT"}, now)
    30.0
    >>> print(retry_after({"Retry-After": "Sat, 31 Jan 2026 12:00:30 +99999999999999999999"}))
    None
    """
    said = headers.get("Retry-After", "").strip()
    if not said:
        return None
    if said.isascii() and said.isdigit():
        return min(float(said[:10]), LONGEST_RETRY_AFTER)
    try:
        moment = parsedate_to_datetime(said)
    except (ValueError, OverflowError):  # the latter for an offset of many digits
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)
