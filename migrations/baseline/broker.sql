-- Identity of this broker, and the services that live here.

CREATE TABLE saf.broker (
    singleton boolean DEFAULT true PRIMARY KEY,
    broker_id uuid DEFAULT gen_random_uuid() NOT NULL, -- identifies this broker to others
    name text DEFAULT current_database() NOT NULL, -- for operators
    shards smallint NOT NULL, -- fixed: a change would move keys to other shards
    system_identifier bigint NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    incarnation bigint DEFAULT '1' NOT NULL,
    senders_since bigint,
    CONSTRAINT broker_is_one_row CHECK (singleton),
    CONSTRAINT broker_shards CHECK (shards BETWEEN 1 AND 1024)
);
COMMENT ON TABLE saf.broker IS 'identity of this broker: one row, written by the first migration';
COMMENT ON COLUMN saf.broker.system_identifier IS
    'identifies the cluster; transaction ids in the logs are valid only there';
COMMENT ON COLUMN saf.broker.incarnation IS
    'number of this broker''s current life. Each repair of a broker that was set back raises it. '
    'Brokers that remember an older number compare what both sides know. It is the time of the '
    'repair in microseconds, so that two repairs after the same backup differ';
COMMENT ON COLUMN saf.broker.senders_since IS
    'outbox messages with greater ids were checked against saf.sender when they were written; '
    'NULL: no message was checked';

INSERT INTO saf.broker (shards, system_identifier)
SELECT {shards}, system_identifier FROM pg_control_system();

CREATE TABLE saf.timeline (
    singleton boolean DEFAULT true PRIMARY KEY,
    written xid8 DEFAULT pg_current_xact_id() NOT NULL,
    CONSTRAINT timeline_is_one_row CHECK (singleton)
);
COMMENT ON TABLE saf.timeline IS
    'origin of the transaction ids in the logs: one row, which only a rebase updates';
COMMENT ON COLUMN saf.timeline.written IS
    'transaction that wrote the row. If it differs from the row''s xmin, the row was restored from '
    'a dump, and so were the logs';

INSERT INTO saf.timeline DEFAULT VALUES;

CREATE TABLE saf.service (
    name text PRIMARY KEY,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT service_named CHECK (name <> '')
);
COMMENT ON TABLE saf.service IS
    'services that live here; while the table is empty, messages for any service are stored';
