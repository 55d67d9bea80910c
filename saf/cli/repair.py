"""``saf reconcile``, ``saf replay`` and ``saf rebase``: compare databases, and repair them.

`reconcile` proves that the destinations hold what the sources have completed. `replay` sends again
the messages that destinations have lost. `rebase` makes restored or set-back databases usable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import (
    AsJson,
    Brokers,
    Config,
    DryRun,
    Round,
    Since,
    Until,
    Where,
    Why,
    routes_of,
)
from saf.cli.console import Table, echo, paragraph
from saf.config import Broker, Settings, load
from saf.database import of_broker, unavailable_if_lost
from saf.destinations.marks import Known
from saf.dialogs.monologs import received_monologs
from saf.dialogs.set_back import Target, received_dialogs
from saf.errors import UsageError, placed
from saf.operating.places import chosen, everywhere
from saf.operating.repair.moved import MovedBy
from saf.operating.repair.rebase import Rebased, rebase
from saf.operating.repair.reconcile import Difference, Outcome, Range, reconcile
from saf.operating.repair.send_again import Sent, send_again
from saf.operating.wording import at, counted

DIFFERENT = 1


def reconcile_(
    *,
    round_: Brokers,
    source: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Instead, compare this source's topic with the inbox."),
    ] = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Name at most this many messages; all are counted.")
    ] = 100,
    shards: Annotated[
        bool, typer.Option("--shards", help="With --json: all shards, not only those that differ.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare sources with the messages in their destinations.

    Completed messages of a source should be in its destinations. Reads only. It is safe while
    everything runs. Exit code 0: both sides hold the same; 1: messages are lost, duplicated or
    unexpected, and named.

    With --source, each message that was read from the topic of a [sources.NAME] should be in its
    inbox. Messages that were not read yet are counted.
    """
    settings = round_.settings
    if source is not None:
        _reconcile_topic(settings, source, since, until, limit, as_json=as_json)
        return
    known = round_.each(
        lambda name, source: reconcile(
            name,
            source.dsn,
            settings.destinations,
            since=since,
            until=until,
            retention_seconds=settings.purge.retention_seconds,
            routes=routes_of(settings),
            limit=limit,
        )
    )
    brokers = [_as_dict(outcome, whole=shards) for outcome in known.values()]
    # report a proven loss first: unlike a failure to connect, it does not pass with time
    is_equal = all(outcome.same for outcome in known.values())
    found = 0 if is_equal else DIFFERENT
    round_.report({"brokers": brokers}, lambda: _show_outcomes(known), as_json=as_json, found=found)


def _reconcile_topic(
    settings: Settings,
    name: str,
    since: datetime | None,
    until: datetime | None,
    limit: int,
    *,
    as_json: bool,
) -> None:
    from saf.operating.repair.reconcile.topics import compare  # needs Arrow

    found = compare(settings, name, since=since, until=until, limit=limit)
    if as_json:
        numbers = ("compared", "pending", "set_aside", "missing", "duplicate")
        answer = {
            "source": name,
            "topic": found.topic,
            "into": found.into,
            "same": found.same,
            "since": found.range.since and found.range.since.isoformat(),
            "until": found.range.until and found.range.until.isoformat(),
            "purged": list(found.range.purged),
            **{number: getattr(found, number) for number in numbers},
            "differences": [one.as_dict() for one in found.named],
        }
        echo(json.dumps(answer))
    else:
        paragraph(
            f"source {name!r}: topic {found.topic!r}, {_range(found.range)}: "
            f"{found.compared:,} compared, {found.pending:,} not read yet, "
            f"{found.set_aside:,} set aside, {found.missing:,} missing in {found.into}, "
            f"{found.duplicate:,} duplicate"
        )
        for one in found.named:
            echo(f"  missing: {one.message_id}, shard {one.shard}, at {placed(one.position)}")
        if found.missing:
            paragraph("messages that an operator has skipped are missing, too: see --since")
    if not found.same:
        raise typer.Exit(DIFFERENT)


def _as_dict(outcome: Outcome, *, whole: bool) -> dict[str, Any]:
    shards = [
        {name: value for name, value in asdict(shard).items() if name != "hashes"}
        | {"same": shard.same}
        for shard in outcome.shards
        if whole or not shard.same
    ]
    return {
        "broker": outcome.broker,
        "same": outcome.same,
        "since": outcome.range.since and outcome.range.since.isoformat(),
        "until": outcome.range.until and outcome.range.until.isoformat(),
        "purged": list(outcome.range.purged),
        **{figure: _sum(outcome, figure) for figure in FIGURES},
        **{kind: outcome.counts.get(kind, 0) for kind in KINDS},
        "left_out": outcome.left_out,
        "unread": dict(outcome.unread),
        "shards": shards,
        "differences": [difference.as_dict() for difference in outcome.named],
    }


FIGURES = ("complete", "aside", "pending", "stored")
KINDS = ("lost", "duplicate", "unexpected", "in_flight", "not_compared", "uncertain", "doubled")


def _sum(outcome: Outcome, figure: str) -> int:
    """Return a number of messages, summed over all shards."""
    return sum(getattr(shard, figure) for shard in outcome.shards)


OUTCOMES = Table[Outcome](
    *("complete", "set aside", "pending", "stored", "in flight", "lost", "duplicate", "unexpected"),
    things="compared sources",
    cells=lambda outcome: (
        *(f"{_sum(outcome, figure):,}" for figure in FIGURES),
        *(f"{outcome.counts.get(kind, 0):,}" for kind in ("in_flight", *KINDS[:3])),
    ),
)
DIFFERENCES = Table[Difference](
    *("difference", "message id", "service", "key", "shard", "created"),
    things="differences",
    below="where",
    cells=lambda row: (
        row.kind, str(row.message_id), row.service, row.key or "", str(row.shard),
        at(row.created_at), _where(row),
    ),
)  # fmt: skip


def _where(row: Difference) -> str:
    stored = f"stored at {', '.join(row.stored)}" if row.stored else ""
    lost = f"lost at {', '.join(row.lost_at)}" if row.lost_at else ""
    return ", and ".join(filter(None, [stored, lost]))


def _show_outcomes(known: Mapping[str, Outcome]) -> None:
    OUTCOMES.show_any({name: [outcome] for name, outcome in known.items()})
    for outcome in known.values():
        paragraph(f"{outcome.broker}: compared {_range(outcome.range)}")
        for name, why in outcome.unread.items():
            paragraph(f"destination {name!r} was not compared: {why}")
        if count := outcome.counts.get("not_compared", 0):
            were = "was" if count == 1 else "were"
            echo(f"{counted(count, 'message')} {were} not compared: they may have arrived")
        if count := outcome.counts.get("uncertain", 0):
            echo(
                f"{counted(count, 'message')} of topics may have lost a copy: it is not known "
                "whether a destination that was set back had it"
            )
        if count := outcome.counts.get("doubled", 0):
            echo(
                f"{counted(count, 'message')} are in the outbox twice, because a backup "
                "was restored over existing rows: saf rebase removes the second rows"
            )
        if count := outcome.left_out:
            echo(f"lost includes {counted(count, 'message')} left out by transforms so far")
        if outcome.named:
            DIFFERENCES.show_rows(outcome.named)


def _range(compared: Range) -> str:
    since = f"messages created since {at(compared.since)}" if compared.since else ""
    until = f"before {at(compared.until)}" if compared.until else ""
    text = " and ".join(filter(None, [since, until])) or "all messages"
    if compared.purged:
        text += (
            f" (now less purge.retention_seconds, because the {' and the '.join(compared.purged)} "
            "may have been purged; if a shorter retention was ever used, add --since)"
        )
    return text


def replay(
    *,
    round_: Brokers,
    since: Since = None,
    until: Until = None,
    why: Why = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send again messages that `saf reconcile` reports lost.

    They go before everything newer, whatever the cause of the loss. A destination that was set back
    may continue afterwards. The next run of the forwarder delivers the messages, each once, even if
    you run this twice.
    """
    settings = round_.settings

    def again(name: str, source: Broker) -> Sent:
        sent = send_again(
            name,
            source.dsn,
            settings.destinations,
            routes_of(settings),
            since=since,
            until=until,
            retention_seconds=settings.purge.retention_seconds,
            why=why,
            dry_run=dry_run,
            only_if_set_back=False,
        )
        assert sent is not None  # noqa: S101 - asked for in any case
        return sent

    done = round_.each(again)
    answer = {
        "message_ids": {name: texts(sent) for name, sent in done.items()},
        "set_back": {name: sent.set_back for name, sent in done.items()},
        "blind": {name: sent.blind for name, sent in done.items()},
        "left_out": {name: left_out(sent) for name, sent in done.items()},
    }
    lines = (f"{name}: {in_words(sent, dry_run=dry_run)}" for name, sent in done.items())
    round_.say(answer, lines, as_json=as_json)


def texts(sent: Sent) -> dict[str, list[str]]:
    """Return the ids of messages to be sent again, by destination, for JSON."""
    return {where: [str(id_) for id_ in ids] for where, ids in sent.by_destination.items()}


def left_out(sent: Sent) -> dict[str, object]:
    """Return messages that may be lost but are not sent again, for JSON."""
    return {
        "not_compared": sent.not_compared
        and [moment and moment.isoformat() for moment in sent.not_compared],
        "unrouted": sent.unrouted,
        "uncertain": dict(sent.uncertain),
        "unread": dict(sent.unread),
    }


def in_words(sent: Sent, *, dry_run: bool = False) -> str:
    """Return the messages to be sent again, in words."""
    counts = [
        f"{len(ids):,} for {where or 'a router'}" for where, ids in sent.by_destination.items()
    ]
    verb = "would be sent again" if dry_run else "to be sent again by the next run"
    default = "nothing sent again" if sent.unrouted else "nothing lost"
    words = f"{', '.join(counts)} {verb}" if counts else default
    if sent.unrouted:
        words += (
            f"; {counted(sent.unrouted, 'message')} more lost, and not sent again, because no "
            "route matches: add one, and run saf replay"
        )
    if sent.set_back and not dry_run:
        words += f"; {', '.join(sent.set_back)} had been set back, and may continue"
    if sent.blind:
        words += (
            f"; {', '.join(sent.blind)} cannot be read back: all messages sent there since then "
            "are sent again, and those still there arrive twice"
        )
    if sent.not_compared:
        since, until = sent.not_compared
        when = f"between {since.isoformat()} and" if since else "before"
        words += (
            f"; messages sent {when} {until.isoformat()} were not compared, and may be lost: they "
            "may have been purged; if not, run saf replay with an earlier --since"
        )
    for name, count in sent.uncertain.items():
        copies = f"{counted(count, 'copy', 'copies')} of topics"
        words += (
            f"; {counted(count, 'message') if name in sent.blind else copies} may be lost at "
            f"{name}, and not sent again: it is not known whether it had them"
        )
    for name, why in sent.unread.items():
        words += f"; nothing to {name}, which was not compared: {why}"
    return words


Answer = TypeVar("Answer")


def rebase_(
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
        raise UsageError(f"--moved-by {moved_by} concerns one database: name it with --broker")
    round_ = Round(everywhere(settings, broker), settings)

    def repair(connection: psycopg.Connection[Any]) -> Rebased | None:
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
    rebased = round_.among(done)
    purged = rebased.each(lambda name, _: _purged_since(settings, done[name]))
    # after a dry run, sources are still unrepaired, and could not be compared
    unrepaired = dry_run and any(result is not None for result in done.values())
    sources = Round({} if unrepaired else chosen(settings, broker), settings)
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
            echo(f"{name}: {_rebased(result, purged.get(name, ()), dry_run=dry_run)}")
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


def _rebased(result: Rebased | None, purged: Sequence[str], *, dry_run: bool) -> str:
    if result is None:
        return "was not restored, nothing to do"
    verb = "would be rebased" if dry_run else "rebased"
    words = f"{verb}, {result.rows:,} rows renumbered"
    if result.here:
        words += f"; {counted(result.here, 'message')} written here since, and pending"
    if result.new_ids:
        words += f"; {counted(result.new_ids, 'message')} with new ids"
    if result.doubled:
        words += f"; {counted(result.doubled, 'row')} removed that were there twice"
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
