"""``saf rebase``: make restored or set-back databases usable again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import AsJson, Config, Round, Where, chosen, everywhere, routes_of
from saf.cli.console import echo
from saf.cli.replay import in_words, left_out, texts
from saf.config import Broker, Settings, load
from saf.database import of_broker, unavailable_if_lost
from saf.destinations.marks import Known
from saf.dialogs.monologs import received_monologs
from saf.dialogs.set_back import Target, received_dialogs
from saf.errors import UsageError
from saf.operating.repair.moved import MovedBy
from saf.operating.repair.rebase import Rebased, rebase
from saf.operating.repair.send_again import Sent, send_again
from saf.operating.wording import counted

Answer = TypeVar("Answer")


def command(
    *,
    config: Config = None,
    broker: Where = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also repair databases that do not look restored.")
    ] = False,
    moved_by: Annotated[
        MovedBy | None,
        typer.Option(help="How the database of --broker was moved, if its rows do not show it."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Repair databases that were restored, moved, or set back.

    It repairs brokers and destinations. Log in as the owner of their schemas. A source compares
    itself with all destinations, so all must be reachable. If the source itself was set back, stop
    all forwarders and receivers first. Messages that a destination has lost are sent again.
    """
    settings = load(config)
    if moved_by is not None and broker is None:
        raise UsageError(f"--moved-by {moved_by} is true of one database: name it with --broker")
    round_ = Round(everywhere(settings, broker))

    def repair(connection: psycopg.Connection[Any], _: object) -> Rebased | None:
        (source,) = of_broker(connection, "SELECT broker_id FROM saf.broker")
        return rebase(
            connection,
            _known(settings, source),
            force=force,
            moved_by=moved_by,
            dry_run=dry_run,
            monologs=lambda: _asked(settings, lambda _, remote: received_monologs(remote, source)),
            targets=lambda: _targets(settings, connection, source),
        )

    done = round_.visit("rebase", repair)
    rebased = Round({name: round_.brokers[name] for name in done})
    purged = rebased.each(lambda name, _: _purged_since(settings, done[name]))
    # after a dry run, sources are still unrepaired, and could not be compared
    unrepaired = dry_run and any(result is not None for result in done.values())
    sources = Round({} if unrepaired else chosen(settings, broker))
    sent = sources.each(
        lambda name, item: _send_again(settings, name, item, round_, dry_run=dry_run)
    )
    reports = {name: item for name, item in sent.items() if item is not None}
    if as_json:
        rows = [
            {"broker": name, "rows": result.rows if result else 0,
             "destinations_ahead": result.destinations_ahead if result else [],
             "second_targets": result.second_targets if result else 0,
             "why": result.why if result else [],
             "written_here": result.here if result else 0,
             "new_ids": result.new_ids if result else 0,
             "doubled": result.doubled if result else 0,
             "purged_since": purged.get(name)}
            for name, result in done.items()
        ]  # fmt: skip
        message_ids = {name: texts(item) for name, item in reports.items()}
        left = {name: left_out(item) for name, item in reports.items()}
        errors = [*round_.errors(), *rebased.errors(), *sources.errors()]
        found = {"brokers": rows, "message_ids": message_ids, "left_out": left, "errors": errors}
        echo(json.dumps(found))
    else:
        for name, result in done.items():
            echo(f"{name}: {_words(result, purged.get(name, ()), dry_run=dry_run)}")
        for name, item in reports.items():
            echo(f"{name}: {in_words(item, dry_run=dry_run)}")
    for other in (rebased, sources):
        round_.failed += [item for item in other.failed if item[0] not in dict(round_.failed)]
    round_.finish(say=not as_json)


def _send_again(
    settings: Settings, name: str, source: Broker, before: Round, *, dry_run: bool
) -> Sent | None:
    """Send again the messages that a source's destinations lost, unless its own repair failed."""
    is_source = name in settings.brokers or name not in settings.destinations
    if not is_source or name in dict(before.failed):
        return None
    return send_again(
        name,
        source.dsn,
        settings.destinations,
        routes_of(settings),
        retention_seconds=settings.purge.retention_seconds,
        why="the destination was set back",
        dry_run=dry_run,
    )


def _known(settings: Settings, source: UUID) -> dict[str, Known]:
    return {
        name: destination.known(name, source, role="rebase")
        for name, destination in settings.destinations.items()
        if destination.capabilities.exactly_once
    }


def _targets(settings: Settings, connection: psycopg.Connection[Any], source: UUID) -> list[Target]:
    """Return the targets of a source's dialogs with services whose routes share."""
    routes = routes_of(settings)(connection)
    if not any(match.shared for match in routes.matches.values()):
        return []
    found = _asked(settings, lambda name, remote: received_dialogs(remote, source, name))
    return [target for target in found if (m := routes.match(target.service, None)) and m.shared]


def _asked(
    settings: Settings, ask: Callable[[str, psycopg.Connection[Any]], Iterable[Answer]]
) -> list[Answer]:
    """Return the answers of the destinations that are brokers."""
    found: list[Answer] = []
    for name, destination in settings.destinations.items():
        if (dsn := destination.broker()) is None:
            continue
        with (
            unavailable_if_lost(f"destination {name!r}"),
            dsn.connect(role="rebase", autocommit=True) as connection,
        ):
            found += ask(name, connection)
    return found


def _purged_since(settings: Settings, result: Rebased | None) -> list[str]:
    """Return the destinations that may have purged messages sent after a broker's backup."""
    if result is None:
        return []
    kept_since = datetime.now(UTC) - timedelta(seconds=settings.purge.retention_seconds)
    if result.remembered_until is not None and result.remembered_until > kept_since:
        return []
    found = []
    for name in result.destinations_ahead:
        if settings.destinations[name].broker() is None:
            continue
        with settings.destinations[name].reading(name) as reading:
            if reading.purged():
                found.append(name)
    return found


def _words(result: Rebased | None, purged: Sequence[str], *, dry_run: bool) -> str:
    if result is None:
        return "was not restored, nothing to do"
    verb = "would be rebased" if dry_run else "rebased"
    words = f"{verb}, {result.rows:,} rows renumbered"
    if result.here:
        words += f"; {counted(result.here, 'message')} written here since, and pending"
    if result.new_ids:
        words += f"; {counted(result.new_ids, 'message')} with new ids"
    if result.doubled:
        words += f"; {counted(result.doubled, 'row')} removed that stood twice"
    if result.why:
        words += f" (because {'; '.join(result.why)})"
    if result.destinations_ahead:
        words += (
            f"; {', '.join(result.destinations_ahead)} knew later batches: messages that were "
            "delivered after the backup was taken, and are in it, are delivered again"
        )
    if result.second_targets:
        words += f"; targets of dialogs that continue elsewhere: {result.second_targets:,}, failed"
    if purged:
        words += (
            f"; {', '.join(purged)} may have purged later messages: if a monolog began after the "
            "backup and no message of it is left there, its subscribers do not learn of its end"
        )
    return words
