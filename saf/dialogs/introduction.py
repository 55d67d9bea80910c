"""Introduction: what a dialog's first message tells the target, in the header `HELLO`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from saf.message import FIRST_DAY, HELLO, LAST_DAY
from saf.received import Received
from saf.setaside.isolation import kept


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """Information about the dialog in the initiator's first message to the target."""

    contract: str | None = None
    version: int | None = None
    broker: UUID | None = None
    """Broker of the initiator, which gets the replies."""
    expires_at: datetime | None = None
    problem: str | None = None
    """Error in the introduction, if it cannot be read."""


def introduction(message: Received) -> Introduction:
    """Read the introduction from a first message; set ``problem`` if it cannot be read."""
    try:
        header = message.headers.get(HELLO) or {}
        seconds, broker = header.get("lifetime_seconds"), header.get("broker")
        hello = Introduction(
            contract=str(header["contract"]) if "contract" in header else None,
            version=int(header["version"]) if "version" in header else None,
            broker=UUID(broker) if broker else None,
            expires_at=message.created_at + timedelta(seconds=float(seconds)) if seconds else None,
        )
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        return Introduction(
            problem=kept(f"its first message lacks what a dialog begins with: {error}")
        )
    problem = None
    if hello.version is not None and not 0 < hello.version < 2**31:
        problem = "its first message names no version that a contract can have"
    if hello.expires_at is not None and not FIRST_DAY <= hello.expires_at < LAST_DAY:
        problem = "its lifetime ends beyond the calendar"
    return Introduction(problem=problem) if problem else hello
