"""The table of stored webhook events."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg


def add_tables(metadata: sa.MetaData) -> None:
    """Add this table to the metadata of a broker."""
    sa.Table(
        "webhook",
        metadata,
        sa.Column(
            "digest",
            pg.BYTEA,
            primary_key=True,
            comment="SHA-256 of service, source and id: of any length, and an index takes them",
        ),
        sa.Column(
            "stored_at",
            sa.DateTime(timezone=True),
            nullable=False,
            server_default=sa.text("now()"),
        ),
        sa.CheckConstraint("octet_length(digest) = 32", name="webhook_digest"),
        sa.Index("webhook_stored_at", "stored_at"),
        comment="events that came by HTTP and are stored; those that are old are deleted as others "
        "come",
    )
