"""Conversations: endpoints, groups, contracts and message types."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"

UP = """
CREATE TABLE saf.message_type (
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    validation TEXT NOT NULL,
    schema JSONB,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (name, version),
    CONSTRAINT message_type_named CHECK (name <> '' AND version > 0),
    CONSTRAINT message_type_validation
        CHECK (validation IN ('none', 'empty', 'json', 'json_schema')),
    CONSTRAINT message_type_schema CHECK ((validation = 'json_schema') = (schema IS NOT NULL))
);
COMMENT ON TABLE saf.message_type IS 'what bodies of a type are; a version never changes';

CREATE TABLE saf.contract (
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (name, version),
    CONSTRAINT contract_named CHECK (name <> '' AND version > 0)
);
COMMENT ON TABLE saf.contract IS
    'which types a dialog''s messages have, and who sends them; a version never changes';

CREATE TABLE saf.contract_message (
    contract TEXT NOT NULL,
    contract_version INTEGER NOT NULL,
    message_type TEXT NOT NULL,
    message_type_version INTEGER NOT NULL,
    sent_by TEXT NOT NULL,
    PRIMARY KEY (contract, contract_version, message_type),
    FOREIGN KEY (contract, contract_version) REFERENCES saf.contract (name, version),
    FOREIGN KEY (message_type, message_type_version) REFERENCES saf.message_type (name, version),
    CONSTRAINT contract_message_sent_by CHECK (sent_by IN ('initiator', 'target', 'any'))
);
COMMENT ON TABLE saf.contract_message IS 'the types of a contract';

CREATE TABLE saf.conversation_group (
    group_id UUID DEFAULT gen_random_uuid() NOT NULL,
    state JSONB,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (group_id)
);
COMMENT ON TABLE saf.conversation_group IS
    'related conversations: received by one receiver at a time, which locks this row';
COMMENT ON COLUMN saf.conversation_group.state IS 'the application''s own';

CREATE TABLE saf.conversation (
    handle UUID DEFAULT gen_random_uuid() NOT NULL,
    conversation_id UUID NOT NULL,
    is_initiator BOOLEAN NOT NULL,
    monolog BOOLEAN DEFAULT false NOT NULL,
    state TEXT GENERATED ALWAYS AS (CASE
    WHEN ended_here AND (ended_there OR error_code IS NOT NULL) THEN 'closed'
    WHEN error_code IS NOT NULL THEN 'error'
    WHEN ended_here THEN 'disconnected_outbound'
    WHEN ended_there THEN 'disconnected_inbound'
    WHEN is_initiator AND send_sequence = 0 THEN 'started_outbound'
    WHEN NOT is_initiator AND receive_sequence = 0 THEN 'started_inbound'
    ELSE 'conversing'
END) STORED,
    service TEXT NOT NULL,
    far_service TEXT NOT NULL,
    far_broker UUID,
    contract TEXT,
    contract_version INTEGER,
    group_id UUID NOT NULL,
    send_sequence BIGINT DEFAULT '0' NOT NULL,
    receive_sequence BIGINT DEFAULT '0' NOT NULL,
    ended_here BOOLEAN DEFAULT false NOT NULL,
    ended_there BOOLEAN DEFAULT false NOT NULL,
    error_code INTEGER,
    error_text TEXT,
    timer UUID,
    expires_at TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    changed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (handle),
    CONSTRAINT conversation_two_ends UNIQUE (conversation_id, is_initiator),
    FOREIGN KEY (contract, contract_version) REFERENCES saf.contract (name, version),
    FOREIGN KEY (group_id) REFERENCES saf.conversation_group (group_id),
    CONSTRAINT conversation_addressed CHECK (service <> '' AND far_service <> ''),
    CONSTRAINT conversation_rises CHECK (send_sequence >= 0 AND receive_sequence >= 0),
    CONSTRAINT conversation_contract CHECK ((contract IS NULL) = (contract_version IS NULL)),
    CONSTRAINT conversation_error CHECK ((error_code IS NULL) = (error_text IS NULL)),
    CONSTRAINT conversation_monolog
        CHECK (NOT monolog OR (is_initiator AND receive_sequence = 0))
) WITH (fillfactor = 60);
CREATE INDEX conversation_of_group ON saf.conversation (group_id);
COMMENT ON TABLE saf.conversation IS
    'the endpoints of dialogs that live here; the state follows from the facts';
COMMENT ON COLUMN saf.conversation.conversation_id IS 'the same at both ends';
COMMENT ON COLUMN saf.conversation.monolog IS
    'one publisher and any number of subscribers: nobody answers';
COMMENT ON COLUMN saf.conversation.service IS 'of this end';
COMMENT ON COLUMN saf.conversation.far_broker IS 'where it lives, if that is known';
COMMENT ON COLUMN saf.conversation.send_sequence IS
    'of the last message sent; assigned under the lock of this row';
COMMENT ON COLUMN saf.conversation.receive_sequence IS
    'of the last message received: only the next one is taken';
COMMENT ON COLUMN saf.conversation.timer IS 'message_id of the timer that counts';
COMMENT ON COLUMN saf.conversation.expires_at IS 'both ends must have ended before';
"""

DOWN = """
DROP TABLE saf.conversation, saf.conversation_group, saf.contract_message, saf.contract,
    saf.message_type;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    # an older library would hand out their messages like any others
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM saf.conversation WHERE state <> 'closed') "
        "THEN RAISE EXCEPTION 'saf.conversation has open conversations: let them end first'; "
        "END IF; END $$"
    )
    op.execute(DOWN)
