"""Lanes: messages that are set aside, grouped by their origin and by what they wait for.

A *lane* is the messages of one origin that wait for the same thing. Lanes are separate; each keeps
its order. The columns destination, kind, subject and broker of saf.parked and saf.backoff identify
a row's lane. The kind is the pair of an `Origin` and what the messages wait for (`WaitsFor`), under
one name:

    origin                      route    destination   found-route    service   outcome
    a batch                     route    main          found_route    service   doubt
    an operator's retry         retry    retry         found_retry
    a replay                    replay   replay        found_replay

    origin                      handler  time          conversation
    a batch of a receiver       key      later         ahead

A forwarder's lane has a destination, unless it waits for a route. The lanes route, found_route and
service name the service as their subject; route and found_route also name the broker that their
messages are addressed to, if any. The messages of found-route lanes waited for a route, have found
one, and now wait for its destination. Messages about to be sent at most once leave their lane for
the lane doubt; messages found there may have left, and become dead letters.

The lanes of receivers have no destination:

    kind   subject       waits for
    key    key           a receiver's next attempt at the key's first message, or its handler
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


class Origin(StrEnum):
    """Where the messages of a lane come from."""

    BATCH = "batch"
    """A batch of the log, read by a forwarder or a receiver."""
    RETRY = "retry"
    """An operator's retry or redirection."""
    REPLAY = "replay"
    """A replay: messages that a destination lost."""


class WaitsFor(StrEnum):
    """What the messages of a lane wait for, in the words of operators."""

    ROUTE = "route"
    """A route to a destination."""
    DESTINATION = "destination"
    """The destination's answer."""
    FOUND_ROUTE = "found-route"
    """The destination of a route that was missing at first."""
    SERVICE = "service"
    """The destination's knowledge of their service."""
    OUTCOME = "outcome"
    """The outcome of an attempt to send them at most once."""
    HANDLER = "handler"
    """A receiver's next attempt, or a handler of their type."""
    TIME = "time"
    """Their deliver_at."""
    CONVERSATION = "conversation"
    """An earlier message of their conversation."""


class Kind(StrEnum):
    """An origin and what its messages wait for, under the name that the database stores.

    >>> Kind("found_retry").origin, Kind("found_retry").waits_for
    (<Origin.RETRY: 'retry'>, <WaitsFor.FOUND_ROUTE: 'found-route'>)
    """

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

    @property
    def origin(self) -> Origin:
        """Where the messages come from."""
        return PAIRS[self][0]

    @property
    def waits_for(self) -> WaitsFor:
        """What they wait for; `Lane.waits_for` also knows whether a lane has a destination."""
        return PAIRS[self][1]


PAIRS: Mapping[Kind, tuple[Origin, WaitsFor]] = MappingProxyType(
    {
        Kind.MAIN: (Origin.BATCH, WaitsFor.DESTINATION),
        Kind.SERVICE: (Origin.BATCH, WaitsFor.SERVICE),
        Kind.ROUTE: (Origin.BATCH, WaitsFor.ROUTE),
        Kind.RETRY: (Origin.RETRY, WaitsFor.DESTINATION),
        Kind.REPLAY: (Origin.REPLAY, WaitsFor.DESTINATION),
        Kind.FOUND_ROUTE: (Origin.BATCH, WaitsFor.FOUND_ROUTE),
        Kind.FOUND_RETRY: (Origin.RETRY, WaitsFor.FOUND_ROUTE),
        Kind.FOUND_REPLAY: (Origin.REPLAY, WaitsFor.FOUND_ROUTE),
        Kind.DOUBT: (Origin.BATCH, WaitsFor.OUTCOME),
        Kind.KEY: (Origin.BATCH, WaitsFor.HANDLER),
        Kind.LATER: (Origin.BATCH, WaitsFor.TIME),
        Kind.AHEAD: (Origin.BATCH, WaitsFor.CONVERSATION),
    }
)
"""The origin of each kind, and what its messages wait for."""


def _waiting_for(*things: WaitsFor) -> tuple[Kind, ...]:
    return tuple(kind for kind in Kind if kind.waits_for in things)


FOUND: Mapping[Kind, Kind] = MappingProxyType(
    {
        kind: found
        for kind in _waiting_for(WaitsFor.ROUTE, WaitsFor.DESTINATION)
        for found in _waiting_for(WaitsFor.FOUND_ROUTE)
        if kind.origin is found.origin and kind is not Kind.MAIN
    }
)
"""For each kind of lane without a destination: the kind that its messages get with a route.

Messages of a batch have a kind of their own without a destination; others keep theirs."""

OF_SERVICE = _waiting_for(WaitsFor.ROUTE, WaitsFor.FOUND_ROUTE, WaitsFor.SERVICE)
"""Lanes whose messages wait for something that concerns their service alone."""

OF_RECEIVERS = _waiting_for(WaitsFor.HANDLER, WaitsFor.TIME, WaitsFor.CONVERSATION)

NO_BROKER = UUID(int=(1 << 128) - 1)
"""The broker that stands for "no broker" in the database, where the column is part of a key."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Messages of one origin that wait for the same thing; the module's docstring lists all kinds.

    A kind may be given by its name, as the database returns it. As a text, a lane is what its
    messages wait for:

    >>> for lane in (
    ...     Lane(destination="mom"),
    ...     Lane(destination="mom", kind=Kind.REPLAY),
    ...     Lane(kind=Kind.RETRY),
    ...     Lane(kind=Kind.ROUTE, subject="billing", broker=UUID(int=7)),
    ...     Lane(destination="mom", kind=Kind.FOUND_ROUTE, subject="billing"),
    ...     Lane(destination="mom", kind=Kind.SERVICE, subject="biling"),
    ...     Lane(kind=Kind.KEY, subject="A-1"),
    ...     Lane(kind=Kind.LATER, subject="7"),
    ... ):
    ...     print(lane)
    destination 'mom'
    destination 'mom' (replay)
    route (retry)
    route for service 'billing' at broker 00000000-0000-0000-0000-000000000007
    service 'billing' at 'mom'
    service 'biling' at 'mom'
    next attempt for key 'A-1'
    time for shard '7'
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

    @property
    def waits_for(self) -> WaitsFor:
        """What its messages wait for.

        >>> Lane(kind=Kind.RETRY).waits_for, Lane(kind=Kind.RETRY, destination="mom").waits_for
        (<WaitsFor.ROUTE: 'route'>, <WaitsFor.DESTINATION: 'destination'>)
        """
        if self.kind in FOUND and not self.destination:
            return WaitsFor.ROUTE
        return self.kind.waits_for

    def of_reader(
        self, subscription: str, *, awaits_handler: bool, message_type: str | None = None
    ) -> str:
        """Return what messages of a subscription wait for, in words.

        >>> lane = Lane(kind=Kind.KEY, subject="A-2")
        >>> lane.of_reader("billing", awaits_handler=False)
        "next attempt of billing for key 'A-2'"
        >>> lane.of_reader("billing", awaits_handler=True, message_type="OrderCancelled")
        "a worker with a handler for 'OrderCancelled' (key 'A-2')"
        """
        if self.kind is not Kind.KEY:
            return str(self)
        if awaits_handler:
            type_ = f" for {message_type!r}" if message_type else ""
            return f"a worker with a handler{type_} (key {self.subject!r})"
        return f"next attempt of {subscription} for key {self.subject!r}"

    def __str__(self) -> str:
        waits_for = self.waits_for
        if waits_for is WaitsFor.FOUND_ROUTE:
            waits_for = WaitsFor.SERVICE if self.subject else WaitsFor.DESTINATION
        subject = _SUBJECTS.get(self.kind)
        text = "next attempt" if self.kind is Kind.KEY else str(waits_for)
        if subject is not None and self.subject:
            text += f" {subject}{self.subject!r}"
        if self.broker is not None:
            text += f" at broker {self.broker}"
        if self.destination:
            text += f" {_TO[waits_for]}{self.destination!r}"
        return text if self.kind.origin is Origin.BATCH else f"{text} ({self.kind.origin})"


_SUBJECTS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.ROUTE: "for service ",
        Kind.FOUND_ROUTE: "",
        Kind.SERVICE: "",
        Kind.KEY: "for key ",
        Kind.LATER: "for shard ",
        Kind.AHEAD: "",
    }
)
_TO: Mapping[WaitsFor, str] = MappingProxyType(
    dict.fromkeys(WaitsFor, "at ") | {WaitsFor.DESTINATION: ""}
)


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

_ROUTED = ", ".join(f"'{kind}'" for kind in FOUND)
WAITS_FOR = (
    f"CASE WHEN destination = '' AND kind IN ({_ROUTED}) THEN '{WaitsFor.ROUTE}' "
    + " ".join(f"WHEN kind = '{kind}' THEN '{kind.waits_for}'" for kind in Kind)
    + " END"
)
"""SQL: what the messages of a lane wait for, as `Lane.waits_for`."""
ORIGIN = "CASE " + " ".join(f"WHEN kind = '{kind}' THEN '{kind.origin}'" for kind in Kind) + " END"
"""SQL: the origin of a lane, as `Kind.origin`."""

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
