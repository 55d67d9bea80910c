"""``saf broker`` and ``saf fleet``: brokers with their identities, and the members of fleets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from saf.cli.brokers import AsJson, Commands, Config, Everywhere, Round, round_at
from saf.cli.console import Table, echo
from saf.config import Broker, load
from saf.database import unavailable_if_lost
from saf.errors import UsageError
from saf.operating.places import Member, destinations_at, everywhere, is_source, memory
from saf.operating.repair.new_id import Renewed, give_new_id, place
from saf.operating.status import Identity, identity
from saf.operating.wording import counted

app = Commands(help="Brokers: the databases with the schema saf.")
fleets = Commands(help="Fleets: their members, and the missing ones.")


@dataclass(frozen=True, kw_only=True)
class Used:
    """A broker, and how saf.toml uses it."""

    name: str
    is_source: bool
    destinations: list[str]
    """Its names as a destination."""
    identity: Identity

    @property
    def roles(self) -> list[str]:
        """Its roles: source, destination, or both."""
        return ["source"] * self.is_source + ["destination"] * bool(self.destinations)

    def __str__(self) -> str:
        names = "" if self.destinations == [self.name] else f" {', '.join(self.destinations)}"
        return f"{' and '.join(self.roles)}{names}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Return the broker as a dict for JSON."""
        used = {"used_as": self.roles, "destinations": self.destinations}
        return {**used, **self.identity.as_dict()}


BROKERS = Table[Used](
    *("broker_id", "used as", "database", "shards", "schema", "PostgreSQL"),
    things="brokers",
    cells=lambda row: (
        str(row.identity.broker_id), str(row), row.identity.database, str(row.identity.shards),
        row.identity.schema, row.identity.postgresql,
    ),
)  # fmt: skip
MEMBERS = Table[Member](
    *("member", "broker_id", "missing since"),
    things="known members of fleets",
    cells=lambda member: (
        member.name, str(member.broker_id or ""), member.missing_since or ""
    ),
)  # fmt: skip


@app.command("list")
def list_(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """List the brokers with their broker_ids.

    Routes by broker, and messages to one broker, name the broker_id. The list also shows whether
    saf.toml has the broker as a source, as a destination, or as both: such a broker is listed by
    its name as a source, with its names as a destination.
    """
    found = round_.visit("broker", identity)
    rows = {name: [_used(round_, name, row)] for name, row in found.items()}
    answer = {"brokers": BROKERS.plain(rows)}
    round_.report(answer, lambda: BROKERS.show(rows), as_json=as_json)


@app.command("new-id")
def new_id(
    *,
    config: Config = None,
    broker: Annotated[
        str, typer.Option("--broker", metavar="NAME", help="Name of the copy in saf.toml.")
    ],
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Confirm that the original is not in saf.toml: the copy keeps pending messages.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Give a copy of a broker its own broker_id.

    A copy, such as one by CREATE DATABASE … TEMPLATE, has its original's broker_id. This command
    gives it a new one. The original still sends the messages that were pending when the copy was
    made. Log in as the owner of the copy's schema, and stop its forwarders and receivers.
    """
    round_ = round_at(everywhere, config, None)
    places = round_.visit("broker", place)
    for name, item in round_.brokers.items():
        if broker in destinations_at(round_.settings, item):
            broker = name
    if broker not in places:
        reason = dict(round_.failed).get(broker) or f"saf.toml names no broker {broker!r}"
        raise UsageError(f"--broker {broker}: {reason}")
    own = places[broker]
    originals = [
        name
        for name, other_place in places.items()
        if other_place.broker_id == own.broker_id and other_place.database != own.database
    ]
    if not (originals or alone):
        raise UsageError(
            f"no other broker of saf.toml has the broker_id of {broker!r}, {own.broker_id}: add "
            "--alone if it is a copy of a broker that is not in saf.toml"
        )
    original = None if alone else originals[0]

    def renew(name: str, target: Broker) -> Renewed:
        with (
            unavailable_if_lost(f"broker {name!r}"),
            target.dsn.connect(role="rebase", autocommit=True) as copy,
        ):
            if original is None:
                return give_new_id(copy, None)
            with round_.brokers[original].dsn.connect(role="rebase", autocommit=True) as other:
                return give_new_id(copy, other)

    copy = round_.among([broker])
    for name, done in copy.each(renew).items():
        if as_json:
            row = asdict(done) | {"broker": name, "broker_id": str(done.broker_id)}
            echo(json.dumps(row | {"original": original, "errors": []}))
            continue
        echo(f"{name}: now broker {done.broker_id}")
        if original is not None:
            echo(f"{name}: {counted(done.given_up, 'message')} left for {original} to send")
        echo(f"{name}: {counted(done.waiting, 'message')} of its own still to send")
        if done.open_dialogs:
            echo(
                f"{name}: {counted(done.open_dialogs, 'open dialog')}, whose other ends know the "
                "original: let its application end them here"
            )
    copy.finish(say=True)


@fleets.command("list")
def list_members(config: Config = None, as_json: AsJson = False) -> None:
    """List the members of fleets that forwarders have met.

    A member that its fleet no longer lists is missing: its database was dropped or renamed, or
    allows no connections.
    """
    settings = load(config)
    registry = memory(settings)
    known = registry.known(list(settings.fleets)) if registry is not None else []
    if as_json:
        echo(json.dumps({"members": [member.as_dict() for member in known]}))
    else:
        MEMBERS.show_rows(known)


@fleets.command()
def forget(
    members: Annotated[
        list[str], typer.Argument(metavar="FLEET/NAME…", help="Names of the members.")
    ],
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


def _used(round_: Round, name: str, found: Identity) -> Used:
    return Used(
        name=name,
        is_source=is_source(round_.settings, name),
        destinations=destinations_at(round_.settings, round_.brokers[name]),
        identity=found,
    )
