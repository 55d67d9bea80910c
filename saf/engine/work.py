"""What the driver and its tasks tell each other; imports neither Spark nor Arrow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID, uuid4

from saf.database import Dsn
from saf.destinations.settings import DestinationSettings
from saf.log.cursor import Batch
from saf.routing.matching import Routes
from saf.setaside.parking import Backoff

LEASE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """One task: forward one batch of one broker."""

    broker: str
    """The source's name, for people."""
    source: UUID
    """The source's broker_id, for watermarks."""
    dsn: Dsn
    batch: Batch
    routes: Routes
    """Frozen with the batch."""
    much: bool = False
    """Worth more than one task."""
    deep: bool = False
    """Too many to have them sorted; see `saf.engine.windows`."""
    keep: bool = False
    """There will be more like it soon, so connections are kept; see `saf.database.connections`."""
    waiting: tuple[Backoff, ...] = ()
    """What a cycle has to know of the lanes, in the order in which they are tried; see
    `saf.setaside.backoff.waiting`."""
    of_services: bool = False
    """There are lanes of services, due or not."""
    cycle: str = field(default_factory=lambda: uuid4().hex)
    """Tells this time apart from any other at which the batch is worked on."""
    lease_seconds: float = LEASE_SECONDS
    """How long the task may not be heard of; see `saf.engine.pulse`."""

    @property
    def life(self) -> str:
        """By what the driver knows that the task lives."""
        return f"{self.cycle} {self.batch.shards[0]}"

    @property
    def alone(self) -> str | None:
        """The one destination that all messages go to, if it is one.

        While that is down, nothing is gained by parking: the batch is left open. What is addressed
        to a broker may go to any that is known, whatever the routes say.
        """
        destinations = {route.destination for route in self.routes.routes} | {*self.routes.brokers}
        return destinations.pop() if len(destinations) == 1 else None

    def split(self, parts: int) -> list[Work]:
        """The same messages as at most ``parts`` tasks, by shards."""
        return [replace(self, batch=batch) for batch in self.batch.split(parts)]


@dataclass(frozen=True, kw_only=True)
class ForwardingRules:
    """How to deliver; the same for all tasks of a run."""

    destinations: Mapping[str, DestinationSettings]
    """By name."""
    chunk_rows: int
    chunk_bytes: int
    max_bytes: int
    """Larger bodies are dead letters."""
    attempts: int

    @property
    def qualities(self) -> dict[str, str]:
        """The default quality of service of each destination."""
        return {name: there.quality for name, there in self.destinations.items()}


@dataclass(kw_only=True)
class Receipt:
    """What one task did for one destination (None: what concerns no single one)."""

    work: int
    destination: str | None
    messages: int = 0
    dropped: int = 0
    parked: int = 0
    dead: int = 0
    complete: bool = False
    """Every message of the batch is delivered."""
    stopped: bool = False
    """It was asked to stop before the end."""
    error_kind: str | None = None
    """The class name of the error that ended the task early, or that a person has to mend."""
    error: str | None = None
