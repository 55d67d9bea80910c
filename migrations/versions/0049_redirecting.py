"""Routing services that redirect: both ends of a dialog remember what they must."""

from __future__ import annotations

from saf.broker.migrate import apply

revision = "0049"
down_revision = "0048"

ADD = """
ALTER TABLE saf.conversation ADD COLUMN redirected_by text;
COMMENT ON COLUMN saf.conversation.redirected_by IS
    'of a target: router that has redirected the first message to it, and is told with the first '
    'answer; NULL: none, or one that must get all messages';
ALTER TABLE saf.resolved_conversation ADD COLUMN kept_until timestamptz;
COMMENT ON COLUMN saf.resolved_conversation.kept_until IS
    'at a routing service that redirects: end of the dialog''s lifetime; NULL: no more of its '
    'messages come this way';
"""
REFUSE = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM saf.resolved_conversation WHERE kept_until > now()) THEN
        RAISE EXCEPTION USING MESSAGE = 'dialogs pass through a router that redirects, and '
            'revision 0048 cannot continue them: let them end, or forward them';
    END IF;
END $$;
"""
DROP = """
ALTER TABLE saf.conversation DROP COLUMN redirected_by;
ALTER TABLE saf.resolved_conversation DROP COLUMN kept_until;
"""


def upgrade() -> None:
    apply(ADD)


def downgrade() -> None:
    apply(REFUSE)
    apply(DROP)
