"""``saf apply`` and ``saf export``: the desired state of brokers, from a file and into one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer

from saf.cli.brokers import AsJson, Config, Everywhere, Round, Where, Yes
from saf.cli.console import Table, confirm, echo
from saf.cli.route import warn_of_early
from saf.config import Settings, load
from saf.database import Dsn
from saf.errors import ConfigurationError
from saf.operating.places import Listing as Found
from saf.operating.places import chosen
from saf.operating.plans.difference import Change, Difference, broker_id, difference, listed
from saf.operating.plans.difference import apply as make_good
from saf.operating.plans.file import BrokerPlan, Plan, as_tables, broker_plan, check, document, read
from saf.operating.plans.tables import OTHER, Entries

HEADER = (
    "# What the brokers had when `saf export` ran; `saf apply FILE` creates it again.",
    "# A missing table stays unchanged; an empty table means that no entry exists.",
)

CHANGES = Table[Change](
    *("to do", "what"),
    things="changes",
    below="with",
    cells=lambda change: (
        change.action, change.table.described(change.key), "; ".join(change.details())
    ),
)  # fmt: skip


def command(
    file: Annotated[Path, typer.Argument(help="Plan in TOML; see docs/setting-up.md.")],
    *,
    yes: Yes = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the difference without changing it.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove entries that the plan's tables do not name.")
    ] = False,
    discard: Annotated[
        bool,
        typer.Option(
            "--discard",
            help="With --prune: remove services that have messages left, and discard these.",
        ),
    ] = False,
    allow_breaking: Annotated[
        bool,
        typer.Option(
            "--allow-breaking",
            help="Create versions of message types even if they reject older bodies.",
        ),
    ] = False,
    config: Config = None,
    broker: Where = None,
    as_json: AsJson = False,
) -> None:
    """Apply a plan: create what is missing, after asking.

    It shows the difference first. All changes of one broker are one transaction. Repeating it
    changes nothing. Entries that the plan does not name stay, unless --prune is given.
    """
    settings, plan = load(config), read(file)
    check(plan, settings)
    places, wanted = _wanted(settings, file, plan, broker)
    round_ = Round(places, settings)

    def compare(connection: psycopg.Connection[Any], dsn: Dsn) -> tuple[str, Difference]:
        return broker_id(connection), difference(connection, wanted[dsn], prune=prune)

    found = round_.visit_each(
        "apply", {name: partial(compare, dsn=item.dsn) for name, item in places.brokers.items()}
    )
    _refuse_twins({name: identity for name, (identity, _) in found.items()})
    differences = {name: item for name, (_, item) in found.items()}
    to_do = {name: item for name, item in differences.items() if item.changes}
    if not as_json:
        show(differences)
    warn_of_early(settings, _new_destinations(to_do.values()))
    if to_do and not dry_run:
        if not allow_breaking:
            _refuse_breaking(to_do)
        confirm("Apply it?", yes=yes, dry_run="see the difference", as_json=as_json)
        changing = round_.among(to_do)
        done = changing.visit_each(
            "apply",
            {
                name: partial(
                    make_good,
                    wanted=wanted[places.brokers[name].dsn],
                    shown=item,
                    prune=prune,
                    discard=discard,
                )
                for name, item in to_do.items()
            },
        )
        round_.failed += changing.failed
        if not as_json:
            for name in done:
                echo(f"{name}: done")
    else:
        done = {}
    if as_json:
        rows = [{"broker": name, **_as_dict(item)} for name, item in differences.items()]
        applied = sorted(done)
        echo(json.dumps({"brokers": rows, "applied": applied, "errors": round_.errors()}))
    round_.finish(say=not as_json)


def export(*, round_: Everywhere) -> None:
    """Export everything that brokers have, as a plan."""
    found = round_.visit("export", _listed)
    for line in _exported(found):
        echo(line)
    round_.finish(say=True)


def show(differences: Mapping[str, Difference]) -> None:
    """Print the changes to make, and what stays."""
    CHANGES.show_any({name: item.changes for name, item in differences.items()})
    if differences and not any(item.changes for item in differences.values()):
        echo("nothing to do: the brokers match the plan")
    for name, item in differences.items():
        if item.refused:
            others = ", ".join(f"{service} ({count:,})" for service, count in item.refused.items())
            echo(
                f"{name}: these are its first services, so messages for other services will wait; "
                f"its inbox has some for {others}"
            )
        if item.any_again:
            echo(f"{name}: no service will be left, so it stores messages for any service again")
        if item.only_senders:
            echo(f"{name}: these are its first rules for senders, so nobody can send without one")
        if item.any_sender:
            echo(f"{name}: no rule for senders will be left, so any writer may send as any service")
        for reason in item.breaking:
            echo(f"{name}: {reason}")
        if item.kept:
            kept = ", ".join(table.described(key) for table, key in item.kept)
            echo(f"{name}: not in the plan, and kept: {kept}")


def _wanted(
    settings: Settings, file: Path, plan: Plan, only: str | None
) -> tuple[Found, dict[Dsn, Mapping[str, Entries]]]:
    """Return the brokers of a plan, and the desired state of each."""
    places = Found()
    wanted: dict[Dsn, Mapping[str, Entries]] = {}
    plans = {name: entry for name, entry in plan.brokers.items() if only in (None, name)}
    if not plans:
        raise ConfigurationError(f"--broker {only}: {file} has no [brokers.{only}]")
    for name, entry in plans.items():
        found = chosen(settings, name, named_by=f"{file}: broker")
        brokers = found.brokers if isinstance(found, Found) else found
        places.problems += found.problems if isinstance(found, Found) else []
        for place, broker in brokers.items():
            names = [other for other, entry in places.brokers.items() if entry.dsn == broker.dsn]
            _refuse_twins(dict.fromkeys((*names, place), place))
            places.brokers[place] = broker
            wanted[broker.dsn] = entry.entries()
    return places, wanted


def _new_destinations(differences: Iterable[Difference]) -> list[str]:
    """Return the destinations of created routes, sorted."""
    found = {
        change.key[change.table.key.index("destination")]
        for item in differences
        for change in item.changes
        if change.table.name == "routes" and change.action == "create"
    }
    return sorted(found)


def _refuse_twins(identities: Mapping[str, str]) -> None:
    """Raise if two names of a plan are the same broker: each would undo the other's changes."""
    names: dict[str, str] = {}
    for name, identity in identities.items():
        if (other := names.setdefault(identity, name)) != name:
            raise ConfigurationError(f"{other!r} and {name!r} of the plan are the same broker")


def _refuse_breaking(differences: Mapping[str, Difference]) -> None:
    """Raise if a new version of a message type rejects bodies of the version before."""
    found = [f"{name}: {reason}" for name, item in differences.items() for reason in item.breaking]
    if found:
        raise ConfigurationError(
            f"{'; '.join(found)}. Nothing is changed. Write an upcaster "
            "(docs/typed-messages.md), or add --allow-breaking"
        )


def _as_dict(comparison: Difference) -> dict[str, Any]:
    return {
        "changes": [
            {
                "action": change.action,
                "what": change.table.described(change.key),
                "with": list(change.details()),
            }
            for change in comparison.changes
        ],
        "kept": [table.described(key) for table, key in comparison.kept],
        "others_wait": dict(comparison.refused),
        "any_again": comparison.any_again,
        "only_senders": comparison.only_senders,
        "any_sender": comparison.any_sender,
        "breaking": list(comparison.breaking),
    }


def _listed(connection: psycopg.Connection[Any]) -> tuple[str, Entries, dict[str, Any]]:
    """Return a broker's identity, the rights of its roles, and its plan as tables."""
    entries = listed(connection)
    return broker_id(connection), entries["grants"], as_tables(_kinds_only(entries))


def _exported(found: Mapping[str, tuple[str, Entries, dict[str, Any]]]) -> Iterator[str]:
    yield from HEADER
    yield ""
    names: dict[str, str] = {}
    for name, (identity, grants, tables) in found.items():
        if (other := names.setdefault(identity, name)) != name:
            yield from (f"# {name} is the same broker as {other}", "")
            continue
        for role, values in grants.items():
            if OTHER in values["kinds"]:
                yield f"# {name}: role {role[0]} has rights that no kind of `saf grant` gives"
        yield from document({"brokers": {name: tables}})


def _kinds_only(entries: Mapping[str, Entries]) -> BrokerPlan:
    """Return a broker's plan, without rights that no plan can give."""
    known: Entries = {
        role: {"kinds": [kind for kind in values["kinds"] if kind != OTHER]}
        for role, values in entries["grants"].items()
    }
    grants = {role: values for role, values in known.items() if values["kinds"]}
    return broker_plan({**entries, "grants": grants})
