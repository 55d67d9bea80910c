"""``saf adopt``: an outbox table that exists already becomes saf's.

The command shows the SQL that it would write, and asks. If it is stopped or killed before the end,
the next run continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import psycopg
import typer

from saf.capture import adoption, layouts
from saf.capture.adoption import Adopted, Declared
from saf.capture.fields import pairs
from saf.capture.rows import Rows
from saf.cli.brokers import Brokers, Why, Yes, with_unit
from saf.cli.capture import ROLE, VERBS, DryRun, FromService, fate, old_rows, show_review
from saf.cli.console import confirm, echo
from saf.config import did_you_mean
from saf.errors import ConfigurationError, UsageError
from saf.operating.wording import counted
from saf.setaside.audit import audit


def columns_in(texts: Sequence[str]) -> dict[str, str]:
    """Return the columns of texts such as ``COLUMN=SQL``.

    >>> columns_in(["sent_at=now()", "state='sent'"])
    {'sent_at': 'now()', 'state': "'sent'"}

    Raises:
        UsageError: a text is something else, or a column appears twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        column, equals, value = text.partition("=")
        if not (column.strip() and equals and value.strip()):
            raise UsageError(f"--mark {text!r}: expected COLUMN=SQL, e.g. sent_at=now()")
        if column.strip() in found:
            raise UsageError(f"--mark: {column.strip()!r} appears twice")
        found[column.strip()] = value.strip()
    return found


def command(
    *,
    table: Annotated[
        str, typer.Option(metavar="TABLE", help="Table, as in SQL, e.g. public.outbox_events.")
    ],
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Columns as a framework writes them: {', '.join(layouts.NAMES)}.",
        ),
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="COLUMN=FIELD",
            help="Columns of message fields, e.g. topic=to_service,payload=body. Repeatable.",
        ),
    ] = None,
    service: Annotated[
        str | None, typer.Option(metavar="NAME", help="Service of all messages.")
    ] = None,
    message_type: Annotated[
        str | None, typer.Option("--type", metavar="NAME", help="Type of all messages.")
    ] = None,
    from_service: FromService = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SQL", help='Only rows for which this is true, e.g. "sent_at IS NULL".'
        ),
    ] = None,
    mark: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=SQL", help="Mark rows as sent, e.g. sent_at=now(). Repeatable."
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete rows in the statement that inserts them.")
    ] = False,
    instead: Annotated[
        bool, typer.Option("--instead", help="Send rows instead of writing them.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave rows as they are. This is the default.")
    ] = False,
    order: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Order of old rows. Default: a primary key that rises with time."
        ),
    ] = None,
    new_only: Annotated[
        bool, typer.Option("--new-only", help="Leave existing rows to the old relay.")
    ] = False,
    hold: Annotated[
        float | None,
        typer.Option(
            parser=with_unit,
            metavar="TIME",
            help="How long writers may wait for old rows, e.g. 30s. Default: 5s.",
        ),
    ] = None,
    why: Why = "",
    yes: Yes = False,
    dry_run: DryRun = False,
    round_: Brokers,
) -> None:
    """Adopt an outbox table: its rows become messages.

    Shows the trigger's SQL, asks, and writes it. Existing rows are sent once, and new ones as they
    are written. Run it again after a stop. `saf capture list`, `show` and `remove` have adoptions.
    """
    declared = Declared(
        table=table,
        fields=pairs(",".join(maps or ())),
        service=service,
        message_type=message_type,
        from_service=from_service,
        condition=where,
        rows=_rows(marked=bool(mark), delete=delete, instead=instead, keep=keep),
        mark=columns_in(mark or ()),
        order=order,
        old=not new_only,
    )
    chosen = _layout(layout)

    def reviewed(connection: psycopg.Connection[Any]) -> adoption.Review:
        return adoption.review(connection, layouts.completed(connection, declared, chosen))

    found = round_.visit(ROLE, reviewed)
    round_.say_failures()
    for name, review in found.items():
        show_review(name, review)
        echo(f"{name}: rows: {fate(review.shape)}; old rows: {old_rows(review.shape)}")
    if found and not dry_run:
        confirm("Write it?", yes=yes, dry_run="show the SQL")

        def write(
            connection: psycopg.Connection[Any],
            stopping: Callable[[], bool],
            shown: adoption.Review,
        ) -> Adopted | int:
            seconds = adoption.HOLD_SECONDS if hold is None else hold
            return _adopt(connection, reviewed, shown, why=why, hold=seconds, stopping=stopping)

        writing = round_.answering(found)
        done = writing.decide(
            ROLE, {name: partial(write, shown=review) for name, review in found.items()}
        )
        for name, adopted in done.items():
            echo(f"{name}: {_adopted(found[name].shape.called, adopted)}")
        writing.finish(say=True)
    round_.finish(say=True)


def _adopt(
    connection: psycopg.Connection[Any],
    reviewed: Callable[[psycopg.Connection[Any]], adoption.Review],
    shown: adoption.Review,
    *,
    why: str,
    hold: float,
    stopping: Callable[[], bool],
) -> Adopted | int:
    """Adopt a table if it is still as shown; return what was done, or the rows until a stop."""
    before = adoption.take(connection, _as_shown(reviewed(connection), shown), stopping)
    if stopping():
        return before
    with connection.transaction():
        review = _as_shown(reviewed(connection), shown)
        done = adoption.put(connection, review, hold)
        if done.outcome != "unchanged":
            audit(connection, f"{VERBS[done.outcome]} adoption {review.shape.called}", [], why)
    return replace(done, messages=done.messages + before)


def _as_shown(review: adoption.Review, shown: adoption.Review) -> adoption.Review:
    if review.statements != shown.statements:
        raise ConfigurationError(
            f"table {shown.shape.called!r} has changed since its SQL was shown: run it again"
        )
    return review


def _adopted(called: str, done: Adopted | int) -> str:
    if isinstance(done, int):
        return (
            f"{counted(done, 'old row')} of {called!r} sent, and then it was stopped: it is not "
            "adopted yet, run the command again"
        )
    old = f", {counted(done.messages, 'old row')} sent" if done.messages else ""
    return f"adoption of {called!r} {done.outcome}{old}"


def _rows(*, marked: bool, delete: bool, instead: bool, keep: bool) -> Rows | None:
    given: dict[Rows, bool] = {"mark": marked, "delete": delete, "instead": instead, "keep": keep}
    chosen = [rows for rows, is_given in given.items() if is_given]
    if len(chosen) > 1:
        options = " and ".join(f"--{rows}" for rows in chosen)
        raise UsageError(f"{options}: choose one thing to do with rows")
    return chosen[0] if chosen else None


def _layout(name: str | None) -> layouts.Name | None:
    for known in layouts.NAMES:
        if name == known:
            return known
    if name is None:
        return None
    raise UsageError(
        f"--layout {name!r}{did_you_mean(name, layouts.NAMES)}: expected {', '.join(layouts.NAMES)}"
    )
