"""The allotment of a receiver: what a subscription's limits allow it to take now.

Limits are set at the broker, so that all processes agree. A receiver learns of a change when it
checks for messages to try alone (`saf.receiving.retries.look`). Without limits, nothing here runs a
statement.

*Rate.* A receiver takes messages only with permits (`saf.log.rates`), at most as many in one
delivery as it has. It takes permits in a short transaction of its own, and waits for them outside
of any. If it then finds fewer messages, it gives the rest back.

*Concurrency.* A delivery's transaction locks one of the subscription's seats, the rows of saf.seat,
and skips locked ones. So a receiver that dies frees its seat at once, like its shards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Event
from typing import Any

import psycopg

from saf.database import fetch
from saf.log import rates
from saf.receiving.link import Link

ASK_SECONDS = 1.0
"""Longest time until a receiver without permits asks again, in seconds: the rate may change."""

SEAT_SECONDS = 0.05
"""Interval at which a receiver without a seat looks for one."""

SEAT = """
SELECT seat FROM saf.seat
WHERE subscription_id = %(subscription_id)s AND seat <= %(concurrency)s
ORDER BY seat LIMIT 1 FOR UPDATE SKIP LOCKED
"""


class Allotment:
    """What one receiver may take."""

    def __init__(self, subscription_id: int, rate: str | None, concurrency: int | None) -> None:
        self._subscription_id = subscription_id
        self._text: str | None = None
        self._rate: float | None = None
        """Messages per second; None: unlimited."""
        self._permits = 0
        self._concurrency: int | None = None
        self.lacks_seat = False
        """True if all seats were locked at the last attempt to get one."""
        self._refused = False
        """True if no permits were free at the last attempt to get some."""
        self.hear(rate, concurrency)

    def hear(self, rate: str | None, concurrency: int | None) -> None:
        """Note the subscription's limits."""
        self._concurrency = concurrency
        if rate != self._text:
            self._text, self._permits = rate, 0
            self._rate = None if rate is None else rates.per_second(rate)

    @property
    def holds_up(self) -> bool:
        """True if a limit has kept the receiver from looking for messages."""
        return self.lacks_seat or self._refused

    @property
    def lacks_permits(self) -> bool:
        """True if the receiver must get permits before it takes messages."""
        return self._rate is not None and self._permits == 0

    def most(self, messages: int) -> int:
        """Return how many messages, of ``messages``, a delivery may have."""
        return messages if self._rate is None else min(messages, self._permits)

    def used(self, messages: int) -> None:
        """Note that messages were handed out."""
        self._permits = max(0, self._permits - messages)

    def get_permits(self, link: Link, most: int, deadline: float, stopping: Event) -> bool:
        """Wait until the receiver has permits, at most ``most``; return whether it has.

        The wait ends on a stop; at the deadline, by the monotonic clock; and at the latest after
        the time for which permits are reserved, even if the deadline is earlier.
        """
        while self.lacks_permits:
            assert self._rate is not None  # noqa: S101 - it lacks permits
            with _briefly(link):
                share = rates.take(link.raw, self._subscription_id, self._rate, most)
            self._permits, self._refused = share.permits, share.permits == 0
            if share.permits:
                if stopping.wait(share.wait_seconds):
                    self.give_back(link)
                    return False
            elif (left := deadline - time.monotonic()) <= 0 or stopping.wait(
                min(share.wait_seconds, ASK_SECONDS, left)
            ):
                return False
        return True

    def give_back(self, link: Link) -> None:
        """Give back the permits that are left."""
        permits, self._permits = self._permits, 0
        if permits and self._rate is not None:
            with _briefly(link):
                rates.give_back(link.raw, self._subscription_id, self._rate, permits)

    def has_seat(self, raw: psycopg.Connection[Any]) -> bool:
        """Lock a seat, if deliveries are limited, until the transaction ends; False: none free."""
        self.lacks_seat = False
        if self._concurrency is not None:
            params = {"subscription_id": self._subscription_id, "concurrency": self._concurrency}
            self.lacks_seat = not fetch(raw, SEAT, params)
        return not self.lacks_seat


@contextmanager
def _briefly(link: Link) -> Iterator[None]:
    """Run a block that is one statement, or two, in a transaction of its own."""
    transaction = nullcontext() if link.raw.autocommit else link.transaction(claims=False)
    with transaction, link.locking(link.lock_seconds):
        yield
