"""``saf parked messages``, ``discard`` and ``redirect``: parked messages, one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from saf.cli.brokers import (
    GREATEST,
    After,
    AsJson,
    Before,
    Config,
    Limit,
    Name,
    Round,
    Why,
    chosen,
    ends,
    rows_of,
    say_next,
)
from saf.cli.console import echo
from saf.cli.decided import MOST, decide_and_show, say_staying
from saf.cli.listing import Listing
from saf.config import did_you_mean, load
from saf.database.pages import Page
from saf.errors import ConfigurationError, UsageError
from saf.operating import decide_parked
from saf.operating.bulk import Decision
from saf.operating.wording import at, counted
from saf.setaside import parked_messages
from saf.setaside.lane import Kind
from saf.setaside.parked_messages import ParkedFilter, ParkedMessage

Ids = Annotated[
    list[int] | None,
    typer.Argument(max=GREATEST, help="Numbers, as `saf parked messages` shows them."),
]
Subscription = Annotated[str | None, typer.Option(help="Only what this one set aside.")]
Destination = Annotated[
    str | None, typer.Option(help="Only messages waiting for this destination.")
]
LaneKind = Annotated[Kind | None, typer.Option("--kind", help="Only lanes of this kind.")]
Subject = Annotated[
    str | None, typer.Option(help="Only the lane of this service, key, shard or conversation.")
]
Service = Annotated[str | None, typer.Option(help="Only those for this service.")]
Key = Annotated[str | None, typer.Option(help="Only those with this key.")]
All = Annotated[bool, typer.Option("--all", help="Really all, where no filter is given.")]
CountFirst = Annotated[bool, typer.Option("--dry-run", help="Count matches without changing them.")]


def messages(
    ids: Ids = None,
    *,
    config: Config = None,
    broker: Name = None,
    subscription: Subscription = None,
    destination: Destination = None,
    kind: LaneKind = None,
    subject: Subject = None,
    service: Service = None,
    key: Key = None,
    before: Before = None,
    after: After = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Show parked messages one by one.

    Those that were parked first come first.
    """
    criteria = ParkedFilter(
        parked_ids=ids or None, subscription=subscription, destination=destination, lane=kind,
        subject=subject, service=service, key=key, before=before,
        after=parked_messages.place_at(after),
    )  # fmt: skip
    round_ = Round(chosen(load(config), broker))
    round_.go_on(after)
    pages = round_.visit(
        "parked", lambda connection, _: parked_messages.page(connection, criteria, limit)
    )
    if as_json:
        report = {"parked": rows_of(pages), "next": ends(pages), "errors": round_.errors()}
        echo(json.dumps(report))
    else:
        _listing(pages).show()
        say_next(pages)
    round_.finish(say=not as_json)


def discard(
    ids: Ids = None,
    *,
    config: Config = None,
    broker: Name = None,
    subscription: Subscription = None,
    destination: Destination = None,
    kind: LaneKind = None,
    subject: Subject = None,
    service: Service = None,
    key: Key = None,
    before: Before = None,
    why: Why = "",
    everything: All = False,
    dry_run: CountFirst = False,
    as_json: AsJson = False,
) -> None:
    """Give parked messages up for good.

    What a forwarder or a receiver has in hand stays as it is; --dry-run says what else, and why. A
    dialog that lacks one of them fails at both ends.
    """
    criteria = _filter(
        everything=everything, parked_ids=ids or None, subscription=subscription,
        destination=destination, lane=kind, subject=subject, service=service, key=key,
        before=before,
    )  # fmt: skip
    round_ = Round(chosen(load(config), broker))
    _act(round_, decide_parked.discard, criteria, why, dry_run=dry_run, as_json=as_json)


def redirect(
    ids: Ids = None,
    *,
    to: Annotated[str, typer.Option(help="The destination, by its name in saf.toml.")],
    config: Config = None,
    broker: Name = None,
    subscription: Subscription = None,
    destination: Destination = None,
    kind: LaneKind = None,
    subject: Subject = None,
    service: Service = None,
    key: Key = None,
    before: Before = None,
    why: Why = "",
    everything: All = False,
    dry_run: CountFirst = False,
    as_json: AsJson = False,
) -> None:
    """Send parked messages to another destination.

    The forwarder does, in order. Those of receivers and of dialogs stay as they are.
    """
    criteria = _filter(
        everything=everything, parked_ids=ids or None, subscription=subscription,
        destination=destination, lane=kind, subject=subject, service=service, key=key,
        before=before,
    )  # fmt: skip
    settings = load(config)
    if to not in settings.destinations:
        raise ConfigurationError(
            f"--to {to}: no [destinations.{to}] in saf.toml"
            f"{did_you_mean(to, settings.destinations)}"
        )
    round_ = Round(chosen(settings, broker))
    decision = partial(decide_parked.redirect, to=to)
    _act(round_, decision, criteria, why, to=to, dry_run=dry_run, as_json=as_json)


def _filter(*, everything: bool, **given: Any) -> ParkedFilter:
    criteria = ParkedFilter(**given)
    if criteria == ParkedFilter() and not everything:
        raise UsageError("which parked messages? Give numbers, a filter, or --all")
    return criteria


def _act(
    round_: Round,
    decision: Decision[ParkedFilter],
    criteria: ParkedFilter,
    why: str,
    *,
    to: str | None = None,
    dry_run: bool,
    as_json: bool,
) -> None:
    round_.only(criteria.parked_ids)
    if dry_run:
        _count(round_, criteria, to, as_json=as_json)
        return
    count = partial(parked_messages.count, to=to)
    decide_and_show(round_, "parked", decision, criteria, why=why, count=count, as_json=as_json)


def _count(round_: Round, criteria: ParkedFilter, to: str | None, *, as_json: bool) -> None:
    found = round_.visit(
        "parked", lambda connection, _: parked_messages.count(connection, criteria, MOST, to=to)
    )
    if as_json:
        counts = {name: {"messages": row.messages, "stay": row.staying, "why": dict(row.stays)}
                  for name, row in found.items()}  # fmt: skip
        echo(json.dumps({"parked": counts, "errors": round_.errors()}))
    else:
        for name, row in found.items():
            stay = f"; {counted(row.staying, 'other')} would stay" if row.staying else ""
            echo(f"{name}: {counted(row.messages, 'parked message')}{stay}")
            say_staying(row.stays)
    round_.finish(say=not as_json)


def _listing(pages: Mapping[str, Page[ParkedMessage]]) -> Listing:
    listing = Listing(
        "broker", "number", "when", "lane", "set aside by", "service", "key", "bytes", below="error"
    )
    for name, page in pages.items():
        for row in page.shown:
            listing.add(
                name, str(row.parked_id), at(row.parked_at), str(row.lane), row.subscription,
                row.service, row.key or "", f"{row.bytes:,}", below=row.error or "",
            )  # fmt: skip
    return listing
