"""Isolation: no message holds up another one, whatever is wrong with it.

A step for many messages, at a source, in a lane or at a receiver, may raise because of one of them.
Nobody has to know which step, or why. A transaction undoes the step, and it is made again for half
of the messages, down to the one that raises alone. That one becomes a dead letter with the error,
and its neighbours go on.

Errors for other reasons are not about the messages: a database or a destination that does not
answer, a missing right or table, a setting. They are raised, as they would be for any message.

So a step must be able to be made again, as after a crash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import psycopg

from saf.database import Meaning, meaning
from saf.errors import (
    InvalidMessage,
    Rejected,
    SafError,
    UnreadableBody,
    UnreadableHeaders,
    masked,
)

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

OF_VALUES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(MemoryError, RecursionError, TypeError, ValueError),
)
"""What Python raises for values that it does not expect, or that are too much for it."""

MAX_ERROR = 2000
"""How many characters of an error are kept."""


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
        # without a state it is psycopg's own: a value that it cannot send
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
    """Make a step for messages, in their order, and ``bury`` those for which it raises alone.

    Return what the last step or burial returns. One that returns something true wants to stop: no
    other half follows. ``undo`` is called before a step is made again for fewer messages.
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
    """An error as text that is kept, without what it quotes of a message (`saf.errors.masked`).

    PostgreSQL's text holds no NUL, and no half of a character.

    >>> said(ValueError("no such account")), said("a\\0b")
    ('ValueError: no such account', 'a\\ufffdb')
    """
    text = str(error)
    if not isinstance(error, str):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return kept(masked(text))[:MAX_ERROR]


def kept(text: str) -> str:
    r"""A text from elsewhere, changed so that PostgreSQL can keep it.

    >>> kept("a\0b\ud800")
    'a\ufffdb?'
    """
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()
