"""Exit codes: how a command ended, for the process that started it.

They tell a scheduler what to do: nothing, retry later, or call an operator. docs/operations.md
shows this for cron, systemd and Airflow, and the files in jobs/ do it.
"""

from __future__ import annotations

from textwrap import fill

from saf.errors import SafError, Unavailable, UsageError

INTERRUPTED = 130
WIDTH = 76
"""Characters per line, in a terminal of 80 columns."""

EXIT_CODES = {
    0: "done, nothing to do, or stopped on request; messages may wait for a route or a service",
    Unavailable.exit_code: "try again later: a database, a destination or Spark does not answer",
    UsageError.exit_code: "an operator must fix it: usage, settings, schema, login or rights",
    SafError.exit_code: "anything else; of a comparison or an examination: it has found something",
    INTERRUPTED: "interrupted before the end (Ctrl-C)",
}


def in_words() -> str:
    """Return the table for the end of a help text, which keeps its lines.

    >>> in_words().splitlines()[4]
    '75   try again later: a database, a destination or Spark does not answer'
    """
    lines = [
        fill(meaning, WIDTH, initial_indent=f"{code:<5}", subsequent_indent=" " * 5)
        for code, meaning in EXIT_CODES.items()
    ]
    return "\n".join(["\b", "Exit codes:", *lines])
