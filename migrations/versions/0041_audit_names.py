"""Names of messages in the audit, so that a message that was cancelled is found by its name."""

from __future__ import annotations

from saf.broker.migrate import apply

revision = "0041"
down_revision = "0040"

ADD = """
ALTER TABLE saf.audit ADD names text[];
COMMENT ON COLUMN saf.audit.names IS
    'names of held messages, in the order of message_ids; NULL: decisions about other messages';
"""
DROP = "ALTER TABLE saf.audit DROP names"


def upgrade() -> None:
    apply(ADD)


def downgrade() -> None:
    apply(DROP)
