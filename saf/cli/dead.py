"""Dead letters: ``saf dead`` shows the messages set aside for an operator, and runs decisions.

The decisions are those of `saf.cli.decisions`. Their ``--dry-run`` lists the matches.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from saf.cli.brokers import GREATEST, After, AsJson, Before, Brokers, DryRun, Limit, Round
from saf.cli.console import write
from saf.cli.decisions import MOST, Key, Service, add_decisions, numbers
from saf.cli.options import Options, grouped
from saf.cli.tables import Table
from saf.errors import UsageError
from saf.operating.wording import at, counted
from saf.setaside import audit, dead
from saf.setaside.audit import Audited
from saf.setaside.dead import REASONS
from saf.setaside.selection import DeadLetter, DeadLetters
from saf.setaside.staying import WHY

app = typer.Typer(no_args_is_help=True, help="Messages that need an operator's decision.")


Reason = Annotated[str | None, typer.Option(help=f"One of {', '.join(REASONS)}.")]
Destination = Annotated[str | None, typer.Option(help="Only messages for this destination.")]
Subscription = Annotated[
    str | None, typer.Option(help="Only dead letters of this subscription, such as forwarder.")
]
Error = Annotated[
    str | None, typer.Option(help="Only dead letters whose error contains this text.")
]


def _selection(*, ids: list[int] | None, **criteria: Any) -> DeadLetters:
    found = DeadLetters(numbers=ids or None, **criteria)
    if found.reason is not None and found.reason not in REASONS:
        raise UsageError(f"--reason {found.reason}: the reasons are {', '.join(REASONS)}")
    return found


CRITERIA = Options(
    {
        "ids": numbers("saf dead list"),
        "reason": Reason,
        "service": Service,
        "destination": Destination,
        "key": Key,
        "before": Before,
        "subscription": Subscription,
        "error": Error,
    },
    make=_selection,
)

LETTERS = Table[DeadLetter](
    *("number", "when", "subscription", "reason", "service", "key", "bytes"),
    below="error",
    cells=lambda row: (
        str(row.dead_letter_id), at(row.dead_letter_at), row.subscription, row.reason, row.service,
        row.key or "", f"{row.bytes:,}",
        row.error if row.stays is None else f"{row.error} ({WHY[row.stays]})",
    ),
)  # fmt: skip
AUDIT = Table[Audited](
    *("when", "who", "person", "action", "messages"),
    below="why",
    cells=lambda row: (
        at(row.audit_at), row.who, row.person or "", row.action, f"{row.messages:,}", row.why
    ),
)  # fmt: skip


@app.command("list")
@grouped
def list_(
    *,
    round_: Brokers,
    criteria: Annotated[DeadLetters, CRITERIA],
    after: After = None,
    limit: Limit = 100,
    count: Annotated[bool, typer.Option("--count", help="Count without listing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show dead letters, oldest first."""
    criteria = criteria.going_on(after)
    round_.go_on(after)
    if count:
        _show_count(round_, criteria, as_json=as_json)
    else:
        _show(round_, criteria, limit, as_json=as_json)


@app.command("audit")
@grouped
def audit_(
    *,
    round_: Brokers,
    limit: Limit = 100,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """Show operators' decisions about messages, the latest first.

    Each decision has its reason.
    """
    before = audit.place_at(after)
    round_.go_on(after)
    pages = round_.visit("dead", lambda connection, _: audit.page(connection, limit, before))
    round_.show_pages("audit", pages, AUDIT, as_json=as_json)


@app.command()
@grouped
def show(
    number: Annotated[
        int, typer.Argument(max=GREATEST, help="Number, as `saf dead list` shows it.")
    ],
    *,
    round_: Brokers,
) -> None:
    """Write the body of a dead letter to standard output.

    On a terminal, the body is shown as text.
    """
    round_.only(number)
    for body in round_.visit("dead", lambda connection, _: dead.body(connection, number)).values():
        if body is None:
            raise UsageError(f"no dead letter {number}; see `saf dead list`")
        write(body)
    round_.finish(say=True)


def _show_count(round_: Round, criteria: DeadLetters, *, as_json: bool) -> None:
    found = round_.visit("dead", lambda connection, _: criteria.count(connection, MOST))
    counts = {name: row.messages for name, row in found.items()}
    lines = (f"{name}: {counted(count, 'dead letter')}" for name, count in counts.items())
    round_.say({"dead_letters": counts}, lines, as_json=as_json)


def _show(
    round_: Round,
    criteria: DeadLetters,
    limit: int | None = None,
    *,
    to: str | None = None,
    as_json: bool,
) -> None:
    pages = round_.visit("dead", lambda connection, _: criteria.page(connection, limit, to=to))
    round_.show_pages("dead_letters", pages, LETTERS, as_json=as_json)


add_decisions(
    app,
    "dead",
    CRITERIA,
    _show,
    DryRun,
    retry="""Deliver dead letters again, in order.

    The forwarder or their receivers deliver them.
    """,
    discard="Give dead letters up for good.",
    redirect="""Deliver dead letters again, to another destination.

    The forwarder delivers them. Dead letters of receivers and of dialogs stay, and are counted.
    """,
)
