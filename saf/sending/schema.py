"""Tables for the messages of Spark jobs: see `saf.sending.staging`."""

from __future__ import annotations

import sqlalchemy as sa


def add_tables(metadata: sa.MetaData) -> None:
    """Add these tables to the metadata of a broker."""
    now = sa.text("now()")
    moment = sa.DateTime(timezone=True)
    sa.Table(
        "staging",
        metadata,
        sa.Column("attempt", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        comment="attempts of tasks whose messages were staged and not sent yet",
    )
    sa.Table(
        "staged",
        metadata,
        sa.Column("attempt", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("from_service", sa.Text),
        sa.Column("to_service", sa.Text, nullable=False),
        sa.Column("to_broker", sa.Text),
        sa.Column("key", sa.Text),
        sa.Column("message_type", sa.Text),
        sa.Column("headers", sa.Text),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("deliver_at", moment),
        sa.Column("expires_at", moment),
        prefixes=["UNLOGGED"],
        comment="what tasks have written, in their order; a crash of the server empties it, and "
        "the job notices",
    )
    sa.Table(
        "sink",
        metadata,
        sa.Column("application", sa.Text, primary_key=True),
        sa.Column(
            "version", sa.BigInteger, comment="rises; NULL: this application sends only once"
        ),
        sa.Column("messages", sa.BigInteger, nullable=False),
        sa.Column("sent_at", moment, nullable=False, server_default=now),
        comment="what each application of Spark has sent last: so nothing is sent twice",
    )
