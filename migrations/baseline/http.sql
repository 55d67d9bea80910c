-- Messages that leave and arrive by HTTP: dispatchers' endpoints, and stored webhook events.

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
    'where messages of a subscription are sent, besides the endpoints of saf.toml';
COMMENT ON COLUMN saf.endpoint.settings IS
    'as in saf.toml; of secrets, the names of environment variables';

CREATE TABLE saf.breaker (
    subscription_id integer PRIMARY KEY REFERENCES saf.subscription ON DELETE CASCADE,
    endpoint text NOT NULL,
    state text DEFAULT 'closed' NOT NULL, -- see saf.dispatch.condition
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
    'how the endpoint of each subscription is, for all its dispatchers; no row: well';
COMMENT ON COLUMN saf.breaker.endpoint IS 'its name, for people';
COMMENT ON COLUMN saf.breaker.failures IS 'how often in a row it was found down';
COMMENT ON COLUMN saf.breaker.failing_since IS 'when it was first found down; NULL: it is up';
COMMENT ON COLUMN saf.breaker.next_probe_at IS 'then one message is sent to see whether it is up';
COMMENT ON COLUMN saf.breaker.error IS 'why it was last found down, or was disabled';
COMMENT ON COLUMN saf.breaker.paused_at IS 'NULL: nobody has paused it';

CREATE TABLE saf.dispatched (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    shard smallint,
    batch bigint NOT NULL,
    ids int8multirange NOT NULL,
    PRIMARY KEY (subscription_id, shard)
) WITH (fillfactor = 40); -- rewritten with each mark: room on the page keeps the updates HOT
COMMENT ON TABLE saf.dispatched IS
    'what endpoints have answered out of order; only the owner of the shard writes it';
COMMENT ON COLUMN saf.dispatched.batch IS 'of the cursor; a row for another batch says nothing';
COMMENT ON COLUMN saf.dispatched.ids IS
    'rows of the batch with an id in it are complete, although the position is before them';

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
    'attempts of dispatchers that failed; of each subscription the last ones are kept';
COMMENT ON COLUMN saf.attempt.status IS 'of HTTP; NULL: it did not answer';
COMMENT ON COLUMN saf.attempt.seconds IS 'until it answered, or was given up';
COMMENT ON COLUMN saf.attempt.error IS 'with the first bytes of the answer';

CREATE TABLE saf.webhook (
    digest bytea PRIMARY KEY,
    stored_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT webhook_digest CHECK (octet_length(digest) = 32)
);
CREATE INDEX webhook_stored_at ON saf.webhook (stored_at);
COMMENT ON TABLE saf.webhook IS
    'events that came by HTTP and are stored; those that are old are deleted as others come';
COMMENT ON COLUMN saf.webhook.digest IS
    'SHA-256 of service, source and id: of any length, and an index takes them';
