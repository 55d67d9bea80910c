"""Savepoints: pieces of work in one transaction, each of which is undone if it raises.

To set a savepoint costs a round trip to the database, which for a handler that does little is most
of what it costs. So pieces that are over within `SHARE_SECONDS` share a savepoint. If one of them
raises, the database is taken back to before the first of them, and the others are done again, each
with a savepoint of its own: what they did is there once, and what the failed piece did is not. If
one of the others fails this time, those that must not be done before it are not done again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

SHARE_SECONDS = 0.01
"""For how long pieces share a savepoint: about as long as it may take to do them again."""

SAVEPOINT = "SAVEPOINT saf"
NEXT = "RELEASE SAVEPOINT saf; SAVEPOINT saf"
UNDO = "ROLLBACK TO SAVEPOINT saf"
RELEASE = "RELEASE SAVEPOINT saf"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of work that can be done again."""

    do: Callable[[], object]
    failed: Callable[[Exception], None]
    """Called after the piece has raised, and its work is undone."""
    undone: Callable[[], None]
    """Called after its work was undone, because it raised or because another one did."""
    may_go_on: Callable[[], bool]
    """Asked before it is done again: whether none has failed that it must not be done before."""


class Savepoints:
    """Pieces of work in one transaction.

    After them runs ``own``, a statement that restores saf's own settings; see `saf.receiving.own`.
    """

    def __init__(self, raw: psycopg.Connection[Any], own: str = "") -> None:
        self.raw = raw
        self.own = own
        self._done: list[Piece] = []
        """The pieces that were done since the savepoint."""
        self._clean = True
        """Whether nothing was done since the savepoint."""
        self._since = 0.0

    def __enter__(self) -> Savepoints:
        self.raw.execute(SAVEPOINT)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            # released here and not by the commit, because what is written next is outside of the
            # pieces
            last = f"{RELEASE}; {self.own}" if self.own else RELEASE
            self.raw.execute(last.encode())

    def as_saf(self, do: Callable[[psycopg.Connection[Any]], object]) -> None:
        """Do what is saf's own between pieces of the application's."""
        if self.own:
            self.raw.execute(self.own.encode())
        do(self.raw)

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Run the block; if it raises, undo its work. The transaction goes on."""
        self._begin(alone=True)
        try:
            yield
            self._end()
        except BaseException:
            if not self.raw.broken:
                self._undo()
            raise

    def do(self, piece: Piece, *, alone: bool = False) -> bool:
        """Do a piece of work; return whether it did not raise.

        The pieces that share a savepoint with one that raises are done again first.
        """
        self._begin(alone=alone)
        try:
            piece.do()
            self._end()
        except Exception as error:
            if self.raw.broken:
                raise
            others, self._done = self._done, []
            self._undo()
            for one in (*others, piece):
                one.undone()
            self._do_again(others)
            piece.failed(error)
            return False
        self._done.append(piece)
        return True

    def do_together(
        self,
        pieces: Sequence[Piece],
        do: Callable[[], object],
        failed: Callable[[Exception], object],
    ) -> None:
        """Do pieces of work at the same time by one call, which raises if one of them does.

        Then ``failed`` is called with the error, and the pieces are done again one by one.
        """
        self._begin(alone=True)
        try:
            do()
            self._end()
        except Exception as error:
            if self.raw.broken:
                raise
            self._undo()
            for one in pieces:
                one.undone()
            failed(error)
            self._do_again(pieces)

    def _do_again(self, pieces: Sequence[Piece]) -> None:
        for one in pieces:
            if one.may_go_on():
                self.do(one, alone=True)

    def _begin(self, *, alone: bool) -> None:
        if self._clean:
            self._since = time.monotonic()
        elif alone or not self._done or time.monotonic() - self._since > SHARE_SECONDS:
            self.raw.execute(NEXT)
            self._since = time.monotonic()
            self._done.clear()
        self._clean = False

    def _end(self) -> None:
        if self.raw.info.transaction_status == TransactionStatus.INERROR:
            # a statement of the piece has failed, and the piece has swallowed the error: this
            # raises
            self.raw.execute(NEXT)

    def _undo(self) -> None:
        self.raw.execute(UNDO)
        self._clean = True
