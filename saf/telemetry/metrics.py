"""Metrics: all metrics of saf, with name, kind, unit, labels and help text, and their counts.

Names follow Prometheus: a unit at the end, `_total` for counters. No label contains a key, an id or
a text that a sender chooses, except for the service, and only the busiest services are named. Of
failure groups, only the largest ones are named, by a hash.

The data of a histogram is a `Tally`: numbers of values by size, in a fixed number of steps. A tally
takes as much memory for a million values as for one, and can be pickled, so a task can return it to
its driver in a receipt.

Any code may add to the counts of this process, and by default none are kept:

    count(FORWARDED, 100, broker="shop", destination="mom")

does nothing until `switch_on` has created a `Store`; from then on, it adds to a number in memory.
This is the only hook by which the engine, receivers and dispatchers report. They know no metrics
library, and report per chunk, delivery or handler call, never per message on the bulk path.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
MESSAGES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 50_000.0, 100_000.0, 1_000_000.0)

Origin = Literal["database", "forwarder", "worker", "dispatcher", "purge"]
"""Reporter of the metric: a broker's database, or a process that counts its own work."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    origin: Origin
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()
    """For a histogram: its steps."""

    @property
    def unit(self) -> str:
        """Unit of a value."""
        name = self.name.removesuffix("_total")
        known = ("seconds", "messages", "slots", "shards")
        return next((unit for unit in known if name.endswith(f"_{unit}")), "")

    def tally(self) -> Tally:
        """Return an empty tally for this histogram."""
        return Tally(self.bounds)


class Tally:
    """Number of values up to each bound, and the sum of all values.

    >>> tally = Tally((1, 10))
    >>> for value in (0.5, 1, 7, 100):
    ...     tally.add(value)
    >>> tally.counts, tally.total, tally.sum
    ([2, 1, 1], 4, 108.5)
    >>> tally.merge(tally.copy())
    >>> tally.counts, tally.total
    ([4, 2, 2], 8)
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Number of values in each step, from the previous bound to its own; the last is open."""
        self.sum = 0.0

    @property
    def total(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merge(self, other: Tally) -> None:
        """Add the values of another tally with the same bounds."""
        assert self.bounds == other.bounds  # noqa: S101 - both belong to one metric
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def copy(self) -> Tally:
        """Return a tally of the same values."""
        copy = Tally(self.bounds)
        copy.merge(self)
        return copy


def _gauge(name: str, labels: str, text: str, origin: Origin = "database") -> Metric:
    return Metric(name=name, kind="gauge", origin=origin, labels=tuple(labels.split()), help=text)


def _counter(name: str, origin: Origin, labels: str, text: str) -> Metric:
    return Metric(name=name, kind="counter", origin=origin, labels=tuple(labels.split()), help=text)


def _histogram(
    name: str, origin: Origin, labels: str, text: str, bounds: tuple[float, ...] = SECONDS
) -> Metric:
    return Metric(
        name=name,
        kind="histogram",
        origin=origin,
        labels=tuple(labels.split()),
        help=text,
        bounds=bounds,
    )


# Reported by a broker's database

SOURCE_PENDING = _gauge(
    "saf_source_pending_messages",
    "broker source",
    "Messages of a source that the inbox does not have yet, when a forwarder last looked.",
)
UP = _gauge("saf_up", "broker", "1 if the broker answered all queries, else 0.")
READ_SECONDS = _gauge("saf_read_seconds", "broker", "Duration of the broker's queries.")
PENDING = _gauge(
    "saf_pending_messages",
    "broker destination service",
    "Messages of the outbox that are committed and not forwarded yet, by the destination of their "
    "present route: `(none)` without a route, `(several)` for a topic or several equal routes, "
    "`(router)` for a router. Counted up to 1,000 in each shard, estimated beyond.",
)
OLDEST_PENDING = _gauge(
    "saf_oldest_pending_seconds",
    "broker destination service",
    "Age of the oldest pending message; absent if there are none.",
)
HELD = _gauge(
    "saf_held_messages",
    "broker",
    "Messages that are due later, or due and not moved to the outbox yet. Counted up to 100,000.",
)
OVERDUE = _gauge(
    "saf_held_overdue_seconds",
    "broker",
    "Time for which the first held message has been due; 0 if none is due. A forwarder moves it.",
)
REFUSED = _gauge(
    "saf_refused_messages",
    "broker",
    "Held messages that the database refused to move to the outbox when they were due, e.g. "
    "because no rule of `saf sender` allows them. They wait for an operator. Counted up to "
    "100,000.",
)
UNREAD = _gauge(
    "saf_unread_messages",
    "broker subscription",
    "Messages of the inbox that a subscription has neither handled nor set aside. Counted like "
    "pending messages.",
)
LAG = _gauge(
    "saf_subscription_lag_seconds",
    "broker log subscription",
    "Age of the oldest message in the log that the subscription has not completed; 0 if there are "
    "none.",
)
PARKED = _gauge(
    "saf_parked_messages",
    "broker subscription destination kind",
    "Parked messages, by the kind of their lane. Counted up to 100,000, estimated beyond.",
)
OLDEST_PARKED = _gauge(
    "saf_parked_lane_seconds",
    "broker subscription destination kind",
    "Time since the lane that has waited longest got its first message.",
)
ATTEMPTS = _gauge(
    "saf_most_attempts",
    "broker subscription destination kind",
    "Failed attempts of the lane that has most of them.",
)
MISSING_MEMBERS = _gauge(
    "saf_missing_members",
    "broker fleet",
    "Databases that a forwarder has found in the fleet before and that the fleet no longer lists: "
    "they were dropped or renamed, or allow no connections. As of the last run.",
)
NEEDS_OPERATOR = _gauge(
    "saf_operator_lanes",
    "broker subscription destination kind",
    "Lanes whose last attempt failed for a reason that only an operator can remove: no route, a "
    "service that the destination does not know, a full disk, a login that is refused, a "
    "destination that has rejected too many messages in a row. Absent if there are none.",
)
DEAD = _gauge(
    "saf_dead_letters",
    "broker subscription reason",
    "Dead letters that wait for an operator. Counted up to 100,000.",
)
DEAD_GROUP = _gauge(
    "saf_dead_letter_group_messages",
    "broker subscription service reason group",
    "Dead letters of the largest failure group of each subscription and reason, of the newest "
    "2,000. `saf dead list --group` shows them.",
)
DROPPED = _counter(
    "saf_dropped_messages_total",
    "database",
    "broker subscription reason",
    "Messages that a subscription has dropped because nobody needs them, such as repeats.",
)
MEMBERS = _gauge(
    "saf_members",
    "broker log subscription",
    "Live members of a subscription: forwarders, processors and dispatchers, but not workers.",
)
UNOWNED = _gauge(
    "saf_unowned_shards", "broker log subscription", "Shards of a subscription that no member owns."
)
PAUSED = _gauge(
    "saf_subscription_paused",
    "broker subscription",
    "1 while an operator has paused a subscription of the inbox, else 0.",
)
SLOTS = _gauge(
    "saf_ring_used_slots",
    "broker log",
    "Slots of the log that hold messages, of eight. If all eight do, the oldest one is used again "
    "before it is purged, and grows.",
)
OLDEST_TRANSACTION = _gauge(
    "saf_oldest_transaction_seconds",
    "broker",
    "Age of the oldest open or prepared transaction in the broker's database. Its messages are not "
    "forwarded yet, and it holds back purge and vacuum.",
)
ENDPOINTS = _gauge(
    "saf_endpoint_state",
    "broker endpoint state",
    "1 for the present state of an endpoint: closed (it is up), open (it is down), disabled or "
    "paused.",
)
DESTINATIONS = _gauge(
    "saf_destination_state",
    "broker destination state",
    "1 for the last state of a destination that this source has seen: up, down, waiting (messages "
    "wait for it, and it has not failed since), or paused by an operator.",
)

# Counted by a forwarder

FORWARDED = _counter(
    "saf_forwarded_messages_total",
    "forwarder",
    "broker destination",
    "Messages that were stored at a destination.",
)
RETRIED = _counter(
    "saf_retried_messages_total",
    "forwarder",
    "broker destination",
    "Forwarded messages that were parked before, or that an operator has sent again.",
)
REPEATED = _counter(
    "saf_repeated_messages_total",
    "forwarder",
    "broker destination",
    "Messages that were sent again after a crash or a lost answer, and that the destination "
    "dropped.",
)
SOURCE_MESSAGES = _counter(
    "saf_source_messages_total",
    "forwarder",
    "source",
    "Messages of a source, such as a topic of Redis, that were stored in an inbox.",
)
SOURCE_DEAD = _counter(
    "saf_source_dead_letters_total",
    "forwarder",
    "source",
    "Records of a source that no inbox takes, and that became dead letters.",
)
DELIVERED = _counter(
    "saf_delivered_messages_total",
    "forwarder",
    "broker destination service",
    "Forwarded and repeated messages, by service; 100 services of a destination are named.",
)
SET_ASIDE = _counter(
    "saf_set_aside_messages_total",
    "forwarder",
    "broker state",
    "Messages that were set aside: parked, or made dead letters.",
)
CYCLES = _histogram(
    "saf_cycle_seconds", "forwarder", "", "Duration of cycles that had messages to forward."
)
CYCLE_MESSAGES = _histogram(
    "saf_cycle_messages", "forwarder", "", "Messages forwarded by such a cycle.", MESSAGES
)
CHUNK_SECONDS = _histogram(
    "saf_chunk_seconds",
    "forwarder",
    "destination",
    "Duration of storing one chunk at a destination, including its transaction.",
)
CHUNK_MESSAGES = _histogram(
    "saf_chunk_messages",
    "forwarder",
    "destination",
    "Messages in such a chunk.",
    MESSAGES,
)
PROBLEMS = _counter(
    "saf_problems_total",
    "forwarder",
    "broker kind",
    "Problems by the class of their error, as in `problems` of `saf forward --json`.",
)
TAKEOVERS = _counter(
    "saf_lease_takeovers_total",
    "forwarder",
    "",
    "Shards that this process has freed because their owner had died or its lease was over.",
)
FENCED = _counter(
    "saf_fenced_total",
    "forwarder",
    "broker",
    "Tasks of this forwarder that stopped because another forwarder owns their shards.",
)

# Counted by a worker or by processors

RECEIVED = _counter(
    "saf_received_messages_total",
    "worker",
    "subscription outcome",
    "Messages of committed deliveries: handled, parked (to be tried again) or dead.",
)
RECEIVE_SECONDS = _histogram(
    "saf_receive_seconds",
    "worker",
    "subscription",
    "Duration of deliveries, from the first message to the commit.",
)
HANDLER_SECONDS = _histogram(
    "saf_handler_seconds",
    "worker",
    "subscription",
    "Duration of calls of handlers, for one message or a batch.",
)
FAILED_ATTEMPTS = _counter(
    "saf_failed_attempts_total",
    "worker",
    "subscription last",
    "Attempts that failed because the handler raised; `last` is true if the message became a dead "
    "letter.",
)

# Counted by a dispatcher

IN_FLIGHT = _gauge(
    "saf_dispatch_in_flight",
    "endpoint",
    "Requests that were sent and are not answered yet.",
    "dispatcher",
)
ANSWERS = _counter(
    "saf_dispatch_answers_total",
    "dispatcher",
    "endpoint outcome",
    "Requests, by the outcome of their answers.",
)
DISPATCH_SECONDS = _histogram(
    "saf_dispatch_seconds", "dispatcher", "endpoint", "Duration of requests."
)

# Counted by a purge

PURGED = _counter(
    "saf_purged_messages_total", "purge", "broker log", "Messages that purges removed."
)
PURGED_SLOTS = _counter(
    "saf_purged_slots_total", "purge", "broker log", "Slots of a log that were emptied."
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""All metrics, in the order of their declaration."""


MOST_SERIES = 1000
"""Most combinations of labels per metric; further ones are counted under `OTHER`."""
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One value of a metric."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Tally


class Store:
    """The counts of one process. Threads may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Metric, dict[tuple[str, ...], float | Tally]] = {}

    def add(self, metric: Metric, amount: float, labels: dict[str, str]) -> None:
        """Add to a counter or a gauge."""
        with self._lock:
            values, names = self._series(metric, labels)
            before = values.get(names, 0.0)
            assert not isinstance(before, Tally)  # noqa: S101 - histograms use observe
            values[names] = before + amount

    def observe(self, metric: Metric, value: float | Tally, labels: dict[str, str]) -> None:
        """Add a value, or a tally of values, to a histogram."""
        with self._lock:
            values, names = self._series(metric, labels)
            tally = values.setdefault(names, metric.tally())
            assert isinstance(tally, Tally)  # noqa: S101 - only histograms use observe
            if isinstance(value, Tally):
                tally.merge(value)
            else:
                tally.add(value)

    def samples(self) -> list[Sample]:
        """Return all current values."""
        with self._lock:
            return [
                Sample(
                    metric=metric,
                    labels=labels,
                    value=value.copy() if isinstance(value, Tally) else value,
                )
                for metric, values in self._values.items()
                for labels, value in values.items()
            ]

    def _series(
        self, metric: Metric, labels: dict[str, str]
    ) -> tuple[dict[tuple[str, ...], float | Tally], tuple[str, ...]]:
        values = self._values.setdefault(metric, {})
        names = tuple(str(labels[name]) for name in metric.labels)
        if names not in values and len(values) >= MOST_SERIES:
            names = (OTHER,) * len(names)
        return values, names


_store: Store | None = None


def switch_on() -> Store:
    """Store reports from now on, in this process."""
    global _store  # noqa: PLW0603 - a process has one
    if _store is None:
        _store = Store()
    return _store


def switch_off() -> None:
    """Drop all counts, and ignore further reports."""
    global _store  # noqa: PLW0603 - a process has one
    _store = None


def counting() -> bool:
    """Return whether reports are stored."""
    return _store is not None


def count(metric: Metric, amount: float = 1, **labels: str) -> None:
    """Add to a counter or a gauge."""
    if _store is not None:
        _store.add(metric, amount, labels)


def observe(metric: Metric, value: float | Tally, **labels: str) -> None:
    """Add a value, or a tally of values, to a histogram."""
    if _store is not None:
        _store.observe(metric, value, labels)


@contextmanager
def timed(metric: Metric, **labels: str) -> Iterator[None]:
    """Add the duration of a block to a histogram, however the block ends."""
    if _store is None:
        yield
        return
    began = perf_counter()
    try:
        yield
    finally:
        observe(metric, perf_counter() - began, **labels)
