"""A breaker: whether an endpoint is up, and whether a failure is the endpoint's. Pure policy.

One request that fails proves nothing about the endpoint: the message may be to blame. Several
failures in a row, with no success between them, are the endpoint's failure: the breaker opens. Then
only one message is sent from time to time, a probe, until a probe succeeds.

An endpoint that is down does not use up the attempts of messages. So a failure does not count as an
attempt at first; the message is a suspect. If the endpoint accepts another message before the
breaker opens, it is up, and the attempts of all suspects count (`Breaker.succeeded`). If the
breaker opens, they do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
"""Data kept about an attempt until it is known whether the attempt counts."""


@dataclass(kw_only=True)
class Breaker(Generic[T]):
    """A process's knowledge of an endpoint that it considers up.

    >>> breaker = Breaker[str](threshold=2)
    >>> breaker.failed("A-1"), breaker.succeeded()
    (False, ['A-1'])
    >>> breaker.failed("A-1"), breaker.failed("A-2"), breaker.succeeded()
    (False, True, [])
    """

    threshold: int
    """Number of failures in a row that opens the breaker."""
    failures: int = 0
    """Number of failures in a row so far."""
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
        """Forget all failures."""
        self.failures = 0
        self._suspects = []
