"""Routing: lifetimes and comments of routes, topics, and keys' choices of routes."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"

UP = """
ALTER TABLE saf.route ADD COLUMN expires_at TIMESTAMP WITH TIME ZONE;
COMMENT ON COLUMN saf.route.expires_at IS 'from then on it does not count';
ALTER TABLE saf.route ADD COLUMN comment TEXT;
ALTER TABLE saf.route_version ADD COLUMN topics TEXT[] DEFAULT '{}' NOT NULL;

CREATE TABLE saf.topic (
    name TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (name),
    CONSTRAINT topic_named CHECK (name <> '')
);

COMMENT ON TABLE saf.topic IS
    'services whose messages go to every destination that a route leads to';

CREATE TABLE saf.route_choice (
    service TEXT NOT NULL,
    broker UUID,
    key TEXT COLLATE "C" NOT NULL,
    destination TEXT NOT NULL,
    used_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT route_choice_once UNIQUE NULLS NOT DISTINCT (key, service, broker)
);

COMMENT ON TABLE saf.route_choice IS
    'which of several routes that share a key has taken, and stays with';
COMMENT ON COLUMN saf.route_choice.service IS 'as the message addresses it';
COMMENT ON COLUMN saf.route_choice.used_at IS 'give or take a day; what nobody uses is forgotten';

CREATE TABLE saf.route_share (
    service TEXT NOT NULL,
    broker UUID,
    keys BIGINT NOT NULL,
    CONSTRAINT route_share_once UNIQUE NULLS NOT DISTINCT (service, broker)
);

COMMENT ON TABLE saf.route_share IS 'how many keys have chosen a route: whose turn is next';
"""

DOWN = """
DROP TABLE saf.topic, saf.route_choice, saf.route_share;
ALTER TABLE saf.route DROP COLUMN expires_at, DROP COLUMN comment;
ALTER TABLE saf.route_version DROP COLUMN topics;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    # an expired route would count again; messages in hand would take only one route
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM saf.route WHERE expires_at IS NOT NULL) "
        "OR EXISTS (SELECT FROM saf.topic) THEN RAISE EXCEPTION 'saf.route has routes that expire, "
        "or saf.topic has topics: remove them first'; END IF; END $$"
    )
    op.execute(DOWN)
