"""``saf contract``: the messages of dialogs, from a file that both ends get."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer

from saf.cli.brokers import AsJson, Everywhere
from saf.cli.console import echo
from saf.cli.options import grouped
from saf.cli.tables import Table
from saf.config import ENCODING
from saf.dialogs.contracts import contracts, create_contract, create_message_type
from saf.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, help="Contracts of dialogs, and their message types.")

File = Annotated[
    Path,
    typer.Argument(
        help="TOML with [[message_types]] and [[contracts]]; see docs/conversations.md."
    ),
]

TYPES = Table[dict[str, object]](
    *("contract", "version", "type", "its version", "sent by", "validation"),
    cells=lambda row: [*map(str, row.values())],
    plain=dict,
)


@app.command()
@grouped
def create(file: File, *, round_: Everywhere) -> None:
    """Create message types and contracts from a file.

    At one broker, or at all. Repeating it changes nothing.
    """
    types, named = _read(file)

    def make(connection: psycopg.Connection[Any], _: object) -> int:
        with connection.transaction():
            created = [create_message_type(connection, **entry) for entry in types]
            created += [create_contract(connection, **entry) for entry in named]
        return sum(created)

    for name, created in round_.visit("contract", make).items():
        echo(f"{name}: {created} created, {len(types) + len(named) - created} there already")
    round_.finish(say=True)


@app.command("list")
@grouped
def list_(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """Show contracts, their message types, and which end sends each."""
    found = round_.visit("contract", lambda connection, _: contracts(connection))
    rows = {
        name: [
            {
                "contract": contract.name,
                "version": contract.version,
                "message_type": usage.name,
                "message_type_version": usage.version,
                "sent_by": usage.sent_by,
                "validation": usage.validation,
            }
            for contract in group
            for usage in contract.types.values()
        ]
        for name, group in found.items()
    }
    round_.show_rows("contracts", rows, TYPES, as_json=as_json)


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
