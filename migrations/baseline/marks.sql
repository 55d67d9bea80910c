-- Marks: what each side of a delivery knows about the other. They make delivery exactly once, and
-- reveal that one side was set back; see saf.destinations.marks.

CREATE TABLE saf.watermark (
    source uuid,
    shard smallint,
    epoch bigint NOT NULL,
    -- part of the key for the same reason as in saf.cursor
    batch bigint,
    position bigint NOT NULL,
    lane text DEFAULT '',
    opened_at timestamptz,
    acknowledged boolean DEFAULT false NOT NULL,
    set_aside_at timestamptz,
    PRIMARY KEY (source, shard, lane, batch)
) WITH (fillfactor = 40); -- same reason as for saf.cursor
COMMENT ON TABLE saf.watermark IS
    'last (batch, position) stored here for a shard of a source; makes delivery exactly once';
COMMENT ON COLUMN saf.watermark.lane IS
    'name of the lane at its source; opaque, only compared';
COMMENT ON COLUMN saf.watermark.opened_at IS
    'time at which the source opened the batch; distinguishes batches with the same number';
COMMENT ON COLUMN saf.watermark.acknowledged IS
    'true if the source remembers this mark too. False for at_most_once, for marks that were never '
    'moved, and for marks older than saf.acknowledged';
COMMENT ON COLUMN saf.watermark.set_aside_at IS
    'in the row of the shard''s own lane: last time at which the source set aside messages of the '
    'shard; NULL: never';

CREATE TABLE saf.acknowledged (
    destination uuid,
    lane text,
    shard smallint,
    -- part of the key for the same reason as in saf.cursor
    batch bigint,
    position bigint NOT NULL,
    opened_at timestamptz,
    PRIMARY KEY (destination, lane, shard, batch)
) WITH (fillfactor = 40); -- same reason as for saf.cursor
COMMENT ON TABLE saf.acknowledged IS
    'last mark that each destination has acknowledged for a shard. A destination with a lower mark '
    'was set back; if its mark is higher, this broker was';
COMMENT ON COLUMN saf.acknowledged.destination IS 'broker_id of the destination';
COMMENT ON COLUMN saf.acknowledged.lane IS 'lane in saf.watermark at the destination';

CREATE TABLE saf.fleet_member (
    fleet text,
    name text,
    broker_id uuid,
    met_at timestamptz DEFAULT now() NOT NULL,
    missing_since timestamptz,
    PRIMARY KEY (fleet, name)
);
COMMENT ON TABLE saf.fleet_member IS
    'at a store: members of fleets that forwarders have met, so that missing members are noticed';
COMMENT ON COLUMN saf.fleet_member.name IS 'FLEET/NAME, the name in commands';
COMMENT ON COLUMN saf.fleet_member.broker_id IS
    'broker_id of the member; NULL: it had nothing to forward when it was met';
COMMENT ON COLUMN saf.fleet_member.missing_since IS
    'time from which the fleet no longer lists the member; NULL: listed';
