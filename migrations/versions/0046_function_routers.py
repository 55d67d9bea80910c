"""Routers whose classifier is a function of the database; only routing services call them."""

from __future__ import annotations

from saf.broker.migrate import apply

revision = "0046"
down_revision = "0045"

CHANGE = """
ALTER TABLE saf.router
    DROP CONSTRAINT router_kind,
    ADD CONSTRAINT router_kind CHECK (kind IN ('sql', 'arrow', 'python', 'function')),
    ADD CONSTRAINT router_function_needs_service CHECK (mode = 'forward' OR kind <> 'function');
COMMENT ON COLUMN saf.router.expression IS
    'classifier: a Spark SQL expression, module:function in Python, or schema.function of this '
    'database';
"""
REFUSE = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM saf.router WHERE kind = 'function') THEN
        RAISE EXCEPTION USING MESSAGE = 'routers call functions of this database, and revision '
            '0045 cannot: remove them with `saf router remove`, or add them with --python';
    END IF;
END $$;
"""
CHANGE_BACK = """
ALTER TABLE saf.router
    DROP CONSTRAINT router_function_needs_service,
    DROP CONSTRAINT router_kind,
    ADD CONSTRAINT router_kind CHECK (kind IN ('sql', 'arrow', 'python'));
COMMENT ON COLUMN saf.router.expression IS
    'classifier: a Spark SQL expression, or module:function in Python';
"""


def upgrade() -> None:
    apply(CHANGE)


def downgrade() -> None:
    apply(REFUSE)
    apply(CHANGE_BACK)
