"""What an earlier task has done with a batch: by shard, by destination, and up to which id."""

from __future__ import annotations

import pyarrow as pa

from saf.engine.context import Context, HeldLanes
from saf.engine.parts import Part
from saf.engine.set_aside import SetAside
from saf.engine.source_session import SourceSession
from saf.engine.task import EarlierTask
from saf.engine.work import Work
from saf.log.cursor import Batch
from saf.routing.matching import Match, Route
from saf.setaside.lane import Lane


def rows(*places: tuple[int, int], route: int = 0) -> pa.Table:
    """Messages, each with a shard and an id."""
    return pa.table(
        {
            "shard": pa.array([shard for shard, _ in places], pa.int16()),
            "id": pa.array([id_ for _, id_ in places], pa.int64()),
            "route": pa.array([route] * len(places), pa.int32()),
        }
    )


class Source(SourceSession):
    """A source that has some messages set aside."""

    def __init__(self, found: list[tuple[int, str, Lane | None]]) -> None:
        self.found = found

    def find(self, _):  # type: ignore[no-untyped-def] # its type is a variable
        return self.found


def earlier(*found: tuple[int, str, Lane | None]) -> tuple[EarlierTask, HeldLanes]:
    context = Context.__new__(Context)
    context.work, context.source, context.lanes = of_nothing(), Source([*found]), HeldLanes()
    one = EarlierTask(context)
    one.find_set_aside()
    return one, context.lanes


def of_nothing() -> Work:
    work = Work.__new__(Work)
    object.__setattr__(work, "batch", Batch.__new__(Batch))
    return work


def test_what_was_attempted_is_told_by_the_id_of_its_own_shard() -> None:
    one, _ = earlier()
    aside = SetAside(work=Work.__new__(Work))
    part = Part(
        destination="mom",
        quality="at_most_once",
        rows=rows((1, 5), (1, 6), (2, 5), (2, 6), (3, 1)),
    )
    (left,) = one.unattempted([part], {1: 5, 2: 0, 3: 9}, aside)
    assert left.rows["id"].to_pylist() == [6, 5, 6]
    assert left.rows["shard"].to_pylist() == [1, 2, 2]
    ((buried, destination, reason, _),) = aside.dead
    assert buried["id"].to_pylist() == [5, 1]
    assert (destination, reason) == ("mom", "unavailable")


def test_a_part_of_which_nothing_is_left_is_none() -> None:
    one, _ = earlier()
    aside = SetAside(work=Work.__new__(Work))
    part = Part(destination="mom", quality="at_most_once", rows=rows((1, 5)))
    assert one.unattempted([part], {1: 5}, aside) == []
    assert one.unattempted([part], {1: 4}, aside) == [part]


def test_what_is_set_aside_for_one_destination_is_fresh_for_others() -> None:
    main = Lane(destination="mom")
    one, lanes = earlier((5, "mom", main), (6, "", None))
    some = rows((1, 5), (1, 6), (1, 7))
    assert one.fresh(some, "mom")["id"].to_pylist() == [6, 7]
    assert one.fresh(some)["id"].to_pylist() == [5, 7]
    assert one.fresh(some, "other")["id"].to_pylist() == [5, 6, 7]
    assert set(lanes.held) == lanes.ahead == {main}


def test_of_a_topics_message_some_copy_may_be_left() -> None:
    one, _ = earlier((5, "mom", None))
    routes = (Route(destination="mom"), Route(destination="erp"))
    matches = [Match(routes=routes[:1]), Match(routes=routes, to_all=True)]
    assert one.unfinished(rows((1, 5), (1, 6)), matches)["id"].to_pylist() == [6]
    assert one.unfinished(rows((1, 5), (1, 6), route=1), matches)["id"].to_pylist() == [5, 6]
