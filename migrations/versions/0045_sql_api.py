"""Dialogs and receiving from SQL: sql_dialogs.sql, sql_receive.sql and sql_taking.sql."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0045"
down_revision = "0044"

DROP = """
DROP FUNCTION saf.take_back, saf.retry_later, saf.reject, saf.out_of_hand, saf.receive,
    saf.take_lane, saf.take_shards, saf.note_failure, saf.take_ahead, saf.take_shard, saf.read_on,
    saf.extend_batch, saf.unread, saf.chosen, saf.has_seat, saf.give_up, saf.count_failed,
    saf.open_lane, saf.keep_copy, saf.dispose, saf.arrive, saf.go_direct, saf.follow_routers,
    saf.make_due, saf.judge, saf.find_end, saf.begin_target, saf.redirecting_router,
    saf.fail_dialog, saf.drop_message, saf.bury, saf.time_late, saf.wait_in_lane, saf.set_aside,
    saf.wait_after, saf.reader,
    saf.refuse_receiver, saf.newest_cursors, saf.in_hand, saf.without_own, saf.is_failed,
    saf.end_dialog, saf.say(uuid, jsonb, text, jsonb), saf.say(uuid, text, text, jsonb),
    saf.say(uuid, bytea, text, jsonb), saf.contract_fault, saf.utter, saf.begin_dialog,
    saf.expire_later, saf.tell_oneself, saf.refuse_handle, saf.header_fault, saf.refuse_dialog;
"""


def upgrade() -> None:
    apply(baseline("sql_dialogs"))
    apply(baseline("sql_receive"))
    apply(baseline("sql_taking"))


def downgrade() -> None:
    apply(DROP)
