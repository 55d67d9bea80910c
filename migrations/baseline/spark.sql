-- Spark: messages of jobs that send, and results of transforms; see saf.sending.staging and
-- saf.engine.kept_results.

CREATE TABLE saf.staging (
    attempt bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at timestamptz DEFAULT now() NOT NULL
);
COMMENT ON TABLE saf.staging IS 'attempts of tasks whose messages were staged and not sent yet';

CREATE UNLOGGED TABLE saf.staged (
    attempt bigint,
    number bigint, -- the order in which the task wrote them
    -- as in saf.outbox
    from_service text,
    to_service text NOT NULL,
    to_broker text,
    key text,
    message_type text,
    headers text,
    body bytea NOT NULL,
    deliver_at timestamptz,
    expires_at timestamptz,
    PRIMARY KEY (attempt, number)
);
COMMENT ON TABLE saf.staged IS
    'what tasks have written, in their order; a crash of the server empties it, and the job '
    'notices';

CREATE TABLE saf.sink (
    application text PRIMARY KEY,
    version bigint,
    messages bigint NOT NULL,
    sent_at timestamptz DEFAULT now() NOT NULL
);
COMMENT ON TABLE saf.sink IS
    'what each application of Spark has sent last: so nothing is sent twice';
COMMENT ON COLUMN saf.sink.version IS 'rises; NULL: this application sends only once';

CREATE TABLE saf.kept_result (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    shard smallint,
    id bigint,
    number integer,
    batch bigint NOT NULL,
    part integer, -- as the transform numbers its results
    -- the message that was made
    key text,
    message_type text,
    headers text,
    body bytea,
    PRIMARY KEY (subscription_id, shard, id, number),
    CONSTRAINT kept_result_possible CHECK (number = 0 OR body IS NOT NULL)
);
CREATE INDEX kept_result_batch ON saf.kept_result (subscription_id, batch);
COMMENT ON TABLE saf.kept_result IS
    'what a transform has made of messages, where it would be something else the next time: kept '
    'until they are delivered';
COMMENT ON COLUMN saf.kept_result.id IS 'of the message in the outbox';
COMMENT ON COLUMN saf.kept_result.number IS 'of several that were made of one message, 0, 1, …';
COMMENT ON COLUMN saf.kept_result.batch IS 'in which it was kept; removed when that is closed';
COMMENT ON COLUMN saf.kept_result.body IS 'NULL: nothing was made of the message';
