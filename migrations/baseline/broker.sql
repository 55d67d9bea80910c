-- The broker that this database is, and the services that live here.

CREATE TABLE saf.broker (
    singleton boolean DEFAULT true PRIMARY KEY,
    broker_id uuid DEFAULT gen_random_uuid() NOT NULL, -- names the broker at all others
    name text DEFAULT current_database() NOT NULL, -- for people
    shards smallint NOT NULL, -- never changes: keys would change their shards
    system_identifier bigint NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    incarnation bigint DEFAULT '1' NOT NULL,
    senders_since bigint,
    CONSTRAINT broker_is_one_row CHECK (singleton),
    CONSTRAINT broker_shards CHECK (shards BETWEEN 1 AND 1024)
);
COMMENT ON TABLE saf.broker IS 'who this broker is: one row, written by the first migration';
COMMENT ON COLUMN saf.broker.system_identifier IS
    'of the cluster: transaction ids in the logs mean nothing in another one';
COMMENT ON COLUMN saf.broker.incarnation IS
    'raised when this broker is repaired after it was set back: who remembers an older one has to '
    'compare what it knows. The moment of the repair in microseconds, so that no two repairs after '
    'the same backup have the same';
COMMENT ON COLUMN saf.broker.senders_since IS
    'messages of the outbox with greater ids were checked by saf.sender when they were written; '
    'NULL: none were';

INSERT INTO saf.broker (shards, system_identifier)
SELECT {shards}, system_identifier FROM pg_control_system();

CREATE TABLE saf.timeline (
    singleton boolean DEFAULT true PRIMARY KEY,
    written xid8 DEFAULT pg_current_xact_id() NOT NULL,
    CONSTRAINT timeline_is_one_row CHECK (singleton)
);
COMMENT ON TABLE saf.timeline IS
    'whose transaction ids the logs have: one row, never updated but by a rebase';
COMMENT ON COLUMN saf.timeline.written IS
    'by which transaction: if it is not the xmin of the row, a dump has brought it here, and the '
    'logs with it';

INSERT INTO saf.timeline DEFAULT VALUES;

CREATE TABLE saf.service (
    name text PRIMARY KEY,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT service_named CHECK (name <> '')
);
COMMENT ON TABLE saf.service IS
    'the services that live here; while there is none, messages for any are stored';
