"""Lanes: messages that are set aside, grouped by the reason why they wait.

A *lane* is the messages that wait for the same thing. Lanes are separate; each keeps its order. The
columns destination, kind, subject and broker of saf.parked and saf.backoff identify a row's lane.

The kind of a forwarder's lane shows the origin of its messages, and the thing they wait for:

                        a route to       the destination   the destination,     the destination
                        a destination    to answer         with a route found   to know the service
    a batch             route            main              found_route          service
    an operator's retry retry            retry             found_retry
    a replay            replay           replay            found_replay

A lane that waits for a route has no destination. The lanes route, found_route and service name the
service as their subject; route and found_route also name the broker that their messages are
addressed to, if any. Messages about to be sent at most once leave their lane for the lane doubt;
messages found there may have left, and become dead letters.

The lanes of receivers have no destination:

    kind   subject       waits for
    key    key           a receiver's next attempt at the key's first message
    later  shard         the deliver_at of each message
    ahead  conversation  an earlier message of the dialog, which is missing
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID


class Kind(StrEnum):
    """What kind of thing the messages of a lane wait for."""

    MAIN = "main"
    SERVICE = "service"
    ROUTE = "route"
    RETRY = "retry"
    REPLAY = "replay"
    FOUND_ROUTE = "found_route"
    FOUND_RETRY = "found_retry"
    FOUND_REPLAY = "found_replay"
    DOUBT = "doubt"
    KEY = "key"
    LATER = "later"
    AHEAD = "ahead"


FOUND: Mapping[Kind, Kind] = MappingProxyType(
    {
        Kind.ROUTE: Kind.FOUND_ROUTE,
        Kind.RETRY: Kind.FOUND_RETRY,
        Kind.REPLAY: Kind.FOUND_REPLAY,
    }
)
"""For each kind of lane without a destination: the kind that its messages get with a route."""

OF_SERVICE = (Kind.ROUTE, *FOUND.values(), Kind.SERVICE)
"""Lanes whose messages wait for something that concerns their service alone."""

OF_RECEIVERS = (Kind.KEY, Kind.LATER, Kind.AHEAD)

NO_BROKER = UUID(int=(1 << 128) - 1)
"""The broker that stands for "no broker" in the database, where the column is part of a key."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What messages wait for; the module's docstring lists all kinds.

    A kind may be given by its name, as the database returns it.

    >>> print(Lane(destination="mom"))
    destination 'mom'
    >>> print(Lane(kind=Kind.ROUTE, subject="billing", broker=UUID(int=7)))
    no route, route 'billing' at 00000000-0000-0000-0000-000000000007
    >>> print(Lane(kind=Kind.KEY, subject="A-1"))
    key 'A-1'
    """

    destination: str = ""
    kind: Kind = Kind.MAIN
    subject: str = ""
    """The service, key, shard or conversation that the lane is about; empty if none."""
    broker: UUID | None = None
    """The broker that its messages are addressed to, if they wait for a route or have found one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))

    @property
    def found(self) -> bool:
        """Whether its messages have waited for a route, and found one."""
        return self.kind in FOUND.values()

    @property
    def of_service(self) -> bool:
        """Whether its messages wait for something that concerns their service alone."""
        return self.kind in OF_SERVICE

    @property
    def unrouted(self) -> bool:
        """Whether its messages wait for a route."""
        return self.kind == Kind.ROUTE

    @property
    def own(self) -> Lane:
        """The lane alone, without a subclass's further columns."""
        return Lane(
            destination=self.destination,
            kind=self.kind,
            subject=self.subject,
            broker=self.broker,
        )

    @property
    def order(self) -> tuple[str, str, str, str]:
        """The key by which lanes are sorted."""
        return self.destination, self.kind, self.subject, str(self.broker or "")

    def __str__(self) -> str:
        what = f"{self.kind} {self.subject!r}" if self.subject else str(self.kind)
        if self.broker is not None:
            what += f" at {self.broker}"
        if self.kind in OF_RECEIVERS:
            return what
        waiting = f"destination {self.destination!r}" if self.destination else "no route"
        return waiting if self.kind == Kind.MAIN else f"{waiting}, {what}"


def found_lane(destination: str, lane: Lane) -> Lane:
    """Return the lane that messages of a lane without a destination move to with a route.

    >>> found_lane("mom", Lane(kind=Kind.ROUTE, subject="billing")).kind
    <Kind.FOUND_ROUTE: 'found_route'>
    """
    return Lane(
        destination=destination, kind=FOUND[lane.kind], subject=lane.subject, broker=lane.broker
    )


def service_lane(destination: str, service: str) -> Lane:
    """Return the lane in which messages wait for the destination to know their service."""
    return Lane(destination=destination, kind=Kind.SERVICE, subject=service)


# A lane in statements. Rows have no single column for it, so lanes are compared by these columns.
COLUMNS = ("destination", "kind", "subject", "broker")
THE_LANE = ", ".join(COLUMNS)
"""SQL: the columns that identify a lane, in a subscription."""

BROKER = f"nullif(broker, '{NO_BROKER}') AS broker"
"""SQL: the column ``broker`` as Python has it, with NULL for no broker."""

GIVEN = """unnest(%(destinations)s::text[], %(kinds)s::text[], %(subjects)s::text[],
           %(brokers)s::uuid[])"""
"""SQL: the lanes that `given` passes, as rows of `THE_LANE`."""

SAME_LANE = """(p.subscription_id, p.destination, p.kind, p.subject, p.broker)
               = (b.subscription_id, b.destination, b.kind, b.subject, b.broker)"""
"""SQL: whether a message p of saf.parked is in the lane b."""


def given(lanes: Iterable[Lane]) -> dict[str, list[Any]]:
    """Return lanes as columns for a statement; see `GIVEN`."""
    lanes = list(lanes)
    return {
        "destinations": [lane.destination for lane in lanes],
        "kinds": [str(lane.kind) for lane in lanes],
        "subjects": [lane.subject for lane in lanes],
        "brokers": [lane.broker or NO_BROKER for lane in lanes],
    }
