-- Captures: a trigger on a table of the application sends a message for each changed row.
--
-- `saf capture add` writes the trigger's function into this schema, and its triggers on the table,
-- after an operator has reviewed them; see saf.capture. These rows say what was written, so that
-- `saf doctor` notices a trigger that is disabled, or a function that was changed.

CREATE TABLE saf.capture (
    capture_id bigint GENERATED ALWAYS AS IDENTITY,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    from_service text,
    to_service text NOT NULL,
    message_type text NOT NULL,
    key text NOT NULL,
    columns text[] NOT NULL,
    condition text,
    primary_key text[] NOT NULL,
    compared text[],
    function_name text NOT NULL,
    digest text NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    changed_at timestamptz DEFAULT now() NOT NULL,
    PRIMARY KEY (capture_id),
    CONSTRAINT capture_once UNIQUE (schema_name, table_name),
    CONSTRAINT capture_addressed CHECK (
        octet_length(to_service) BETWEEN 1 AND 255 AND octet_length(from_service) BETWEEN 1 AND 255
        AND octet_length(message_type) BETWEEN 1 AND 248),
    CONSTRAINT capture_columns CHECK (cardinality(columns) > 0 AND cardinality(primary_key) > 0)
);
COMMENT ON TABLE saf.capture IS 'tables whose changes are sent as messages, by a trigger';
COMMENT ON COLUMN saf.capture.schema_name IS 'schema of the table: a name, because dumps have names';
COMMENT ON COLUMN saf.capture.message_type IS
    'beginning of the message types: orders for orders.insert, orders.update and orders.delete';
COMMENT ON COLUMN saf.capture.key IS 'column whose text is the key of the messages';
COMMENT ON COLUMN saf.capture.columns IS 'columns in the bodies, in this order';
COMMENT ON COLUMN saf.capture.condition IS
    'SQL expression about old and new; rows for which it is not true are not sent; NULL: none';
COMMENT ON COLUMN saf.capture.primary_key IS 'columns by which old and new rows are matched';
COMMENT ON COLUMN saf.capture.compared IS
    'an update of none of these columns is not sent: those in the bodies, the key, and those that '
    'the condition reads; NULL: any column, because the condition reads the whole row';
COMMENT ON COLUMN saf.capture.function_name IS 'name of the trigger''s function in this schema';
COMMENT ON COLUMN saf.capture.digest IS 'SHA-256 of the function''s source, in hexadecimal digits';

CREATE TABLE saf.backfill (
    backfill_id bigint GENERATED ALWAYS AS IDENTITY,
    capture_id bigint NOT NULL REFERENCES saf.capture ON DELETE CASCADE,
    condition text,
    chunk_rows integer NOT NULL,
    rate text,
    last_key jsonb,
    left_over jsonb DEFAULT '[]' NOT NULL,
    messages bigint DEFAULT 0 NOT NULL,
    begun_at timestamptz DEFAULT now() NOT NULL,
    chunk_at timestamptz,
    paused_at timestamptz,
    paused_by text,
    ended_at timestamptz,
    cancelled boolean DEFAULT false NOT NULL,
    PRIMARY KEY (backfill_id),
    CONSTRAINT backfill_chunk CHECK (chunk_rows BETWEEN 1 AND 100000),
    CONSTRAINT backfill_paused CHECK ((paused_at IS NULL) = (paused_by IS NULL))
);
CREATE UNIQUE INDEX backfill_one ON saf.backfill (capture_id) WHERE ended_at IS NULL;
COMMENT ON TABLE saf.backfill IS
    'existing rows of captured tables that are sent, in chunks, in the order of the primary key';
COMMENT ON COLUMN saf.backfill.condition IS 'SQL expression that the rows match; NULL: all rows';
COMMENT ON COLUMN saf.backfill.rate IS 'most rows in a time, e.g. 5000/s; NULL: unlimited';
COMMENT ON COLUMN saf.backfill.last_key IS
    'primary key up to which rows were read, as texts; NULL: none was read';
COMMENT ON COLUMN saf.backfill.left_over IS
    'primary keys of rows before it that other sessions had locked; the next chunk tries them';
COMMENT ON COLUMN saf.backfill.chunk_at IS 'time of the last chunk; NULL: none was sent';
COMMENT ON COLUMN saf.backfill.paused_by IS 'login that has paused it; NULL: not paused';
COMMENT ON COLUMN saf.backfill.ended_at IS 'time of its end; NULL: a run continues it';
COMMENT ON COLUMN saf.backfill.cancelled IS 'true: ended by an operator, before it was complete';
