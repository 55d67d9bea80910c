-- Destinations of outbox messages: routes, and routers that classify messages first.

CREATE TABLE saf.route (
    route_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    service text,
    broker uuid,
    destination text NOT NULL, -- name in saf.toml
    quality text, -- NULL: quality of the destination
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
COMMENT ON TABLE saf.route IS
    'routes from a service and broker to a destination; NULL matches any';
COMMENT ON COLUMN saf.route.expires_at IS 'time from which the route is ignored';
COMMENT ON COLUMN saf.route.local IS
    'true: the sender''s transaction stores the message in the inbox of this database';

-- Trigger function of local routes, whose triggers are created and removed with the routes.
--
-- Messages get the same header about their sender as forwarded messages; see saf.engine.storing. A
-- snapshot taken before the removal of the last rule still shows the rule, although senders are no
-- longer checked. So unless each statement has its own snapshot, the function locks the row of
-- saf.broker, which fails if the row has changed since the snapshot.
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
-- A role with EXECUTE on a function can create a trigger with it, even on the role's own table.
-- Existing triggers of the owner do not need this right.
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
COMMENT ON TABLE saf.route_version IS 'frozen set of routes that batches are opened with';
COMMENT ON COLUMN saf.route_version.brokers IS
    'known broker_id of each destination, by name';

CREATE TABLE saf.route_choice (
    service text NOT NULL,
    broker uuid,
    key text COLLATE "C" NOT NULL,
    destination text NOT NULL,
    used_at timestamptz DEFAULT now() NOT NULL,
    -- the key comes first, because it is nearly unique on its own
    CONSTRAINT route_choice_once UNIQUE NULLS NOT DISTINCT (key, service, broker)
);
COMMENT ON TABLE saf.route_choice IS
    'destination that a key keeps, chosen among routes that share';
COMMENT ON COLUMN saf.route_choice.service IS 'service that the message is addressed to';
COMMENT ON COLUMN saf.route_choice.used_at IS
    'last use, accurate to a day; unused rows are deleted';
-- Same reason as for saf.sender
ALTER TABLE saf.route_choice REPLICA IDENTITY FULL;

CREATE TABLE saf.route_share (
    service text NOT NULL,
    broker uuid,
    keys bigint NOT NULL,
    CONSTRAINT route_share_once UNIQUE NULLS NOT DISTINCT (service, broker)
);
COMMENT ON TABLE saf.route_share IS
    'number of keys that have chosen a route so far; it decides which route is next';
-- Same reason as for saf.sender
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
COMMENT ON TABLE saf.router IS
    'services that stand for others; a classifier names the actual service';
COMMENT ON COLUMN saf.router.expression IS
    'classifier: a Spark SQL expression, or module:function in Python';
COMMENT ON COLUMN saf.router.once_per IS
    'unit that is classified once: message or key. A conversation always is';
COMMENT ON COLUMN saf.router.mode IS
    'redirect: classify at the source; forward: pass messages on in a routing service';

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
    'resolutions of a router for keys and conversations, which are not classified again';
COMMENT ON COLUMN saf.resolved_conversation.key IS 'key or conversation_id of the messages';
COMMENT ON COLUMN saf.resolved_conversation.service IS 'service that the router resolved to';
COMMENT ON COLUMN saf.resolved_conversation.broker IS 'NULL: as in the message';
COMMENT ON COLUMN saf.resolved_conversation.to_key IS 'NULL: as in the message';
COMMENT ON COLUMN saf.resolved_conversation.used_at IS
    'last use, accurate to a day; unused rows are deleted';
COMMENT ON COLUMN saf.resolved_conversation.handle IS
    'handle, at a routing service, of the end on which this conversation continues';
