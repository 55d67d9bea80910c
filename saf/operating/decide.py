"""Operators' decisions about messages set aside: deliver them again, or give them up.

`retry` returns dead letters to the forwarder or the receivers that set them aside. `redirect`
passes dead letters or parked messages to the forwarder, for another destination. `discard` gives
either up: if a dialog misses one, both of its ends get an Error, and so do the subscribers of a
monolog. To retry parked messages now, call `saf.setaside.waiting.retry_now`. Each decision releases
keys that waited for it, and records in ``saf.audit`` who decided, when and why.

The two kinds differ in how messages are locked for a decision, and in what becomes of them: see
`saf.operating.decide_dead` and `saf.operating.decide_parked`. Some messages stay as they are
(`saf.setaside.selection`).

A decision about a million messages in one transaction would hold its locks for minutes, and could
not be stopped. So `in_chunks` decides about `CHUNK` messages at a time, the oldest first, each time
in a transaction with its own line in the audit. If a decision stops or fails midway, decided
messages are done, and the others are still set aside. `in_chunks` does not touch messages set aside
after it began, so a message that fails again immediately is not decided about twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

import psycopg

from saf.operating.decide_dead import HeldDead
from saf.operating.decide_parked import HeldParked
from saf.setaside.audit import ONE_AT_A_TIME, audit
from saf.setaside.selection import DeadLetters, ParkedMessages, Selection

CHUNK = 1000
"""Number of messages decided about in one transaction."""


class Held(Protocol):
    """Some messages that are locked for a decision, until the transaction ends."""

    message_ids: list[UUID]

    def pass_on(
        self, connection: psycopg.Connection[Any], to: str | None, number: int, person: str | None
    ) -> None:
        """Pass the messages to their program, or for ``to`` to the forwarder.

        ``number`` is that of the decision in the audit.
        """

    def give_up(self, connection: psycopg.Connection[Any]) -> None:
        """Give the messages up for good."""


HELD: Mapping[type, Callable[[psycopg.Connection[Any], Any, int | None, str | None], Held]] = {
    DeadLetters: HeldDead,
    ParkedMessages: HeldParked,
}
"""How the oldest of some chosen messages are locked, by the kind of the selection."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of messages: "retry", "redirect" or "discard", as their selection permits."""

    action: str
    to: str | None = None
    """The destination of a redirection. The caller has checked that it exists."""

    def __str__(self) -> str:
        return self.action if self.to is None else f"{self.action} to {self.to}"

    def __call__(
        self,
        connection: psycopg.Connection[Any],
        chosen: Selection[Any],
        why: str,
        person: str | None = None,
        limit: int | None = None,
    ) -> list[UUID]:
        """Decide about chosen messages; return their message ids, in order.

        Deciding again does nothing. ``person``: see `saf.setaside.audit.audit`. With ``limit``,
        the decision concerns only the oldest messages.

        Raises:
            Unavailable: a forwarder has them in hand, and does not release them in time; or it
                took too long to decide about messages of receivers.
        """
        passes_on = self.action != "discard"
        with connection.transaction():
            if passes_on:
                connection.execute(ONE_AT_A_TIME)
            held = HELD[type(chosen)](connection, chosen, limit, self.to)
            if held.message_ids:
                number = audit(connection, str(self), held.message_ids, why, person)
                if passes_on:
                    held.pass_on(connection, self.to, number, person)
                else:
                    held.give_up(connection)
        return held.message_ids


retry, discard = Decision(action="retry"), Decision(action="discard")


def redirect(to: str) -> Decision:
    """Return the decision to pass messages to the forwarder for the destination ``to``.

    Messages of receivers stay, because they have arrived, and so do those of dialogs, whose other
    ends cannot move.
    """
    return Decision(action="redirect", to=to)


def in_chunks(
    connection: psycopg.Connection[Any],
    decision: Decision,
    chosen: Selection[Any],
    why: str,
    *,
    person: str | None = None,
    chunk: int = CHUNK,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[UUID]]:
    """Decide about all chosen messages that are set aside now; yield the ids of each chunk.

    Call ``stop`` before each chunk: if it returns true, the remaining messages stay as they are.
    The connection is in autocommit.
    """
    chosen = chosen.until_now(connection)
    while not stop() and (done := decision(connection, chosen, why, person, chunk)):
        yield done
