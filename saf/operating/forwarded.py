"""Check that everything up to a moment has been forwarded; schedules wait for this.

Each message that was committed before the moment was created before it. So if no message created
before it is pending, parked or dead, all of them have been forwarded. Messages committed later, by
a transaction that began before the moment, were not sent before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import psycopg

from saf.errors import TookTooLong, Unavailable
from saf.operating.outbox import SECONDS, Sent, Wanted, messages

Left = Literal["pending", "parked", "dead"]
"""The states of messages that have not been forwarded."""

LEFT: tuple[Left, ...] = ("pending", "parked", "dead")

SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"


@dataclass(frozen=True, kw_only=True)
class Forwarded:
    """The rest of an outbox, as one message of each state."""

    left: dict[Left, Sent]

    @property
    def everything(self) -> bool:
        """True if nothing is left."""
        return not self.left

    @property
    def waits(self) -> bool:
        """True if the forwarder will still handle a message, with or without an operator's help.

        Only operators decide about dead letters.
        """
        return any(state != "dead" for state in self.left)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "forwarded": self.everything,
            "waits": self.waits,
            "left": {state: left.as_dict() for state, left in self.left.items()},
        }


def forwarded(
    connection: psycopg.Connection[Any], wanted: Wanted, *, seconds: float = SECONDS
) -> Forwarded:
    """Return which messages an outbox has not forwarded, by state. Reads one snapshot.

    The search stops at the first message of each state, so it reads little while messages are
    left. It reads pending messages that are younger than wanted, even if they are many.

    Raises:
        Unavailable: a statement takes longer than ``seconds``. Try again later.
        Restored: the cursors do not show which messages are pending.
    """
    left: dict[Left, Sent] = {}
    with connection.transaction():
        # in one snapshot, a message that changes its state is in one of the states
        connection.execute(SNAPSHOT)
        for state in LEFT:
            try:
                page = messages(connection, replace(wanted, state=state), limit=1, seconds=seconds)
            except TookTooLong:
                raise Unavailable(
                    "the answer",
                    f"it took longer than {seconds:g} s to look for {state} messages, perhaps "
                    "because many younger ones are pending: ask again later, or add --timeout "
                    "with more seconds",
                ) from None
            for lane in page.shown:
                left[state] = lane
    return Forwarded(left=left)
