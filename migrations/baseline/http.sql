-- Messages sent and received by HTTP: endpoints of dispatchers, and stored webhook events.

CREATE TABLE saf.endpoint (
    name text PRIMARY KEY,
    subscription_id integer NOT NULL REFERENCES saf.subscription ON DELETE CASCADE,
    url text NOT NULL,
    settings jsonb DEFAULT '{}' NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    created_by text DEFAULT session_user NOT NULL,
    CONSTRAINT endpoint_of_subscription UNIQUE (subscription_id),
    CONSTRAINT endpoint_named CHECK (name <> '' AND url <> ''),
    CONSTRAINT endpoint_settings CHECK (jsonb_typeof(settings) = 'object')
);
COMMENT ON TABLE saf.endpoint IS
    'endpoints of dispatchers for a subscription''s messages, besides those in saf.toml';
COMMENT ON COLUMN saf.endpoint.settings IS
    'settings as in saf.toml; secrets are given as names of environment variables';

CREATE TABLE saf.breaker (
    subscription_id integer PRIMARY KEY REFERENCES saf.subscription ON DELETE CASCADE,
    endpoint text NOT NULL,
    state text DEFAULT 'closed' NOT NULL, -- see saf.receiving.dispatch.condition
    failures integer DEFAULT 0 NOT NULL,
    failing_since timestamptz,
    next_probe_at timestamptz,
    error text,
    paused_at timestamptz,
    paused_by text,
    changed_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT breaker_state CHECK (state IN ('closed', 'open', 'disabled') AND endpoint <> ''),
    CONSTRAINT breaker_possible CHECK (
        (state = 'closed') = (failing_since IS NULL) AND (state = 'closed') = (error IS NULL)
        AND (state = 'open') = (next_probe_at IS NOT NULL)),
    CONSTRAINT breaker_paused CHECK ((paused_at IS NULL) = (paused_by IS NULL))
);
COMMENT ON TABLE saf.breaker IS
    'condition of each subscription''s endpoint, shared by all dispatchers; no row: it is up';
COMMENT ON COLUMN saf.breaker.endpoint IS 'name of the endpoint, for operators';
COMMENT ON COLUMN saf.breaker.failures IS 'consecutive failures';
COMMENT ON COLUMN saf.breaker.failing_since IS
    'time of the first failure; NULL: the endpoint is up';
COMMENT ON COLUMN saf.breaker.next_probe_at IS
    'time of the next probe: one message, sent to test whether the endpoint is up';
COMMENT ON COLUMN saf.breaker.error IS
    'reason of the last failure, or why the endpoint was disabled';
COMMENT ON COLUMN saf.breaker.paused_at IS
    'time at which an operator paused the endpoint; NULL: not paused';

CREATE TABLE saf.dispatched (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    shard smallint,
    batch bigint NOT NULL,
    ids int8multirange NOT NULL,
    PRIMARY KEY (subscription_id, shard)
) WITH (fillfactor = 40); -- rewritten with each mark; free space keeps updates HOT
COMMENT ON TABLE saf.dispatched IS
    'messages that endpoints answered out of order; only the owner of the shard writes here';
COMMENT ON COLUMN saf.dispatched.batch IS
    'batch of the cursor; a row of any other batch is obsolete';
COMMENT ON COLUMN saf.dispatched.ids IS
    'ids beyond the position whose messages in the batch are complete';

CREATE TABLE saf.attempt (
    attempt_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subscription_id integer NOT NULL REFERENCES saf.subscription ON DELETE CASCADE,
    at timestamptz DEFAULT now() NOT NULL,
    message_id uuid NOT NULL,
    key text,
    status smallint,
    seconds real NOT NULL,
    outcome text NOT NULL,
    error text NOT NULL
);
CREATE INDEX attempt_of ON saf.attempt (subscription_id, attempt_id);
COMMENT ON TABLE saf.attempt IS
    'failed attempts of dispatchers; the latest are kept for each subscription';
COMMENT ON COLUMN saf.attempt.status IS 'HTTP status; NULL: the endpoint did not answer';
COMMENT ON COLUMN saf.attempt.seconds IS
    'duration until the endpoint answered or the attempt was given up';
COMMENT ON COLUMN saf.attempt.error IS
    'reason of the failure, with the first bytes of the answer';

CREATE TABLE saf.webhook (
    digest bytea PRIMARY KEY,
    stored_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT webhook_digest CHECK (octet_length(digest) = 32)
);
CREATE INDEX webhook_stored_at ON saf.webhook (stored_at);
COMMENT ON TABLE saf.webhook IS
    'digests of stored webhook events, by which repeats are dropped; new events remove old rows';
COMMENT ON COLUMN saf.webhook.digest IS
    'SHA-256 of service, source and id, which may be too long for an index';
