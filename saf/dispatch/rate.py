"""A rate: how many messages go to an endpoint in a time, however many processes send them.

Each process takes the share of the rate that it has of the shards. A rate is kept on average: what
is left unused of one second may be used in the next, and no more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
FORM = re.compile(r"(\d{1,7})/(s|min|h)")


def per_second(text: str) -> float:
    """How many messages a second a rate allows.

    >>> per_second("100/s"), per_second("30/min")
    (100.0, 0.5)

    Raises:
        ValueError: it is no rate, or allows nothing.
    """
    found = FORM.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise ValueError(f"{text!r} is no rate such as '100/s', '30/min' or '500/h'")
    return int(found[1]) / UNITS[found[2]]


@dataclass(kw_only=True)
class Bucket:
    """What may be sent now; it fills with time.

    >>> bucket = Bucket(per_second=2.0)
    >>> [bucket.take(now=at) for at in (10.0, 10.0, 10.0, 10.25, 10.5)]
    [0.0, 0.0, 0.5, 0.25, 0.0]
    """

    per_second: float
    """How fast it fills, and, with at least one, how much it holds."""
    share: float = 1.0
    """The part of it that is this process's."""
    _tokens: float = 1.0
    _at: float | None = None

    def take(self, now: float) -> float:
        """Take one, and return 0; or return in how many seconds there will be one."""
        speed = self.per_second * self.share
        if speed <= 0:
            return 1.0
        most = max(1.0, speed)
        if self._at is None:
            self._tokens = most
        else:
            self._tokens = min(most, self._tokens + (now - self._at) * speed)
        self._at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / speed
