"""Routing services: routers that forward, and the dialogs that they join."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"

UP = """
ALTER TABLE saf.router
    ADD COLUMN mode TEXT DEFAULT 'redirect' NOT NULL,
    ADD CONSTRAINT router_mode CHECK (mode IN ('redirect', 'forward')),
    ADD CONSTRAINT router_sql_needs_spark CHECK (mode = 'redirect' OR kind <> 'sql');
COMMENT ON COLUMN saf.router.mode IS
    'classified at the source, or forwarded by a routing service of its own';

ALTER TABLE saf.resolved_conversation ADD COLUMN handle UUID;
COMMENT ON COLUMN saf.resolved_conversation.handle IS
    'of the end, at a routing service, on which this conversation goes on';
"""

DOWN = """
ALTER TABLE saf.resolved_conversation DROP COLUMN handle;
ALTER TABLE saf.router DROP COLUMN mode;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    # an older forwarder would resolve messages at the source that must be forwarded
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM saf.router WHERE mode = 'forward') "
        "THEN RAISE EXCEPTION 'saf.router has routers that forward: remove them first'; "
        "END IF; END $$"
    )
    op.execute(DOWN)
