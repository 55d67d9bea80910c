-- Local routes for dialogs: the messages of both ends of a dialog, if both live in this database.
--
-- An end takes each number of the other end once and in order, so its messages may come by both
-- ways, by the forwarder and from here. What must be certain is that the other end lives here:
--
--   to_broker           message
--   this broker         is stored here
--   another broker      goes by the forwarder
--   NULL                a dialog's first one is stored here; all others go by the forwarder
--
-- The first message decides for all later ones: with it, the initiator learns that its far broker
-- is this one. Dialogs that have begun before the route became local have learnt it then
-- (saf.routing.local). So a dialog never changes over to another target, whatever happens to routes.
CREATE OR REPLACE FUNCTION saf.store_locally() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    here uuid;
    source uuid;
BEGIN
    IF NEW.conversation_id IS NOT NULL THEN
        SELECT broker_id INTO here FROM saf.broker;
        IF NEW.to_broker IS NULL THEN
            -- A repair may send the first message of a dialog again that has continued since
            UPDATE saf.conversation c SET far_broker = here
            WHERE c.conversation_id = NEW.conversation_id AND c.is_initiator AND NEW.from_initiator
              AND NEW.sequence = 1 AND c.send_sequence = 1
              AND c.far_broker IS NULL AND c.answered_by IS NULL;
            IF NOT FOUND THEN
                RETURN NEW;
            END IF;
        ELSIF NEW.to_broker <> here THEN
            RETURN NEW;
        END IF;
    END IF;
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
                           deliver_at, expires_at, source)
    VALUES (NEW.message_id, NEW.from_service, NEW.to_service, NEW.to_broker, NEW.key,
            NEW.conversation_id, NEW.from_initiator, NEW.sequence, NEW.message_type, NEW.headers,
            NEW.body, NEW.created_at, NEW.deliver_at, NEW.expires_at, here);
    RETURN NULL;
END $$;

-- Routes that are local already: their triggers, and open dialogs whose target is known. A dialog
-- that a session has in hand stays with the forwarder.
UPDATE saf.conversation c SET far_broker = coalesce(c.answered_by, b.broker_id)
FROM saf.broker b
WHERE c.handle IN (
    SELECT i.handle FROM saf.conversation i
    WHERE i.is_initiator AND NOT i.monolog AND i.far_broker IS NULL AND i.state <> 'closed'
      AND i.far_service IN (SELECT r.service FROM saf.route r WHERE r.local AND r.enabled)
      AND (i.answered_by IS NOT NULL OR EXISTS (
          SELECT FROM saf.conversation t
          WHERE t.conversation_id = i.conversation_id AND NOT t.is_initiator))
    FOR NO KEY UPDATE SKIP LOCKED);
DO $$
DECLARE
    route record;
BEGIN
    FOR route IN
        SELECT t.tgname, r.service FROM saf.route r
        JOIN pg_trigger t ON t.tgname = 'outbox_local_' || r.route_id
        WHERE r.local AND t.tgrelid = 'saf.outbox'::regclass AND t.tgenabled <> 'D'
    LOOP
        EXECUTE format('DROP TRIGGER %I ON saf.outbox', route.tgname);
        EXECUTE format($trigger$
            CREATE TRIGGER %I BEFORE INSERT ON saf.outbox FOR EACH ROW WHEN (
                NEW.to_service = %L
                AND (NEW.to_broker IS NULL AND NEW.conversation_id IS NULL
                     OR NEW.conversation_id IS NOT NULL AND NEW.from_initiator IS NOT NULL)
                AND (NOT row_security_active('saf.outbox'::regclass)
                     OR saf.check_sender(current_user, NEW.from_service, NEW.to_service)))
            EXECUTE FUNCTION saf.store_locally()$trigger$, route.tgname, route.service);
    END LOOP;
END $$;
