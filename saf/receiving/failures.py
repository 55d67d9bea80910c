"""Log fields of a message whose handling failed: everything except the message itself.

The log shows the exception with its traceback, the message's identity, the attempt, and the time of
the next attempt. It does not show the body, the parameters of a statement, the rows that the
database quotes, or the connection's password: where the exception's text contains one of these, the
log shows `HIDDEN` in its place. Local variables are not shown. Everything else that an application
writes into its exceptions is logged, including parts of a body.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from saf.errors import UnreadableBody, masked
from saf.received import Received
from saf.receiving.retries import Policy
from saf.telemetry.tracing import trace_of

LAST = "none: it is a dead letter, because this was the last attempt"
PERMANENT = "none: it is a dead letter, because no further attempt helps"
"""Logged in place of the time of the next attempt."""

HIDDEN = "***"

SHORTEST = 4
"""Minimum length of a text that is hidden: shorter texts would match everywhere."""

LONGEST = 1 << 20
"""Maximum length of a body that is searched for, in bytes: a longer one may not fit into memory."""


def failure(
    error: BaseException, message: Received, policy: Policy, raw: psycopg.Connection[Any]
) -> dict[str, Any]:
    """Return the log fields for a message whose handling has raised an exception."""
    fields = {**about(message), "attempt": f"{message.attempt} of {policy.max_attempts}"}
    if policy.gives_up(message.attempt, error):
        fields["next_attempt"] = PERMANENT if policy.is_permanent(error) else LAST
    else:
        seconds = policy.wait_seconds(message.attempt)
        moment = datetime.now(UTC) + timedelta(seconds=seconds)
        fields["next_attempt"] = f"in {seconds:g} s, at {moment.isoformat(timespec='seconds')}"
    return {**fields, **exception(error, raw, message)}


def about(message: Received) -> dict[str, Any]:
    """Return the fields that identify a message and its trace, if any."""
    return {
        "message_id": str(message.message_id),
        "key": message.key,
        "message_type": message.message_type,
        **trace_of(message),
    }


def exception(
    error: BaseException, raw: psycopg.Connection[Any] | None = None, *messages: Received
) -> dict[str, Any]:
    """Return the fields that show an exception, without the texts that `failure` hides."""
    with _without_parameters(error):
        text = "".join(traceback.format_exception(error))
        summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    for secret in _secrets(error, raw, messages):
        if len(secret) >= SHORTEST:
            text, summary = (part.replace(secret, HIDDEN) for part in (text, summary))
    text, summary = masked(text), masked(summary)
    # structlog prints the field named stack on lines of its own, unchanged
    return {"error": " ".join(summary.split()), "stack": text}


def _secrets(
    error: BaseException, raw: psycopg.Connection[Any] | None, messages: tuple[Received, ...]
) -> Iterator[str]:
    for cause in _chain(error):
        if isinstance(cause, psycopg.Error):
            # they quote rows
            yield from filter(None, (cause.diag.message_detail, cause.diag.context))
    for message in messages:
        if message.size > LONGEST:
            continue
        body = message.body.decode(errors="replace")
        yield from (body, repr(body)[1:-1], repr(message.body)[2:-1])
        with suppress(UnreadableBody):
            yield repr(message.json())
    if raw is not None:
        with suppress(psycopg.Error):  # it is closed
            yield raw.info.password


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that led to it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def _without_parameters(error: BaseException) -> Iterator[None]:
    """Hide the parameters of statements in SQLAlchemy's errors during a block."""
    if "sqlalchemy" not in sys.modules:
        yield
        return
    import sqlalchemy as sa

    with ExitStack() as stack:
        for cause in _chain(error):
            if isinstance(cause, sa.exc.StatementError):
                stack.callback(setattr, cause, "hide_parameters", cause.hide_parameters)
                cause.hide_parameters = True
        yield
