"""``saf dialog`` and ``saf contract``: ends of conversations, and contracts of their messages.

A contract is created from a file, which both ends get.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import After, AsJson, Commands, Everywhere, Limit, Round, Yes
from saf.cli.console import Table, confirm, echo, results_of
from saf.config import ENCODING
from saf.dialogs.contracts import contracts, create_contract, create_message_type
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
from saf.errors import ConfigurationError, DialogNotFound, UsageError
from saf.operating.wording import at, counted

app = Commands(help="Conversations: dialogs and monologs.")

Handle = Annotated[UUID, typer.Argument(help="Handle of the end, as `saf dialog list` shows it.")]
StateOption = Annotated[
    list[str] | None,
    typer.Option("--state", help=f"Only ends in this state: {', '.join(State)}."),
]
Service = Annotated[str | None, typer.Option(help="Only ends of this service.")]
Code = Annotated[
    int | None, typer.Option(help="Code of the error to end with, from 1 to 2147483647.")
]
Text = Annotated[str, typer.Option(help="Text of the error for the other end.")]

SIDES = Table[Conversation](
    *("handle", "state", "service", "with", "sent", "received"),
    things="conversations",
    below="error",
    cells=lambda row: (
        str(row.handle), row.state, row.service, row.far_service, str(row.send_sequence),
        _received(row), _error(row),
    ),
)  # fmt: skip

EXCHANGED = Table[Spoken](
    *("log", "when", "number", "from", "type", "bytes"),
    things="messages of the conversation",
    cells=lambda row: (
        row.log, at(row.at), "" if row.sequence is None else str(row.sequence),
        row.from_service or "", row.message_type or "", f"{row.bytes:,}",
    ),
)  # fmt: skip


@app.command("list")
def list_(
    *,
    round_: Everywhere,
    service: Service = None,
    state: StateOption = None,
    limit: Limit = 100,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List conversations, oldest first."""
    place = place_at(after)
    round_.go_on(after)
    round_.show_pages(
        "dialog",
        lambda connection: page(
            connection, limit, service=service, states=state or None, after=place
        ),
        "conversations",
        SIDES,
        as_json=as_json,
        matching=bool(service or state),
    )


@app.command()
def show(handle: Handle, *, round_: Everywhere, as_json: AsJson = False) -> None:
    """Show one end of a conversation, at any broker."""
    found = round_.visit("dialog", lambda connection: conversations(connection, handle=handle))
    sides = SIDES.plain(found)
    lines = (
        f"{name:18}{json.dumps(value) if name == 'group_state' else value}"
        for side in sides
        for name, value in side.items()
    )
    round_.say({"conversations": sides}, lines, as_json=as_json)
    if not sides:
        raise UsageError(f"no conversation {handle}; see `saf dialog list`")


@app.command("exchange")
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
    found = round_.visit("dialog", lambda connection: exchange(connection, conversation_id, limit))
    messages = {name: side.messages for name, side in found.items()}
    round_.report(
        {"exchange": results_of(found)}, lambda: EXCHANGED.show(messages), as_json=as_json
    )


@app.command()
def end(
    handle: Handle,
    *,
    round_: Everywhere,
    code: Code = None,
    text: Text = "ended by an operator",
) -> None:
    """End one end of a dialog in order, or both ends with an error.

    The other end is notified.
    """

    def act(connection: psycopg.Connection[Any]) -> None:
        with connection.transaction():
            dialog = open_dialog(connection, handle)
            if code is None:
                dialog.end(connection)
            else:
                dialog.end_with_error(connection, code, text)

    _where_it_lives(round_, handle, act, "ended")


@app.command()
def cleanup(handle: Handle, *, round_: Everywhere, yes: Yes = False) -> None:
    """Close one end for good, in any state, after asking.

    The other end is not notified.
    """
    confirm(f"Close conversation {handle} without notifying the other end?", yes=yes)
    _where_it_lives(round_, handle, lambda connection: clean_up(connection, handle), "closed")


@app.command("compare")
def compare_(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """Compare both ends of all open dialogs, after a repair.

    The ends compare which messages each has sent and received. Run it after one of the databases
    was set back and repaired: if messages are missing, both ends of the dialog get an Error. Other
    dialogs are not affected, except that dialogs with a dead letter end.
    """

    def let_compare(connection: psycopg.Connection[Any]) -> int:
        with connection.transaction():
            return compare_all(connection)

    found = round_.visit("dialog", let_compare)
    lines = (
        f"{name}: {counted(count, 'end')} will compare, once forwarded"
        for name, count in found.items()
    )
    round_.say({"compared": found}, lines, as_json=as_json)


def _where_it_lives(round_: Round, handle: UUID, act: Any, done: str) -> None:
    def there(connection: psycopg.Connection[Any]) -> bool:
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


agreements = Commands(help="Contracts: the message types of dialogs, and who sends them.")

File = Annotated[
    Path,
    typer.Argument(
        help="TOML file with [[message_types]] and [[contracts]]; see docs/conversations.md."
    ),
]

TYPES = Table[dict[str, object]](
    *("contract", "version", "type", "its version", "sent by", "validation"),
    things="contracts",
    cells=lambda row: [*map(str, row.values())],
    plain=dict,
)


@agreements.command("create")
def create_contracts(file: File, *, round_: Everywhere) -> None:
    """Create message types and contracts from a file, at all brokers.

    Repeating it changes nothing.
    """
    types, named = _read(file)

    def make(connection: psycopg.Connection[Any]) -> int:
        with connection.transaction():
            created = [create_message_type(connection, **entry) for entry in types]
            created += [create_contract(connection, **entry) for entry in named]
        return sum(created)

    wanted = len(types) + len(named)
    round_.tell(
        "contract",
        make,
        lambda created: f"{created} created, {wanted - created} existed",
    )


@agreements.command("list")
def list_contracts(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """List contracts, their message types, and which end sends each."""
    round_.show_rows("contract", _usages, "contracts", TYPES, as_json=as_json)


def _usages(connection: psycopg.Connection[Any]) -> list[dict[str, object]]:
    return [
        {
            "contract": contract.name,
            "version": contract.version,
            "message_type": usage.name,
            "message_type_version": usage.version,
            "sent_by": usage.sent_by,
            "validation": usage.validation,
        }
        for contract in contracts(connection)
        for usage in contract.types.values()
    ]


def _read(file: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the arguments of `create_message_type` and of `create_contract`, from a file.

    Raises:
        ConfigurationError: the file is unreadable or invalid.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding=ENCODING))
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{file}: not TOML: {error}") from None
    known = {
        "message_types": ({"name"}, {"version", "validation", "schema"}),
        "contracts": ({"name", "types"}, {"version"}),
    }
    for table, entries in tables.items():
        if table not in known:
            raise ConfigurationError(f"{file}: unknown {table}, only {', '.join(known)}")
        needed, optional = known[table]
        for number, entry in enumerate(entries):
            if missing := needed - set(entry):
                raise ConfigurationError(f"{file}: {table}.{number}: no {missing.pop()}")
            if wrong := set(entry) - needed - optional:
                raise ConfigurationError(f"{file}: {table}.{number}: unknown {wrong.pop()}")
    return tables.get("message_types", []), tables.get("contracts", [])
