"""How a subscription's messages are shared out: by groups, and by weights of classes."""

from __future__ import annotations

from saf.broker.migrate import apply

revision = "0043"
down_revision = "0042"

ADD = """
ALTER TABLE saf.subscription
    ADD fair_by text,
    ADD priority_by text,
    ADD priority jsonb,
    ADD CONSTRAINT subscription_fair_by CHECK (
        fair_by IN ('key', 'message_type', 'from_service')
        OR fair_by LIKE 'key:_%' OR fair_by LIKE 'header:_%'),
    ADD CONSTRAINT subscription_priority_by CHECK (priority_by IN ('message_type', 'from_service')),
    ADD CONSTRAINT subscription_priority CHECK (
        (priority_by IS NULL) = (priority IS NULL) AND jsonb_typeof(priority) = 'object'),
    ADD CONSTRAINT subscription_fair CHECK (
        log = 'inbox' AND NOT stream OR fair_by IS NULL AND priority_by IS NULL);
COMMENT ON COLUMN saf.subscription.fair_by IS
    'what makes a message''s group; each group gets its share: the key, the key up to a '
    'separator (key:/), a header (header:tenant), message_type or from_service; NULL: nothing';
COMMENT ON COLUMN saf.subscription.priority_by IS
    'column whose values are weighted: message_type or from_service; NULL: none';
COMMENT ON COLUMN saf.subscription.priority IS
    'weight of each value; the others have weight 1';
COMMENT ON TABLE saf.dispatched IS
    'messages that are complete ahead of the position: answered by endpoints out of order, or '
    'received in a fair order; only who has the shard in hand writes here';
"""
DROP = """
COMMENT ON TABLE saf.dispatched IS
    'messages that endpoints answered out of order; only the owner of the shard writes here';
ALTER TABLE saf.subscription DROP fair_by, DROP priority_by, DROP priority;
"""


def upgrade() -> None:
    apply(ADD)


def downgrade() -> None:
    apply(DROP)
