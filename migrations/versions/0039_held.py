"""Messages that are due later, and names; its SQL is in migrations/baseline/held.sql."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0039"
down_revision = "0038"

REFUSE_HELD = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM saf.held WHERE due IS NOT NULL) THEN
        RAISE EXCEPTION USING MESSAGE = 'messages are held, and revision 0038 has no place for '
            'them: wait until they are sent, or cancel them';
    END IF;
END $$;
"""
DROP = """
DROP FUNCTION saf.forget_names, saf.move_held, saf.lock_overdue, saf.pass_on, saf.cancel,
    saf.reschedule, saf.hold, saf.never_read, saf.time_fault, saf.text_fault, saf.refuse_argument,
    saf.vouch_for, saf.vouch, saf.session_role,
    saf.send(text, text, text, text, timestamptz, timestamptz, text, jsonb, text, uuid, text,
             interval, interval),
    saf.send(text, jsonb, text, text, timestamptz, timestamptz, text, jsonb, text, uuid, text,
             interval, interval),
    saf.send(text, bytea, text, text, timestamptz, timestamptz, text, jsonb, text, uuid, text,
             interval, interval),
    saf.with_content_type;
DROP TABLE saf.held;
"""


def upgrade() -> None:
    apply(baseline("held").replace("{message}", baseline("message").rstrip()))


def downgrade() -> None:
    apply(REFUSE_HELD)
    apply(DROP)
