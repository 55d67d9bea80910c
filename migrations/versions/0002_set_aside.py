"""Messages set aside: parked in lanes with a backoff, dead letters, and operators' actions."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

MESSAGE = """
    message_id UUID DEFAULT gen_random_uuid() NOT NULL,
    from_service TEXT,
    to_service TEXT NOT NULL,
    to_broker UUID,
    key TEXT COLLATE "C",
    conversation_id UUID,
    from_initiator BOOLEAN,
    sequence BIGINT,
    message_type TEXT,
    headers JSONB,
    body BYTEA NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    deliver_at TIMESTAMP WITH TIME ZONE,
    expires_at TIMESTAMP WITH TIME ZONE"""

# The two tables are always empty at revision 0001
UP = f"""
DROP VIEW saf.outbox_status;
DROP TABLE saf.parked, saf.dead_letter;

CREATE TABLE saf.service (
    name TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (name),
    CONSTRAINT service_named CHECK (name <> '')
);

COMMENT ON TABLE saf.service IS
    'the services that live here; while there is none, messages for any are stored';

CREATE TABLE saf.parked (
    parked_id BIGINT GENERATED ALWAYS AS IDENTITY,
    subscription_id INTEGER NOT NULL,
    destination TEXT DEFAULT '' NOT NULL,
    shard SMALLINT NOT NULL,
    id BIGINT NOT NULL,{MESSAGE},
    parked_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    lane TEXT DEFAULT '' NOT NULL,
    quality TEXT,
    batch BIGINT NOT NULL,
    position BIGINT NOT NULL,
    PRIMARY KEY (parked_id),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);

COMMENT ON TABLE saf.parked IS 'set aside in order, to be tried again';
COMMENT ON COLUMN saf.parked.lane IS
    'messages that wait for the same thing, in order; see saf.parking';
COMMENT ON COLUMN saf.parked.batch IS
    'with position: what the lane''s watermark is compared with';

CREATE TABLE saf.dead_letter (
    dead_letter_id BIGINT GENERATED ALWAYS AS IDENTITY,
    subscription_id INTEGER NOT NULL,
    destination TEXT DEFAULT '' NOT NULL,
    shard SMALLINT NOT NULL,
    id BIGINT NOT NULL,{MESSAGE},
    dead_letter_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    reason TEXT NOT NULL,
    error TEXT NOT NULL,
    PRIMARY KEY (dead_letter_id),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);

COMMENT ON TABLE saf.dead_letter IS 'set aside for a person: not tried again by itself';

CREATE TABLE saf.backoff (
    subscription_id INTEGER NOT NULL,
    destination TEXT NOT NULL,
    lane TEXT DEFAULT '' NOT NULL,
    attempts INTEGER DEFAULT '0' NOT NULL,
    next_attempt_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    error TEXT NOT NULL,
    since TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (subscription_id, destination, lane),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);

COMMENT ON TABLE saf.backoff IS 'lanes that wait: when they are tried next, shared by all members';
COMMENT ON COLUMN saf.backoff.lane IS
    'messages that wait for the same thing, in order; see saf.parking';

CREATE TABLE saf.audit (
    audit_id BIGINT GENERATED ALWAYS AS IDENTITY,
    audit_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    who TEXT DEFAULT session_user NOT NULL,
    action TEXT NOT NULL,
    message_ids UUID[] NOT NULL,
    why TEXT NOT NULL,
    PRIMARY KEY (audit_id)
);

COMMENT ON TABLE saf.audit IS 'what people did to messages that were set aside';

ALTER TABLE saf.watermark ADD COLUMN lane TEXT DEFAULT '' NOT NULL;
ALTER TABLE saf.watermark DROP CONSTRAINT watermark_pkey;
ALTER TABLE saf.watermark ADD PRIMARY KEY (source, shard, lane);
ALTER TABLE saf.watermark ADD COLUMN opened_at TIMESTAMP WITH TIME ZONE;
COMMENT ON COLUMN saf.watermark.opened_at IS
    'when the source opened the batch: tells it from another of the same number';

ALTER TABLE saf.cursor ADD COLUMN opened_at TIMESTAMP WITH TIME ZONE;
COMMENT ON COLUMN saf.cursor.opened_at IS 'by this clock messages of the batch expire';
"""

# Shard and id identify a row of the outbox; the cursors have the rest.
OUTBOX_STATUS = """
CREATE VIEW saf.outbox_status AS
SELECT o.id, o.shard, o.message_id, o.to_service, o.key, o.message_type, o.created_at,
       CASE
           WHEN EXISTS (SELECT FROM saf.parked p
                        WHERE p.subscription_id = c.subscription_id
                          AND p.message_id = o.message_id) THEN 'parked'
           WHEN EXISTS (SELECT FROM saf.dead_letter d
                        WHERE d.subscription_id = c.subscription_id
                          AND d.message_id = o.message_id) THEN 'dead'
           WHEN pg_visible_in_snapshot(o.txid, c.done)
             OR c.open IS NOT NULL AND pg_visible_in_snapshot(o.txid, c.open)
                AND o.id <= c.position THEN 'forwarded'
           ELSE 'pending'
       END AS status
FROM saf.outbox o
JOIN saf.subscription s ON s.log = 'outbox' AND s.name = 'forwarder'
JOIN saf.cursor c ON c.subscription_id = s.subscription_id AND c.shard = o.shard;

COMMENT ON VIEW saf.outbox_status IS
    'each message of the outbox: pending, forwarded, parked or dead';
"""

DOWN = f"""
DROP VIEW saf.outbox_status;
DROP TABLE saf.parked, saf.dead_letter, saf.backoff, saf.audit, saf.service;

CREATE TABLE saf.parked (
    parked_id BIGINT GENERATED ALWAYS AS IDENTITY,
    subscription_id INTEGER NOT NULL,
    destination TEXT,
    shard SMALLINT NOT NULL,
    id BIGINT NOT NULL,{MESSAGE},
    attempts INTEGER DEFAULT '0' NOT NULL,
    error TEXT,
    parked_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    next_attempt_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (parked_id),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);

COMMENT ON TABLE saf.parked IS 'set aside in order, to be tried again';

CREATE TABLE saf.dead_letter (
    dead_letter_id BIGINT GENERATED ALWAYS AS IDENTITY,
    subscription_id INTEGER NOT NULL,
    destination TEXT,
    shard SMALLINT NOT NULL,
    id BIGINT NOT NULL,{MESSAGE},
    attempts INTEGER DEFAULT '0' NOT NULL,
    error TEXT,
    dead_letter_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (dead_letter_id),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);

COMMENT ON TABLE saf.dead_letter IS 'set aside for a person: not tried again by itself';

DELETE FROM saf.watermark WHERE lane <> '';
ALTER TABLE saf.watermark DROP CONSTRAINT watermark_pkey;
ALTER TABLE saf.watermark DROP COLUMN lane, DROP COLUMN opened_at;
ALTER TABLE saf.watermark ADD PRIMARY KEY (source, shard);
ALTER TABLE saf.cursor DROP COLUMN opened_at;
"""


def upgrade() -> None:
    op.execute(UP)
    op.execute(OUTBOX_STATUS)


def downgrade() -> None:
    # a downgrade would lose the waiting messages
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM saf.parked) OR EXISTS (SELECT FROM saf.dead_letter) "
        "THEN RAISE EXCEPTION 'saf.parked or saf.dead_letter hold messages: deliver or discard "
        "them first'; END IF; END $$"
    )
    op.execute(DOWN)
    op.execute(OUTBOX_STATUS)
