"""Dispatchers, and events that come by HTTP.

New tables hold endpoints' out-of-order answers, their state and their failures, and the events that
are already stored.
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"

UP = """
CREATE TABLE saf.endpoint (
    name TEXT NOT NULL,
    subscription_id INTEGER NOT NULL,
    url TEXT NOT NULL,
    settings JSONB DEFAULT '{}' NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    created_by TEXT DEFAULT session_user NOT NULL,
    PRIMARY KEY (name),
    CONSTRAINT endpoint_of_subscription UNIQUE (subscription_id),
    CONSTRAINT endpoint_named CHECK (name <> '' AND url <> ''),
    CONSTRAINT endpoint_settings CHECK (jsonb_typeof(settings) = 'object'),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);
COMMENT ON TABLE saf.endpoint IS
    'where messages of a subscription are sent, besides the endpoints of saf.toml';
COMMENT ON COLUMN saf.endpoint.settings IS
    'as in saf.toml; of secrets, the names of environment variables';

CREATE TABLE saf.dispatched (
    subscription_id INTEGER NOT NULL,
    shard SMALLINT NOT NULL,
    batch BIGINT NOT NULL,
    ids INT8MULTIRANGE NOT NULL,
    PRIMARY KEY (subscription_id, shard),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
) WITH (fillfactor = 40);
COMMENT ON TABLE saf.dispatched IS
    'what endpoints have answered out of order; only the owner of the shard writes it';
COMMENT ON COLUMN saf.dispatched.batch IS
    'of the cursor; a row for another batch says nothing';
COMMENT ON COLUMN saf.dispatched.ids IS
    'rows of the batch with an id in it are complete, although the position is before them';

CREATE TABLE saf.breaker (
    subscription_id INTEGER NOT NULL,
    endpoint TEXT NOT NULL,
    state TEXT DEFAULT 'closed' NOT NULL,
    failures INTEGER DEFAULT '0' NOT NULL,
    failing_since TIMESTAMP WITH TIME ZONE,
    next_probe_at TIMESTAMP WITH TIME ZONE,
    error TEXT,
    paused_at TIMESTAMP WITH TIME ZONE,
    paused_by TEXT,
    changed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (subscription_id),
    CONSTRAINT breaker_state CHECK (state IN ('closed', 'open', 'disabled') AND endpoint <> ''),
    CONSTRAINT breaker_possible CHECK ((state = 'closed') = (failing_since IS NULL) AND (state =
        'closed') = (error IS NULL) AND (state = 'open') = (next_probe_at IS NOT NULL)),
    CONSTRAINT breaker_paused CHECK ((paused_at IS NULL) = (paused_by IS NULL)),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);
COMMENT ON TABLE saf.breaker IS
    'how the endpoint of each subscription is, for all its dispatchers; no row: well';
COMMENT ON COLUMN saf.breaker.endpoint IS
    'its name, for people';
COMMENT ON COLUMN saf.breaker.failures IS
    'how often in a row it was found down';
COMMENT ON COLUMN saf.breaker.failing_since IS
    'when it was first found down; NULL: it is up';
COMMENT ON COLUMN saf.breaker.next_probe_at IS
    'then one message is sent to see whether it is up';
COMMENT ON COLUMN saf.breaker.error IS
    'why it was last found down, or was disabled';
COMMENT ON COLUMN saf.breaker.paused_at IS
    'NULL: nobody has paused it';

CREATE TABLE saf.attempt (
    attempt_id BIGINT GENERATED ALWAYS AS IDENTITY,
    subscription_id INTEGER NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    message_id UUID NOT NULL,
    key TEXT,
    status SMALLINT,
    seconds REAL NOT NULL,
    outcome TEXT NOT NULL,
    error TEXT NOT NULL,
    PRIMARY KEY (attempt_id),
    FOREIGN KEY(subscription_id) REFERENCES saf.subscription (subscription_id) ON DELETE CASCADE
);
CREATE INDEX attempt_of ON saf.attempt (subscription_id, attempt_id);
COMMENT ON TABLE saf.attempt IS
    'attempts of dispatchers that failed; of each subscription the last ones are kept';
COMMENT ON COLUMN saf.attempt.status IS
    'of HTTP; NULL: it did not answer';
COMMENT ON COLUMN saf.attempt.seconds IS
    'until it answered, or was given up';
COMMENT ON COLUMN saf.attempt.error IS
    'with the first bytes of the answer';

CREATE TABLE saf.webhook (
    digest BYTEA NOT NULL,
    stored_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (digest),
    CONSTRAINT webhook_digest CHECK (octet_length(digest) = 32)
);
CREATE INDEX webhook_stored_at ON saf.webhook (stored_at);
COMMENT ON TABLE saf.webhook IS
    'events that came by HTTP and are stored; those that are old are deleted as others come';
COMMENT ON COLUMN saf.webhook.digest IS
    'SHA-256 of service, source and id: of any length, and an index takes them';
"""

DOWN = """
DROP TABLE saf.webhook;
DROP TABLE saf.attempt;
DROP TABLE saf.breaker;
DROP TABLE saf.dispatched;
DROP TABLE saf.endpoint;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
