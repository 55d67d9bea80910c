"""Whether everything up to a moment has been forwarded: what a schedule waits for.

Each message that was committed before the moment was created before it. So if no message that was
created before is pending, parked or dead, all of them have been forwarded. What is committed later
by a transaction that began before the moment was not sent before it.
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
    """What an outbox has left, by one message of each state."""

    left: dict[Left, Sent]

    @property
    def everything(self) -> bool:
        """Whether nothing is left."""
        return not self.left

    @property
    def waits(self) -> bool:
        """Whether the forwarder will still come to something, without a person's help or with it.

        Of a dead letter, only a person decides.
        """
        return any(state != "dead" for state in self.left)

    def as_dict(self) -> dict[str, Any]:
        """Return it as a dict for JSON."""
        return {
            "forwarded": self.everything,
            "waits": self.waits,
            "left": {state: one.as_dict() for state, one in self.left.items()},
        }


def forwarded(
    connection: psycopg.Connection[Any], wanted: Wanted, *, seconds: float = SECONDS
) -> Forwarded:
    """Say whether an outbox has forwarded messages, of any state. Reads one snapshot.

    It stops at the first message of each state, so it reads little while something is left. Where
    much is pending that is younger, it reads that.

    Raises:
        Unavailable: a statement takes longer than ``seconds``. Whoever waits asks again later.
        Restored: the cursors do not say what is pending.
    """
    left: dict[Left, Sent] = {}
    with connection.transaction():
        # in one snapshot, a message that moves on is in one of the states
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
            for one in page.shown:
                left[state] = one
    return Forwarded(left=left)
