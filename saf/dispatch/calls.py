"""Calls: endpoints that have a protocol of their own, in which a request is a call of something."""

from __future__ import annotations

from typing import Protocol

from saf.dispatch.envelope import Request
from saf.received import Received


class Call(Protocol):
    """How messages become calls, and what answers say."""

    def request(self, message: Received) -> Request:
        """The call that a message stands for.

        Raises:
            UnreadableBody: it stands for none.
        """
        ...

    def fault(self, status: int, body: bytes) -> str | None:
        """What is wrong, by the answer to a call; None if nothing is, or HTTP's status says it."""
        ...

    def result(self, body: bytes) -> bytes:
        """What a call has returned, as JSON."""
        ...
