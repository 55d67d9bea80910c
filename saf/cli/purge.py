"""``saf purge``: empty the slots of the logs that nobody needs any more."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from saf.config import Broker, Settings, load
from saf.database import check_schema, unavailable_if_lost
from saf.errors import ConfigurationError, SafError
from saf.maintenance import Outcome, purge_broker

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

MEANING = {
    "current": "ids are drawn from it",
    "rotated": "left for the next slot; it goes when it is old enough",
    "rotatable": "would be left for the next slot",
    "retained": "holds messages younger than the retention",
    "unread": "no subscription has read it",
    "locked": "a transaction that has written or read it goes on: try again",
    "changed": "a message came in meanwhile: try again",
    "purged": "",
    "purgeable": "would be purged",
}


def _seconds(duration: str) -> float:
    """A duration in seconds.

    >>> _seconds("7d"), _seconds("12h"), _seconds("1.5m"), _seconds("0")
    (604800.0, 43200.0, 90.0, 0.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", duration)
    if match is None:
        raise typer.BadParameter(f"{duration!r} is no duration such as 7d, 12h, 30m, 90s or 0")
    return float(match[1]) * UNITS[match[2]]


def command(
    *,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration file. Default: $SAF_CONFIG, or saf.toml in this folder."),
    ] = None,
    broker: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this one. Default: all brokers.")
    ] = None,
    retention: Annotated[
        float | None,
        typer.Option(
            parser=_seconds,
            metavar="DURATION",
            help="Keep younger messages: 7d, 12h, 30m, 0. Default: purge.retention_seconds.",
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(help="Folder for the messages as Parquet. Default: purge.archive, or none."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Purge old messages that every subscription has completed, a slot of the log at a time.

    Safe at any time and as often as you like; what cannot go now is kept and said.
    """
    settings = load(config)
    changes = {"retention_seconds": retention, "archive": archive}
    rules = settings.purge.model_copy(
        update={name: value for name, value in changes.items() if value is not None}
    )
    settings = settings.model_copy(update={"purge": rules})
    known: dict[str, Outcome] = {}
    failed: list[tuple[str, SafError]] = []
    for name, source in _chosen(settings, broker).items():
        try:
            known[name] = _purge(name, source, settings, dry_run=dry_run)
        except SafError as error:
            failed.append((name, error))
    if as_json:
        errors = [{"broker": name, "error": str(problem)} for name, problem in failed]
        brokers = [_as_dict(name, outcome) for name, outcome in known.items()]
        typer.echo(json.dumps({"dry_run": dry_run, "brokers": brokers, "errors": errors}))
    else:
        if known:
            Console().print(_table(known))
        for name, problem in failed:
            typer.echo(f"saf: broker {name!r}: {problem}", err=True)
    if failed:
        raise typer.Exit(max(problem.exit_code for _, problem in failed))


def _chosen(settings: Settings, name: str | None) -> dict[str, Broker]:
    if name is None:
        return settings.brokers
    if name not in settings.brokers:
        there = ", ".join(settings.brokers)
        raise ConfigurationError(f"--broker {name}: there is no [brokers.{name}], only {there}")
    return {name: settings.brokers[name]}


def _purge(name: str, broker: Broker, settings: Settings, *, dry_run: bool) -> Outcome:
    rules, archive = settings.purge, None
    if rules.archive is not None and not dry_run:
        from saf.archive import ParquetArchive  # needs the extra, and says so

        archive = ParquetArchive(broker.dsn, rules.archive)
    with (
        unavailable_if_lost(f"broker {name!r}"),
        broker.dsn.connect(role="purge", autocommit=True) as connection,
    ):
        check_schema(connection)
        return purge_broker(
            connection,
            retention_seconds=rules.retention_seconds,
            rotate_after_seconds=rules.rotate_after_seconds,
            archive=archive,
            dry_run=dry_run,
        )


def _as_dict(name: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "broker": name,
        "busy": outcome.busy,
        "slots": [
            {**asdict(slot), "archive": slot.archive and str(slot.archive)}
            for slot in outcome.slots
        ],
        "route_versions": outcome.route_versions,
    }


def _table(known: dict[str, Outcome]) -> Table:
    table = Table("broker", "log", "slot", "state", "messages", "why")
    for name, outcome in known.items():
        if outcome.busy:
            table.add_row(name, "", "", "busy", "", "another purge is at work")
        for slot in outcome.slots:
            if slot.state == "empty":
                continue
            why = MEANING.get(slot.state, f"subscription {slot.subscription!r} has not read all")
            table.add_row(
                name,
                slot.log,
                str(slot.number),
                slot.state,
                "" if slot.messages is None else f"{slot.messages:,}",
                str(slot.archive or why),
            )
    return table
