-- Readers of a log and their progress: subscriptions, members, and a cursor per shard.

CREATE TABLE saf.subscription (
    subscription_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL,
    log text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    service text REFERENCES saf.service,
    stream boolean DEFAULT false NOT NULL,
    CONSTRAINT subscription_name UNIQUE (log, name),
    CONSTRAINT subscription_log CHECK (log IN ('outbox', 'inbox')),
    CONSTRAINT subscription_service CHECK (service IS NULL OR log = 'inbox'),
    CONSTRAINT subscription_stream CHECK (NOT (stream AND service IS NOT NULL))
);
COMMENT ON TABLE saf.subscription IS 'named readers of a log, with one cursor per shard each';
COMMENT ON COLUMN saf.subscription.service IS
    'service whose messages are read from the inbox; NULL: all services';
COMMENT ON COLUMN saf.subscription.stream IS
    'true: a stream. Its checkpoint has the progress of reading; its cursors, that of commits';

CREATE TABLE saf.member (
    member_id uuid PRIMARY KEY,
    subscription_id integer NOT NULL REFERENCES saf.subscription ON DELETE CASCADE,
    name text NOT NULL, -- host and process, for operators
    joined_at timestamptz DEFAULT now() NOT NULL,
    lease_until timestamptz NOT NULL,
    stopping boolean DEFAULT false NOT NULL -- its tasks end after the chunk in hand
);
COMMENT ON TABLE saf.member IS
    'live processes of a subscription; leases end by this database''s clock';

CREATE TABLE saf.cursor (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    shard smallint,
    owner uuid REFERENCES saf.member ON DELETE SET NULL,
    epoch bigint DEFAULT '0' NOT NULL,
    -- part of the key only so that the newest version is found first; see saf.log.shards and
    -- keys.sql
    batch bigint DEFAULT '0',
    done pg_snapshot DEFAULT '1:1:' NOT NULL,
    open pg_snapshot,
    position bigint DEFAULT '0' NOT NULL,
    attempted bigint DEFAULT '0' NOT NULL,
    route_version bigint REFERENCES saf.route_version,
    opened_at timestamptz,
    allowance integer,
    until pg_snapshot,
    cuts xid8[],
    set_aside_at timestamptz[],
    PRIMARY KEY (subscription_id, shard, batch),
    CONSTRAINT cursor_position CHECK (open IS NOT NULL OR (position = 0 AND attempted = 0)),
    CONSTRAINT cursor_rises CHECK (attempted >= 0 AND position >= 0),
    CONSTRAINT cursor_allowance CHECK (allowance > 0)
) WITH (fillfactor = 40); -- short rows; free space keeps updates within a batch HOT
COMMENT ON TABLE saf.cursor IS 'progress of a subscription in one shard';
COMMENT ON COLUMN saf.cursor.epoch IS 'rises with each change of owner; fences previous owners';
COMMENT ON COLUMN saf.cursor.done IS 'snapshot: all rows visible in it are complete';
COMMENT ON COLUMN saf.cursor.open IS
    'snapshot of the open batch, which is the rows visible in open and not in done';
COMMENT ON COLUMN saf.cursor.position IS
    'within the open batch, rows with id <= position are complete';
COMMENT ON COLUMN saf.cursor.attempted IS
    'within the open batch, at_most_once rows with id <= attempted are not sent again';
COMMENT ON COLUMN saf.cursor.opened_at IS
    'time at which the batch was opened; decides which of its messages have expired';
COMMENT ON COLUMN saf.cursor.allowance IS
    'maximum number of messages in the next delivery, after a failed one; NULL: unlimited';
COMMENT ON COLUMN saf.cursor.until IS 'snapshot for which cuts were found';
COMMENT ON COLUMN saf.cursor.cuts IS
    'ids where the next batches of a deep backlog may end; see saf.receiving.reading';
COMMENT ON COLUMN saf.cursor.set_aside_at IS
    'latest times at which messages of the shard were set aside';

INSERT INTO saf.subscription (name, log) VALUES ('forwarder', 'outbox');
INSERT INTO saf.cursor (subscription_id, shard)
SELECT subscription_id, generate_series(0, {shards} - 1) FROM saf.subscription;
