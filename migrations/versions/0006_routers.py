"""Routers: services that a classifier resolves, with their remembered resolutions."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"

UP = """
ALTER TABLE saf.route_version ADD COLUMN routers JSONB DEFAULT '[]' NOT NULL;

CREATE TABLE saf.router (
    service TEXT NOT NULL,
    kind TEXT NOT NULL,
    expression TEXT NOT NULL,
    once_per TEXT DEFAULT 'message' NOT NULL,
    enabled BOOLEAN DEFAULT true NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    comment TEXT,
    PRIMARY KEY (service),
    CONSTRAINT router_named CHECK (service <> ''),
    CONSTRAINT router_kind CHECK (kind IN ('sql', 'arrow', 'python')),
    CONSTRAINT router_once_per CHECK (once_per IN ('message', 'key'))
);

COMMENT ON TABLE saf.router IS 'services that stand for others: a classifier says for which';
COMMENT ON COLUMN saf.router.expression IS 'Spark SQL, or module:function of Python';
COMMENT ON COLUMN saf.router.once_per IS 'what is classified once; a conversation always is';

CREATE TABLE saf.resolved_conversation (
    router TEXT NOT NULL,
    key TEXT COLLATE "C" NOT NULL,
    service TEXT NOT NULL,
    broker UUID,
    to_key TEXT COLLATE "C",
    used_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
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
"""

DOWN = """
DROP TABLE saf.router, saf.resolved_conversation;
ALTER TABLE saf.route_version DROP COLUMN routers;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    # messages for a router would be sent to the router's own service
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM saf.router) THEN RAISE EXCEPTION "
        "'saf.router has routers: remove them first'; END IF; END $$"
    )
    op.execute(DOWN)
