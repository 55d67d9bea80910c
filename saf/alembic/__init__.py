"""saf beside an application's own Alembic: what ``env.py`` and revisions use.

`include_name` and `include_object` let autogenerate leave out schema ``saf``, whose tables belong
to saf's own migrations. Without them, ``include_schemas=True`` drops these tables.

Importing this module adds two operations, for an application that wants saf's schema in its own
tree of revisions instead of running `saf migrate`:

    op.saf_upgrade("0051")      # at least this revision of saf's schema
    op.saf_downgrade("0051")    # back to this revision

Both run on the connection of the migration around them, in its transaction. saf's own version stays
in ``saf.alembic_version``. A database that already has the revision, or a newer one, stays as it
is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alembic.operations import MigrateOperation, Operations
from alembic.util import CommandError

from saf.broker.migrate import (
    checked_shards,
    downgrade,
    in_transaction,
    revisions,
    upgrade,
    written,
)
from saf.errors import ConfigurationError, SafError

__all__ = ["include_name", "include_object"]

SCHEMA = "saf"


def include_name(name: str | None, type_: str, parent_names: Mapping[Any, str | None]) -> bool:
    """Return whether autogenerate looks at a name in the database: False for schema ``saf``.

    Give it to ``context.configure``, or call it first in your own:

        return saf.alembic.include_name(name, type_, parent_names) and …

    >>> include_name("saf", "schema", {}), include_name(None, "schema", {})
    (False, True)
    >>> include_name("outbox", "table", {"schema_name": "saf"})
    False
    """
    return (name if type_ == "schema" else parent_names.get("schema_name")) != SCHEMA


def include_object(
    object_: Any,
    name: str | None,  # noqa: ARG001 - Alembic passes it
    type_: str,  # noqa: ARG001
    reflected: bool,  # noqa: ARG001
    compare_to: object,  # noqa: ARG001
) -> bool:
    """Return whether autogenerate looks at a table, or a part of one: False in schema ``saf``.

    Only models that map tables of schema ``saf``, for example to read ``saf.dead_letter``, need it
    in addition to `include_name`.
    """
    table = getattr(object_, "table", object_)
    return bool(getattr(table, "schema", None) != SCHEMA)


@Operations.register_operation("saf_upgrade")
class SafUpgrade(MigrateOperation):
    """The operation ``op.saf_upgrade``."""

    def __init__(self, revision: str, shards: int | None, since: str | None) -> None:
        self.revision = revision
        self.shards = shards
        self.since = since

    @classmethod
    def saf_upgrade(
        cls,
        operations: Operations,
        revision: str,
        *,
        shards: int | None = None,
        since: str | None = None,
    ) -> None:
        """Upgrade schema ``saf`` to at least this revision, creating the schema if it is missing.

        ``shards`` is for the first migration (default 64). ``since`` is only for ``--sql``, which
        asks no database: the revision that the database has; without it, none.
        """
        operations.invoke(cls(revision, shards, since))


@Operations.register_operation("saf_downgrade")
class SafDowngrade(MigrateOperation):
    """The operation ``op.saf_downgrade``."""

    def __init__(self, revision: str) -> None:
        self.revision = revision

    @classmethod
    def saf_downgrade(cls, operations: Operations, revision: str) -> None:
        """Downgrade schema ``saf`` to this revision. What only a newer one can store is lost."""
        operations.invoke(cls(revision))


@Operations.implementation_for(SafUpgrade)
def _upgrade(operations: Operations, asked: SafUpgrade) -> None:
    try:
        shards = None if asked.shards is None else checked_shards(asked.shards)
        revision = _known(asked.revision, or_older=True)
        if operations.migration_context.as_sql:
            since = None if asked.since is None else _known(asked.since)
            written(operations.migration_context.output_buffer, revision, since, shards)
            return
        with in_transaction(operations.get_bind()) as connection:
            upgrade(connection, revision, shards)
    except SafError as error:
        raise CommandError(str(error)) from error


@Operations.implementation_for(SafDowngrade)
def _downgrade(operations: Operations, asked: SafDowngrade) -> None:
    try:
        revision = _known(asked.revision)
        if operations.migration_context.as_sql:
            raise ConfigurationError(
                "op.saf_downgrade needs a database, and --sql asks none: run it without --sql"
            )
        with in_transaction(operations.get_bind()) as connection:
            downgrade(connection, revision)
    except SafError as error:
        raise CommandError(str(error)) from error


def _known(asked: str, *, or_older: bool = False) -> str:
    """Return a revision; with ``or_older``, the first one for each that is older."""
    known = revisions()
    if asked in known:
        return asked
    if or_older and asked.isdecimal() and len(asked) == len(known[0]) and asked < known[0]:
        return known[0]
    raise ConfigurationError(
        f"{asked!r} is not a revision of saf's schema: this version of the package knows "
        f"{', '.join(known)}. Upgrade the saf-outbox package for a newer one; to remove saf with "
        "all messages, run DROP SCHEMA saf CASCADE"
    )
