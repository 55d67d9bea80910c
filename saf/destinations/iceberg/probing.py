"""The promise of an Iceberg table's place: what a power failure may take back, and a probe.

Commits meet in the catalog. So a table only needs the store to keep files: `probe` writes a file
beside a table's own, reads it, and deletes it. If the file cannot be written, or other bytes are
read, `probe` raises. If the login may not delete, `probe` yields the problem and the address where
the file stays. On this machine, or if only a REST catalog knows the address, nothing is probed.

`guarantee` returns the promise, and findings about the table's state and the parts that saf does
not test; it writes nothing. A loss always takes the marks back with the messages. The loss is
noticed at the next contact, and `saf rebase` sends the lost messages again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

from pyiceberg.io import load_file_io

from saf.destinations.iceberg.address import file_of, is_sql
from saf.destinations.iceberg.link import Link
from saf.destinations.lake.settings import compactable, untested
from saf.destinations.settings import Guarantee
from saf.errors import Unavailable

if TYPE_CHECKING:
    from pyiceberg.table import Table

NAME = "_saf_probe"
"""Beginning of the name of a probe's file."""
CONTENT = b"a probe by saf destination check"
MANY_SNAPSHOTS = 1_000
"""Above this number, each commit is slow, because it writes all snapshots."""


def probe(link: Link) -> Iterator[tuple[str, str]]:
    """Yield each problem of the table's object store, with its cure.

    Raises:
        Refused: the login has no right to write there.
        Unavailable: the store does not answer, or returns other bytes than were written.
    """
    table = link.load()
    warehouse = place_of(link, table)
    if not warehouse or link.settings.folder:
        return
    address = f"{warehouse}/{NAME}-{uuid4()}"
    with link.errors():
        io = table.io if table else load_file_io(link.properties(), address)
        with io.new_output(address).create() as file:
            file.write(CONTENT)
        with io.new_input(address).open() as stored:
            if stored.read() != CONTENT:
                raise Unavailable(link.what, f"{address} returns other bytes than were written")
        try:
            io.delete(address)
        except OSError:
            yield (
                f"its login may not delete: a probe stays at {address}",
                "let its login delete files of the table, which expiring snapshots needs, too",
            )


def guarantee(link: Link) -> Guarantee:
    """Return the table's promise where it is now."""
    settings, table = link.settings, link.load()
    findings: list[tuple[str, str]] = []
    server = f"no Iceberg table yet, {settings.table}"
    if table is not None:
        snapshot = table.current_snapshot()
        summary = snapshot.summary if snapshot else None
        totals = summary.additional_properties if summary else {}
        files, size = int(totals.get("total-data-files", 0)), int(totals.get("total-files-size", 0))
        kept = len(table.snapshots())
        server = f"Iceberg table of {files:,} files, {kept:,} snapshots, {settings.table}"
        cure = "rewrite_data_files of Spark, or what your engine has for it"
        findings += compactable(files, size, cure)
        if kept > MANY_SNAPSHOTS:
            findings.append(
                (
                    f"its {kept:,} snapshots are rewritten by each commit",
                    "expire_snapshots of Spark or pyiceberg; saf's marks stay",
                )
            )
    kept_by = "a crash of the process or of the machine loses nothing that was acknowledged"
    if not settings.folder:
        kept_by = "acknowledged messages are as safe as the object store"
        findings += untested(place_of(link, table))
    if not is_sql(settings.catalog):
        findings.append(
            ("no product with a REST catalog is tested by saf", "your own test of yours")
        )
        catalog = "a REST catalog"
    else:
        catalog = f"a catalog in {'SQLite' if file_of(settings.catalog) else 'PostgreSQL'}"
    return Guarantee(
        server=f"{server}, by {catalog}",
        promise=f"{settings.quality.replace('_', ' ')}; {kept_by}; a loss is detected, and "
        "saf rebase sends the lost messages again",
        more=tuple(findings),
    )


def place_of(link: Link, table: Table | None) -> str:
    """Return where a table's files are, or will be; empty if only a REST catalog knows."""
    if table is not None:
        return table.location()
    warehouse = link.settings.warehouse or ""
    return warehouse if "://" in warehouse else ""
