-- Messages that could not be delivered or handled. They are parked in order for another attempt, or
-- dead letters until an operator decides. Messages that wait for the same thing are a lane, which
-- destination, kind, subject and broker identify; saf.setaside.lane lists all kinds.

CREATE TABLE saf.parked (
    parked_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subscription_id integer NOT NULL REFERENCES saf.subscription ON DELETE CASCADE,
    destination text DEFAULT '' NOT NULL,
    shard smallint NOT NULL,
    id bigint NOT NULL, -- id in its log
{message},
    parked_at timestamptz DEFAULT now() NOT NULL,
    kind text DEFAULT 'main' NOT NULL,
    quality text, -- quality of service of its route
    batch bigint NOT NULL,
    position bigint NOT NULL,
    opened_at timestamptz DEFAULT now(),
    subject text DEFAULT '' NOT NULL,
    broker uuid DEFAULT 'ffffffff-ffff-ffff-ffff-ffffffffffff' NOT NULL,
    source uuid,
    CONSTRAINT parked_lane_possible CHECK (
{lane})
);
CREATE INDEX parked_lane ON saf.parked (subscription_id, destination, kind, subject, broker, id);
CREATE INDEX parked_later ON saf.parked (subscription_id, destination, subject, deliver_at, id)
    WHERE kind = 'later';
CREATE INDEX parked_expiring ON saf.parked (subscription_id, expires_at)
    WHERE kind = 'route' AND expires_at IS NOT NULL;
COMMENT ON TABLE saf.parked IS 'messages set aside in order, to be tried again automatically';
COMMENT ON COLUMN saf.parked.kind IS
    'kind of the lane, by what its messages wait for; see saf.setaside.lane';
COMMENT ON COLUMN saf.parked.batch IS
    'batch that is compared, with position, to the watermark of the lane';
COMMENT ON COLUMN saf.parked.opened_at IS
    'time at which the batch was opened. For a message that is sent again or has found a route, '
    'the time of that event. Distinguishes marks of a lane that have the same number';
COMMENT ON COLUMN saf.parked.subject IS
    'service, key, shard or conversation that the lane is about';
COMMENT ON COLUMN saf.parked.broker IS
    'broker that the messages of the lane are addressed to; all ones: no broker';
COMMENT ON COLUMN saf.parked.source IS
    'source as in the inbox, for messages that a receiver has set aside';

CREATE TABLE saf.backoff (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    destination text,
    kind text DEFAULT 'main',
    attempts integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamptz DEFAULT now() NOT NULL,
    error text NOT NULL, -- error of the last attempt
    since timestamptz DEFAULT now() NOT NULL,
    shard smallint,
    subject text DEFAULT '',
    broker uuid DEFAULT 'ffffffff-ffff-ffff-ffff-ffffffffffff',
    awaits_handler boolean DEFAULT false NOT NULL,
    message_type text,
    needs_operator boolean DEFAULT false NOT NULL,
    PRIMARY KEY (subscription_id, destination, kind, subject, broker),
    CONSTRAINT backoff_lane_possible CHECK (
{lane}),
    -- a lane that waits for a handler has no next attempt, so it is never due
    CONSTRAINT backoff_awaits_possible CHECK (
        CASE WHEN awaits_handler
             THEN kind = 'key' AND shard IS NOT NULL
                  AND next_attempt_at = '9999-01-01 00:00:00+00'
             ELSE message_type IS NULL END)
);
CREATE INDEX backoff_key ON saf.backoff (subscription_id, next_attempt_at) WHERE shard IS NOT NULL;
-- Uses a hash, because other writers' message types may exceed the size limit of index rows
CREATE INDEX backoff_awaits_handler
    ON saf.backoff (subscription_id, hashtextextended(message_type, 0), since) WHERE awaits_handler;
COMMENT ON TABLE saf.backoff IS
    'waiting lanes with the time of their next attempt, shared by all members';
COMMENT ON COLUMN saf.backoff.kind IS
    'kind of the lane, by what its messages wait for; see saf.setaside.lane';
COMMENT ON COLUMN saf.backoff.shard IS
    'shard of a receiver''s lane that holds the messages of one key; NULL: another lane';
COMMENT ON COLUMN saf.backoff.subject IS
    'service, key, shard or conversation that the lane is about';
COMMENT ON COLUMN saf.backoff.broker IS
    'broker that the messages of the lane are addressed to; all ones: no broker';
COMMENT ON COLUMN saf.backoff.awaits_handler IS
    'true: the lane waits for a receiver that handles its first message';
COMMENT ON COLUMN saf.backoff.message_type IS
    'type of that message, if any; NULL if the lane waits for something else';
COMMENT ON COLUMN saf.backoff.needs_operator IS
    'true: only an operator can remove the cause of the last failure';

CREATE TABLE saf.rejecting (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    destination text,
    messages integer NOT NULL,
    PRIMARY KEY (subscription_id, destination),
    CONSTRAINT rejecting_counted CHECK (messages > 0)
);
COMMENT ON TABLE saf.rejecting IS
    'number of consecutive messages that a destination has rejected; no row: zero';

CREATE TABLE saf.taken_out (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    destination text,
    kind text DEFAULT 'main',
    subject text DEFAULT '',
    broker uuid DEFAULT 'ffffffff-ffff-ffff-ffff-ffffffffffff',
    shard smallint,
    opened_at timestamptz,
    taken_out_at timestamptz DEFAULT now() NOT NULL,
    PRIMARY KEY (subscription_id, destination, kind, subject, broker, shard, opened_at)
);
COMMENT ON TABLE saf.taken_out IS
    'places of messages that operators took out of lanes. A destination may have stored these '
    'messages, if its answer got lost';
COMMENT ON COLUMN saf.taken_out.kind IS
    'kind of the lane, by what its messages wait for; see saf.setaside.lane';
COMMENT ON COLUMN saf.taken_out.subject IS
    'service, key, shard or conversation that the lane is about';
COMMENT ON COLUMN saf.taken_out.broker IS
    'broker that the messages of the lane are addressed to; all ones: no broker';
COMMENT ON COLUMN saf.taken_out.opened_at IS 'opened_at of the message in saf.parked';

CREATE TABLE saf.dead_letter (
    dead_letter_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subscription_id integer NOT NULL REFERENCES saf.subscription ON DELETE CASCADE,
    destination text DEFAULT '' NOT NULL,
    shard smallint NOT NULL,
    id bigint NOT NULL, -- id in its log
{message},
    dead_letter_at timestamptz DEFAULT now() NOT NULL,
    reason text NOT NULL, -- one word, e.g. rejected
    error text NOT NULL
);
COMMENT ON TABLE saf.dead_letter IS
    'messages set aside for an operator, never tried again automatically';

CREATE TABLE saf.dropped (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    shard smallint,
    reason text,
    messages bigint NOT NULL,
    last_message_id uuid NOT NULL,
    last_at timestamptz DEFAULT now() NOT NULL,
    PRIMARY KEY (subscription_id, shard, reason),
    CONSTRAINT dropped_counted CHECK (reason <> '' AND messages > 0)
) WITH (fillfactor = 60); -- only the shard's owner writes here, so no writer waits for a row lock
COMMENT ON TABLE saf.dropped IS
    'number of messages that a subscription has dropped, by reason';
COMMENT ON COLUMN saf.dropped.last_message_id IS
    'last dropped message, to find in the log';

CREATE TABLE saf.audit (
    audit_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    audit_at timestamptz DEFAULT now() NOT NULL,
    who text DEFAULT session_user NOT NULL,
    action text NOT NULL, -- one word, e.g. retry
    message_ids uuid[] NOT NULL,
    why text NOT NULL, -- reason that the operator gave
    person text
);
COMMENT ON TABLE saf.audit IS 'operators'' decisions about messages that were set aside';
COMMENT ON COLUMN saf.audit.person IS
    'user for whom a program acted; NULL: for the login itself';

-- For operators. The forwarder never reads the state of a row, because the cursors hold it.
CREATE VIEW saf.outbox_status AS
SELECT o.id, o.shard, o.message_id, o.to_service, o.key, o.message_type, o.created_at,
       CASE
           WHEN EXISTS (SELECT FROM saf.parked p
                        WHERE p.subscription_id = c.subscription_id
                          AND p.message_id = o.message_id) THEN 'parked'
           WHEN EXISTS (SELECT FROM saf.dead_letter d
                        WHERE d.subscription_id = c.subscription_id
                          AND d.message_id = o.message_id) THEN 'dead'
           WHEN pg_visible_in_snapshot(o.txid, c.done)
             OR c.open IS NOT NULL AND pg_visible_in_snapshot(o.txid, c.open)
                AND o.id <= c.position THEN 'forwarded'
           ELSE 'pending'
       END AS status
FROM saf.outbox o
JOIN saf.subscription s ON s.log = 'outbox' AND s.name = 'forwarder'
JOIN saf.cursor c ON c.subscription_id = s.subscription_id AND c.shard = o.shard;
COMMENT ON VIEW saf.outbox_status IS
    'messages of the outbox with their status: pending, parked, dead or forwarded; forwarded includes '
    'discarded and dropped messages';
