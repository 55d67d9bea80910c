"""Tables of dispatchers: endpoints, completed messages, conditions, and failed attempts."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

STATES = ("closed", "open", "disabled")


def add_tables(metadata: sa.MetaData) -> None:
    """Add these tables to the metadata of a broker."""
    now = sa.text("now()")
    moment = sa.DateTime(timezone=True)

    sa.Table(
        "endpoint",
        metadata,
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("subscription_id", sa.Integer, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column(
            "settings",
            pg.JSONB,
            nullable=False,
            server_default="{}",
            comment="as in saf.toml; of secrets, the names of environment variables",
        ),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.Column("created_by", sa.Text, nullable=False, server_default=sa.text("session_user")),
        sa.UniqueConstraint("subscription_id", name="endpoint_of_subscription"),
        sa.CheckConstraint("name <> '' AND url <> ''", name="endpoint_named"),
        sa.CheckConstraint("jsonb_typeof(settings) = 'object'", name="endpoint_settings"),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        comment="where messages of a subscription are sent, besides the endpoints of saf.toml",
    )
    sa.Table(
        "dispatched",
        metadata,
        sa.Column("subscription_id", sa.Integer, primary_key=True),
        sa.Column("shard", sa.SmallInteger, primary_key=True),
        sa.Column(
            "batch",
            sa.BigInteger,
            nullable=False,
            comment="of the cursor; a row for another batch says nothing",
        ),
        sa.Column(
            "ids",
            pg.INT8MULTIRANGE,
            nullable=False,
            comment="rows of the batch with an id in it are complete, although the position is "
            "before them",
        ),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        # rewritten with each mark: free room on the page keeps the updates HOT
        postgresql_with={"fillfactor": "40"},
        comment="what endpoints have answered out of order; only the owner of the shard writes it",
    )
    sa.Table(
        "breaker",
        metadata,
        sa.Column("subscription_id", sa.Integer, primary_key=True),
        sa.Column("endpoint", sa.Text, nullable=False, comment="its name, for people"),
        sa.Column("state", sa.Text, nullable=False, server_default="closed"),
        sa.Column(
            "failures",
            sa.Integer,
            nullable=False,
            server_default="0",
            comment="how often in a row it was found down",
        ),
        sa.Column("failing_since", moment, comment="when it was first found down; NULL: it is up"),
        sa.Column(
            "next_probe_at", moment, comment="then one message is sent to see whether it is up"
        ),
        sa.Column("error", sa.Text, comment="why it was last found down, or was disabled"),
        sa.Column("paused_at", moment, comment="NULL: nobody has paused it"),
        sa.Column("paused_by", sa.Text),
        sa.Column("changed_at", moment, nullable=False, server_default=now),
        sa.CheckConstraint(f"state IN {STATES} AND endpoint <> ''", name="breaker_state"),
        sa.CheckConstraint(
            "(state = 'closed') = (failing_since IS NULL) AND (state = 'closed') = (error IS NULL) "
            "AND (state = 'open') = (next_probe_at IS NOT NULL)",
            name="breaker_possible",
        ),
        sa.CheckConstraint("(paused_at IS NULL) = (paused_by IS NULL)", name="breaker_paused"),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        comment="how the endpoint of each subscription is, for all its dispatchers; no row: well",
    )
    sa.Table(
        "attempt",
        metadata,
        sa.Column("attempt_id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("subscription_id", sa.Integer, nullable=False),
        sa.Column("at", moment, nullable=False, server_default=now),
        sa.Column("message_id", pg.UUID, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("status", sa.SmallInteger, comment="of HTTP; NULL: it did not answer"),
        sa.Column("seconds", sa.REAL, nullable=False, comment="until it answered, or was given up"),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False, comment="with the first bytes of the answer"),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        sa.Index("attempt_of", "subscription_id", "attempt_id"),
        comment="attempts of dispatchers that failed; of each subscription the last ones are kept",
    )
