"""``saf dialog``: the ends of conversations that live at a broker."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import (
    After,
    AsJson,
    Config,
    Everywhere,
    Limit,
    Round,
    Where,
    everywhere,
)
from saf.cli.console import echo
from saf.cli.options import grouped
from saf.cli.tables import Table, results_of
from saf.config import load
from saf.dialogs.conversations import (
    Conversation,
    Spoken,
    clean_up,
    conversations,
    exchange,
    page,
    place_at,
)
from saf.dialogs.dialog import open_dialog
from saf.dialogs.set_back import compare_all
from saf.dialogs.statements import State
from saf.errors import DialogNotFound, UsageError
from saf.operating.wording import at

app = typer.Typer(no_args_is_help=True, help="Conversations: dialogs and monologs.")

Handle = Annotated[UUID, typer.Argument(help="Handle of the end, as `saf dialog list` shows it.")]
StateOption = Annotated[
    list[str] | None,
    typer.Option("--state", help=f"Only ends in this state: {', '.join(State)}."),
]
Service = Annotated[str | None, typer.Option(help="Only ends of this service.")]
Code = Annotated[
    int | None, typer.Option(help="End with an error of this code, from 1 to 2147483647.")
]
Text = Annotated[str, typer.Option(help="Text of the error for the other end.")]

SIDES = Table[Conversation](
    *("handle", "state", "service", "with", "sent", "received"),
    below="error",
    cells=lambda row: (
        str(row.handle), row.state, row.service, row.far_service, str(row.send_sequence),
        _received(row), _error(row),
    ),
)  # fmt: skip

EXCHANGED = Table[Spoken](
    *("log", "when", "number", "from", "type", "bytes"),
    cells=lambda row: (
        row.log, at(row.at), "" if row.sequence is None else str(row.sequence),
        row.from_service or "", row.message_type or "", f"{row.bytes:,}",
    ),
)  # fmt: skip


@app.command("list")
@grouped
def list_(
    *,
    round_: Everywhere,
    service: Service = None,
    state: StateOption = None,
    limit: Limit = 100,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """Show conversations, oldest first."""
    place = place_at(after)
    round_.go_on(after)
    pages = round_.visit(
        "dialog",
        lambda connection, _: page(
            connection, limit, service=service, states=state or None, after=place
        ),
    )
    round_.show_pages("conversations", pages, SIDES, as_json=as_json)


@app.command()
@grouped
def show(handle: Handle, *, round_: Everywhere, as_json: AsJson = False) -> None:
    """Show one end of a conversation, at any broker."""
    found = round_.visit("dialog", lambda connection, _: conversations(connection, handle=handle))
    sides = SIDES.plain(found)
    lines = (f"{name:18}{value}" for side in sides for name, value in side.items())
    round_.say({"conversations": sides}, lines, as_json=as_json)
    if not sides:
        raise UsageError(f"no conversation {handle}; see `saf dialog list`")


@app.command("exchange")
@grouped
def exchange_(
    conversation_id: Annotated[
        UUID, typer.Argument(help="Conversation id, as `saf dialog show` shows it.")
    ],
    *,
    round_: Everywhere,
    limit: Limit = 200,
    as_json: AsJson = False,
) -> None:
    """Show the messages of both ends of a conversation.

    It reads the logs of all brokers; purged messages are missing.
    """
    found = round_.visit(
        "dialog", lambda connection, _: exchange(connection, conversation_id, limit)
    )
    messages = {name: side.messages for name, side in found.items()}
    round_.report(
        {"exchange": results_of(found)}, lambda: EXCHANGED.show(messages), as_json=as_json
    )


@app.command()
def end(
    handle: Handle,
    *,
    config: Config = None,
    broker: Where = None,
    code: Code = None,
    text: Text = "ended by an operator",
) -> None:
    """End this side in order, or both with an error.

    The other end is notified.
    """

    def act(connection: psycopg.Connection[Any]) -> None:
        with connection.transaction():
            dialog = open_dialog(connection, handle)
            if code is None:
                dialog.end(connection)
            else:
                dialog.end_with_error(connection, code, text)

    _where_it_lives(Round(everywhere(load(config), broker)), handle, act, "ended")


@app.command()
@grouped
def cleanup(handle: Handle, *, round_: Everywhere) -> None:
    """Close this side for good, in any state.

    The other end is not notified.
    """
    _where_it_lives(round_, handle, lambda connection: clean_up(connection, handle), "closed")


@app.command("compare")
@grouped
def compare_(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """Let the open ends compare with their other ends.

    They compare which messages each has sent and received. Run it after one of the databases was
    set back and repaired: if messages are missing, both ends of the dialog get an Error. Other
    dialogs are not affected, except that dialogs with a dead letter end.
    """

    def let_compare(connection: psycopg.Connection[Any], _: object) -> int:
        with connection.transaction():
            return compare_all(connection)

    found = round_.visit("dialog", let_compare)
    lines = (
        f"{name}: {count} ends compare, as soon as it is forwarded" for name, count in found.items()
    )
    round_.say({"compared": found}, lines, as_json=as_json)


def _where_it_lives(round_: Round, handle: UUID, act: Any, done: str) -> None:
    def there(connection: psycopg.Connection[Any], _: object) -> bool:
        try:
            act(connection)
        except DialogNotFound:
            return False
        return True

    found = [name for name, exists in round_.visit("dialog", there).items() if exists]
    for name in found:
        echo(f"{name}: conversation {handle} {done}")
    if not found and not round_.failed:
        raise UsageError(f"no conversation {handle}; see `saf dialog list`")
    round_.finish(say=True)


def _received(side: Conversation) -> str:
    return f"{side.receive_sequence}" + (f" (+{side.ahead} ahead)" if side.ahead else "")


def _error(side: Conversation) -> str:
    return "" if side.error_code is None else f"{side.error_code}: {side.error_text}"
