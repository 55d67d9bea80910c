"""Local routes carry dialogs; the SQL is in migrations/baseline/local_dialogs.sql."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0044"
down_revision = "0043"

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
    """Let messages of dialogs go by the forwarder again, by the function of the baseline."""
    text = baseline("routing")
    start = text.index("CREATE FUNCTION saf.store_locally()")
    function = text[start : text.index("END $$;", start)] + "END $$;"
    apply(function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
    apply(TRIGGERS)
