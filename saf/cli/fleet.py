"""``saf fleet``: the members of fleets that forwarders have met, and those that are missing."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from saf.cli.brokers import AsJson, Config
from saf.cli.console import Listing, echo
from saf.config import load
from saf.errors import UsageError
from saf.fleets import memory

app = typer.Typer(no_args_is_help=True, help="Members of fleets, and which are missing.")


@app.command("list")
def list_(config: Config = None, as_json: AsJson = False) -> None:
    """Show the members of fleets that forwarders have met.

    A member that its fleet no longer lists is missing: its database was dropped or renamed, or
    allows no connections.
    """
    settings = load(config)
    registry = memory(settings)
    known = registry.known(list(settings.fleets)) if registry is not None else []
    if as_json:
        rows = [
            {
                "member": member.name,
                "fleet": member.fleet,
                "broker_id": member.broker_id and str(member.broker_id),
                "missing_since": member.missing_since,
            }
            for member in known
        ]
        echo(json.dumps({"members": rows}))
        return
    listing = Listing("member", "broker_id", "missing since")
    for member in known:
        listing.add(member.name, str(member.broker_id or ""), member.missing_since or "")
    listing.show()


@app.command()
def forget(
    members: Annotated[list[str], typer.Argument(metavar="FLEET/NAME…", help="The members.")],
    *,
    config: Config = None,
) -> None:
    """Forget members that are gone for good.

    A member that its fleet still lists is remembered again by the next run.
    """
    registry = memory(load(config))
    if registry is None:
        raise UsageError("no destination of saf.toml is a broker, so no member is remembered")
    for name in members:
        if not registry.forget(name.partition("/")[0], name):
            raise UsageError(f"no forwarder has met {name!r}: `saf fleet list` shows the members")
        echo(f"{name} is forgotten")
