"""Schedules; the SQL is in migrations/baseline/schedule.sql."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0040"
down_revision = "0039"

REFUSE_SCHEDULES = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM saf.schedule) THEN
        RAISE EXCEPTION USING MESSAGE = 'there are schedules, and revision 0039 has no place for '
            'them: remove them with `saf schedule remove`';
    END IF;
END $$;
"""
DROP = """
DROP FUNCTION saf.run_schedule, saf.send_schedule, saf.note_run, saf.send_scheduled,
    saf.resume_schedule, saf.pause_schedule, saf.remove_schedule,
    saf.schedule_to_change, saf.put_schedule, saf.lock_schedule;
DROP TABLE saf.schedule_run, saf.schedule;
"""


def upgrade() -> None:
    apply(baseline("schedule"))


def downgrade() -> None:
    apply(REFUSE_SCHEDULES)
    apply(DROP)
