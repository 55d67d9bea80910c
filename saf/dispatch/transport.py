"""Transports: carry a request's bytes to an endpoint, and its answer's bytes back.

A transport keeps connections. It follows no redirect, keeps no cookie, ignores the environment's
proxy, and decompresses nothing. It reads an answer up to a number of bytes; a longer answer is cut,
and not read to its end. The endpoint's timeout is for a whole exchange, so an endpoint that sends a
byte from time to time does not extend it.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

IDLE_SECONDS = 30.0
"""Time for which an unused connection is kept."""

HEADERS = {"User-Agent": "saf", "Accept-Encoding": "identity"}
"""Headers of every request."""


class NoAnswer(Exception):
    """An exchange without an answer; the message gives the reason, and may contain secrets."""


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    """By name, case-insensitive."""
    body: bytes
    """At most as many bytes as were requested."""


class Transport(abc.ABC):
    """The connections to one endpoint. Use it inside a running loop, as an async context.

    Raises:
        MissingExtra: a library is not installed.
        ConfigurationError: a certificate cannot be read.
    """

    @abc.abstractmethod
    async def __aenter__(self) -> Self:
        """Prepare; connections are opened when they are needed."""

    @abc.abstractmethod
    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""

    @abc.abstractmethod
    async def post(self, url: str, headers: Mapping[str, str], body: bytes, most: int) -> Exchanged:
        """Send a body; return the answer, with at most ``most`` bytes of its body.

        Raises:
            NoAnswer: no answer came, for any reason.
        """
