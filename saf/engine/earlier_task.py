"""An earlier task: its work on a batch's messages before it died.

Messages that it set aside beyond the position are not sent, and new messages wait behind them.
Messages that it tried to send at most once are not sent again. The earlier task may still be alive:
Spark starts a second run of a task that is slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.engine.held_lanes import HeldLanes
from saf.engine.parts import Part
from saf.engine.set_aside import MAY_HAVE_LEFT, SetAside
from saf.engine.source_session import SourceSession
from saf.log.cursor import Batch
from saf.routing.matching import Match
from saf.setaside import parking


class EarlierTask:
    """The work of earlier tasks on one batch. Call `look` first, and after a step has raised."""

    def __init__(self, batch: Batch, source_session: SourceSession, lanes: HeldLanes) -> None:
        self._batch = batch
        self._at_source = source_session
        self._lanes = lanes
        self._set_aside: dict[str, pa.Array] = {}
        """For each destination, the ids beyond the position that are already set aside."""

    def look(self) -> None:
        """Find the messages that are set aside, and hold their lanes."""
        ids: dict[str, list[int]] = defaultdict(list)
        found = self._at_source.find(lambda source: parking.set_aside(source, self._batch))
        for id_, destination, lane in found:
            ids[destination].append(id_)
            if lane is not None:
                self._lanes.hold(lane, "behind others")
                self._lanes.ahead.add(lane)
        self._set_aside = {name: pa.array(numbers, pa.int64()) for name, numbers in ids.items()}

    def fresh(self, rows: pa.Table, destination: str = "") -> pa.Table:
        """Return the messages not set aside for a destination; if empty, for all destinations."""
        if destination not in self._set_aside:
            return rows
        return rows.filter(pc.invert(pc.is_in(rows["id"], self._set_aside[destination])))

    def unfinished(self, routed: pa.Table, matches: Sequence[Match]) -> pa.Table:
        """Return messages with anything left to do; keep a topic's, as some copy may be left."""
        if not self._set_aside:
            return routed
        topics = [number for number, match in enumerate(matches) if match.to_all]
        copies = pc.is_in(routed["route"], pa.array(topics, pa.int32()))
        set_aside = pa.concat_arrays(list(self._set_aside.values()))
        return routed.filter(pc.or_(copies, pc.invert(pc.is_in(routed["id"], set_aside))))

    def unattempted(
        self, parts: Iterable[Part], attempted: Mapping[int, int], set_aside: SetAside
    ) -> list[Part]:
        """Return parts without the messages that may have been sent at most once; bury these.

        ``attempted`` maps each shard to the id up to which sending has been attempted.
        """
        limits = np.zeros(max(attempted) + 1, np.int64)
        limits[list(attempted)] = list(attempted.values())
        left = []
        for part in parts:
            before = part.rows["id"].to_numpy() <= limits[part.rows["shard"].to_numpy()]
            if before.any():
                set_aside.bury(part.rows.filter(pa.array(before)), part.waits_at, *MAY_HAVE_LEFT)
                part = replace(part, rows=part.rows.filter(pa.array(~before)))  # noqa: PLW2901
            left.append(part)
        return [part for part in left if part.rows.num_rows]
