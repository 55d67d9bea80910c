"""The identity of each destination when a batch was opened; and counts of dropped messages."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"

UP = """
ALTER TABLE saf.route_version ADD COLUMN brokers JSONB DEFAULT '{}' NOT NULL;
COMMENT ON COLUMN saf.route_version.brokers IS
    'by destination: the broker_id that it was known to have';

CREATE TABLE saf.dropped (
    subscription_id INTEGER NOT NULL,
    shard SMALLINT NOT NULL,
    reason TEXT NOT NULL,
    messages BIGINT NOT NULL,
    last_message_id UUID NOT NULL,
    last_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (subscription_id, shard, reason),
    FOREIGN KEY (subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE,
    CONSTRAINT dropped_counted CHECK (reason <> '' AND messages > 0)
) WITH (fillfactor = 60);
COMMENT ON TABLE saf.dropped IS
    'how many messages a subscription took without handing them on, and why';
COMMENT ON COLUMN saf.dropped.last_message_id IS 'to look for it in the log';
"""

DOWN = """
DROP TABLE saf.dropped;
ALTER TABLE saf.route_version DROP COLUMN brokers;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
