"""A stream: its driver dies, is asked for rows again, commits late, while others send and purge.

The truth is what was committed to the outbox. Each message is in one micro-batch, in the order of
its key. A range of offsets gives the same rows whenever it is read, until it is committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from saf.log import offset, ring
from tests.stateful.senders import Senders
from tests.stateful.site import Place, Site
from tests.streams import Crash, Query

KEYS = ("a", "b", "c", "d")
DSN_FROM = "SAF_STATEFUL_STREAM"
# Only the stream keeps messages
NO_OTHERS = "DELETE FROM saf.subscription WHERE NOT stream"
NEXT_SLOT = """
SELECT setval('saf.outbox_id_seq', ((last_value >> 20) + 1) << 20) FROM saf.outbox_id_seq
"""
CRASHES = ("", "", "", "asked", "written", "committed", "read")


class Streaming(Senders):
    """One outbox and one stream."""

    def __init__(self, app: Place) -> None:
        super().__init__(app)
        self.numbers: Counter[str] = Counter()
        self.first_read: dict[int, list[tuple[Any, ...]]] = {}
        """What each micro-batch had when it was read first."""
        self.patch = pytest.MonkeyPatch()
        self.limit: int | None = None
        self.query = Query(options={})
        Site.empty(app)

    @classmethod
    def on(cls, site: Site) -> Callable[[], Self]:
        """Makes machines; their database is made once."""
        app = site.create("stream")
        return lambda: cls(app)

    @initialize(
        limit=st.sampled_from((None, 1, 2, 3, 7)),
        partitions=st.integers(1, 3),
        bits=st.sampled_from((1, 2, 13)),
    )
    def agree(self, limit: int | None, partitions: int, bits: int) -> None:
        """How much a trigger reads, and how it is counted."""
        self.limit = limit
        self.patch.setattr(offset, "PART_BITS", bits)
        self.patch.setenv(DSN_FROM, self.app.dsn.conninfo)
        given = {"maxRowsPerTrigger": str(limit)} if limit else {}
        self.query.options = {
            **{"dsn_from": DSN_FROM, "log": "outbox", "subscription": "lake"},
            **{"partitions": str(partitions), **given},
        }
        self.query.start()  # registers the stream: an outbox without any reader is refused
        self.app.person.execute(NO_OTHERS)

    # What is sent

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=8),
        late=st.sampled_from((False, False, True)),
    )
    def send(self, keys: list[str], late: bool) -> None:
        """A transaction sends messages, and may commit later than others."""
        held = {key for _, some in self.open for key, _ in some}
        messages = []
        for key in keys:
            if key not in held:
                self.numbers[key] += 1
                number = self.numbers[key]
                messages.append(((key, number), key, str(number).encode()))
        self.begin(messages, late=late)

    # The stream

    @rule(crash=st.sampled_from(CRASHES), limited=st.sampled_from((True, True, False)))
    def trigger(self, crash: str, limited: bool) -> None:
        """A micro-batch, or a part of one."""
        number = self.query.complete
        new = len(self.query.offsets) == number
        try:
            self.query.step(limited=limited, crash=crash)
        except Crash:
            return
        if number in self.query.sink:
            self._same(number, self.query.sink[number])
            # the end may be of an earlier attempt
            if limited and self.limit and new:
                assert len(self.query.sink[number]) <= self.limit

    @precondition(lambda self: self.query.offsets)
    @rule()
    def again(self) -> None:
        """The last range that is in the checkpoint is read once more."""
        number = len(self.query.offsets) - 1
        self._same(number, self.query.rows(number))

    def _same(self, number: int, rows: list[tuple[Any, ...]]) -> None:
        assert sorted(self.first_read.setdefault(number, rows)) == sorted(rows)

    @rule()
    def restart(self) -> None:
        """The driver is killed, and another one begins."""
        self.query.die()

    @rule(more=st.booleans())
    def all_that_is_there(self, more: bool) -> None:
        """A run with Trigger.AvailableNow; what is sent after its start is not for it."""
        self.query.die()
        self.query.reader().prepareForTriggerAvailableNow()
        before = set(self.committed)
        if more:
            self.send(["a", "b"], False)
        self.query.drain()
        assert {name for name, _ in self._read()} == before
        self.query.die()

    # The log

    @rule()
    def purge(self) -> None:
        """What nobody needs is purged."""
        ring.purge(self.app.person, "outbox", retention_seconds=0, lock_timeout_seconds=0.01)

    @rule()
    def next_slot(self) -> None:
        """Ids go on in the next slot."""
        self.app.person.execute(NEXT_SLOT)

    def _read(self) -> list[tuple[tuple[str, int], int]]:
        """Each message that the sink has, and its id, in the order of the micro-batches."""
        return [
            ((row[2], int(row[3])), row[0])
            for number in sorted(self.query.sink)
            for row in self.query.sink[number]
        ]

    @invariant()
    def once_and_in_order(self) -> None:
        """No message is there twice, none that was not sent, and each key's rise."""
        read = [name for name, _ in self._read()]
        assert len(read) == len(set(read))
        assert set(read) <= set(self.committed)
        for key in KEYS:
            mine = [number for one, number in read if one == key]
            assert mine == sorted(mine)

    def teardown(self) -> None:
        """In the end, the sink has all that was sent."""
        try:
            self.commit_all()
            if self.query.options:
                self.query.drain()
                self.once_and_in_order()
                assert {name for name, _ in self._read()} == set(self.committed)
        finally:
            self.close()
            self.patch.undo()
