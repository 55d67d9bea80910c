"""A rate: limit of messages per time to an endpoint, for all sending processes together.

Each process takes a part of the rate equal to its part of the shards. A rate is kept on average:
capacity unused in one second may be used in the next second, but not later. A key is sent by one
process, so its messages are simply kept a fixed time apart.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
FORM = re.compile(r"(\d{1,7})/(s|min|h)")


def per_second(text: str) -> float:
    """Return the messages per second that a rate allows.

    >>> per_second("100/s"), per_second("30/min")
    (100.0, 0.5)

    Raises:
        ValueError: the text is not a rate, or the rate is 0.
    """
    found = FORM.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise ValueError(f"{text!r} is not a rate such as '100/s', '30/min' or '500/h'")
    return int(found[1]) / UNITS[found[2]]


@dataclass(kw_only=True)
class Bucket:
    """Tokens for messages that may be sent now; it fills with time.

    >>> bucket = Bucket(per_second=2.0)
    >>> [bucket.take(now=at) for at in (10.0, 10.0, 10.0, 10.25, 10.5)]
    [0.0, 0.0, 0.5, 0.25, 0.0]
    """

    per_second: float
    """Tokens added per second, and the bucket's capacity, which is at least one."""
    share: float = 1.0
    """This process's part of the rate."""
    _tokens: float = 1.0
    _at: float | None = None

    def take(self, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
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
    """Minimum time between the messages of a key.

    >>> apart = Apart(seconds=2.0)
    >>> apart.sent("a", now=10.0)
    >>> apart.wait("a", now=10.5), apart.wait("b", now=10.5), apart.wait("a", now=12.0)
    (1.5, 0.0, 0.0)
    """

    seconds: float
    _sent: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Time of each key's last message, in this order; keys that may send again are removed."""

    def wait(self, key: str, now: float) -> float:
        """Return the seconds until the next message of a key may be sent."""
        return max(0.0, self._sent.get(key, now - self.seconds) + self.seconds - now)

    def sent(self, key: str, now: float) -> None:
        """Note that a message of a key is being sent."""
        self._sent.pop(key, None)
        self._sent[key] = now
        while next(iter(self._sent.values())) <= now - self.seconds:
            self._sent.popitem(last=False)
