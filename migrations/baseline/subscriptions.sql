-- Who reads a log, and how far: subscriptions, their members, and a cursor for each shard.

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
COMMENT ON TABLE saf.subscription IS 'named readers of a log, each with one cursor per shard';
COMMENT ON COLUMN saf.subscription.service IS
    'whose messages of the inbox it reads; NULL for everybody''s';
COMMENT ON COLUMN saf.subscription.stream IS
    'read by a stream, whose checkpoint says how far it is; its cursors say what it has committed';

CREATE TABLE saf.member (
    member_id uuid PRIMARY KEY,
    subscription_id integer NOT NULL REFERENCES saf.subscription ON DELETE CASCADE,
    name text NOT NULL, -- host and process, for people
    joined_at timestamptz DEFAULT now() NOT NULL,
    lease_until timestamptz NOT NULL,
    stopping boolean DEFAULT false NOT NULL -- its tasks finish the chunk in hand and end
);
COMMENT ON TABLE saf.member IS
    'live processes of a subscription; a lease is a term by this database''s clock';

CREATE TABLE saf.cursor (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    shard smallint,
    owner uuid REFERENCES saf.member ON DELETE SET NULL,
    epoch bigint DEFAULT '0' NOT NULL,
    -- in the key only so that the newest version is found first; see saf.log.cursor
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
) WITH (fillfactor = 40); -- short rows, rewritten with each batch: room on the page keeps it HOT
COMMENT ON TABLE saf.cursor IS 'how far a subscription has got in one shard';
COMMENT ON COLUMN saf.cursor.epoch IS 'rises with each change of owner; fences the owners before';
COMMENT ON COLUMN saf.cursor.done IS 'every row visible in it is complete';
COMMENT ON COLUMN saf.cursor.open IS 'the batch in hand: the rows visible in open and not in done';
COMMENT ON COLUMN saf.cursor.position IS
    'within the open batch, rows with id <= position are complete';
COMMENT ON COLUMN saf.cursor.attempted IS
    'within the open batch, at_most_once rows with id <= attempted are not sent again';
COMMENT ON COLUMN saf.cursor.opened_at IS 'by this clock messages of the batch expire';
COMMENT ON COLUMN saf.cursor.allowance IS
    'how many messages are handed out at once after a delivery that failed; NULL for any number';
COMMENT ON COLUMN saf.cursor.until IS 'what cuts are cuts of';
COMMENT ON COLUMN saf.cursor.cuts IS
    'where the next batches of a deep backlog may end; see saf.claim';
COMMENT ON COLUMN saf.cursor.set_aside_at IS
    'the last times at which messages of the shard were set aside';

-- A unique index on saf.cursor without the batch would have to check every version on each write.
-- So the actual key is in a table of its own, to which only the first row writes.
CREATE TABLE saf.cursor_key (
    subscription_id integer,
    shard smallint,
    PRIMARY KEY (subscription_id, shard)
);
COMMENT ON TABLE saf.cursor_key IS
    'one for each row of saf.cursor, whose own key has the batch too: it lets in no second one';

-- It runs as the owner of the tables for every inserting role: nothing else writes the keys
CREATE FUNCTION saf.cursor_is_one() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO saf.cursor_key SELECT NEW.subscription_id, NEW.shard;
    ELSIF TG_OP = 'DELETE' THEN
        DELETE FROM saf.cursor_key
        WHERE (subscription_id, shard) = (OLD.subscription_id, OLD.shard);
    ELSE
        DELETE FROM saf.cursor_key;
    END IF;
    RETURN NULL;
END $$;
-- As for saf.store_locally
REVOKE ALL ON FUNCTION saf.cursor_is_one FROM PUBLIC;
CREATE TRIGGER cursor_is_one AFTER INSERT OR DELETE ON saf.cursor
    FOR EACH ROW EXECUTE FUNCTION saf.cursor_is_one();
CREATE TRIGGER cursor_is_none AFTER TRUNCATE ON saf.cursor
    FOR EACH STATEMENT EXECUTE FUNCTION saf.cursor_is_one();

INSERT INTO saf.subscription (name, log) VALUES ('forwarder', 'outbox');
INSERT INTO saf.cursor (subscription_id, shard)
SELECT subscription_id, generate_series(0, {shards} - 1) FROM saf.subscription;
