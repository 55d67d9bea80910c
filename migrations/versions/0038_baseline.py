"""The whole schema of a broker; its SQL is in migrations/baseline, by subject."""

from __future__ import annotations

from alembic import context

from saf.broker.migrate import apply, baseline
from saf.errors import ConfigurationError

revision = "0038"
down_revision = None

# A file needs only what the files before it have created
FILES = (
    *("broker", "log", "senders", "routing", "subscriptions", "set_aside"),
    *("marks", "keys", "dialogs", "http", "spark"),
)


def upgrade() -> None:
    parts = {
        "{message}": baseline("message").rstrip(),
        "{lane}": baseline("lane").rstrip(),
        "{shards}": str(context.config.attributes["shards"]),  # set by env.py
    }
    for name in FILES:
        sql = baseline(name)
        for part, text in parts.items():
            sql = sql.replace(part, text)
        apply(sql)


def downgrade() -> None:
    raise ConfigurationError(
        "0038 is the oldest revision of this version. To remove saf from a database, with "
        "all messages, run DROP SCHEMA saf CASCADE"
    )
