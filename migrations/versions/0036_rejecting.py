"""Count consecutive rejections; remember lanes that need an operator, and members of fleets."""

from __future__ import annotations

from alembic import op

revision = "0036"
down_revision = "0035"

UP = """
CREATE TABLE saf.rejecting (
    subscription_id INTEGER NOT NULL,
    destination TEXT NOT NULL,
    messages INTEGER NOT NULL,
    PRIMARY KEY (subscription_id, destination),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE,
    CONSTRAINT rejecting_counted CHECK (messages > 0)
);
COMMENT ON TABLE saf.rejecting IS
    'how many messages a destination has rejected in a row; no row: none';
CREATE TABLE saf.fleet_member (
    fleet TEXT NOT NULL,
    name TEXT NOT NULL,
    broker_id UUID,
    met_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    missing_since TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (fleet, name)
);
COMMENT ON TABLE saf.fleet_member IS
    'at a store: the members of fleets that forwarders have met, so that a missing one is noticed';
COMMENT ON COLUMN saf.fleet_member.name IS 'FLEET/NAME, as commands call it';
COMMENT ON COLUMN saf.fleet_member.broker_id IS 'NULL: it had nothing to forward when it was met';
COMMENT ON COLUMN saf.fleet_member.missing_since IS 'NULL: its fleet lists it';
ALTER TABLE saf.backoff ADD COLUMN needs_operator BOOLEAN DEFAULT false NOT NULL;
COMMENT ON COLUMN saf.backoff.needs_operator IS
    'whether the last attempt failed for a reason that only an operator can remove';
"""
# Without the count of rejections, no destination stays stopped

DOWN = """
UPDATE saf.backoff SET next_attempt_at = now()
WHERE kind = 'main' AND next_attempt_at = '9999-01-01 00:00:00+00';
ALTER TABLE saf.backoff DROP COLUMN needs_operator;
DROP TABLE saf.rejecting;
DROP TABLE saf.fleet_member;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
