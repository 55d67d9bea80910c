-- Where messages of the outbox go: routes, and routers that classify messages first.

CREATE TABLE saf.route (
    route_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    service text,
    broker uuid,
    destination text NOT NULL, -- by its name in saf.toml
    quality text, -- NULL: the destination's
    enabled boolean DEFAULT true NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    expires_at timestamptz,
    comment text,
    local boolean DEFAULT false NOT NULL,
    CONSTRAINT route_quality CHECK (quality IN ('at_most_once', 'at_least_once', 'exactly_once')),
    CONSTRAINT route_local CHECK (
        NOT local
        OR service IS NOT NULL AND broker IS NULL AND quality IS NULL AND expires_at IS NULL),
    CONSTRAINT route_once UNIQUE NULLS NOT DISTINCT (service, broker, destination)
);
CREATE UNIQUE INDEX route_local_once ON saf.route (service) WHERE local;
COMMENT ON TABLE saf.route IS 'service and broker to destination; NULL matches any';
COMMENT ON COLUMN saf.route.expires_at IS 'from then on it does not count';
COMMENT ON COLUMN saf.route.local IS
    'its senders store what they send in the inbox of this database themselves';

-- The trigger function of local routes; their triggers are created and removed with the routes.
--
-- Messages get the same statement about their sender as forwarded ones; see saf.engine.storing. A
-- snapshot from before the removal of the last rule still shows the rule, although senders are no
-- longer checked. So unless each statement has its own snapshot, the row of saf.broker is locked,
-- which fails if it has changed since.
CREATE FUNCTION saf.store_locally() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    source uuid;
BEGIN
    IF NEW.from_service IS NOT NULL
       AND (NEW.headers IS NULL OR jsonb_typeof(NEW.headers) = 'object') THEN
        SELECT broker_id INTO source FROM saf.broker WHERE NEW.id > senders_since;
        IF source IS NOT NULL AND current_setting('transaction_isolation') <> 'read committed' THEN
            PERFORM FROM saf.broker FOR SHARE;
        END IF;
    END IF;
    IF source IS NOT NULL THEN
        NEW.headers = coalesce(NEW.headers, '{}') || jsonb_build_object('saf-verified-from',
            jsonb_build_object('broker', source, 'service', NEW.from_service));
    ELSIF NEW.headers ? 'saf-verified-from' THEN
        NEW.headers = replace(
            NEW.headers::text, '"saf-verified-from":', '"saf-claimed-from":')::jsonb;
    END IF;
    INSERT INTO saf.inbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                           from_initiator, sequence, message_type, headers, body, created_at,
                           deliver_at, expires_at)
    VALUES (NEW.message_id, NEW.from_service, NEW.to_service, NEW.to_broker, NEW.key,
            NEW.conversation_id, NEW.from_initiator, NEW.sequence, NEW.message_type, NEW.headers,
            NEW.body, NEW.created_at, NEW.deliver_at, NEW.expires_at);
    RETURN NULL;
END $$;
-- A role that may execute a function can create a trigger with it, even on its own table. The
-- owner's existing triggers do not need this right.
REVOKE ALL ON FUNCTION saf.store_locally FROM PUBLIC;

CREATE TABLE saf.topic (
    name text PRIMARY KEY,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT topic_named CHECK (name <> '')
);
COMMENT ON TABLE saf.topic IS
    'services whose messages go to every destination that a route leads to';

CREATE TABLE saf.route_version (
    version bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    routes jsonb NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    topics text[] DEFAULT '{}' NOT NULL,
    routers jsonb DEFAULT '[]' NOT NULL,
    brokers jsonb DEFAULT '{}' NOT NULL
);
COMMENT ON TABLE saf.route_version IS 'the frozen set of routes that a batch was opened with';
COMMENT ON COLUMN saf.route_version.brokers IS
    'by destination: the broker_id that it was known to have';

CREATE TABLE saf.route_choice (
    service text NOT NULL,
    broker uuid,
    key text COLLATE "C" NOT NULL,
    destination text NOT NULL,
    used_at timestamptz DEFAULT now() NOT NULL,
    -- the key comes first, because it alone distinguishes nearly all rows
    CONSTRAINT route_choice_once UNIQUE NULLS NOT DISTINCT (key, service, broker)
);
COMMENT ON TABLE saf.route_choice IS
    'which of several routes that share a key has taken, and stays with';
COMMENT ON COLUMN saf.route_choice.service IS 'as the message addresses it';
COMMENT ON COLUMN saf.route_choice.used_at IS 'give or take a day; what nobody uses is forgotten';
-- As for saf.sender
ALTER TABLE saf.route_choice REPLICA IDENTITY FULL;

CREATE TABLE saf.route_share (
    service text NOT NULL,
    broker uuid,
    keys bigint NOT NULL,
    CONSTRAINT route_share_once UNIQUE NULLS NOT DISTINCT (service, broker)
);
COMMENT ON TABLE saf.route_share IS 'how many keys have chosen a route: whose turn is next';
-- As for saf.sender
ALTER TABLE saf.route_share REPLICA IDENTITY FULL;

CREATE TABLE saf.router (
    service text PRIMARY KEY,
    kind text NOT NULL,
    expression text NOT NULL,
    once_per text DEFAULT 'message' NOT NULL,
    enabled boolean DEFAULT true NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    comment text,
    mode text DEFAULT 'redirect' NOT NULL,
    CONSTRAINT router_named CHECK (service <> ''),
    CONSTRAINT router_kind CHECK (kind IN ('sql', 'arrow', 'python')),
    CONSTRAINT router_once_per CHECK (once_per IN ('message', 'key')),
    CONSTRAINT router_mode CHECK (mode IN ('redirect', 'forward')),
    CONSTRAINT router_sql_needs_spark CHECK (mode = 'redirect' OR kind <> 'sql')
);
COMMENT ON TABLE saf.router IS 'services that stand for others: a classifier says for which';
COMMENT ON COLUMN saf.router.expression IS 'Spark SQL, or module:function of Python';
COMMENT ON COLUMN saf.router.once_per IS 'what is classified once; a conversation always is';
COMMENT ON COLUMN saf.router.mode IS
    'classified at the source, or forwarded by a routing service of its own';

CREATE TABLE saf.resolved_conversation (
    router text NOT NULL,
    key text COLLATE "C" NOT NULL,
    service text NOT NULL,
    broker uuid,
    to_key text COLLATE "C",
    used_at timestamptz DEFAULT now() NOT NULL,
    handle uuid,
    PRIMARY KEY (key, router)
);
COMMENT ON TABLE saf.resolved_conversation IS
    'what a router has resolved once: later messages are not classified again';
COMMENT ON COLUMN saf.resolved_conversation.key IS 'of the messages, or their conversation_id';
COMMENT ON COLUMN saf.resolved_conversation.service IS 'that the router stood for';
COMMENT ON COLUMN saf.resolved_conversation.broker IS 'NULL: as the message says';
COMMENT ON COLUMN saf.resolved_conversation.to_key IS 'NULL: as the message says';
COMMENT ON COLUMN saf.resolved_conversation.used_at IS
    'give or take a day; what nobody uses is forgotten';
COMMENT ON COLUMN saf.resolved_conversation.handle IS
    'of the end, at a routing service, on which this conversation goes on';
