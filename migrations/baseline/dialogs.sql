-- Conversations: contracts, and the ends of dialogs and monologs that live here.

CREATE TABLE saf.message_type (
    name text,
    version integer,
    validation text NOT NULL,
    schema jsonb, -- JSON Schema
    created_at timestamptz DEFAULT now() NOT NULL,
    PRIMARY KEY (name, version),
    CONSTRAINT message_type_named CHECK (name <> '' AND version > 0),
    CONSTRAINT message_type_validation CHECK (
        validation IN ('none', 'empty', 'json', 'json_schema')),
    CONSTRAINT message_type_schema CHECK ((validation = 'json_schema') = (schema IS NOT NULL))
);
COMMENT ON TABLE saf.message_type IS
    'message types, each with the validation of its bodies; a version never changes';

CREATE TABLE saf.contract (
    name text,
    version integer,
    created_at timestamptz DEFAULT now() NOT NULL,
    PRIMARY KEY (name, version),
    CONSTRAINT contract_named CHECK (name <> '' AND version > 0)
);
COMMENT ON TABLE saf.contract IS
    'contracts: message types of a dialog, and the end that sends each; a version never changes';

CREATE TABLE saf.contract_message (
    contract text,
    contract_version integer,
    message_type text,
    message_type_version integer NOT NULL,
    sent_by text NOT NULL,
    PRIMARY KEY (contract, contract_version, message_type),
    FOREIGN KEY (contract, contract_version) REFERENCES saf.contract,
    FOREIGN KEY (message_type, message_type_version) REFERENCES saf.message_type,
    CONSTRAINT contract_message_sent_by CHECK (sent_by IN ('initiator', 'target', 'any'))
);
COMMENT ON TABLE saf.contract_message IS 'message types of a contract';

CREATE TABLE saf.conversation_group (
    group_id uuid DEFAULT gen_random_uuid() PRIMARY KEY,
    state jsonb,
    created_at timestamptz DEFAULT now() NOT NULL
);
COMMENT ON TABLE saf.conversation_group IS
    'groups of related conversations; a receiver locks the row, so only one at a time receives it';
COMMENT ON COLUMN saf.conversation_group.state IS
    'state of the application; saf does not interpret it';

CREATE TABLE saf.conversation (
    handle uuid DEFAULT gen_random_uuid() PRIMARY KEY, -- identifies this end in this database
    conversation_id uuid NOT NULL,
    is_initiator boolean NOT NULL,
    monolog boolean DEFAULT false NOT NULL,
    -- computed from the facts; saf.dialogs.statements lists the transitions
    state text GENERATED ALWAYS AS (CASE
        WHEN ended_here AND (ended_there OR error_code IS NOT NULL) THEN 'closed'
        WHEN error_code IS NOT NULL THEN 'error'
        WHEN ended_here THEN 'disconnected_outbound'
        WHEN ended_there THEN 'disconnected_inbound'
        WHEN is_initiator AND send_sequence = 0 THEN 'started_outbound'
        WHEN NOT is_initiator AND receive_sequence = 0 THEN 'started_inbound'
        ELSE 'conversing'
    END) STORED,
    service text NOT NULL,
    far_service text NOT NULL,
    far_broker uuid,
    contract text,
    contract_version integer,
    group_id uuid NOT NULL REFERENCES saf.conversation_group,
    send_sequence bigint DEFAULT '0' NOT NULL,
    receive_sequence bigint DEFAULT '0' NOT NULL,
    ended_here boolean DEFAULT false NOT NULL,
    ended_there boolean DEFAULT false NOT NULL,
    error_code integer,
    error_text text,
    timer uuid,
    expires_at timestamptz,
    created_at timestamptz DEFAULT now() NOT NULL,
    changed_at timestamptz DEFAULT now() NOT NULL,
    lineage jsonb,
    far_lineage jsonb,
    answered_by uuid,
    CONSTRAINT conversation_two_ends UNIQUE (conversation_id, is_initiator),
    FOREIGN KEY (contract, contract_version) REFERENCES saf.contract,
    CONSTRAINT conversation_addressed CHECK (service <> '' AND far_service <> ''),
    CONSTRAINT conversation_rises CHECK (send_sequence >= 0 AND receive_sequence >= 0),
    CONSTRAINT conversation_contract CHECK ((contract IS NULL) = (contract_version IS NULL)),
    CONSTRAINT conversation_error CHECK ((error_code IS NULL) = (error_text IS NULL)),
    CONSTRAINT conversation_monolog CHECK (
        NOT monolog OR (is_initiator AND receive_sequence = 0)),
    CONSTRAINT conversation_lineages CHECK (
        jsonb_typeof(lineage) = 'array' AND jsonb_typeof(far_lineage) = 'array')
) WITH (fillfactor = 60); -- rewritten with each message; free space keeps updates HOT
CREATE INDEX conversation_of_group ON saf.conversation (group_id);
COMMENT ON TABLE saf.conversation IS
    'ends of conversations that live here; the state is computed from the other columns';
COMMENT ON COLUMN saf.conversation.conversation_id IS 'id shared by both ends';
COMMENT ON COLUMN saf.conversation.monolog IS
    'true: one publisher and any number of subscribers, without answers';
COMMENT ON COLUMN saf.conversation.service IS 'service at this end';
COMMENT ON COLUMN saf.conversation.far_broker IS 'broker of far_service; NULL: unknown';
COMMENT ON COLUMN saf.conversation.send_sequence IS
    'sequence of the last message sent; assigned under the lock of this row';
COMMENT ON COLUMN saf.conversation.receive_sequence IS
    'sequence of the last message received; only the next number is accepted';
COMMENT ON COLUMN saf.conversation.timer IS
    'message_id of the current timer; older timers are ignored';
COMMENT ON COLUMN saf.conversation.expires_at IS 'time by which both ends must have ended';
COMMENT ON COLUMN saf.conversation.lineage IS
    '[[incarnation, after], ...]: the incarnation of this broker that assigned the numbers above '
    'after; NULL: this broker was never set back';
COMMENT ON COLUMN saf.conversation.far_lineage IS 'last known lineage of the other end';
COMMENT ON COLUMN saf.conversation.answered_by IS
    'broker of the target that answered this initiator first; no other broker''s answers are '
    'accepted';

-- No foreign key to saf.conversation, because fragments that arrive before the first message of
-- their dialog wait here too
CREATE TABLE saf.fragment (
    conversation_id uuid,
    from_initiator boolean,
    sequence bigint,
    body bytea NOT NULL,
    PRIMARY KEY (conversation_id, from_initiator, sequence)
);
COMMENT ON TABLE saf.fragment IS
    'fragments of large bodies, stored until the whole body is received';
COMMENT ON COLUMN saf.fragment.from_initiator IS
    'true: sent by the initiator; false: by the target';
