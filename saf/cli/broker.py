"""``saf broker``: which brokers saf.toml names, and who they are."""

from __future__ import annotations

import json

import typer

from saf.cli.brokers import AsJson, Config, Round, Where, everywhere
from saf.cli.console import echo
from saf.cli.listing import Listing
from saf.config import Settings, load
from saf.operating.identity import identity

app = typer.Typer(no_args_is_help=True, help="Brokers: the databases with the schema saf.")


@app.command("list")
def list_(config: Config = None, broker: Where = None, as_json: AsJson = False) -> None:
    """Show each broker with its broker_id.

    Routes by broker, and messages to one broker, name the broker_id. It says also whether saf.toml
    has the broker as a source, as a destination, or as both.
    """
    settings = load(config)
    round_ = Round(everywhere(settings, broker))
    found = round_.visit("broker", lambda connection, _: identity(connection))
    if as_json:
        rows = [
            {"broker": name, "used_as": _used_as(settings, name), **one.as_dict()}
            for name, one in found.items()
        ]
        echo(json.dumps({"brokers": rows, "errors": round_.errors()}))
    else:
        listing = Listing(
            *("broker", "broker_id", "used as", "database", "shards", "schema", "PostgreSQL"),
        )
        for name, one in found.items():
            listing.add(
                name, str(one.broker_id), " and ".join(_used_as(settings, name)), one.database,
                str(one.shards), one.schema, one.postgresql,
            )  # fmt: skip
        listing.show()
    round_.finish(say=not as_json)


def _used_as(settings: Settings, name: str) -> list[str]:
    source = name in settings.brokers or name.partition("/")[0] in settings.fleets
    return ["source"] * source + ["destination"] * (name in settings.destinations)
