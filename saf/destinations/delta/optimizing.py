"""Maintenance of a table: merge small files into large ones, and remove files that are not needed.

Compaction is a commit of its own: it changes no row, and forwarders can append at the same time.
Afterwards, the order of rows in files is meaningless: ``id`` gives a key's order.

A file is removed when it is older than ``keep_hours`` and either was replaced that long ago, or was
left by a process that was killed before its commit. Until then, readers of older versions find
their files, and so do commits that are under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from saf.destinations.delta.files import Files, sizes_of
from saf.destinations.delta.link import Link
from saf.destinations.delta.log import checkpoint_of, file_of
from saf.errors import UsageError

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

LEAST_HOURS = 1
"""Least hours to keep; longer than any commit takes."""


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """Result of optimizing a table."""

    table: str
    version: int
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    removed: int
    """Number of unneeded files that were removed."""


def optimize(name: str, settings: Delta, *, keep_hours: int, dry_run: bool) -> Optimized:
    """Compact a table, and remove files that are not needed; ``dry_run``: change nothing.

    Raises:
        UsageError: the table does not exist yet, or ``keep_hours`` is too low.
        Unavailable: the table cannot be read or changed.
    """
    if keep_hours < LEAST_HOURS:
        raise UsageError(
            f"{keep_hours} hours is too short: a forwarder may be writing files that are not in "
            f"the table yet. Keep {LEAST_HOURS} or more"
        )
    link = Link(name, settings)
    table = link.load()
    if table is None:
        raise UsageError(f"{link.what} has no table yet: nothing was forwarded there")
    with link.errors():
        version, old_sizes = table.version(), sizes_of(table)
        if not dry_run:
            table.optimize.compact()
        removed_files = table.vacuum(
            retention_hours=keep_hours,
            dry_run=dry_run,
            enforce_retention_duration=False,
            full=True,
        )
        table.update_incremental()
        files = Files(settings.table, settings.folder, settings.options)
        versions = range(version + 1, table.version() + 1)
        files.sync(path for one in versions for path in (file_of(one), checkpoint_of(one)))
        new_sizes = sizes_of(table)
    return Optimized(
        table=settings.table,
        version=table.version(),
        files_before=len(old_sizes),
        files_after=len(new_sizes),
        bytes_before=sum(old_sizes),
        bytes_after=sum(new_sizes),
        removed=len(removed_files),
    )
