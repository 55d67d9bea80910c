"""The core: logs, cursors, members, routes, watermarks."""

from __future__ import annotations

from alembic import context, op

revision = "0001"
down_revision = None

SLOTS = 8

TABLES = """
CREATE TABLE saf.broker (
    singleton BOOLEAN DEFAULT true NOT NULL,
    broker_id UUID DEFAULT gen_random_uuid() NOT NULL,
    name TEXT DEFAULT current_database() NOT NULL,
    shards SMALLINT NOT NULL,
    system_identifier BIGINT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (singleton),
    CONSTRAINT broker_is_one_row CHECK (singleton),
    CONSTRAINT broker_shards CHECK (shards BETWEEN 1 AND 1024)
);

COMMENT ON TABLE saf.broker IS 'who this broker is: one row, written by the first migration';
COMMENT ON COLUMN saf.broker.system_identifier IS
    'of the cluster: transaction ids in the logs mean nothing in another one';

CREATE TABLE saf.outbox (
    txid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    id BIGINT GENERATED ALWAYS AS IDENTITY (CACHE 1),
    shard SMALLINT GENERATED ALWAYS AS (
        (((hashtextextended(COALESCE(key, message_id::text), 0) % {shards}) + {shards})
            % {shards})::smallint
    ) STORED,
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
    expires_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT outbox_addressed CHECK (to_service <> ''),
    CONSTRAINT outbox_in_calendar CHECK (
        created_at >= '0001-01-01 00:00:00+00' AND created_at < '9999-12-31 00:00:00+00'
        AND deliver_at >= '0001-01-01 00:00:00+00' AND deliver_at < '9999-12-31 00:00:00+00'
        AND expires_at >= '0001-01-01 00:00:00+00' AND expires_at < '9999-12-31 00:00:00+00')
) PARTITION BY LIST (((id / 1048576) % 8));

CREATE INDEX outbox_shard_txid ON saf.outbox (shard, txid);
COMMENT ON TABLE saf.outbox IS 'messages sent from this broker; append-only, read by cursor';

CREATE TABLE saf.inbox (
    txid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    id BIGINT GENERATED ALWAYS AS IDENTITY (CACHE 1),
    shard SMALLINT GENERATED ALWAYS AS (
        (((hashtextextended(COALESCE(key, message_id::text), 0) % {shards}) + {shards})
            % {shards})::smallint
    ) STORED,
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
    expires_at TIMESTAMP WITH TIME ZONE,
    source UUID,
    received_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT inbox_addressed CHECK (to_service <> ''),
    CONSTRAINT inbox_in_calendar CHECK (
        created_at >= '0001-01-01 00:00:00+00' AND created_at < '9999-12-31 00:00:00+00'
        AND deliver_at >= '0001-01-01 00:00:00+00' AND deliver_at < '9999-12-31 00:00:00+00'
        AND expires_at >= '0001-01-01 00:00:00+00' AND expires_at < '9999-12-31 00:00:00+00')
) PARTITION BY LIST (((id / 1048576) % 8));

CREATE INDEX inbox_shard_txid ON saf.inbox (shard, txid);
COMMENT ON TABLE saf.inbox IS
    'messages stored for the services that live here; append-only, read by cursor';

CREATE TABLE saf.subscription (
    subscription_id INTEGER GENERATED ALWAYS AS IDENTITY,
    name TEXT NOT NULL,
    log TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (subscription_id),
    CONSTRAINT subscription_name UNIQUE (log, name),
    CONSTRAINT subscription_log CHECK (log IN ('outbox', 'inbox'))
);

COMMENT ON TABLE saf.subscription IS 'named readers of a log, each with one cursor per shard';

CREATE TABLE saf.route (
    route_id INTEGER GENERATED ALWAYS AS IDENTITY,
    service TEXT,
    broker UUID,
    destination TEXT NOT NULL,
    quality TEXT,
    enabled BOOLEAN DEFAULT true NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (route_id),
    CONSTRAINT route_quality CHECK (quality IN ('at_most_once', 'at_least_once', 'exactly_once')),
    CONSTRAINT route_once UNIQUE NULLS NOT DISTINCT (service, broker, destination)
);

COMMENT ON TABLE saf.route IS 'service and broker to destination; NULL matches any';

CREATE TABLE saf.route_version (
    version BIGINT GENERATED ALWAYS AS IDENTITY,
    routes JSONB NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (version)
);

COMMENT ON TABLE saf.route_version IS 'the frozen set of routes that a batch was opened with';

CREATE TABLE saf.watermark (
    source UUID NOT NULL,
    shard SMALLINT NOT NULL,
    epoch BIGINT NOT NULL,
    batch BIGINT NOT NULL,
    position BIGINT NOT NULL,
    PRIMARY KEY (source, shard)
) WITH (fillfactor = 40);

COMMENT ON TABLE saf.watermark IS
    'the last (batch, position) stored here of one source shard: what makes delivery exactly '
    'once';

CREATE TABLE saf.member (
    member_id UUID NOT NULL,
    subscription_id INTEGER NOT NULL,
    name TEXT NOT NULL,
    joined_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    lease_until TIMESTAMP WITH TIME ZONE NOT NULL,
    stopping BOOLEAN DEFAULT false NOT NULL,
    PRIMARY KEY (member_id),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);

COMMENT ON TABLE saf.member IS
    'live processes of a subscription; a lease is a term by this database''s clock';

CREATE TABLE saf.parked (
    parked_id BIGINT GENERATED ALWAYS AS IDENTITY,
    subscription_id INTEGER NOT NULL,
    destination TEXT,
    shard SMALLINT NOT NULL,
    id BIGINT NOT NULL,
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
    expires_at TIMESTAMP WITH TIME ZONE,
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
    id BIGINT NOT NULL,
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
    expires_at TIMESTAMP WITH TIME ZONE,
    attempts INTEGER DEFAULT '0' NOT NULL,
    error TEXT,
    dead_letter_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (dead_letter_id),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);

COMMENT ON TABLE saf.dead_letter IS 'set aside for a person: not tried again by itself';

CREATE TABLE saf.cursor (
    subscription_id INTEGER NOT NULL,
    shard SMALLINT NOT NULL,
    owner UUID,
    epoch BIGINT DEFAULT '0' NOT NULL,
    batch BIGINT DEFAULT '0' NOT NULL,
    done pg_snapshot DEFAULT '1:1:' NOT NULL,
    open pg_snapshot,
    position BIGINT DEFAULT '0' NOT NULL,
    attempted BIGINT DEFAULT '0' NOT NULL,
    route_version BIGINT,
    PRIMARY KEY (subscription_id, shard),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE,
    FOREIGN KEY(owner) REFERENCES saf.member (member_id) ON DELETE SET NULL,
    FOREIGN KEY(route_version) REFERENCES saf.route_version (version),
    CONSTRAINT cursor_position CHECK (open IS NOT NULL OR (position = 0 AND attempted = 0)),
    CONSTRAINT cursor_rises CHECK (attempted >= 0 AND position >= 0)
) WITH (fillfactor = 40);

COMMENT ON TABLE saf.cursor IS 'how far a subscription has got in one shard';
COMMENT ON COLUMN saf.cursor.epoch IS 'rises with each change of owner; fences the owners before';

COMMENT ON COLUMN saf.cursor.done IS 'every row visible in it is complete';
COMMENT ON COLUMN saf.cursor.open IS 'the batch in hand: the rows visible in open and not in done';
COMMENT ON COLUMN saf.cursor.position IS
    'within the open batch, rows with id <= position are complete';
COMMENT ON COLUMN saf.cursor.attempted IS
    'within the open batch, at_most_once rows with id <= attempted are not sent again';
"""

SLOT = "CREATE TABLE saf.{log}_{slot} PARTITION OF saf.{log} FOR VALUES IN ({slot})"

ROWS = """
INSERT INTO saf.broker (shards, system_identifier)
SELECT {shards}, system_identifier FROM pg_control_system();

INSERT INTO saf.subscription (name, log) VALUES ('forwarder', 'outbox');

INSERT INTO saf.cursor (subscription_id, shard)
SELECT subscription_id, generate_series(0, {shards} - 1) FROM saf.subscription;
"""

# For humans. The forwarder never reads a row's state: the cursors have it.
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


def upgrade() -> None:
    number = context.config.attributes["shards"]  # set by env.py
    op.execute(TABLES.format(shards=number))
    for log in ("outbox", "inbox"):
        for slot in range(SLOTS):
            op.execute(SLOT.format(log=log, slot=slot))
    op.execute(ROWS.format(shards=number))
    op.execute(OUTBOX_STATUS)


def downgrade() -> None:
    op.execute("DROP VIEW saf.outbox_status")
    op.execute(
        "DROP TABLE saf.cursor, saf.member, saf.parked, saf.dead_letter, saf.subscription, "
        "saf.watermark, saf.route, saf.route_version, saf.outbox, saf.inbox, saf.broker"
    )
