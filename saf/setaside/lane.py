"""Lanes: messages that are set aside, grouped by the reason why they wait.

A *lane* is the messages that wait for the same thing. Lanes are separate; each keeps its order. The
same columns of saf.parked and saf.backoff identify a row's lane:

    destination  kind           subject       waits for
    mom          main                         the destination to answer: all for it, in order
    mom          service        service       the destination to know the service
    (empty)      route          service       a route to a destination
    mom          retry, replay                nothing: sent again at an operator's request
    mom          found_route    service       the destination; it waited for a route, and found one
    mom          found_retry, found_replay    the destination; sent again, it has found a route
    mom          doubt                        nothing: sent at most once from another lane, or about
                                              to be; messages found here become dead letters
    (empty)      key            key           a receiver's next attempt at the key's first message
    (empty)      later          shard         the deliver_at of each: a receiver's, of a shard
    (empty)      ahead          conversation  an earlier message of the dialog, which is missing

Messages that are addressed to a broker wait for a route in a separate lane that names the broker.
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
            kind=Kind(self.kind),
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
