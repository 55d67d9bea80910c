"""A rate: how many messages go to an endpoint in a time, however many processes send them.

Each process takes the share of the rate that it has of the shards. A rate is kept on average: what
is left unused of one second may be used in the next, and no more. A key is sent by one process, so
its messages are simply so far apart.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

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
        raise ValueError(f"{text!r} is not a rate such as '100/s', '30/min' or '500/h'")
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


@dataclass(kw_only=True)
class Apart:
    """How far apart the messages of each key are.

    >>> apart = Apart(seconds=2.0)
    >>> apart.sent("a", now=10.0)
    >>> apart.wait("a", now=10.5), apart.wait("b", now=10.5), apart.wait("a", now=12.0)
    (1.5, 0.0, 0.0)
    """

    seconds: float
    _sent: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """When each key was sent last, in this order; who may be sent again is forgotten."""

    def wait(self, key: str, now: float) -> float:
        """In how many seconds the next message of a key may be sent."""
        return max(0.0, self._sent.get(key, now - self.seconds) + self.seconds - now)

    def sent(self, key: str, now: float) -> None:
        """Note that a message of a key is sent."""
        self._sent.pop(key, None)
        self._sent[key] = now
        while next(iter(self._sent.values())) <= now - self.seconds:
            self._sent.popitem(last=False)
