"""A table in deltalake: how it is opened, its identity and its marks.

Besides its rows, saf's table has:

    saf.destination     a property: the destination's identity, which stays if the table is moved
    saf:…               application transactions: the marks; see `saf.destinations.delta.files`

This module does not use Arrow, because a forwarder's driver asks for the identity.

`Link.guarantee` returns the promise, and findings about what deltalake needs, such as compaction;
it writes nothing. A loss always takes the marks back with the messages. The loss is noticed at the
next contact, and `saf rebase` sends the lost messages again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import NAMESPACE_URL, UUID, uuid5

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, DeltaProtocolError, TableNotFoundError

from saf.destinations.lake import DESTINATION, State, compactable, untested
from saf.destinations.marks import Known
from saf.destinations.settings import Guarantee, readable, unusable
from saf.errors import Refused, Unavailable
from saf.log.disk import unavailable_if_lost

if TYPE_CHECKING:
    from saf.destinations.delta import Delta
    from saf.destinations.delta.files import Log

DENIED = ("lacked the necessary privileges", "lacked valid authentication credentials")
"""Words in error texts for an object store's refused login; its client has no error codes."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
REMOVING = ("DELETE", "UPDATE", "MERGE", "TRUNCATE", "REPLACE TABLE", "RESTORE")
"""Operations after which rows may be missing on purpose, as named by deltalake or Spark."""


class Link:
    """One table, loaded on each request."""

    def __init__(self, name: str, settings: Delta, what: str | None = None) -> None:
        """``what``: its name in errors, if it is not a destination."""
        self.name = name
        self.what = what or f"destination {name!r}"
        self.settings = settings

    def load(self) -> DeltaTable | None:
        """Load the newest version of the table; None if there is no table yet.

        Raises:
            Unavailable: the folder does not exist, or the store does not answer.
        """
        with self.errors():
            if self.settings.folder:
                next(self.settings.folder.iterdir(), None)  # raises if the folder is missing
            try:
                return DeltaTable(self.settings.table, storage_options=self.settings.options)
            except TableNotFoundError:
                return None

    def identity(self) -> UUID:
        """Return the identity of the table, or its future one; write nothing.

        A future identity is computed from the address. So a table that is gone is not taken for a
        new one: it is the same one, without its acknowledged data.
        """
        return self.identity_of(self.load())

    def identity_of(self, table: DeltaTable | None) -> UUID:
        """Return the identity of a version of the table."""
        identity = table.metadata().configuration.get(DESTINATION) if table else None
        return UUID(identity) if identity else self.first_identity()

    def first_identity(self) -> UUID:
        """Return the identity of a table that is created here."""
        folder = self.settings.folder
        return uuid5(NAMESPACE_URL, folder.resolve().as_uri() if folder else self.settings.table)

    def known(self, source: UUID) -> Known:
        """Return how far the table has got with a source."""
        return self.known_of(self.load(), source)

    def known_of(self, table: DeltaTable | None, source: UUID) -> Known:
        """Return how far a version of the table has got with a source."""
        identity = self.identity_of(table)
        if table is None:
            return State().known(identity)
        with self.errors():
            return self.state(self.log(), table.version(), source).known(identity)

    def state(self, log: Log, version: int, source: UUID) -> State:
        """Return the knowledge of a source in a version of the table.

        Raises:
            Refused: the marks in the log are not as saf writes them.
        """
        from saf.destinations.delta.files import state_of

        cure = "restore the table to a version before somebody changed them, or name another table"
        with readable(self.what, "its marks in the log of its table", cure):
            return state_of(source, log.at(version))

    def log(self) -> Log:
        """Return the table's log, not yet read."""
        from saf.destinations.delta.files import Files, Log

        settings = self.settings
        return Log(Files(settings.table, settings.folder, settings.options))

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate the errors of deltalake and of the file system."""
        try:
            yield
        except DeltaProtocolError as error:
            raise unusable(
                self.what, self.said(error), "name a table that deltalake can write to"
            ) from None
        except OSError as error:
            if error.errno is None:  # from an object store
                raise self._of_store(error) from None
            with unavailable_if_lost(self.what):
                raise
        except DeltaError as error:
            raise self._of_store(error) from None

    def _of_store(self, error: Exception) -> Unavailable:
        reason = self.said(error)
        if any(words in reason for words in DENIED):
            return Refused(
                self.what,
                reason,
                "let its login list, read, write and delete below the table's address",
            )
        return Unavailable(self.what, reason)

    def said(self, error: Exception) -> str:
        """Return an error's text on one line, without secrets."""
        text = COLOURS.sub("", str(error)).replace("↳", "")
        return self.settings.redact(text) or type(error).__name__

    def probe(self) -> Iterator[tuple[str, str]]:
        """Test whether an object store keeps commits apart; see `saf.destinations.delta.files`."""
        if self.settings.folder is None:
            from saf.destinations.delta.files import probe

            with self.errors():
                yield from probe(self.what, self.settings)

    def guarantee(self) -> Guarantee:
        """Return the table's promise where it is now."""
        from saf.destinations.delta.files import sizes_of

        settings, table = self.settings, self.load()
        findings: list[tuple[str, str]] = []
        server = f"no Delta table yet, {settings.table}"
        if table is not None:
            with self.errors():
                sizes = sizes_of(table)
            version = table.version()
            server = f"Delta table of {len(sizes):,} files, version {version:,}, {settings.table}"
            findings += compactable(len(sizes), sum(sizes), f"saf lake optimize {self.name}")
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


def restored(table: DeltaTable) -> int | None:
    """Return the version that last restored an older version of the table; None if none did."""
    versions = [
        commit["version"] for commit in table.history() if commit.get("operation") == "RESTORE"
    ]
    return versions[0] if versions else None


def removed(table: DeltaTable) -> bool:
    """Return True if a table's history shows that rows may be missing on purpose."""
    return any(commit.get("operation", "").startswith(REMOVING) for commit in table.history())
