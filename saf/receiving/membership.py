"""A member whose lease a thread renews while the process lives and the database answers.

The thread has a connection of its own, because a delivery may take longer than a third of the
lease. The member ends with the session that has joined, so this must be a real session, not one
lent by a pooler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg

from saf.database.dsn import refuse_pooler
from saf.log.shards import Member
from saf.receiving.claim import BEGIN
from saf.receiving.link import connected
from saf.telemetry.logger import Log

if TYPE_CHECKING:
    from saf.receiving.link import Engine

LEAVE_SECONDS = 5.0
"""Time limit for a leaving member to free its shards, e.g. while another session locks them."""

log = Log("saf.membership")


class Membership:
    """A member of a subscription, from now until `leave`, or until it is ``lost``.

    Raises:
        Unavailable: the database does not answer.
        ConfigurationError: the connection goes through a pooler.
    """

    def __init__(self, engine: Engine, subscription_id: int, lease_seconds: float) -> None:
        self.member = Member(subscription_id=subscription_id, lease_seconds=lease_seconds)
        self.lost = False
        """True if the lease could not be renewed: other members take over the shards."""
        self._leaving = threading.Event()
        # only saf's own transactions run here, and they are useless once the lease is over
        with ExitStack() as stack:
            self._link = replace(stack.enter_context(connected(engine)), always=_for(lease_seconds))
            with self._link.transaction(claims=False):
                refuse_pooler(self._link.raw)
                self.member.join(self._link.raw)
            self._open = stack.pop_all()
        self._thread = threading.Thread(target=self._keep, name="saf lease", daemon=True)
        self._thread.start()

    def enter(
        self, using: Callable[[psycopg.Connection[Any]], AbstractContextManager[None]]
    ) -> None:
        """Enter a context with this member's connection, until the member leaves."""
        self._open.enter_context(using(self._link.raw))

    def leave(self) -> None:
        """Free the shards. If that takes too long, the end of the session frees them."""
        self._leaving.set()
        self._thread.join(self.member.lease_seconds)
        link = replace(self._link, always=_for(min(LEAVE_SECONDS, self.member.lease_seconds)))
        with suppress(Exception), self._open, link.transaction(claims=False):
            self.member.leave(link.raw)

    def _keep(self) -> None:
        # every third of the lease, so that two renewals may fail before it is over
        while not self._leaving.wait(self.member.lease_seconds / 3):
            try:
                with self._link.transaction(claims=False):
                    self.member.renew(self._link.raw)
            except Exception as error:
                self.lost = True
                log.warning("membership_lost", member=self.member.name, error=str(error))
                return


def _for(seconds: float) -> str:
    """Return the statements that begin a transaction and limit each later statement's time."""
    return f"{BEGIN}; SET LOCAL statement_timeout = {max(1, round(seconds * 1000))}"
