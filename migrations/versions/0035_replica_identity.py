"""Each table whose rows are updated or deleted has a replica identity, in case it is published.

A publication FOR ALL TABLES, as Debezium makes one, publishes saf's tables too. PostgreSQL then
refuses each UPDATE and DELETE of a table that has neither a primary key nor another identity.

The whole row stands for itself in three small tables that have no primary key, because their unique
constraints have columns that may be NULL. The slots of the logs stay as they are: rows are inserted
and slots truncated, and an index on the id would cost each send.
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
