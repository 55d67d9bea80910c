"""``saf capture`` and ``saf backfill``: a table's changes as messages, and the rows that it has.

`add` shows the SQL that it would write, and asks. A backfill runs in the command itself, until it
is done, paused or interrupted; the next run continues it. Adoptions (`saf.cli.adopt`) are listed,
shown and removed as captures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import psycopg
import typer

from saf.capture import adoption, backfill, rows, stored
from saf.capture.adoption import Adoption
from saf.capture.backfill import Backfill, Ran, Wanted
from saf.capture.drift import Drift, drift
from saf.capture.stored import Capture, Declaration, Outcome, Review, named, one_of
from saf.cli.brokers import AsJson, Brokers, Commands, Panels, Round, Why, Yes
from saf.cli.console import Listing, Table, confirm, echo
from saf.errors import ConfigurationError, UsageError
from saf.operating.wording import at, counted
from saf.setaside.audit import audit

app = Commands(help="Captures: send a table's changes as messages.")

ROLE = "capture"

TableName = Annotated[
    str, typer.Argument(metavar="TABLE", help="Table, as in SQL, e.g. orders or sales.orders.")
]
FromService = Annotated[
    str | None,
    typer.Option("--from", metavar="NAME", help="Sender in the messages. Default: none."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the SQL without writing it.")]
VERBS: Mapping[Outcome, str] = {"added": "add", "changed": "change"}


def names_in(text: str) -> tuple[str, ...]:
    """Return the names in a list with commas.

    >>> names_in("number, total")
    ('number', 'total')

    Raises:
        UsageError: a name is empty.
    """
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"--columns {text!r}: expected names with commas, e.g. number,total")
    return names


@app.command()
def add(
    table: TableName,
    *,
    service: Annotated[str, typer.Option(metavar="NAME", help="Service that gets the messages.")],
    key: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column whose text is the key. Default: the primary key, if it is one column.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Columns to send, e.g. number,total. Default: all that exist now."
        ),
    ] = None,
    when: Annotated[
        str | None,
        typer.Option(
            metavar="SQL",
            help="Send only rows for which this is true, e.g. \"new.status = 'paid'\".",
        ),
    ] = None,
    message_type: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="NAME",
            help="Beginning of the message types. Default: the table's name, as in orders.insert.",
        ),
    ] = None,
    from_service: FromService = None,
    why: Why = "",
    yes: Yes = False,
    dry_run: DryRun = False,
    round_: Brokers,
) -> None:
    """Capture a table: show the trigger's SQL, ask, and write it.

    For a captured table, these values replace the earlier ones. The user must own schema saf.
    """
    declared = Declaration(
        table=table,
        service=service,
        key=key,
        columns=None if columns is None else names_in(columns),
        condition=when,
        from_service=from_service,
        message_type=message_type,
    )
    found = round_.visit(ROLE, lambda connection: stored.review(connection, declared))
    round_.say_failures()
    for where, review in found.items():
        show_review(where, review)
    if found and not dry_run:
        confirm("Write it?", yes=yes, dry_run="show the SQL")
        writing = round_.answering(found)
        done = writing.visit_each(
            ROLE,
            {
                where: partial(_write, declared=declared, shown=review, why=why)
                for where, review in found.items()
            },
        )
        for where, outcome in done.items():
            echo(f"{where}: capture of {found[where].shape.called!r} {outcome}")
    round_.finish(say=True)


def show_review(where: str, review: Review | adoption.Review) -> None:
    """Print the SQL of a review, and triggers that it is to be compared with."""
    for statement in review.statements:
        echo(statement, lines=True)
        echo("")
    if review.others:
        echo(
            f"{where}: triggers of the application fire before it: {', '.join(review.others)}. If "
            "they change rows of this table that their statement has changed, these later changes "
            "are sent first",
        )


def _write(
    connection: psycopg.Connection[Any], declared: Declaration, shown: Review, why: str
) -> Outcome:
    """Write a capture if it is still as shown."""
    with connection.transaction():
        review = stored.review(connection, declared)
        if review.statements != shown.statements:
            raise ConfigurationError(
                f"table {declared.table!r} has changed since its SQL was shown: run it again"
            )
        outcome = stored.put(connection, review)
        if outcome != "unchanged":
            audit(connection, f"{VERBS[outcome]} capture {review.shape.called}", [], why)
    return outcome


@dataclass(frozen=True)
class Looked:
    """A capture, and how it differs from the database."""

    capture: Capture | Adoption
    differences: list[Drift]

    @property
    def state(self) -> str:
        """Its state in one word."""
        return "differs" if self.differences else "active"


def _looked(connection: psycopg.Connection[Any], capture: Capture | Adoption) -> Looked:
    return Looked(capture, drift(connection, capture))


def _one(connection: psycopg.Connection[Any], table: str) -> Capture | Adoption:
    return one_of(connection, adoption.every(connection), table)


@app.command("list")
def list_(*, round_: Brokers, as_json: AsJson = False) -> None:
    """List captures and adoptions, and how they differ from the database."""
    round_.show_rows(
        ROLE,
        lambda connection: [_looked(connection, item) for item in adoption.every(connection)],
        "captures",
        CAPTURES,
        as_json=as_json,
    )


@app.command()
def show(table: TableName, *, round_: Brokers, as_json: AsJson = False) -> None:
    """Show a capture or adoption, its differences, and its command."""
    found = round_.visit(ROLE, lambda connection: _looked(connection, _one(connection, table)))

    def say() -> None:
        for where, looked in found.items():
            listing = Listing("", where)
            for title, text in _details(looked):
                if text:
                    listing.add(title, text)
            listing.show()

    rows = [{"broker": where, **_plain(looked)} for where, looked in found.items()]
    round_.report({"captures": rows}, say, as_json=as_json)


@app.command()
def remove(table: TableName, *, why: Why = "", yes: Yes = False, round_: Brokers) -> None:
    """Remove a capture or adoption, with triggers, function and backfills.

    Messages that were sent stay. Later changes of the table are not sent.
    """
    found = round_.visit(ROLE, lambda connection: _one(connection, table))
    round_.say_failures()
    if found:
        tables = ", ".join(f"{where} {item.called}" for where, item in found.items())
        confirm(f"Remove the capture of {tables}? Later changes are not sent.", yes=yes)

    def drop(connection: psycopg.Connection[Any], capture: Capture | Adoption) -> None:
        with connection.transaction():
            stored.remove(connection, capture)
            audit(connection, f"remove capture {capture.called}", [], why)

    removing = round_.answering(found)
    done = removing.visit_each(
        ROLE, {where: partial(drop, capture=item) for where, item in found.items()}
    )
    for where in done:
        echo(f"{where}: capture of {found[where].called!r} removed")
    round_.finish(say=True)


class WithRun(Panels):
    """A group whose first word may be a table: `saf backfill orders` runs a backfill."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return a command and its words; a word that is no command is a table."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().resolve_command(ctx, args)


backfills = Commands(
    cls=WithRun,
    help="Backfills: send the rows of a captured table; `saf backfill TABLE`.",
)


@backfills.command()
def run(
    table: TableName,
    *,
    where: Annotated[
        str | None,
        typer.Option(metavar="SQL", help="Only rows for which this is true. Default: all."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Rate limit, e.g. 5000/s. Default: unlimited."),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(metavar="ROWS", help="Maximum rows per transaction. Default: 1000."),
    ] = None,
    why: Why = "",
    round_: Brokers,
) -> None:
    """Send the existing rows of a captured table, or continue after a stop.

    `saf backfill TABLE` does the same. Each message has "op": "read", and the header saf-backfill.
    """
    wanted = Wanted(condition=where, chunk_rows=chunk, rate=rate)

    def begin(connection: psycopg.Connection[Any], stopping: Any) -> Ran:
        capture = named(connection, table)
        if backfill.open_backfill(connection, capture) is None:
            audit(connection, f"backfill {capture.called}", [], why)
        return backfill.run(connection, capture, wanted, stopping)

    done = round_.decide(ROLE, dict.fromkeys(round_.brokers, begin))
    round_.say_failures()
    for name, ran in done.items():
        echo(f"{name}: {_told(ran)}")
    round_.finish(say=True)


def _told(ran: Ran) -> str:
    sent = f"{counted(ran.messages, 'message')} of {ran.backfill.called!r}"
    if ran.state == "done":
        return f"{sent}, done; {counted(ran.backfill.messages, 'message')} in all"
    if ran.state == "cancelled":
        return f"{sent}, and then it was cancelled"
    reason = "it was paused" if ran.state == "paused" else "it was stopped"
    command = "resume" if ran.state == "paused" else "run"
    return f"{sent}, and then {reason}: `saf backfill {command} {ran.backfill.called}`"


@backfills.command("list")
def list_backfills(*, round_: Brokers, as_json: AsJson = False) -> None:
    """List backfills and their progress."""
    round_.show_rows(ROLE, backfill.backfills, "backfills", BACKFILLS, as_json=as_json)


@backfills.command()
def pause(table: TableName, *, why: Why = "", round_: Brokers) -> None:
    """Pause a backfill: its run ends after the current chunk."""
    _decide(round_, table, "pause", why)


@backfills.command()
def resume(table: TableName, *, why: Why = "", round_: Brokers) -> None:
    """End a pause. Then `saf backfill TABLE` continues."""
    _decide(round_, table, "resume", why)


@backfills.command()
def cancel(table: TableName, *, why: Why = "", round_: Brokers) -> None:
    """End a backfill before it is complete.

    Messages that were sent stay. The next backfill begins with the first row.
    """
    _decide(round_, table, "cancel", why)


DECISIONS = {
    "pause": (backfill.pause, "paused"),
    "resume": (backfill.resume, "may continue: `saf backfill {}`"),
    "cancel": (backfill.cancel, "cancelled"),
}


def _decide(round_: Round, table: str, verb: str, why: str) -> None:
    action, words = DECISIONS[verb]

    def decide(connection: psycopg.Connection[Any]) -> Backfill:
        with connection.transaction():
            capture = named(connection, table)
            found = backfill.open_backfill(connection, capture)
            if found is None:
                raise ConfigurationError(f"table {capture.called!r} has no open backfill")
            action(connection, found)
            audit(connection, f"{verb} backfill {capture.called}", [], why)
        return found

    round_.tell(
        ROLE, decide, lambda found: f"backfill of {found.called!r} {words.format(found.called)}"
    )


def _plain(looked: Looked) -> dict[str, Any]:
    capture = looked.capture
    same = {
        "table": capture.called,
        "service": capture.to_service,
        "from_service": capture.from_service,
        "message_type": capture.message_type,
    }
    if isinstance(capture, Adoption):
        own: dict[str, Any] = {
            "key": capture.fields.get("key"),
            "columns": list(capture.columns),
            "where": capture.condition,
            "fields": dict(capture.fields),
            "rows": capture.rows,
            "mark": dict(capture.mark),
            "order": capture.order,
            "old": capture.old,
        }
    else:
        own = {
            "key": capture.key,
            "columns": list(capture.columns),
            "when": capture.condition,
        }
    return {
        **same,
        **own,
        "primary_key": list(capture.primary_key),
        "function": f"saf.{capture.function}",
        "created_at": capture.created_at.isoformat(),
        "changed_at": capture.changed_at.isoformat(),
        "differences": [found.what for found in looked.differences],
    }


def _details(looked: Looked) -> Iterator[tuple[str, str]]:
    capture = looked.capture
    yield "table", capture.called
    for number, found in enumerate(looked.differences):
        yield "" if number else "differs", found.what
    yield "to", _service(capture)
    yield "sent by", capture.from_service or ""
    if isinstance(capture, Adoption):
        yield "type", capture.message_type or ""
        yield from capture.fields.items()
        yield "where", capture.condition or ""
        yield "rows", fate(capture)
        yield "old rows", old_rows(capture)
    else:
        yield (
            "types",
            ", ".join(f"{capture.message_type}.{op}" for op in ("insert", "update", "delete")),
        )
        yield "key", capture.key
        yield "columns", ", ".join(capture.columns)
        yield "when", capture.condition or ""
        yield "rows matched by", ", ".join(capture.primary_key)
    yield "function", f"saf.{capture.function}"
    yield "added", at(capture.created_at)
    yield "changed", at(capture.changed_at)
    yield (
        "written by",
        adoption.typed(capture) if isinstance(capture, Adoption) else stored.typed(capture),
    )


def _service(capture: Capture | Adoption) -> str:
    if isinstance(capture, Adoption) and capture.to_service is None:
        return capture.fields["to_service"]
    return str(capture.to_service)


def _key(capture: Capture | Adoption) -> str:
    return capture.fields.get("key", "") if isinstance(capture, Adoption) else capture.key


def fate(shape: rows.Shape) -> str:
    """Return what becomes of rows, in words."""
    if shape.rows == "mark":
        return "marked: " + ", ".join(f"{name} = {text}" for name, text in shape.mark.items())
    words = {"keep": "stay as they are", "delete": "are deleted", "instead": "are not written"}
    return words[shape.rows]


def old_rows(shape: rows.Shape) -> str:
    """Return what becomes of rows that existed before, in words."""
    if not shape.old:
        return "left to the old relay"
    return f"sent once, in the order of {shape.order or ', '.join(shape.primary_key)}"


CAPTURES = Table[Looked](
    *("table", "service", "key", "columns", "adopted", "state"),
    things="captures",
    below="differs",
    sparse=("adopted",),
    cells=lambda row: (
        row.capture.called, _service(row.capture), _key(row.capture),
        f"{len(row.capture.columns):,}",
        row.capture.rows if isinstance(row.capture, Adoption) else "", row.state,
        "; ".join(found.what for found in row.differences),
    ),
    plain=_plain,
)  # fmt: skip
BACKFILLS = Table[Backfill](
    *("table", "number", "state", "messages", "up to", "locked", "rate", "last chunk"),
    things="backfills",
    below="where",
    sparse=("where", "locked", "rate"),
    cells=lambda row: (
        row.called, str(row.backfill_id), row.state, f"{row.messages:,}",
        ", ".join(row.last_key or ()), f"{row.left_over:,}" if row.left_over else "",
        row.rate or "", "" if row.chunk_at is None else at(row.chunk_at), row.condition or "",
    ),
)  # fmt: skip
