"""The whole schema of a broker; its SQL is in migrations/baseline, by subject."""

from __future__ import annotations

from pathlib import Path

from alembic import context, op

from saf.errors import ConfigurationError

revision = "0037"
down_revision = None

FOLDER = Path(__file__).parents[1] / "baseline"
# A file needs only what the files before it have created
FILES = (
    *("broker", "log", "senders", "routing", "subscriptions", "set_aside"),
    *("marks", "dialogs", "http", "spark"),
)


def sql(name: str) -> str:
    return (FOLDER / f"{name}.sql").read_text(encoding="utf-8")


def upgrade() -> None:
    message = sql("message").rstrip()
    number = str(context.config.attributes["shards"])  # set by env.py
    for name in FILES:
        op.execute(sql(name).replace("{message}", message).replace("{shards}", number))


def downgrade() -> None:
    raise ConfigurationError(
        "0037 is the oldest revision of this version. To remove saf from a database, with "
        "all messages, run DROP SCHEMA saf CASCADE"
    )
