"""The table of transforms' kept results: see `saf.engine.kept_results`."""

from __future__ import annotations

import sqlalchemy as sa


def add_tables(metadata: sa.MetaData) -> None:
    """Add the table to the metadata of a broker."""
    sa.Table(
        "kept_result",
        metadata,
        sa.Column("subscription_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column(
            "id",
            sa.BigInteger,
            primary_key=True,
            autoincrement=False,
            comment="of the message in the outbox",
        ),
        sa.Column(
            "number",
            sa.Integer,
            primary_key=True,
            autoincrement=False,
            comment="of several that were made of one message, 0, 1, …",
        ),
        sa.Column(
            "batch",
            sa.BigInteger,
            nullable=False,
            comment="in which it was kept; removed when that is closed",
        ),
        sa.Column("part", sa.Integer),
        sa.Column("key", sa.Text),
        sa.Column("message_type", sa.Text),
        sa.Column("headers", sa.Text),
        sa.Column("body", sa.LargeBinary, comment="NULL: nothing was made of the message"),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        sa.CheckConstraint("number = 0 OR body IS NOT NULL", name="kept_result_possible"),
        sa.Index("kept_result_batch", "subscription_id", "batch"),
        comment="what a transform has made of messages, where it would be something else the next "
        "time: kept until they are delivered",
    )
