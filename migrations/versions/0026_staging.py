"""Spark jobs send: their tasks stage messages, and one transaction moves them to the outbox."""

from __future__ import annotations

from alembic import op

revision = "0026"
down_revision = "0025"

UP = """
CREATE TABLE saf.staging (
    attempt BIGINT GENERATED ALWAYS AS IDENTITY,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (attempt)
);
COMMENT ON TABLE saf.staging IS 'attempts of tasks whose messages were staged and not sent yet';

CREATE UNLOGGED TABLE saf.staged (
    attempt BIGINT NOT NULL,
    number BIGINT NOT NULL,
    from_service TEXT,
    to_service TEXT NOT NULL,
    to_broker TEXT,
    key TEXT,
    message_type TEXT,
    headers TEXT,
    body BYTEA NOT NULL,
    deliver_at TIMESTAMP WITH TIME ZONE,
    expires_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (attempt, number)
);
COMMENT ON TABLE saf.staged IS 'what tasks have written, in their order; a crash of the server '
    'empties it, and the job notices';

CREATE TABLE saf.sink (
    application TEXT NOT NULL,
    version BIGINT,
    messages BIGINT NOT NULL,
    sent_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (application)
);
COMMENT ON TABLE saf.sink IS
    'what each application of Spark has sent last: so nothing is sent twice';
COMMENT ON COLUMN saf.sink.version IS 'rises; NULL: this application sends only once';
"""
DOWN = "DROP TABLE saf.sink, saf.staged, saf.staging"


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
