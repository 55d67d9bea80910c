"""Promise of a table's place: which messages a power failure may take back, and deltalake's needs.

A loss always takes the marks back with the messages. It is noticed at the next contact, and `saf
rebase` sends the lost messages again.
"""

from __future__ import annotations

from saf.destinations.delta.files import sizes_of
from saf.destinations.delta.link import Link
from saf.destinations.settings import Guarantee

S3 = ("s3://", "s3a://")
NOT_TESTED = ("saf tests only object stores that speak S3", "your own test of yours")
MANY_FILES = 1_000
SMALL_BYTES = 8 << 20
"""A table with more than `MANY_FILES` files below this average size is worth compacting."""


def guarantee(link: Link) -> Guarantee:
    """Return the table's promise where it is now."""
    settings, table = link.settings, link.load()
    findings: list[tuple[str, str]] = []
    server = f"no Delta table yet, {settings.table}"
    if table is not None:
        with link.errors():
            sizes = sizes_of(table)
        server = (
            f"Delta table of {len(sizes):,} files, version {table.version():,}, {settings.table}"
        )
        if len(sizes) > MANY_FILES and sum(sizes) / len(sizes) < SMALL_BYTES:
            findings.append(
                (
                    f"its {len(sizes):,} files have {sum(sizes) // len(sizes) >> 10:,} KiB on "
                    "average, which makes reading slow",
                    f"saf lake optimize {link.name}",
                )
            )
    kept = "a crash of the process or of the machine loses nothing that was acknowledged"
    if settings.folder is None:
        kept = (
            "acknowledged messages are as safe as the object store; the store must refuse to "
            "overwrite a file of the log, which saf destination check tries"
        )
        if not settings.table.startswith(S3):
            findings.append(NOT_TESTED)
    return Guarantee(
        server=server,
        promise=f"{settings.quality.replace('_', ' ')}; {kept}; a loss is detected, and saf "
        "rebase sends the lost messages again",
        more=tuple(findings),
    )
