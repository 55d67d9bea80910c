-- Messages that Spark jobs send, and results of transforms; see saf.sending.staging and
-- saf.engine.kept_results.

CREATE UNLOGGED TABLE saf.staged (
    attempt bigint,
    number bigint, -- order in which the task wrote its messages
    -- columns as in saf.outbox
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
    'messages that tasks have written, in order. A crash of the server empties the table, which '
    'the job detects';
COMMENT ON COLUMN saf.staged.attempt IS
    'attempt of a task: the second of its beginning, times 2^31, plus a random number';

CREATE TABLE saf.sink (
    application text PRIMARY KEY,
    version bigint,
    messages bigint NOT NULL,
    sent_at timestamptz DEFAULT now() NOT NULL
);
COMMENT ON TABLE saf.sink IS
    'last version that each Spark application has sent, so that nothing is sent twice';
COMMENT ON COLUMN saf.sink.version IS
    'rises with each send; NULL: the application sends only once';

CREATE TABLE saf.kept_result (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    shard smallint,
    id bigint,
    number integer,
    batch bigint NOT NULL,
    part integer, -- number that the transform gives the result
    -- the resulting message
    key text,
    message_type text,
    headers text,
    body bytea,
    PRIMARY KEY (subscription_id, shard, id, number),
    CONSTRAINT kept_result_possible CHECK (number = 0 OR body IS NOT NULL)
);
CREATE INDEX kept_result_batch ON saf.kept_result (subscription_id, batch);
COMMENT ON TABLE saf.kept_result IS
    'results of transforms that would differ in another run, kept until they are delivered';
COMMENT ON COLUMN saf.kept_result.id IS 'id of the message in the outbox';
COMMENT ON COLUMN saf.kept_result.number IS
    'ordinal among the results of one message: 0, 1, …';
COMMENT ON COLUMN saf.kept_result.batch IS
    'batch that produced the result, which is removed when the batch is closed';
COMMENT ON COLUMN saf.kept_result.body IS 'NULL: the message has no result';
