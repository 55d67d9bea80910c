"""A stay: one broker's knowledge of a message."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from saf.log.finding import Search
from saf.operating.outbox import Details


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A message in an inbox, without its body."""

    id: int
    shard: int
    message_id: UUID
    source: UUID | None
    """The broker_id of the outbox that the message comes from."""
    from_service: str | None
    service: str
    key: str | None
    message_type: str | None
    conversation_id: UUID | None
    from_initiator: bool | None
    sequence: int | None
    bytes: int
    created_at: datetime
    received_at: datetime
    headers: str | None
    """As JSON text; None also if they are too large to be read."""
    txid: str


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The progress of an inbox's subscription with the message."""

    subscription: str
    owner: str | None
    """The member that has the message's shard; None if no member does."""
    complete: bool
    """True if it was taken, i.e. handled, unless it is set aside."""


@dataclass(frozen=True, kw_only=True)
class Aside:
    """A message that is set aside: parked in a lane, or a dead letter."""

    state: str
    """Either parked or dead."""
    subscription: str
    destination: str
    since: datetime
    error: str | None
    lane: str | None = None
    attempts: int | None = None
    next_attempt_at: datetime | None = None
    reason: str | None = None
    dead_letter_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Attempted:
    """A failed attempt of a dispatcher, as long as it is remembered."""

    at: datetime
    subscription: str
    status: int | None
    """The endpoint's status code; None if it did not answer."""
    seconds: float
    outcome: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Decided:
    """An operator's decision about the message."""

    audit_at: datetime
    who: str
    person: str | None
    action: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Stay:
    """One broker's knowledge of a message."""

    sent: Details | None
    stored: Stored | None
    readings: tuple[Reading, ...]
    attempts: tuple[Attempted, ...]
    aside: tuple[Aside, ...]
    decided: tuple[Decided, ...]
    unfinished: Mapping[str, Search]
    """The logs that were not searched to the end, and where the search stopped."""

    @property
    def nothing(self) -> bool:
        """True if the broker does not know the message."""
        return not (self.sent or self.stored or self.aside or self.decided)

    @property
    def size(self) -> int | None:
        """The size of the message's body in bytes; None if no log of the broker has it."""
        if self.sent is not None:
            return self.sent.message.bytes
        return self.stored.bytes if self.stored is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "sent": self.sent and self.sent.as_dict(),
            "stored": self.stored and _plain(self.stored),
            "subscriptions": [_plain(item) for item in self.readings],
            "attempts": [_plain(item) for item in self.attempts],
            "set_aside": [_plain(item) for item in self.aside],
            "decided": [_plain(item) for item in self.decided],
            "not_looked_through": {
                log: {"looked_at_since": item.since and item.since.isoformat(), "part": item.part}
                for log, item in self.unfinished.items()
            },
        }


def _plain(item: Any) -> dict[str, Any]:
    known: dict[type, Callable[[Any], Any]] = {UUID: str, datetime: datetime.isoformat}
    plain = {k: known.get(type(v), lambda value: value)(v) for k, v in asdict(item).items()}
    plain.pop("txid", None)
    if plain.get("headers") is not None:
        with suppress(ValueError, RecursionError):  # as text if Python cannot decode them
            plain["headers"] = json.loads(plain["headers"])
    return plain
