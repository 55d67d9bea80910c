"""A breaker: whether an endpoint is up, and whose fault a failure is. Pure policy.

One request that fails says nothing about the endpoint: the message may be to blame. Several in a
row, with nothing that succeeds between them, are the endpoint's failure: the breaker opens. Then
nothing is sent but one message from time to time, a probe, until one succeeds.

An endpoint that is down does not use up the attempts of messages. So a failure does not count as an
attempt at first; the message is a suspect. If the endpoint accepts another message before the
breaker opens, it is up, and the attempts of all suspects count (`Breaker.succeeded`). If the
breaker opens, they do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
"""What is remembered of an attempt until it is known whether it counts."""


@dataclass(kw_only=True)
class Breaker(Generic[T]):
    """What one process knows of an endpoint while it takes it to be up.

    >>> breaker = Breaker[str](threshold=2)
    >>> breaker.failed("A-1"), breaker.succeeded()
    (False, ['A-1'])
    >>> breaker.failed("A-1"), breaker.failed("A-2"), breaker.succeeded()
    (False, True, [])
    """

    threshold: int
    """So many failures in a row open it."""
    failures: int = 0
    """How many requests have failed in a row."""
    _suspects: list[T] = field(default_factory=list)

    def failed(self, suspect: T) -> bool:
        """Note that an attempt has failed; return whether this opens the breaker."""
        self.failures += 1
        self._suspects.append(suspect)
        if self.failures < self.threshold:
            return False
        self.reset()
        return True

    def succeeded(self) -> list[T]:
        """Note that the endpoint is up; return the attempts that count."""
        suspects = self._suspects
        self.reset()
        return suspects

    def reset(self) -> None:
        """Forget what has failed."""
        self.failures = 0
        self._suspects = []
