"""Sources; the SQL is in migrations/baseline/sources.sql."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0048"
down_revision = "0047"

REFUSE = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM saf.source_shard WHERE start_batch IS NOT NULL) THEN
        RAISE EXCEPTION USING MESSAGE = 'sources were read, and revision 0047 has no place for '
            'that: forget them with `saf source forget NAME`';
    END IF;
END $$;
"""
DROP = "DROP TABLE saf.source_shard, saf.source_member, saf.source;"


def upgrade() -> None:
    apply(baseline("sources"))


def downgrade() -> None:
    apply(REFUSE)
    apply(DROP)
