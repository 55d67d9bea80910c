"""The promise of a Delta table's place: what a power failure may take back, and a probe.

A table's promise depends on its object store: if a second commit can overwrite the first one, the
store silently loses messages that the first commit has acknowledged. Only writing shows whether a
store does this. So `probe` makes commits for the same version of a table, and only one may win. The
commits run at the same time, because deltalake checks for others just before it writes. So a store
that passes all rounds may have been lucky, but one that fails is certainly wrong, and is refused.

The probe is a table of its own in the folder ``_saf_probe`` below the address of the table, which
readers and vacuums ignore. The probe is deleted afterwards. If the login may not delete, `probe`
yields the problem and the address where files stay.

`guarantee` returns the promise, and findings about what deltalake needs, such as compaction; it
writes nothing. A loss always takes the marks back with the messages. The loss is noticed at the
next contact, and `saf rebase` sends the lost messages again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from uuid import uuid4

import pyarrow as pa
from deltalake import DeltaTable

from saf.destinations.delta.appending import commit, write
from saf.destinations.delta.files import Files, sizes_of
from saf.destinations.delta.link import Link
from saf.destinations.delta.log import LOG
from saf.destinations.lake.settings import compactable, untested
from saf.destinations.queues import unusable
from saf.destinations.settings import Guarantee

FOLDER = "_saf_probe"
"""Folder of probes below the table's address."""
ROWS = pa.table({"n": pa.array([1], pa.int64())})
AT_ONCE = 4
"""Commits that compete in one round."""
ROUNDS = 2


def probe(link: Link) -> Iterator[tuple[str, str]]:
    """Yield each problem of the table's object store, with its cure.

    Raises:
        Refused: the login has no right to write there, or the store lets two commits win.
        Unavailable: the store does not answer.
    """
    settings = link.settings
    address, options = f"{settings.table}/{FOLDER}/{uuid4()}", settings.options
    with link.errors():
        files, paths = Files(address, None, options), list[str]()
        try:
            DeltaTable.create(address, ROWS.schema, storage_options=options)
            with ThreadPoolExecutor(AT_ONCE) as threads:
                won = [_winners(link, address, files, paths, threads) for _ in range(ROUNDS)]
        finally:
            remaining = files.remove([*paths, *(f"{LOG}/{name}" for name in files.names(LOG))])
    if max(won) > 1:
        raise unusable(
            link.what,
            "its store lets two commits write the same file of a table's log: of two forwarders, "
            "one overwrites what the other has acknowledged",
            "use a store with conditional writes (If-None-Match), which S3 has; or set "
            'AWS_S3_LOCKING_PROVIDER = "dynamodb" in storage_options',
        )
    if remaining:
        yield (
            f"its login may not delete: {len(remaining)} files of a probe stay at {address}",
            "let its login delete below the table's address, which `saf lake optimize` needs, too",
        )


def _winners(
    link: Link, address: str, files: Files, paths: list[str], threads: ThreadPoolExecutor
) -> int:
    """Make competing commits that set the same transaction's number; return how many commits win.

    ``paths`` collects the files that they write.
    """
    ready = Barrier(AT_ONCE)

    def commits(_: int) -> bool:
        added = [*write(files, ROWS, (), ())]
        paths.extend(file.path for file in added)
        table = DeltaTable(address, storage_options=link.settings.options)
        ready.wait(link.settings.bounds.statement_seconds)
        return commit(link.what, table, files, added, by=(), numbers=[("saf-probe", 1)])

    return sum(threads.map(commits, range(AT_ONCE)))


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
        findings += compactable(len(sizes), sum(sizes), f"saf lake optimize {link.name}")
    kept = "a crash of the process or of the machine loses nothing that was acknowledged"
    if settings.folder is None:
        kept = (
            "acknowledged messages are as safe as the object store; the store must refuse to "
            "overwrite a file of the log, which saf destination check tries"
        )
        findings += untested(settings.table)
    return Guarantee(
        server=server,
        promise=f"{settings.quality.replace('_', ' ')}; {kept}; a loss is detected, and saf "
        "rebase sends the lost messages again",
        more=tuple(findings),
    )
