"""Dead letters: ``saf dead`` shows the messages set aside for an operator, and runs decisions.

An operator's decision runs at each chosen broker, for messages that are dead letters when it begins
there. Afterwards, `decide_and_show` prints how many messages were decided about, and how many
others stay as they were, with the reason. If a broker fails, its error is shown, and the other
brokers are decided about as usual. `saf.cli.parked` uses the same function for parked messages.

``--dry-run`` lists the matches without changing them. A decision about all dead letters needs
``--all``: without numbers or a filter, it is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, Any
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import (
    GREATEST,
    After,
    AsJson,
    Before,
    Brokers,
    Config,
    DryRun,
    Limit,
    Name,
    Round,
    Why,
    chosen,
    ends,
    rows_of,
    say_next,
)
from saf.cli.console import Listing, echo, write
from saf.cli.options import Options, grouped
from saf.config import Settings, did_you_mean, load
from saf.database.pages import Page
from saf.errors import ConfigurationError, UsageError
from saf.operating import decide
from saf.operating.decide import Chosen, Decision, in_chunks
from saf.operating.wording import at, counted
from saf.setaside import audit, dead, staying
from saf.setaside.dead import REASONS, DeadLetter, Filter
from saf.setaside.parked_messages import ParkedFilter
from saf.setaside.staying import WHY, Counted

MOST = 1_000_000_000
"""Exceeds any number of messages: a command may take the time to count all."""

app = typer.Typer(no_args_is_help=True, help="Messages that need an operator's decision.")

Ids = Annotated[
    list[int] | None,
    typer.Argument(max=GREATEST, help="Numbers, as `saf dead list` shows them."),
]
Reason = Annotated[str | None, typer.Option(help=f"One of {', '.join(REASONS)}.")]
Service = Annotated[str | None, typer.Option(help="Only those for this service.")]
Destination = Annotated[str | None, typer.Option(help="Only those for this destination.")]
Key = Annotated[str | None, typer.Option(help="Only those with this key.")]
All = Annotated[bool, typer.Option("--all", help="Really all, where no filter is given.")]
Subscription = Annotated[
    str | None, typer.Option(help="Only those of this one: forwarder, or a receivers'.")
]
Error = Annotated[str | None, typer.Option(help="Only those whose error has this text in it.")]


def _filter(*, ids: list[int] | None, **criteria: Any) -> Filter:
    found = Filter(dead_letter_ids=ids or None, **criteria)
    if found.reason is not None and found.reason not in REASONS:
        raise UsageError(f"--reason {found.reason}: the reasons are {', '.join(REASONS)}")
    return found


CRITERIA = Options(
    {
        "ids": Ids,
        "reason": Reason,
        "service": Service,
        "destination": Destination,
        "key": Key,
        "before": Before,
        "subscription": Subscription,
        "error": Error,
    },
    make=_filter,
)


@app.command("list")
@grouped
def list_(
    *,
    round_: Brokers,
    criteria: Annotated[Filter, CRITERIA],
    after: After = None,
    limit: Limit = 100,
    count: Annotated[bool, typer.Option("--count", help="Count without listing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show dead letters, oldest first."""
    criteria = replace(criteria, after=dead.place_at(after))
    round_.go_on(after)
    if count:
        _show_count(round_, criteria, as_json=as_json)
        return
    pages = round_.visit("dead", lambda connection, _: dead.page(connection, criteria, limit))
    _show(round_, pages, as_json=as_json)


@app.command("audit")
@grouped
def audit_(
    *,
    round_: Brokers,
    limit: Limit = 100,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """Show operators' decisions about messages, the latest first.

    Each decision has its reason.
    """
    before = audit.place_at(after)
    round_.go_on(after)
    pages = round_.visit("dead", lambda connection, _: audit.page(connection, limit, before))
    if as_json:
        echo(json.dumps({"audit": rows_of(pages), "next": ends(pages), "errors": round_.errors()}))
    else:
        listing = Listing("broker", "when", "who", "person", "action", "messages", below="why")
        for name, page in pages.items():
            for entry in page.shown:
                listing.add(
                    name, at(entry.audit_at), entry.who, entry.person or "", entry.action,
                    f"{entry.messages:,}", below=entry.why,
                )  # fmt: skip
        listing.show()
        say_next(pages)
    round_.finish(say=not as_json)


@app.command()
@grouped
def show(
    number: Annotated[int, typer.Argument(max=GREATEST, help="As `saf dead list` shows it.")],
    *,
    round_: Brokers,
) -> None:
    """Write the body of a dead letter to standard output.

    On a terminal, the body is shown as text.
    """
    round_.only(number)
    for body in round_.visit("dead", lambda connection, _: dead.body(connection, number)).values():
        if body is None:
            raise UsageError(f"no dead letter {number}; see `saf dead list`")
        write(body)
    round_.finish(say=True)


@app.command()
@grouped
def retry(
    *,
    round_: Brokers,
    criteria: Annotated[Filter, CRITERIA],
    why: Why = "",
    everything: All = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Deliver dead letters again, in order.

    The forwarder or their receivers deliver them.
    """
    refuse_all(criteria, "dead letters", everything=everything)
    _act(round_, decide.retry, criteria, why, dry_run=dry_run, as_json=as_json)


@app.command()
@grouped
def discard(
    *,
    round_: Brokers,
    criteria: Annotated[Filter, CRITERIA],
    why: Why = "",
    everything: All = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give dead letters up for good."""
    refuse_all(criteria, "dead letters", everything=everything)
    _act(round_, decide.discard, criteria, why, dry_run=dry_run, as_json=as_json)


@app.command()
@grouped
def redirect(
    *,
    to: Annotated[str, typer.Option(help="The destination, by its name in saf.toml.")],
    config: Config = None,
    broker: Name = None,
    criteria: Annotated[Filter, CRITERIA],
    why: Why = "",
    everything: All = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Deliver dead letters again, to another destination.

    The forwarder delivers them. Dead letters of receivers and of dialogs stay, and are counted.
    """
    refuse_all(criteria, "dead letters", everything=everything)
    settings = load(config)
    refuse_unknown(to, settings)
    round_ = Round(chosen(settings, broker))
    decision = partial(decide.redirect, to=to)
    _act(round_, decision, criteria, why, to=to, dry_run=dry_run, as_json=as_json)


def refuse_all(criteria: Filter | ParkedFilter, which: str, *, everything: bool) -> None:
    """Raise a UsageError for a filter that matches everything, unless that is wanted."""
    if criteria == type(criteria)() and not everything:
        raise UsageError(f"which {which}? Give numbers, a filter, or --all")


def refuse_unknown(to: str, settings: Settings) -> None:
    """Raise a ConfigurationError for a destination that saf.toml does not have."""
    if to not in settings.destinations:
        raise ConfigurationError(
            f"--to {to}: no [destinations.{to}] in saf.toml"
            f"{did_you_mean(to, settings.destinations)}"
        )


def _act(
    round_: Round,
    decision: Decision[Filter],
    criteria: Filter,
    why: str,
    *,
    to: str | None = None,
    dry_run: bool,
    as_json: bool,
) -> None:
    round_.only(criteria.dead_letter_ids)
    if dry_run:
        pages = round_.visit(
            "dead", lambda connection, _: dead.page(connection, criteria, None, to=to)
        )
        _show(round_, pages, as_json=as_json)
        return
    count = partial(dead.count, to=to)
    decide_and_show(round_, "dead", decision, criteria, why=why, count=count, as_json=as_json)


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The result of a decision at a broker."""

    ids: list[UUID]
    """Ids of the messages that were decided about."""
    left: Counted
    """The other matching messages, which stay as they were."""
    stopped: bool
    """True if an operator stopped the decision before its end."""

    @property
    def stays(self) -> dict[str, int]:
        """Numbers of messages that stay, by reason; see `saf.setaside.staying.WHY`."""
        stays = dict(self.left.stays)
        if self.left.messages:
            # a decision skips messages that others have locked
            why = "stopped" if self.stopped else "in_hand"
            stays[why] = stays.get(why, 0) + self.left.messages
        return stays


def decide_and_show(
    round_: Round,
    role: str,
    decision: Decision[Chosen],
    which: Chosen,
    *,
    why: str,
    count: Callable[[psycopg.Connection[Any], Chosen, int], Counted],
    as_json: bool,
) -> None:
    """Run a decision at each broker, show its results, and end the command.

    ``role`` is the connections' role; ``count`` counts the matches of a filter, up to a number.
    """

    def decide(connection: psycopg.Connection[Any], stop: Callable[[], bool]) -> Decided:
        chosen: Chosen = which.until_now(connection)
        ids = [*chain.from_iterable(in_chunks(connection, decision, chosen, why, stop=stop))]
        return Decided(ids=ids, left=count(connection, chosen, MOST), stopped=stop())

    done = round_.decide(role, decide)
    if as_json:
        ids = {name: [str(number) for number in one.ids] for name, one in done.items()}
        stay = {name: one.stays for name, one in done.items() if one.stays}
        echo(json.dumps({"message_ids": ids, "stay": stay, "errors": round_.errors()}))
    else:
        for name, one in done.items():
            echo(f"{name}: {counted(len(one.ids), 'message')}")
            say_staying(one.stays)
    round_.finish(say=not as_json)


def say_staying(stays: Mapping[str, int]) -> None:
    """Print how many messages stay as they are, and why."""
    for why, number in staying.in_words([stays]).items():
        echo(f"  {number:,} {'stays' if number == 1 else 'stay'}: {why}")


def _show_count(round_: Round, criteria: Filter, *, as_json: bool) -> None:
    found = round_.visit("dead", lambda connection, _: dead.count(connection, criteria, MOST))
    if as_json:
        counts = {name: row.messages for name, row in found.items()}
        echo(json.dumps({"dead_letters": counts, "errors": round_.errors()}))
    else:
        for name, row in found.items():
            echo(f"{name}: {counted(row.messages, 'dead letter')}")
    round_.finish(say=not as_json)


def _show(round_: Round, pages: Mapping[str, Page[DeadLetter]], *, as_json: bool) -> None:
    if as_json:
        report = {"dead_letters": rows_of(pages), "next": ends(pages), "errors": round_.errors()}
        echo(json.dumps(report))
    else:
        listing = Listing(
            *("broker", "number", "when", "subscription", "reason", "service", "key", "bytes"),
            below="error",
        )
        for name, page in pages.items():
            for row in page.shown:
                listing.add(
                    name, str(row.dead_letter_id), at(row.dead_letter_at),
                    row.subscription, row.reason, row.service, row.key or "", f"{row.bytes:,}",
                    below=row.error if row.stays is None else f"{row.error} ({WHY[row.stays]})",
                )  # fmt: skip
        listing.show()
        say_next(pages)
    round_.finish(say=not as_json)
