"""Results of transforms that are not deterministic, stored before they are sent."""

from __future__ import annotations

from alembic import op

revision = "0029"
down_revision = "0028"

UP = """
CREATE TABLE saf.kept_result (
    subscription_id INTEGER NOT NULL,
    shard SMALLINT NOT NULL,
    id BIGINT NOT NULL,
    number INTEGER NOT NULL,
    batch BIGINT NOT NULL,
    part INTEGER,
    key TEXT,
    message_type TEXT,
    headers TEXT,
    body BYTEA,
    PRIMARY KEY (subscription_id, shard, id, number),
    CONSTRAINT kept_result_possible CHECK (number = 0 OR body IS NOT NULL),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);
COMMENT ON TABLE saf.kept_result IS 'what a transform has made of messages, where it would be '
    'something else the next time: kept until they are delivered';
COMMENT ON COLUMN saf.kept_result.id IS 'of the message in the outbox';
COMMENT ON COLUMN saf.kept_result.number IS 'of several that were made of one message, 0, 1, …';
COMMENT ON COLUMN saf.kept_result.batch IS 'in which it was kept; removed when that is closed';
COMMENT ON COLUMN saf.kept_result.body IS 'NULL: nothing was made of the message';
CREATE INDEX kept_result_batch ON saf.kept_result (subscription_id, batch);
"""
DOWN = "DROP TABLE saf.kept_result"


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
