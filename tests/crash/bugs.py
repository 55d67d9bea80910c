"""Bugs to be planted, each a small patch, which a checker must find."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

import saf
import saf.routing_service
from saf import Outbox
from saf.broker import grants
from saf.broker.grants import RIGHTS, Kind
from saf.destinations import Chunk, marks, places
from saf.destinations.marks import Difference
from saf.destinations.postgresql import inbox
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.dialogs import arrival
from saf.dialogs.facts import Facts, Verdict, judge
from saf.engine import kept_results, task
from saf.engine.set_aside import SetAside
from saf.engine.storing import Storing
from saf.errors import Rejected
from saf.log import cursor, read, ring
from saf.log.cursor import Batch
from saf.log.offset import Offset, between
from saf.operating.repair import rebase, send_again
from saf.receiving import claim
from saf.sending import staging
from saf.setaside import dead, dropped, parking
from saf.setaside.dropped import Reason
from saf.spark.table import stream
from tests.programs import ROOT

PLANT = ROOT / "tests" / "crash" / "plant"
"""What Python imports at its start, with this in its path, plants what `CRASH_BUG` names."""


def watermark_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inbox, "MOVE", "SELECT 1")


def watermark_moved_and_a_row_not_stored(patch: pytest.MonkeyPatch) -> None:
    whole = inbox.inbox_rows
    patch.setattr(inbox, "inbox_rows", lambda rows, source: whole(rows, source).slice(1))


def marked_before_sent(patch: pytest.MonkeyPatch) -> None:
    deliver = Storing.deliver

    def early(self: Storing, part: Any, aside: SetAside) -> None:
        last = part.rows["id"][-1].as_py()
        work = self.context.work
        self.context.source(lambda source: cursor.advance(source, work.batch, last))
        deliver(self, part, aside)

    patch.setattr(Storing, "deliver", early)


def no_fence_at_the_destination(patch: pytest.MonkeyPatch) -> None:
    blind = inbox.LOCK.replace("epoch,", "0::bigint AS epoch,", 1)
    patch.setattr(inbox, "LOCK", blind)
    # what the new owner has set aside would give the old one away
    patch.setattr(marks.InHand, "has_forgotten", lambda *_: False)


def no_fence_at_the_source(patch: pytest.MonkeyPatch) -> None:
    fence = "\n  AND c.owner = %(owner)s AND c.epoch = mine.epoch AND c.batch = %(batch)s"
    for name in ("ADVANCE", "CLOSE", "LOCK_CURSORS"):
        statement = getattr(cursor, name)
        assert fence in statement
        patch.setattr(cursor, name, statement.replace(fence, ""))


def id_used_as_cursor(patch: pytest.MonkeyPatch) -> None:
    def beyond_the_last(table: str, shards: list[int], done: str) -> sql.Composed:
        query = (
            "SELECT * FROM saf.{} WHERE shard = ANY ({}::smallint[]) AND id > coalesce((SELECT "
            "max(id) FROM saf.outbox WHERE pg_visible_in_snapshot(txid, {}::pg_snapshot)), 0)"
        )
        return sql.SQL(query).format(sql.Identifier(table), sql.Literal(shards), sql.Literal(done))

    patch.setattr(cursor, "since", beyond_the_last)


def transactions_in_progress_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(read, "ENDED_SINCE", "")


def done_is_the_snapshot_of_now(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        cursor, "CLOSE", cursor.CLOSE.replace("done = c.open", "done = pg_current_snapshot()")
    )


def read_in_no_order(patch: pytest.MonkeyPatch) -> None:
    def select(self: Batch, columns: Any) -> str:
        return f"{self.rows(columns)} ORDER BY id DESC"

    patch.setattr(Batch, "select", select)


def moved_past_a_chunk_that_failed(patch: pytest.MonkeyPatch) -> None:
    deliver = Storing.deliver

    def carefree(self: Storing, part: Any, _: SetAside) -> None:
        deliver(self, part, SetAside(work=self.context.work))

    patch.setattr(Storing, "deliver", carefree)


def parked_messages_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parking, "park", lambda *_: None)


def a_lane_released_in_no_order(patch: pytest.MonkeyPatch) -> None:
    backwards = parking.IN_LANES.replace("BY {order}", "BY parked_id DESC")
    patch.setattr(parking, "IN_LANES", backwards)


def purged_without_the_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ring, "_obstacle", lambda *_: None)


def neighbours_rejected_too(patch: pytest.MonkeyPatch) -> None:
    store = PostgresInbox.store
    bury = SetAside.bury

    def all_or_nothing(self: Storing, part: Any, aside: SetAside) -> None:
        work, destinations = self.context.work, self.context.destinations
        chunk = Chunk(source=work.source, batch=work.batch, rows=part.rows)
        try:
            store(destinations.connected(part.destination), chunk, exactly_once=True)  # type: ignore[arg-type]
        except Rejected as error:
            bury(aside, part.rows, part.destination, "rejected", str(error))

    patch.setattr(Storing, "deliver", all_or_nothing)


def a_rejected_message_below_the_watermark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SetAside, "ahead", False)


def set_aside_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dead, "known", lambda *_: set())


def attempts_forgotten(patch: pytest.MonkeyPatch) -> None:
    def never(_: object, batch: Batch, *__: object) -> dict[int, int]:
        return dict.fromkeys(batch.shards, 0)

    patch.setattr(task, "attempted", never)
    patch.setattr(task, "attempt", never)


def sent_outside_of_the_transaction(patch: pytest.MonkeyPatch) -> None:
    send = Outbox.send

    def apart(self: Outbox, conn: Any, *arguments: Any, **more: Any) -> Any:
        with psycopg.connect(conn.info.dsn) as another:
            return send(self, another, *arguments, **more)

    patch.setattr(Outbox, "send", apart)


def repeats_in_a_dialog_taken(patch: pytest.MonkeyPatch) -> None:
    def trusting(before: Facts, message: saf.Received, **more: Any) -> tuple[Verdict, Facts]:
        repeat = (message.sequence or 0) <= before.receive_sequence
        return (Verdict.TAKE, before) if repeat else judge(before, message, **more)

    patch.setattr(arrival, "judge", trusting)


def a_drop_counted_for_another_reason(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arrival, "why_dropped", lambda *_, **__: Reason.OVERTAKEN)


def a_drop_counted_twice(patch: pytest.MonkeyPatch) -> None:
    count = dropped.count
    patch.setattr(dropped, "count", lambda raw, by, some: count(raw, by, [*some, *some]))


def marks_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(places, "compare", lambda *_: Difference())


def a_repair_sends_nothing_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(send_again, "replay", lambda *_, **__: {})


def a_repair_does_not_go_on_after_what_destinations_know(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rebase, "_go_on_after", lambda *_: None)


def a_receiver_forgets_how_far_it_got(patch: pytest.MonkeyPatch) -> None:
    moved = claim.MOVE_CURSORS.replace("position = m.position", "position = c.position")
    patch.setattr(claim, "MOVE_CURSORS", moved)


def a_hub_passes_nothing_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saf.routing_service, "pass_on", lambda *_, **__: True)


def a_writer_may_read(patch: pytest.MonkeyPatch) -> None:
    more = {Kind.WRITER: (*RIGHTS[Kind.WRITER], {"outbox": {"SELECT": ()}})}
    patch.setattr(grants, "RIGHTS", {**RIGHTS, **more})


def dead_for_another_reason(patch: pytest.MonkeyPatch) -> None:
    bury = SetAside.bury
    patch.setattr(
        SetAside, "bury", lambda self, rows, to, _, error: bury(self, rows, to, "expired", error)
    )


def what_is_left_out_is_counted_before_the_position(patch: pytest.MonkeyPatch) -> None:
    leave_out = SetAside.leave_out

    def at_once(self: SetAside, rows: pa.Table, destination: str) -> None:
        leave_out(self, rows, destination)
        with self.work.dsn.connect(role="test") as source:
            self.count_left_out(source)
        self._left_out.clear()

    patch.setattr(SetAside, "leave_out", at_once)


def results_of_transforms_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    keep = kept_results.keep

    def forgetful(connection: psycopg.Connection[Any], batch: Batch, results: Any) -> Any:
        made = keep(connection, batch, results)
        connection.execute("DELETE FROM saf.kept_result")
        return made

    patch.setattr(kept_results, "keep", forgetful)


def a_stream_forgets_where_in_a_batch_it_was(patch: pytest.MonkeyPatch) -> None:
    def forgetful(log: str, start: Offset, *more: Any) -> Any:
        return between(log, replace(start, position=0), *more)

    patch.setattr(stream, "between", forgetful)


def epochs_are_sent_again(patch: pytest.MonkeyPatch) -> None:
    mark = "SELECT %(application)s::text, %(version)s::bigint, %(messages)s::bigint"
    patch.setattr(staging, "MARK", mark)


def with_bug(name: str, program: Callable[..., None], *arguments: object) -> None:
    """Run a program, for `tests.processes`, in which one of these is planted; "" for none.

    It is planted in all processes that it starts, too, as far as they are Python's.
    """
    with pytest.MonkeyPatch.context() as patch:
        if name:
            globals()[name](patch)
            patch.setenv("CRASH_BUG", name)
            patch.setenv("PYTHONPATH", f"{PLANT}{os.pathsep}{ROOT}")
        program(*arguments)
