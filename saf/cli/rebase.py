"""``saf rebase``: make a restored broker usable again."""

from __future__ import annotations

import json
from typing import Annotated, Any
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import AsJson, Config, Name, Round, chosen
from saf.cli.console import echo
from saf.config import Settings, load
from saf.database import check_schema, fetch, unavailable_if_lost
from saf.rebase import Known, Rebased, known_at, rebase


def command(
    config: Config = None,
    broker: Name = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also where nothing looks restored.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Repair brokers that were restored from a backup. As their owner; nothing else may run.

    Asks all destinations what they know of each broker, so all have to be there.
    """
    settings = load(config)
    round_ = Round(chosen(settings, broker))

    def repair(connection: psycopg.Connection[Any], _: object) -> Rebased | None:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        return rebase(connection, _known(settings, source), force=force)

    done = round_.visit("rebase", repair)
    if as_json:
        rows = [
            {"broker": name, "rows": result.rows if result else 0,
             "destinations_ahead": result.destinations_ahead if result else []}
            for name, result in done.items()
        ]  # fmt: skip
        echo(json.dumps({"brokers": rows, "errors": round_.errors()}))
    else:
        for name, result in done.items():
            echo(f"{name}: {_words(result)}")
    round_.finish(say=not as_json)


def _known(settings: Settings, source: UUID) -> dict[str, Known]:
    known = {}
    for name, destination in settings.destinations.items():
        with (
            unavailable_if_lost(f"destination {name!r}"),
            destination.dsn.connect(role="rebase", autocommit=True) as connection,
        ):
            check_schema(connection)
            known[name] = known_at(connection, source)
    return known


def _words(result: Rebased | None) -> str:
    if result is None:
        return "was not restored, nothing to do"
    words = f"rebased, {result.rows:,} rows renumbered"
    if result.destinations_ahead:
        words += (
            f"; {', '.join(result.destinations_ahead)} knew later batches: messages that were "
            "delivered after the backup was taken, and are in it, are delivered again"
        )
    return words
