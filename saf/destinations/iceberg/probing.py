"""A probe of an object store: a file that is written beside a table's own, read, and deleted.

Commits meet in the catalog. So a table only needs the store to keep files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

from pyiceberg.io import load_file_io

from saf.destinations.iceberg.link import Link
from saf.errors import Unavailable

if TYPE_CHECKING:
    from pyiceberg.table import Table

NAME = "_saf_probe"
CONTENT = b"a probe by saf destination check"


def place_of(link: Link, table: Table | None) -> str:
    """Return where a table's files are, or will be; empty if only a REST catalog knows."""
    if table is not None:
        return table.location()
    warehouse = link.settings.warehouse or ""
    return warehouse if "://" in warehouse else ""


def probe(link: Link) -> Iterator[tuple[str, str]]:
    """Yield each problem of the table's object store, with its cure.

    Raises:
        Unavailable: the store does not answer, or its login has no right to write there.
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
