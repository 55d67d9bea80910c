"""What the driver and its tasks tell each other; imports neither Spark nor Arrow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID, uuid4

from saf.database import Dsn
from saf.destinations.settings import DestinationSettings
from saf.engine.survey import Survey
from saf.log.cursor import Batch
from saf.metrics.declared import CHUNK_MESSAGES, CHUNK_SECONDS
from saf.metrics.process import OTHER
from saf.metrics.tally import Tally
from saf.routing.matching import Routes
from saf.setaside.parking import Backoff

LEASE_SECONDS = 30.0

MAX_REJECTED = 10

MOST_SERVICES = 100
"""How many services of a destination are named in counts; others are counted under `OTHER`."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One item of work: forward one open batch of one broker."""

    broker: str
    """The source's name, for people."""
    source: UUID
    """The source's broker_id, by which destinations keep watermarks."""
    dsn: Dsn
    batch: Batch
    routes: Routes
    """The routes that are frozen with the batch."""
    much: bool = False
    """Whether it is worth more than one task."""
    deep: bool = False
    """Whether it has too many messages to have them sorted; see `saf.engine.windows`."""
    survey: Survey | None = None
    """Where the messages of the batch are, if that was surveyed for several tasks."""
    keep: bool = False
    """Whether more work like it comes soon, so that connections are kept; see
    `saf.database.connections`."""
    among_others: bool = False
    """Whether its job has other tasks, which may be at work long after its own has ended."""
    waiting: tuple[Backoff, ...] = ()
    """The lanes that a cycle must know, in the order in which they are tried; see
    `saf.setaside.backoff.waiting`."""
    of_services: bool = False
    """Whether there are lanes of services, due or not."""
    rejecting: Mapping[str, int] = field(default_factory=dict)
    """How many messages each destination has rejected in a row, if any."""
    vouched_since: int | None = None
    """The source has checked who sent the messages with greater ids; None: of none. See
    `saf.engine.vouching`."""
    cycle: str = field(default_factory=lambda: uuid4().hex)
    """Tells this work on the batch apart from any other work on it."""
    lease_seconds: float = LEASE_SECONDS
    """How long nothing may be heard of the task, in seconds; see `saf.engine.pulse`."""

    @property
    def life(self) -> str:
        """The name by which the driver sees that the task lives."""
        return f"{self.cycle} {self.batch.shards[0]}"

    @property
    def alone(self) -> str | None:
        """The destination that all messages go to, if there is only one.

        While it is down, parking gains nothing, so the batch is left open. A message that is
        addressed to a broker may go to any known destination, whatever the routes say.
        """
        destinations = {route.destination for route in self.routes.routes} | {*self.routes.brokers}
        return destinations.pop() if len(destinations) == 1 else None

    def split(self, parts: int) -> list[Work]:
        """Split the messages into at most ``parts`` items of work, by shards."""
        return [replace(self, batch=batch) for batch in self.batch.split(parts)]


@dataclass(frozen=True, kw_only=True)
class ForwardingRules:
    """How a run delivers; the same for all its tasks."""

    destinations: Mapping[str, DestinationSettings]
    """The destinations by name."""
    chunk_rows: int
    chunk_bytes: int
    max_bytes: int
    """Messages with a larger body, in bytes, become dead letters."""
    attempts: int
    transforms: Mapping[str, str] = field(default_factory=dict)
    """For each service with a transform, its function; see `saf.engine.transforming`."""
    not_deterministic: frozenset[str] = frozenset()
    """Those of them whose transform may make something else of a message the next time."""
    max_rejected: int = MAX_REJECTED
    """Messages that a destination rejects in a row before it gets no more."""

    @property
    def qualities(self) -> dict[str, str]:
        """The default quality of service of each destination."""
        return {name: there.quality for name, there in self.destinations.items()}


@dataclass(kw_only=True)
class Receipt:
    """What one task did for one destination; None: what concerns no single destination."""

    work: int
    destination: str | None
    messages: int = 0
    retried: int = 0
    """Those of the messages that were parked before."""
    dropped: int = 0
    left_out: int = 0
    """Messages of which a transform has made nothing."""
    early: int = 0
    """Messages that the destination got before their deliver_at, because it holds none."""
    services: dict[str, int] = field(default_factory=dict)
    """Messages by service that the destination has now: stored, or dropped because it had them."""
    parked: int = 0
    dead: int = 0
    down: bool = False
    """Whether the destination did not answer, or refused everything."""
    rejecting: int | None = None
    """How many messages the destination has rejected in a row; None if it was asked for nothing."""
    complete: bool = False
    """Whether every message of the batch is delivered."""
    closed: bool = False
    """Whether it has closed the batch, too."""
    stopped: bool = False
    """Whether it was asked to stop before the end."""
    error_kind: str | None = None
    """The class name of the error that ended the task early, or that a person has to mend."""
    error: str | None = None
    chunk_seconds: Tally = field(default_factory=CHUNK_SECONDS.tally, compare=False)
    """How long storing each chunk at the destination took."""
    chunk_messages: Tally = field(default_factory=CHUNK_MESSAGES.tally, compare=False)
    """How many messages each chunk had."""


def add_services(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Add messages by service to counts, which stay few whatever services senders address.

    >>> counts = {str(number): 1 for number in range(MOST_SERVICES)}
    >>> add_services(counts, {"7": 1, "one": 2, "more": 3})
    >>> counts["7"], counts["other"], len(counts)
    (2, 5, 101)
    """
    for service, messages in more.items():
        name = service if service in counts or len(counts) < MOST_SERVICES else OTHER
        counts[name] = counts.get(name, 0) + messages
