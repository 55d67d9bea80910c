"""Each table whose rows are updated or deleted has a replica identity, in case it is published.

A publication FOR ALL TABLES, as Debezium creates it, also publishes saf's tables. PostgreSQL then
rejects each UPDATE and DELETE in a table that has neither a primary key nor another identity.

In three small tables without a primary key, the whole row is the identity, because their unique
constraints include columns that may be NULL. The slots of the logs stay unchanged: rows are only
inserted and slots truncated, and an index on the id would slow each send.
"""

from __future__ import annotations

from alembic import op

revision = "0035"
down_revision = "0033"

TABLES = ("route_choice", "route_share", "sender")


def upgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE saf.{table} REPLICA IDENTITY FULL")


def downgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE saf.{table} REPLICA IDENTITY DEFAULT")
