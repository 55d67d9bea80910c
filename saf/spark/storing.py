"""Storing: the step of a delivery in which messages reach their destinations.

What stands in the way of some messages delays only those. What a destination rejects is found by
halving, and its neighbours are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from saf.cursor import hold
from saf.destinations import Chunk, Destination
from saf.destinations.postgresql import PostgresInbox
from saf.errors import (
    Ahead,
    ConfigurationError,
    Fenced,
    Rejected,
    Unavailable,
    UnknownService,
)
from saf.parking import Lane
from saf.retry import while_unavailable
from saf.spark.aside import Aside
from saf.spark.at_source import AtSource
from saf.spark.chunks import mark
from saf.spark.lanes import Lanes
from saf.spark.receipts import Receipts
from saf.spark.sorting import (
    LANE,
    Part,
    found_lanes,
    in_lanes,
    route_lanes,
    service_lanes,
)
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
        name, exactly_once = part.destination, part.quality == EXACTLY_ONCE
        behind = self.lanes.services(name) if part.main else frozenset()
        chunk = replace(self._chunk(part, end), behind=behind)
        try:
            stored = while_unavailable(
                self.policy.attempts,
                lambda: self._destination(name).store(chunk, exactly_once=exactly_once),
            )
        except Unavailable as error:
            aside.failed |= dict.fromkeys(part.lanes, error)
            aside.down.add(name)
            aside.wait(part)
            if part.main:
                self.lanes.hold(Lane(destination=name), str(error))
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
            lane = Lane(destination=name)
            if part.main and lane in self.lanes.untried:
                self.lanes.untried.discard(lane)
                aside.opened.add(lane)

    def store_once(self, part: Part, aside: Aside) -> None:
        """Store a part at most once: what may have left is not sent again, and said to be dead."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        if not part.rows.num_rows:
            return
        chunk = self._chunk(part, mark(part.rows, self.work.batch.number))
        try:
            stored = self._destination(part.destination).store(chunk, exactly_once=False)
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
        if part.destination in aside.down:
            aside.wait(second)
        else:
            self.store(second, end, aside)

    def _store_known(
        self, part: Part, end: tuple[int, int], aside: Aside, error: UnknownService
    ) -> None:
        """Store the rest of a part, some of whose services the destination does not know.

        Those wait in lanes of their services, so that the rest need not. In lanes that messages
        come to when they have found a route, unless they wait there already or are in the order
        that they were sent in: what was stored before the service went, or is sent again, must not
        meet another lane's watermark.
        """
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        unknown = pc.is_in(error.rows["to_service"], pa.array(error.services, pa.string()))
        rows = error.rows.filter(unknown)
        by_service = service_lanes(rows)
        if part.main:
            here, names = pc.equal(by_service, ""), by_service  # none
        else:
            by_route = found_lanes(route_lanes(rows))
            here = pc.or_(pc.equal(rows[LANE], by_service), pc.equal(rows[LANE], by_route))
            names = pc.if_else(here, rows[LANE], by_route)
        waiting = replace(part, rows=in_lanes(rows, names))
        staying = replace(waiting, rows=waiting.rows.filter(here))
        going = replace(waiting, rows=waiting.rows.filter(pc.invert(here)))
        services = dict(zip(names.to_pylist(), rows["to_service"].to_pylist(), strict=True))
        for lane in waiting.lanes:
            why = error.of(services[lane.lane])
            if not part.main or lane not in self.lanes.held:
                aside.failed[lane] = why
            self.lanes.hold(lane, str(why))
        if staying.rows.num_rows:
            aside.wait(staying)
        if going.rows.num_rows:
            aside.move(going)
        rest = replace(part, rows=error.rows.filter(pc.invert(unknown)))
        self.receipts.of(part.destination).dropped += part.rows.num_rows - error.rows.num_rows
        if rest.rows.num_rows:
            self.store(rest, end, aside)

    def _chunk(self, part: Part, end: tuple[int, int]) -> Chunk:
        return Chunk(
            source=self.work.source,
            batch=self.work.batch,
            rows=part.rows,
            number=end[0],
            position=end[1],
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
