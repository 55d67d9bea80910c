-- What each side of a delivery knows of the other: by these marks a delivery is exactly once, and
-- each side notices that it, or the other side, was set back; see saf.destinations.marks.

CREATE TABLE saf.watermark (
    source uuid,
    shard smallint,
    epoch bigint NOT NULL,
    -- in the key for the same reason as in saf.cursor
    batch bigint,
    position bigint NOT NULL,
    lane text DEFAULT '',
    opened_at timestamptz,
    acknowledged boolean DEFAULT false NOT NULL,
    set_aside_at timestamptz,
    PRIMARY KEY (source, shard, lane, batch)
) WITH (fillfactor = 40); -- as saf.cursor
COMMENT ON TABLE saf.watermark IS
    'the last (batch, position) stored here of one source shard: what makes delivery exactly once';
COMMENT ON COLUMN saf.watermark.lane IS
    'as its source calls it: a name to compare, not to take apart';
COMMENT ON COLUMN saf.watermark.opened_at IS
    'when the source opened the batch: tells it from another of the same number';
COMMENT ON COLUMN saf.watermark.acknowledged IS
    'whether the source remembers it too; false of one that nothing has moved, or before sources '
    'did, and of at_most_once';
COMMENT ON COLUMN saf.watermark.set_aside_at IS
    'of the shard''s own lane: when the source had last set aside messages of the shard; NULL if '
    'it had not';

-- As saf.cursor_key
CREATE TABLE saf.watermark_key (
    source uuid,
    shard smallint,
    lane text,
    PRIMARY KEY (source, shard, lane)
);
COMMENT ON TABLE saf.watermark_key IS
    'one for each row of saf.watermark, whose own key has the batch too: it lets in no second one';

CREATE FUNCTION saf.watermark_is_one() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO saf.watermark_key SELECT NEW.source, NEW.shard, NEW.lane;
    ELSIF TG_OP = 'DELETE' THEN
        DELETE FROM saf.watermark_key
        WHERE (source, shard, lane) = (OLD.source, OLD.shard, OLD.lane);
    ELSE
        DELETE FROM saf.watermark_key;
    END IF;
    RETURN NULL;
END $$;
-- As for saf.store_locally
REVOKE ALL ON FUNCTION saf.watermark_is_one FROM PUBLIC;
CREATE TRIGGER watermark_is_one AFTER INSERT OR DELETE ON saf.watermark
    FOR EACH ROW EXECUTE FUNCTION saf.watermark_is_one();
CREATE TRIGGER watermark_is_none AFTER TRUNCATE ON saf.watermark
    FOR EACH STATEMENT EXECUTE FUNCTION saf.watermark_is_one();

CREATE TABLE saf.acknowledged (
    destination uuid,
    lane text,
    shard smallint,
    -- in the key for the same reason as in saf.cursor
    batch bigint,
    position bigint NOT NULL,
    opened_at timestamptz,
    PRIMARY KEY (destination, lane, shard, batch)
) WITH (fillfactor = 40); -- as saf.cursor
COMMENT ON TABLE saf.acknowledged IS
    'the last that each destination has said to have stored of a shard: one that has less was set '
    'back, and if one has more, this broker was';
COMMENT ON COLUMN saf.acknowledged.destination IS 'its broker_id';
COMMENT ON COLUMN saf.acknowledged.lane IS 'as in saf.watermark there';

CREATE TABLE saf.fleet_member (
    fleet text,
    name text,
    broker_id uuid,
    met_at timestamptz DEFAULT now() NOT NULL,
    missing_since timestamptz,
    PRIMARY KEY (fleet, name)
);
COMMENT ON TABLE saf.fleet_member IS
    'at a store: the members of fleets that forwarders have met, so that a missing one is noticed';
COMMENT ON COLUMN saf.fleet_member.name IS 'FLEET/NAME, as commands call it';
COMMENT ON COLUMN saf.fleet_member.broker_id IS 'NULL: it had nothing to forward when it was met';
COMMENT ON COLUMN saf.fleet_member.missing_since IS 'NULL: its fleet lists it';
