"""Isolation: no message blocks another, whatever is wrong with it.

A step for many messages, at a source, in a lane or at a receiver, may raise because of one of them.
Isolation works for any step and any such error. A transaction undoes the step, and the step is
repeated for half of the messages, down to the one message for which it raises alone. That message
becomes a dead letter with the error, and its neighbours continue.

Other errors are not about the messages: a database or a destination that does not answer, a missing
right or table, a setting. They are raised, as they would be for any message.

So steps must be repeatable, as after a crash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import psycopg

from saf.database import Meaning, meaning
from saf.errors import InvalidMessage, Rejected, SafError, UnreadableBody, UnreadableHeaders, masked

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

OF_VALUES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(MemoryError, RecursionError, TypeError, ValueError),
)
"""Python's exceptions for unexpected values, or for values that are too large."""

MAX_ERROR = 2000
"""Characters of an error that are kept."""


def of_messages(error: Exception) -> bool:
    """Whether an error may be caused by one of the messages.

    >>> of_messages(RecursionError()), of_messages(psycopg.errors.ProgramLimitExceeded())
    (True, True)
    >>> of_messages(ConnectionError()), of_messages(psycopg.errors.UndefinedTable())
    (False, False)
    """
    if isinstance(error, SafError):
        return isinstance(error, (InvalidMessage, Rejected, UnreadableBody, UnreadableHeaders))
    if isinstance(error, psycopg.Error):
        # without a state it is psycopg's own error: for a value that it cannot send
        of_rows = meaning(error.sqlstate) is Meaning.OF_THE_ROWS
        return of_rows or isinstance(error, psycopg.DataError)
    if hasattr(error, "sqlstate"):
        return meaning(error.sqlstate) is Meaning.OF_THE_ROWS
    arrow = sys.modules.get("pyarrow")
    return isinstance(error, OF_VALUES) or (
        arrow is not None and isinstance(error, arrow.ArrowException)
    )


def isolate(
    rows: pa.Table,
    step: Callable[[pa.Table], T],
    bury: Callable[[pa.Table, str], T],
    undo: Callable[[], None] = lambda: None,
) -> T:
    """Run a step for messages, in their order, and ``bury`` those for which it raises alone.

    Return the result of the last step or burial. A true result is a request to stop: no other half
    follows. ``undo`` is called before a step is repeated for fewer messages.
    """
    try:
        return step(rows)
    except Exception as error:
        if not of_messages(error):
            raise
        undo()
        if rows.num_rows == 1:
            return bury(rows, said(error))
    half = rows.num_rows // 2
    if stop := isolate(rows.slice(0, half), step, bury, undo):
        return stop
    return isolate(rows.slice(half), step, bury, undo)


def said(error: BaseException | str) -> str:
    """Return an error as text to store, without message contents that it quotes (`masked`).

    PostgreSQL's text cannot contain NUL or half of a surrogate pair.

    >>> said(ValueError("no such account")), said("a\\0b")
    ('ValueError: no such account', 'a\\ufffdb')
    """
    text = str(error)
    if not isinstance(error, str):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return kept(masked(text))[:MAX_ERROR]


def kept(text: str) -> str:
    r"""Return text from elsewhere, changed so that PostgreSQL can store it.

    >>> kept("a\0b\ud800")
    'a\ufffdb?'
    """
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()
