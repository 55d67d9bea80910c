"""Fragments of large bodies."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"

UP = """
CREATE TABLE saf.fragment (
    conversation_id UUID NOT NULL,
    from_initiator BOOLEAN NOT NULL,
    sequence BIGINT NOT NULL,
    body BYTEA NOT NULL,
    PRIMARY KEY (conversation_id, from_initiator, sequence)
);
COMMENT ON TABLE saf.fragment IS
    'of bodies in fragments: what has come, until the whole is received';
COMMENT ON COLUMN saf.fragment.from_initiator IS 'which end has sent it';
"""

DOWN = """
DROP TABLE saf.fragment;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    # stored fragments count as received, and would be missing
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM saf.fragment) "
        "THEN RAISE EXCEPTION 'saf.fragment has parts of messages: let them be received first'; "
        "END IF; END $$"
    )
    op.execute(DOWN)
