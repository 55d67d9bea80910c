"""Transports: how a request's bytes reach an endpoint, and its answer's come back.

A transport keeps connections. It follows no redirect, keeps no cookie, uses no proxy of the
environment, and unpacks nothing. It reads an answer up to a number of bytes; what is longer is cut,
and not read to its end. The endpoint's timeout is for a whole exchange, so an endpoint that sends a
byte now and then does not extend it.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

IDLE_SECONDS = 30.0
"""How long a connection is kept that nobody uses."""

HEADERS = {"User-Agent": "saf", "Accept-Encoding": "identity"}
"""Headers of every request."""


class NoAnswer(Exception):
    """An exchange has no answer; the message says why. It may hold what nobody may see."""


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """An answer of HTTP."""

    status: int
    headers: Mapping[str, str]
    """By name, in any case."""
    body: bytes
    """Up to as many bytes as were asked for."""


class Transport(abc.ABC):
    """The connections to one endpoint. Use it inside of a running loop, as an async context.

    Raises:
        MissingExtra: a library is not installed.
        ConfigurationError: a certificate cannot be read.
    """

    @abc.abstractmethod
    async def __aenter__(self) -> Self:
        """Get ready; connections are made when they are needed."""

    @abc.abstractmethod
    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""

    @abc.abstractmethod
    async def post(self, url: str, headers: Mapping[str, str], body: bytes, most: int) -> Exchanged:
        """Send a body; return the answer, with ``most`` bytes of its body at most.

        Raises:
            NoAnswer: there is none, whatever the reason.
        """
