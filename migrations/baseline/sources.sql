-- Sources: topics of other brokers that forwarders read into this inbox; see saf.sources.

CREATE TABLE saf.source (
    source uuid DEFAULT gen_random_uuid() PRIMARY KEY,
    name text NOT NULL,
    kind text NOT NULL,
    topic text NOT NULL,
    topic_id text,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT source_name UNIQUE (name)
);
COMMENT ON TABLE saf.source IS
    'topics of other brokers that are read into the inbox; the marks are in saf.watermark';
COMMENT ON COLUMN saf.source.source IS
    'source of its messages in the inbox and in saf.watermark. Each `saf source continue` creates '
    'a new one, so that marks never go back';
COMMENT ON COLUMN saf.source.name IS 'name of the table [sources.NAME] in saf.toml';
COMMENT ON COLUMN saf.source.topic IS 'topic as in saf.toml';
COMMENT ON COLUMN saf.source.topic_id IS
    'id that the topic''s broker gave it when it was created; NULL: its broker gives none';

CREATE TABLE saf.source_member (
    member_id uuid PRIMARY KEY,
    source uuid NOT NULL REFERENCES saf.source ON DELETE CASCADE,
    name text NOT NULL, -- host and process, for operators
    lease_until timestamptz NOT NULL
);
COMMENT ON TABLE saf.source_member IS
    'live processes that read a source; leases end by this database''s clock';

CREATE TABLE saf.source_shard (
    source uuid REFERENCES saf.source ON DELETE CASCADE,
    shard smallint,
    owner uuid REFERENCES saf.source_member ON DELETE SET NULL,
    epoch bigint DEFAULT '0' NOT NULL,
    start_batch bigint,
    start_position bigint,
    added numeric,
    pending bigint,
    looked_at timestamptz,
    PRIMARY KEY (source, shard),
    CONSTRAINT source_shard_start CHECK ((start_batch IS NULL) = (start_position IS NULL))
) WITH (fillfactor = 50); -- free space keeps updates HOT
COMMENT ON TABLE saf.source_shard IS
    'partitions of sources: their owners, and what their brokers had when they were read';
COMMENT ON COLUMN saf.source_shard.shard IS 'number of the partition';
COMMENT ON COLUMN saf.source_shard.epoch IS
    'rises with each change of owner; fences previous owners';
COMMENT ON COLUMN saf.source_shard.start_batch IS
    'with start_position: place after which to read, if the mark is not higher; NULL: not begun';
COMMENT ON COLUMN saf.source_shard.added IS
    'messages of the partition up to that place, as its broker counts all that were ever added';
COMMENT ON COLUMN saf.source_shard.pending IS 'messages that were not read yet, at looked_at';
COMMENT ON COLUMN saf.source_shard.looked_at IS 'time at which the partition was last looked at';
