-- The key of saf.cursor and saf.watermark, whose primary keys also have the batch.
--
-- A unique index without the batch would need to check every version of a row on each write. So
-- another table holds the actual keys, and only the first version of a row writes to it.

CREATE TABLE saf.actual_key (
    of_table text,
    key text[],
    PRIMARY KEY (of_table, key)
);
COMMENT ON TABLE saf.actual_key IS
    'keys of saf.cursor and saf.watermark, whose primary keys also have the batch; prevents a '
    'second row';

-- The arguments are the columns of the key. Runs as the owner of the tables for every inserting
-- role; nothing else writes the keys.
CREATE FUNCTION saf.keep_key() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO saf.actual_key
        SELECT TG_TABLE_NAME, array_agg(to_jsonb(NEW) ->> name ORDER BY number)
        FROM unnest(TG_ARGV) WITH ORDINALITY AS a (name, number);
    ELSIF TG_OP = 'DELETE' THEN
        DELETE FROM saf.actual_key WHERE of_table = TG_TABLE_NAME AND key = (
            SELECT array_agg(to_jsonb(OLD) ->> name ORDER BY number)
            FROM unnest(TG_ARGV) WITH ORDINALITY AS a (name, number));
    ELSE
        DELETE FROM saf.actual_key WHERE of_table = TG_TABLE_NAME;
    END IF;
    RETURN NULL;
END $$;
-- Same reason as for saf.store_locally
REVOKE ALL ON FUNCTION saf.keep_key FROM PUBLIC;

CREATE TRIGGER cursor_is_one AFTER INSERT OR DELETE ON saf.cursor
    FOR EACH ROW EXECUTE FUNCTION saf.keep_key('subscription_id', 'shard');
CREATE TRIGGER cursor_is_none AFTER TRUNCATE ON saf.cursor
    FOR EACH STATEMENT EXECUTE FUNCTION saf.keep_key();
CREATE TRIGGER watermark_is_one AFTER INSERT OR DELETE ON saf.watermark
    FOR EACH ROW EXECUTE FUNCTION saf.keep_key('source', 'shard', 'lane');
CREATE TRIGGER watermark_is_none AFTER TRUNCATE ON saf.watermark
    FOR EACH STATEMENT EXECUTE FUNCTION saf.keep_key();

-- Rows that exist already
INSERT INTO saf.actual_key
SELECT 'cursor', ARRAY[subscription_id::text, shard::text] FROM saf.cursor
UNION ALL
SELECT 'watermark', ARRAY[source::text, shard::text, lane] FROM saf.watermark;
