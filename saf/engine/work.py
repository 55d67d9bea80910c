"""Work and receipts: what the driver and its tasks exchange.

The driver gives a task one item of `Work`, an open batch of one broker or some shards of the batch,
and the `ForwardingRules`, which are the same for all tasks of a run. The task returns its receipts,
one per destination: all that the driver learns about messages.

Neither Spark nor Arrow is imported here, so a driver needs neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from saf.database import Dsn
from saf.destinations.settings import DestinationSettings
from saf.engine.survey import Survey
from saf.log.cursor import Batch
from saf.routing.matching import Routes
from saf.setaside.parking import Backoff
from saf.telemetry.metrics import CHUNK_MESSAGES, CHUNK_SECONDS, OTHER, Tally

if TYPE_CHECKING:
    import pyarrow as pa

LEASE_SECONDS = 30.0

MAX_REJECTED = 10

MOST_SERVICES = 100
"""Services per destination that are counted by name; others are counted under `OTHER`."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One item of work: forward one open batch of one broker."""

    broker: str
    """The source's name, for messages to operators."""
    source: UUID
    """The source's broker_id, by which destinations keep watermarks."""
    dsn: Dsn
    batch: Batch
    routes: Routes
    """The routes that were frozen with the batch."""
    new: int = 0
    """Messages that were counted when the batch was opened just now; 0: a task may have had it."""
    configured: str | None = None
    """Fingerprint of the configuration that the routes were frozen of; see `saf.routing.routes`.
    None: the routes change with time."""
    much: bool = False
    """Whether the work is large enough for more than one task."""
    deep: bool = False
    """Whether it has too many messages to sort them; see `saf.engine.source`."""
    survey: Survey | None = None
    """The windows of the batch, if it was surveyed for several tasks."""
    keep: bool = False
    """Whether similar work comes soon, so that connections are kept; see
    `saf.database.connections`."""
    among_others: bool = False
    """Whether its job has other tasks, which may run long after this one has ended."""
    waiting: tuple[Backoff, ...] = ()
    """The lanes that a cycle must know, in the order in which they are tried; see
    `saf.setaside.backoff.waiting`."""
    of_services: bool = False
    """Whether there are lanes of services, due or not."""
    rejecting: Mapping[str, int] = field(default_factory=dict)
    """Messages that each destination has rejected in a row, if any."""
    vouched_since: int | None = None
    """The source has checked the senders of messages with greater ids; None: of no messages. See
    `saf.engine.storing`."""
    cycle: str = field(default_factory=lambda: uuid4().hex)
    """Unique id of this attempt at the batch."""
    lease_seconds: float = LEASE_SECONDS
    """Seconds without a sign of life after which the task's lease ends; see `saf.engine.pulse`."""

    @property
    def life(self) -> str:
        """The name by which the driver recognizes the task's sign of life."""
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
    """The function of each service with a transform; see `saf.engine.transforming`."""
    not_deterministic: frozenset[str] = frozenset()
    """Services in `transforms` whose transform may return a different result the next time."""
    max_rejected: int = MAX_REJECTED
    """Rejections in a row after which a destination gets no more messages."""

    @property
    def qualities(self) -> dict[str, str]:
        """The default quality of service of each destination."""
        return {name: destination.quality for name, destination in self.destinations.items()}


@dataclass(kw_only=True)
class Receipt:
    """One task's results at one destination; None: counts of no single destination."""

    work: int
    destination: str | None
    messages: int = 0
    retried: int = 0
    """The number of `messages` that were parked before."""
    dropped: int = 0
    left_out: int = 0
    """Messages that a transform has left out."""
    early: int = 0
    """Messages that the destination got before their deliver_at, because it holds none."""
    services: dict[str, int] = field(default_factory=dict)
    """Messages by service that the destination has now: stored, or dropped because it had them."""
    parked: int = 0
    dead: int = 0
    down: bool = False
    """Whether the destination did not answer, or refused everything."""
    rejecting: int | None = None
    """Messages that the destination has rejected in a row; None if it was not used."""
    complete: bool = False
    """Whether every message of the batch is delivered."""
    closed: bool = False
    """Whether the task has also closed the batch."""
    stopped: bool = False
    """Whether the task was asked to stop before the end."""
    error_kind: str | None = None
    """Class name of the error that ended the task early, or that needs an operator."""
    error: str | None = None
    chunk_seconds: Tally = field(default_factory=CHUNK_SECONDS.tally, compare=False)
    """Seconds that storing each chunk at the destination took."""
    chunk_messages: Tally = field(default_factory=CHUNK_MESSAGES.tally, compare=False)
    """Messages per chunk."""


def add_services(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Add messages by service to counts; the number of services counted stays bounded.

    >>> counts = {str(number): 1 for number in range(MOST_SERVICES)}
    >>> add_services(counts, {"7": 1, "one": 2, "more": 3})
    >>> counts["7"], counts["other"], len(counts)
    (2, 5, 101)
    """
    for service, messages in more.items():
        name = service if service in counts or len(counts) < MOST_SERVICES else OTHER
        counts[name] = counts.get(name, 0) + messages


class Receipts:
    """The receipts of one task."""

    def __init__(self, work: int) -> None:
        self._work = work
        self._by_destination: dict[str | None, Receipt] = {}

    def of(self, destination: str | None) -> Receipt:
        """Return the receipt of a destination; None: for counts of no single destination."""
        return self._by_destination.setdefault(
            destination, Receipt(work=self._work, destination=destination)
        )

    def stored(self, destination: str, rows: int, seconds: float) -> None:
        """Note that a chunk of ``rows`` messages was stored in one transaction."""
        receipt = self.of(destination)
        receipt.chunk_seconds.add(seconds)
        receipt.chunk_messages.add(rows)

    def delivered(self, destination: str, rows: pa.Table) -> None:
        """Note that a destination now has these rows."""
        add_services(self.of(destination).services, _by_service(rows))

    def __iter__(self) -> Iterator[Receipt]:
        return iter(self._by_destination.values())


def _by_service(rows: pa.Table) -> Counter[str]:
    """Count rows by service; Python sees no message."""
    counts = rows["to_service"].value_counts()
    return Counter(
        dict(zip(*(counts.field(name).to_pylist() for name in ("values", "counts")), strict=True))
    )
