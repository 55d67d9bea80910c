-- The two logs. Both are rings of 8 slots with 2^20 ids each: ids walk through the slots without
-- any DDL at run time, and TRUNCATE removes the old rows of a whole slot; see saf.log.ring.
--
-- Even a published log needs no replica identity, because its rows are never updated. An index on
-- the id would slow down each send.

-- Constraints on messages, enforced for senders in any language. Before a statement inserts into a
-- table, PostgreSQL reads and prepares the table's CHECKs, which takes longer than inserting a row.
-- A chunk of thousands of messages pays that price once, but a sending application pays it for each
-- message. So the outbox makes the same checks in a function, which the server prepares once per
-- transaction. Preparation also takes longer for a larger expression. So saf.accept has a small
-- expression that is true for nearly all messages. saf.examine checks the others as the CHECKs of
-- the inbox do. It raises an error with the name of the constraint that it replaces, so that the
-- sender learns which constraint was violated.
--
-- addressed    A message without a service can never be routed.
-- possible     No transaction has a larger id. Ids above the current one belong to no transaction
--              either. They are accepted, because a dump must fit into any cluster, and the current
--              id differs between clusters; `saf doctor` finds them.
-- in_calendar  Arrow and Python support the years 1 to 9999. A row with 'infinity' could never be
--              forwarded.
-- bounded      Sizes are in bytes. Headers are measured as text, the form in which they are sent. A
--              number that takes 16 bytes in a jsonb may become 147,456 characters of text, so
--              headers up to 96 bytes are always within the limit; see saf.limits.

-- Sets its own search_path, so that senders cannot substitute their own operators
CREATE FUNCTION saf.examine(
    txid xid8, to_service text, key text, headers jsonb,
    created_at timestamptz, deliver_at timestamptz, expires_at timestamptz
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    refused text;
BEGIN
    refused = CASE
        WHEN NOT (to_service <> '') THEN 'outbox_addressed'
        WHEN NOT (txid < '9223372036854775808'::xid8) THEN 'outbox_possible'
        WHEN NOT (
            created_at >= '0001-01-01 00:00:00+00' AND created_at < '9999-12-31 00:00:00+00'
            AND deliver_at >= '0001-01-01 00:00:00+00' AND deliver_at < '9999-12-31 00:00:00+00'
            AND expires_at >= '0001-01-01 00:00:00+00' AND expires_at < '9999-12-31 00:00:00+00'
        ) THEN 'outbox_in_calendar'
        WHEN NOT (
            octet_length(to_service) <= 255 AND octet_length(key) <= 1024
            AND (pg_column_size(headers || '{}') <= 96
                 OR octet_length(CAST(headers AS text)) <= 1048576)
        ) THEN 'outbox_bounded'
    END;
    IF refused IS NULL THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION USING
        ERRCODE = 'check_violation', SCHEMA = 'saf', TABLE = 'outbox', CONSTRAINT = refused,
        MESSAGE = format('new row for relation "outbox" violates check constraint %I', refused);
END $$;

-- Setting a search_path takes as long as checking, so each name is qualified with its schema
CREATE FUNCTION saf.accept(
    txid xid8, to_service text, key text, headers jsonb,
    created_at timestamptz, deliver_at timestamptz, expires_at timestamptz
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    IF pg_catalog.octet_length(to_service) OPERATOR(pg_catalog.>=) 1
       AND pg_catalog.octet_length(to_service) OPERATOR(pg_catalog.<=) 255
       AND (key IS NULL OR pg_catalog.octet_length(key) OPERATOR(pg_catalog.<=) 1024)
       AND (headers IS NULL OR
            pg_catalog.pg_column_size(headers OPERATOR(pg_catalog.||) '{}'::pg_catalog.jsonb)
            OPERATOR(pg_catalog.<=) 96)
       AND txid OPERATOR(pg_catalog.<) '9223372036854775808'::pg_catalog.xid8
       AND least(created_at, deliver_at, expires_at)
           OPERATOR(pg_catalog.>=) '0001-01-01 00:00:00+00'::pg_catalog.timestamptz
       AND greatest(created_at, deliver_at, expires_at)
           OPERATOR(pg_catalog.<) '9999-12-31 00:00:00+00'::pg_catalog.timestamptz
    THEN
        RETURN true;
    END IF;
    RETURN saf.examine(txid, to_service, key, headers, created_at, deliver_at, expires_at);
END $$;

CREATE TABLE saf.outbox (
    -- txid comes before id so that a row's id is always drawn after its transaction's xid
    txid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1),
    -- same formula as saf.log.shards.shard_of
    shard smallint GENERATED ALWAYS AS (
        (((hashtextextended(coalesce(key, message_id::text), 0) % {shards}) + {shards})
            % {shards})::smallint
    ) STORED,
{message},
    CONSTRAINT outbox_bounded CHECK (
        saf.accept(txid, to_service, key, headers, created_at, deliver_at, expires_at))
) PARTITION BY LIST ((id / 1048576 % 8));
CREATE INDEX outbox_shard_txid ON saf.outbox (shard, txid);
COMMENT ON TABLE saf.outbox IS 'messages sent from this broker; append-only, read by cursor';
COMMENT ON CONSTRAINT outbox_bounded ON saf.outbox IS
    'sizes are in bytes, because limits of indexes, COPY and memory are; see saf.limits';

CREATE TABLE saf.inbox (
    txid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1),
    shard smallint GENERATED ALWAYS AS (
        (((hashtextextended(coalesce(key, message_id::text), 0) % {shards}) + {shards})
            % {shards})::smallint
    ) STORED,
{message},
    source uuid, -- broker that forwarded the message
    received_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT inbox_addressed CHECK (to_service <> ''),
    CONSTRAINT inbox_possible CHECK (txid < '9223372036854775808'::xid8),
    CONSTRAINT inbox_in_calendar CHECK (
        created_at >= '0001-01-01 00:00:00+00' AND created_at < '9999-12-31 00:00:00+00'
        AND deliver_at >= '0001-01-01 00:00:00+00' AND deliver_at < '9999-12-31 00:00:00+00'
        AND expires_at >= '0001-01-01 00:00:00+00' AND expires_at < '9999-12-31 00:00:00+00'),
    CONSTRAINT inbox_bounded CHECK (
        octet_length(to_service) <= 255 AND octet_length(key) <= 1024
        AND (pg_column_size(headers || '{}') <= 96
             OR octet_length(CAST(headers AS text)) <= 1048576))
) PARTITION BY LIST ((id / 1048576 % 8));
CREATE INDEX inbox_shard_txid ON saf.inbox (shard, txid);
COMMENT ON TABLE saf.inbox IS
    'messages stored for the services that live here; append-only, read by cursor';
COMMENT ON CONSTRAINT inbox_bounded ON saf.inbox IS
    'sizes are in bytes, because limits of indexes, COPY and memory are; see saf.limits';

DO $$ BEGIN
    FOR slot IN 0..7 LOOP
        EXECUTE format(
            'CREATE TABLE saf.outbox_%s PARTITION OF saf.outbox FOR VALUES IN (%s)', slot, slot);
        EXECUTE format(
            'CREATE TABLE saf.inbox_%s PARTITION OF saf.inbox FOR VALUES IN (%s)', slot, slot);
    END LOOP;
END $$;

-- Disabled until receivers of this database wait for NOTIFY: `saf inbox notify on` enables it
CREATE FUNCTION saf.notify_inbox() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN NOTIFY saf_inbox; RETURN NULL; END';
CREATE TRIGGER inbox_notify AFTER INSERT ON saf.inbox
    FOR EACH STATEMENT EXECUTE FUNCTION saf.notify_inbox();
ALTER TABLE saf.inbox DISABLE TRIGGER inbox_notify;
