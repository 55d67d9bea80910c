-- Pauses and limits: what operators have stopped for a while, or slowed down.

ALTER TABLE saf.subscription
    ADD paused_at timestamptz,
    ADD paused_by text,
    ADD paused_why text,
    ADD CONSTRAINT subscription_paused CHECK (
        (paused_at IS NULL) = (paused_by IS NULL) AND (paused_at IS NULL) = (paused_why IS NULL)
        AND (paused_at IS NULL OR (log = 'inbox' AND NOT stream)));
COMMENT ON COLUMN saf.subscription.paused_at IS
    'time at which an operator paused it: receivers hand out no messages; NULL: it is not paused';
COMMENT ON COLUMN saf.subscription.paused_by IS 'login that paused it';
COMMENT ON COLUMN saf.subscription.paused_why IS 'reason that the operator gave';

-- The lane of a paused destination exists even without messages, and is never due
ALTER TABLE saf.backoff
    ADD paused_at timestamptz,
    ADD CONSTRAINT backoff_paused CHECK (
        paused_at IS NULL OR (kind = 'main' AND next_attempt_at = '9999-01-01 00:00:00+00'));
COMMENT ON COLUMN saf.backoff.paused_at IS
    'time at which an operator paused the destination, with the reason in error; NULL: it is not '
    'paused';

ALTER TABLE saf.subscription
    ADD rate text,
    ADD concurrency smallint,
    ADD CONSTRAINT subscription_limited CHECK (
        concurrency BETWEEN 1 AND 1000 AND rate ~ '^[0-9]{1,7}/(s|min|h)$'
        AND (log = 'inbox' AND NOT stream OR rate IS NULL AND concurrency IS NULL));
COMMENT ON COLUMN saf.subscription.rate IS
    'most messages that all receivers together may take in a time, e.g. 100/s; NULL: unlimited';
COMMENT ON COLUMN saf.subscription.concurrency IS
    'most deliveries at a time, of all receivers together; NULL: unlimited';

CREATE TABLE saf.allotment (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    destination text DEFAULT '',
    next_free_at timestamptz NOT NULL,
    PRIMARY KEY (subscription_id, destination)
) WITH (fillfactor = 50); -- free space keeps updates HOT
COMMENT ON TABLE saf.allotment IS 'progress of subscriptions and destinations that have a rate';
COMMENT ON COLUMN saf.allotment.destination IS
    'destination of the forwarder; empty: the subscription itself';
COMMENT ON COLUMN saf.allotment.next_free_at IS
    'time from which a message may be taken that no process has a permit for yet';

CREATE TABLE saf.seat (
    subscription_id integer REFERENCES saf.subscription ON DELETE CASCADE,
    seat smallint,
    created_at timestamptz DEFAULT now() NOT NULL,
    PRIMARY KEY (subscription_id, seat),
    CONSTRAINT seat_numbered CHECK (seat > 0)
);
COMMENT ON TABLE saf.seat IS
    'seats for the deliveries of subscriptions with a concurrency; a delivery locks one';
