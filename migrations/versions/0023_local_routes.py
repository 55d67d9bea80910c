"""Local routes: a trigger for a service's route stores sent messages in the inbox.

The triggers themselves are created and removed with their routes. A downgrade removes them, and the
forwarder gets the messages again: a local route then leads to its destination like any other.
"""

from __future__ import annotations

from alembic import op

revision = "0023"
down_revision = "0021"

UP = """
ALTER TABLE saf.route ADD COLUMN local BOOLEAN DEFAULT false NOT NULL;
COMMENT ON COLUMN saf.route.local IS
    'its senders store what they send in the inbox of this database themselves';
ALTER TABLE saf.route ADD CONSTRAINT route_local CHECK (
    NOT local OR service IS NOT NULL AND broker IS NULL AND quality IS NULL AND expires_at IS NULL);
CREATE UNIQUE INDEX route_local_once ON saf.route (service) WHERE local;

CREATE FUNCTION saf.store_locally() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO saf.inbox (message_id, from_service, to_service, to_broker, key, conversation_id, \
from_initiator, sequence, message_type, headers, body, created_at, deliver_at, expires_at)
    VALUES (NEW.message_id, NEW.from_service, NEW.to_service, NEW.to_broker, NEW.key, \
NEW.conversation_id, NEW.from_initiator, NEW.sequence, NEW.message_type, NEW.headers, NEW.body, \
NEW.created_at, NEW.deliver_at, NEW.expires_at);
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION saf.store_locally FROM PUBLIC;
"""

DOWN = """
DROP FUNCTION saf.store_locally CASCADE;
DROP INDEX saf.route_local_once;
ALTER TABLE saf.route DROP CONSTRAINT route_local;
ALTER TABLE saf.route DROP COLUMN local;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
