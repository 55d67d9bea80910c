"""Calls: endpoints with a protocol of their own, in which each request is a call."""

from __future__ import annotations

from typing import Protocol

from saf.dispatch.envelope import Request
from saf.received import Received


class Call(Protocol):
    """Conversion of messages into calls, and of answers into results."""

    def request(self, message: Received) -> Request:
        """Return the call for a message.

        Raises:
            UnreadableBody: the body is not a call.
        """
        ...

    def fault(self, status: int, body: bytes) -> str | None:
        """Return the fault in an answer; None if it shows none, or the HTTP status shows it."""
        ...

    def result(self, body: bytes) -> bytes:
        """Return the result of a call, as JSON."""
        ...
