"""An archive: purges are killed, messages commit late, and a log and its archive are read as one.

The truth is what was committed to the outbox. A read has each message once, as of its plan, or says
that one was purged since. Nothing that left the log is missing in the archive, or there twice.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from saf.destinations.kinds import archive_at
from saf.errors import PurgedMeanwhile
from saf.failpoints import arm
from saf.log import ring
from tests.archives import DONE, FORMS, Reading, in_log, next_slot, place, texts
from tests.dying import Crash, crash
from tests.stateful.senders import Senders
from tests.stateful.site import Place, Site

DSN_FROM = "SAF_STATEFUL_ARCHIVE"
# An id that was drawn, and comes late
SEND_LATE = """
INSERT INTO saf.outbox (id, to_service, key, body) OVERRIDING SYSTEM VALUE
SELECT 500000 + %(number)s + (last_value >> 20 << 20) - (%(ago)s::bigint << 20),
       'lake', 'late', %(body)s
FROM saf.outbox_id_seq WHERE last_value >> 20 >= %(ago)s
RETURNING id
"""
POINTS = ("", "", "archive_written", "archived")
MOST_PLANNED = 2


@dataclass
class Planned:
    """A read whose tasks have not run yet."""

    read: Reading
    committed: list[str]


class Archiving(Senders):
    """One outbox and its archive."""

    def __init__(self, app: Place) -> None:
        super().__init__(app)
        self.number = 0
        self.planned: list[Planned] = []
        self.patch = pytest.MonkeyPatch()
        self.folder = Path(tempfile.mkdtemp(prefix="saf-archive-"))
        self.where = ""
        Site.empty(app)

    @classmethod
    def on(cls, site: Site) -> Callable[[], Self]:
        """Makes machines; their database is made once."""
        app = site.create("archive")
        return lambda: cls(app)

    @initialize(form=st.sampled_from(FORMS))
    def agree(self, form: str) -> None:
        """What the archive is."""
        self.patch.setenv(DSN_FROM, self.app.dsn.conninfo)
        self.where = place(form, self.folder)
        (self.folder / "archive").mkdir()

    # What is sent

    @rule(count=st.integers(1, 3), late=st.booleans())
    def send(self, count: int, late: bool) -> None:
        """A transaction sends messages, and may commit later than others."""
        numbers = range(self.number + 1, self.number + count + 1)
        self.number += count
        self.begin([(str(n), str(n % 5), str(n).encode()) for n in numbers], late=late)

    @rule(ago=st.integers(1, 9))
    def send_with_an_id_of_long_ago(self, ago: int) -> None:
        """A message comes into a slot that ids have left, and that may be purged."""
        self.number += 1
        text = str(self.number)
        given = {"number": self.number, "ago": ago, "body": text.encode()}
        if self.app.person.execute(SEND_LATE, given).fetchall():
            self.committed.append(text)

    # The log and its archive

    @rule(point=st.sampled_from(POINTS))
    def purge(self, point: str) -> None:
        """What everybody has completed is archived and purged; the purge may be killed."""
        self.app.person.execute(DONE)
        arm(point, crash)
        try:
            ring.purge(
                self.app.person,
                "outbox",
                retention_seconds=0,
                archive=archive_at(self.where, self.app.dsn),
                lock_timeout_seconds=0.01,
            )
        except Crash:
            pass
        finally:
            arm("")

    @rule()
    def next_slot(self) -> None:
        """Ids go on in the next slot."""
        next_slot(self.app.dsn)

    # Reads

    @precondition(lambda self: len(self.planned) < MOST_PLANNED)
    @rule()
    def plan(self) -> None:
        """A read is planned; its tasks come later."""
        self.planned.append(Planned(read=self._reading(), committed=sorted(self.committed)))

    @precondition(lambda self: self.planned)
    @rule()
    def read(self) -> None:
        """The tasks of a read run, and run again."""
        one = self.planned.pop(0)
        for _ in range(2):
            try:
                assert one.read.texts() == one.committed
            except PurgedMeanwhile:
                return

    @rule()
    def read_at_once(self) -> None:
        """A read that nothing comes between sees everything."""
        assert self._reading().texts() == sorted(self.committed)

    def _reading(self) -> Reading:
        return Reading({"dsn_from": DSN_FROM, "log": "outbox", "archive": self.where})

    @invariant()
    def once(self) -> None:
        """An archive has no message twice, and together with the log it has all."""
        if self.where:
            archived = texts(self.where)
            assert len(archived) == len({*archived})
            assert {*archived, *in_log(self.app.dsn)} == {*self.committed}

    def teardown(self) -> None:
        """In the end, all is there."""
        try:
            self.commit_all()
            if self.where:
                self.once()
                self.read_at_once()
        finally:
            arm("")
            self.close()
            self.patch.undo()
            shutil.rmtree(self.folder, ignore_errors=True)
