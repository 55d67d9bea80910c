"""Storing: the step of a delivery in which messages reach their destinations.

What stands in the way of some messages delays only those. What a destination rejects is found by
halving, and its neighbours are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.cursor import hold
from saf.destinations import Chunk, Destination
from saf.destinations.postgresql import PostgresInbox
from saf.errors import (
    Ahead,
    AnotherBroker,
    ConfigurationError,
    Fenced,
    Rejected,
    Unavailable,
    UnknownService,
)
from saf.parking import MAIN
from saf.retry import while_unavailable
from saf.spark.aside import Aside
from saf.spark.at_source import AtSource
from saf.spark.chunks import mark
from saf.spark.lanes import Lanes
from saf.spark.receipts import Receipts
from saf.spark.sorting import Part, service_lane, unroutable
from saf.spark.work import Policy, Work
from saf.ways import EXACTLY_ONCE


def nowhere(name: str) -> Unavailable:
    """The error for a destination that is not configured."""
    return Unavailable(f"destination {name!r}", f"saf.toml has no [destinations.{name}]")


@dataclass
class Storing:
    """The destinations of one task, each connected when something first goes there."""

    work: Work
    policy: Policy
    at_source: AtSource
    lanes: Lanes
    receipts: Receipts
    _open: dict[str, Destination] = field(default_factory=dict)
    _identities: dict[str, str] = field(default_factory=dict)

    def store(self, part: Part, end: tuple[int, int], aside: Aside) -> None:
        """Store a part, which completes its lane up to (batch, position) ``end``.

        What does not go is in ``aside``.
        """
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        aside.write_ahead(self.at_source)
        behind = self.lanes.services(part.destination) if part.lane.lane == MAIN else frozenset()
        chunk = replace(self._chunk(part, end), behind=behind)
        name, exactly_once = part.destination, part.quality == EXACTLY_ONCE
        try:
            stored = while_unavailable(
                self.policy.attempts,
                lambda: self._destination(name).store(chunk, exactly_once=exactly_once),
            )
        except Unavailable as error:
            aside.failed[part.lane] = error
            aside.parked.append(part)
            self.lanes.hold(part.lane, error)
        except AnotherBroker as error:
            self._store_own(part, end, aside, error)
        except UnknownService as error:
            self._store_known(part, end, aside, error)
        except Fenced as error:
            # a newer owner than the source itself knows of: raises Fenced, or is not so
            self.at_source(lambda source: hold(source, self.work.batch))
            raise Ahead(f"destination {name!r}", error.shards) from None
        except Rejected as error:
            self._store_halves(part, end, aside, error)
        else:
            self.receipts.of(name).messages += stored.messages
            self.receipts.of(name).dropped += stored.dropped
            if part.lane in self.lanes.untried:
                self.lanes.untried.discard(part.lane)
                aside.opened.add(part.lane)

    def store_once(self, part: Part, aside: Aside) -> None:
        """Store a part at most once: what may have left is not sent again, and said to be dead."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        if not part.rows.num_rows:
            return
        chunk = self._chunk(part, mark(part.rows, self.work.batch.number))
        try:
            stored = self._destination(part.destination).store(chunk, exactly_once=False)
        except AnotherBroker as error:
            mine, others = _told_apart(error)
            self._let_wait(others, aside, error)
            self.store_once(replace(part, rows=mine), aside)
        except (Unavailable, UnknownService, Rejected) as error:
            aside.bury(part.rows, part.destination, "unavailable", str(error))
        else:
            self.receipts.of(part.destination).messages += stored.messages

    def close(self) -> None:
        """Give up all connections."""
        for destination in self._open.values():
            destination.close()

    def _store_halves(
        self, part: Part, end: tuple[int, int], aside: Aside, error: Rejected
    ) -> None:
        """Store what can be of a part with something that the destination rejects."""
        if part.rows.num_rows == 1:
            aside.bury(part.rows, part.destination or "", "rejected", str(error))
            return
        half = part.rows.num_rows // 2
        first = replace(part, rows=part.rows.slice(0, half))
        self.store(first, mark(first.rows, end[0]), aside)
        second = replace(part, rows=part.rows.slice(half))
        if part.lane in self.lanes.held:
            aside.parked.append(second)
        else:
            self.store(second, end, aside)

    def _store_own(
        self, part: Part, end: tuple[int, int], aside: Aside, error: AnotherBroker
    ) -> None:
        """Store the rest of a part, some of which is for other brokers: that waits for a route."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        mine, others = _told_apart(error)
        self._let_wait(others, aside, error)
        self._store_rest(part, mine, end, aside, error.rows)

    def _let_wait(self, rows: pa.Table, aside: Aside, error: AnotherBroker) -> None:
        """Let messages wait for a route, as those do that have none."""
        for waiting in unroutable(rows):
            aside.failed[waiting.lane] = error
            aside.parked.append(waiting)
            self.lanes.hold(waiting.lane, error)

    def _store_known(
        self, part: Part, end: tuple[int, int], aside: Aside, error: UnknownService
    ) -> None:
        """Store the rest of a part, some of whose services the destination does not know."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        services = error.rows["to_service"]
        for service in error.services:
            # what was stored before the service went must not get another lane's watermark
            rows = error.rows.filter(pc.equal(services, service))
            lane = part.lane if part.lane.lane else service_lane(part.destination, service)
            if lane == part.lane or lane not in self.lanes.occupied:
                aside.failed[lane] = error
            aside.parked.append(replace(part, lane=lane, rows=rows))
            self.lanes.hold(lane, error)
        known = pc.invert(pc.is_in(services, pa.array(error.services)))
        self._store_rest(part, error.rows.filter(known), end, aside, error.rows)

    def _store_rest(
        self, part: Part, rest: pa.Table, end: tuple[int, int], aside: Aside, fresh: pa.Table
    ) -> None:
        """Store what a destination has not refused of the ``fresh`` rows of a part."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        self.receipts.of(part.destination).dropped += part.rows.num_rows - fresh.num_rows
        if rest.num_rows:
            self.store(replace(part, rows=rest), end, aside)

    def _chunk(self, part: Part, end: tuple[int, int]) -> Chunk:
        return Chunk(
            source=self.work.source,
            batch=self.work.batch,
            rows=part.rows,
            number=end[0],
            position=end[1],
            lane=part.lane.lane,
        )

    def _destination(self, name: str) -> Destination:
        destination = self._open.setdefault(
            name, PostgresInbox(name, self.policy.destinations[name][0], keep=self.work.keep)
        )
        if name not in self._identities:
            identity = destination.identity()
            for other, known in self._identities.items():
                if known == identity:
                    raise ConfigurationError(
                        f"destinations {other!r} and {name!r} are the same broker: one watermark "
                        "cannot serve both, so keep one of them in saf.toml"
                    )
            self._identities[name] = identity
        return destination


def _told_apart(error: AnotherBroker) -> tuple[pa.Table, pa.Table]:
    """Of the rows that were refused, those that are for the destination, and the others."""
    others = pa.array([UUID(one).bytes for one in error.others], pa.binary())
    away = pc.is_in(error.rows["to_broker"], value_set=others, skip_nulls=True)
    return error.rows.filter(pc.invert(away)), error.rows.filter(away)
