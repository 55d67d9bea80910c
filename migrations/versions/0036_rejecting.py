"""A source counts rejections in a row, and remembers which lanes need an operator."""

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
ALTER TABLE saf.backoff ADD COLUMN needs_operator BOOLEAN DEFAULT false NOT NULL;
COMMENT ON COLUMN saf.backoff.needs_operator IS
    'whether the last attempt failed for a reason that only an operator can remove';
"""
# Without the count of rejections, nothing keeps a destination stopped
DOWN = """
UPDATE saf.backoff SET next_attempt_at = now()
WHERE kind = 'main' AND next_attempt_at = '9999-01-01 00:00:00+00';
ALTER TABLE saf.backoff DROP COLUMN needs_operator;
DROP TABLE saf.rejecting;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
