"""Savepoints: pieces of work in one transaction; a piece that raises is undone.

Setting a savepoint costs a round trip to the database, which for a small handler is most of its
cost. So pieces that complete within `SHARE_SECONDS` share a savepoint. If a piece raises, the
database goes back to before the first piece, and the others are repeated, each with its own
savepoint: their work is present once, and the failed piece's is not. If another piece fails this
time, pieces that may not run without it are not repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import psycopg
from psycopg.pq import TransactionStatus

SHARE_SECONDS = 0.01
"""Time for which pieces share a savepoint: roughly the time needed to repeat them."""

SAVEPOINT = "SAVEPOINT saf"
NEXT = "RELEASE SAVEPOINT saf; SAVEPOINT saf"
UNDO = "ROLLBACK TO SAVEPOINT saf"
RELEASE = "RELEASE SAVEPOINT saf"


class Piece(Protocol):
    """A piece of work that can be repeated."""

    @property
    def do(self) -> Callable[[], object]:
        """The work."""

    def failed(self, error: Exception, /) -> None:
        """Note that the piece has raised; its work is undone."""

    def undone(self) -> None:
        """Note that the piece's work was undone, because this piece or another one raised."""

    def may_go_on(self) -> bool:
        """Return False if the piece must not be repeated: one that it depends on has failed."""


class State:
    """State of the transaction that the application's library keeps; by default, none."""

    def check(self) -> None:
        """Raise if the library would roll the transaction back at its end."""

    def mark(self) -> Callable[[], None]:
        """Note the state at a savepoint; return the function that restores it after a rollback."""
        return lambda: None


class Savepoints:
    """Pieces of work in one transaction.

    ``own``, a statement that restores saf's own settings, runs after them; see
    `saf.receiving.link`. ``state`` is rolled back together with the database.
    """

    def __init__(
        self, raw: psycopg.Connection[Any], own: str = "", state: State | None = None
    ) -> None:
        self.raw = raw
        self.own = own
        self._state = state or State()
        self._restore: Callable[[], None] = lambda: None
        self._done: list[Piece] = []
        """Pieces done since the savepoint."""
        self._clean = True
        """True if nothing was done since the savepoint."""
        self._since = 0.0

    def __enter__(self) -> Savepoints:
        self._set(SAVEPOINT)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            # released here and not by the commit, because later writes are outside the pieces
            last = f"{RELEASE}; {self.own}" if self.own else RELEASE
            self.raw.execute(last.encode())

    def as_saf(self, do: Callable[[psycopg.Connection[Any]], object]) -> None:
        """Do saf's own work between pieces of the application's."""
        if self.own:
            self.raw.execute(self.own.encode())
        do(self.raw)

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Run the block; if it raises, undo its work. The transaction continues."""
        self._begin(alone=True)
        try:
            yield
            self._end()
        except BaseException:
            if not self.raw.broken:
                self._undo()
            raise

    def do(self, piece: Piece, *, alone: bool = False) -> bool:
        """Do a piece of work; return False if it raised.

        In that case, the pieces that shared a savepoint with it are repeated first.
        """
        self._begin(alone=alone)
        try:
            piece.do()
            self._end()
        except Exception as error:
            if self.raw.broken:
                raise
            neighbours, self._done = self._done, []
            self._undo()
            for one in (*neighbours, piece):
                one.undone()
            self._do_again(neighbours)
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
        """Do pieces of work at the same time by one call, which raises if any piece does.

        If it raises, ``failed`` is called with the error, and the pieces are repeated one by one.
        """
        self._begin(alone=True)
        try:
            do()
            self._end()
        except Exception as error:
            if self.raw.broken:
                raise
            self._undo()
            for piece in pieces:
                piece.undone()
            failed(error)
            self._do_again(pieces)

    def _do_again(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.may_go_on():
                self.do(piece, alone=True)

    def _begin(self, *, alone: bool) -> None:
        if self._clean:
            self._since = time.monotonic()
        elif alone or not self._done or time.monotonic() - self._since > SHARE_SECONDS:
            self._set(NEXT)
            self._since = time.monotonic()
            self._done.clear()
        self._clean = False

    def _end(self) -> None:
        if self.raw.info.transaction_status == TransactionStatus.INERROR:
            # a statement of the piece has failed, and the piece has swallowed the error: this
            # raises
            self.raw.execute(NEXT)
        self._state.check()

    def _set(self, savepoint: str) -> None:
        self.raw.execute(savepoint.encode())
        self._restore = self._state.mark()

    def _undo(self) -> None:
        self.raw.execute(UNDO)
        self._restore()
        self._clean = True
