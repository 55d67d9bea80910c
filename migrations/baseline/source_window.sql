-- The ids of messages that sources without places have stored last; see saf.sources.window.

CREATE TABLE saf.source_window (
    source uuid,
    shard smallint,
    number bigint,
    stored_at timestamptz DEFAULT now() NOT NULL,
    ids uuid[] NOT NULL,
    PRIMARY KEY (source, shard, number),
    CONSTRAINT source_window_shard FOREIGN KEY (source, shard)
        REFERENCES saf.source_shard ON DELETE CASCADE
);
COMMENT ON TABLE saf.source_window IS
    'ids of the last messages of queues, by which a message that is delivered again is recognised; '
    'one row for each stored chunk, so that old ones go cheaply';
COMMENT ON COLUMN saf.source_window.number IS
    'number of the chunk''s last message, of all that were ever stored of the partition';
COMMENT ON COLUMN saf.source_window.stored_at IS 'rows are removed some time after it';
COMMENT ON COLUMN saf.source_window.ids IS 'message ids of the chunk';
