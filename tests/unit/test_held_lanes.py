"""What a task knows of its lanes: which hold new messages up, and what opens them."""

from __future__ import annotations

from uuid import uuid4

import pyarrow as pa

from saf.engine.context import HeldLanes
from saf.engine.parts import Part
from saf.engine.set_aside import SetAside
from saf.engine.work import Work
from saf.setaside.lane import Kind, Lane

MAIN = Lane(destination="mom")
REPLAY = Lane(destination="mom", kind=Kind.REPLAY)
RETRY = Lane(destination="mom", kind=Kind.RETRY)
SERVICE = Lane(destination="mom", kind=Kind.SERVICE, subject="billing")


def test_a_lane_that_the_batch_itself_has_filled_stays_held() -> None:
    """Else what comes after these messages in the batch would be sent before them."""
    lanes = HeldLanes(held={MAIN: "down", RETRY: "down"}, ahead={MAIN})
    lanes.emptied(MAIN)
    lanes.emptied(RETRY)
    assert lanes.held == {MAIN: "down"}


def test_a_replay_holds_the_destinations_own_lane_and_no_other_destinations() -> None:
    lanes = HeldLanes()
    lanes.hold(REPLAY, "sent again")
    assert lanes.held == {REPLAY: "sent again", MAIN: "sent again"}


def test_while_a_replay_waits_no_lane_of_its_destination_opens() -> None:
    other = Lane(destination="other")
    lanes = HeldLanes(held={other: "down"})
    lanes.hold(REPLAY, "sent again")
    lanes.emptied(MAIN)
    lanes.emptied(other)
    assert set(lanes.held) == {REPLAY, MAIN}


def test_services_that_wait_are_those_of_one_destination_and_of_their_kind() -> None:
    lanes = HeldLanes()
    lanes.hold(SERVICE, "unknown")
    lanes.hold(Lane(destination="other", kind=Kind.SERVICE, subject="shipping"), "unknown")
    lanes.hold(Lane(destination="mom", kind=Kind.FOUND_ROUTE, subject="audit"), "unknown")
    assert lanes.services("mom") == {"billing"}
    assert lanes.of_services


# What a chunk sets aside, before it is written


def of_ids(*ids: int) -> Part:
    rows = pa.table({"id": pa.array(ids, pa.int64())})
    return Part(destination="mom", quality="exactly_once", rows=rows)


def aside() -> SetAside:
    return SetAside(work=Work.__new__(Work))


def test_the_first_message_that_waits_is_the_least_of_all_parts() -> None:
    one = aside()
    assert one.waits_from() is None
    one.parked += [of_ids(7, 9), of_ids(), of_ids(5, 8)]
    assert one.waits_from() == 5


def test_a_chunk_that_has_opened_a_lane_is_not_done_up_to_its_first_message_that_waits() -> None:
    """That the lane is open is written with the whole chunk, not with a part of it."""
    one = aside()
    one.parked.append(of_ids(5))
    one.opened.add(MAIN)
    assert one.waits_from() is None


def test_a_chunk_with_dead_letters_is_not_done_up_to_its_first_message_that_waits() -> None:
    one = aside()
    one.parked.append(of_ids(5))
    one.dead.append((of_ids(3).rows, "mom", "rejected", str(uuid4())))
    assert one.waits_from() is None


def test_a_chunk_of_which_messages_are_left_out_is_not_done_up_to_its_first_that_waits() -> None:
    """They are counted with the whole chunk, not with a part of it."""
    one = aside()
    one.parked.append(of_ids(5))
    rows = {"id": pa.array([3]), "shard": pa.array([0]), "message_id": pa.array([bytes(16)])}
    assert one.leave_out(pa.table(rows), "mom") == 1
    assert one.waits_from() is None
