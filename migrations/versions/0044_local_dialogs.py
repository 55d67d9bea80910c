"""Local routes carry dialogs; the SQL is in migrations/baseline/local_dialogs.sql."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0044"
down_revision = "0043"

# Messages of dialogs go by the forwarder
BEFORE = """
CREATE OR REPLACE FUNCTION saf.store_locally() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
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
"""
TRIGGERS = """
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
                NEW.to_service = %L AND NEW.to_broker IS NULL AND NEW.conversation_id IS NULL
                AND (NOT row_security_active('saf.outbox'::regclass)
                     OR saf.check_sender(current_user, NEW.from_service, NEW.to_service)))
            EXECUTE FUNCTION saf.store_locally()$trigger$, route.tgname, route.service);
    END LOOP;
END $$;
"""


def upgrade() -> None:
    apply(baseline("local_dialogs"))


def downgrade() -> None:
    apply(BEFORE)
    apply(TRIGGERS)
