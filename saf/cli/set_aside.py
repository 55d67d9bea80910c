"""``saf parked`` and ``saf dead``: messages set aside, and operators' decisions about them.

``saf parked`` shows why messages wait, e.g. for a destination, and until when: `lanes` by lane,
each with its next attempt, and `messages` one by one. `retry_now_` makes lanes due now. ``saf
dead`` shows the messages that need an operator. ``groups`` shows either by the causes of their
failure. The decisions are those of `saf.cli.decisions`.
Their ``--dry-run`` counts parked messages, and lists dead letters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import psycopg
import typer

from saf.cli.brokers import (
    GREATEST,
    MOST_ROWS,
    After,
    AsJson,
    Before,
    Brokers,
    Commands,
    DryRun,
    Limit,
    Options,
    Round,
    Why,
)
from saf.cli.console import Table, echo, ends, say_next, write
from saf.cli.decisions import MOST, Key, Service, add_decisions, numbers, say_staying
from saf.errors import UsageError
from saf.operating.wording import at, counted
from saf.setaside import audit, dead
from saf.setaside.audit import Audited
from saf.setaside.dead import REASONS
from saf.setaside.failure_groups import FailureGroup, failure_groups
from saf.setaside.fingerprint import check_group
from saf.setaside.lane import Kind
from saf.setaside.parking import BLOCKED
from saf.setaside.selection import (
    WHY,
    DeadLetter,
    DeadLetters,
    ParkedMessage,
    ParkedMessages,
    Selection,
)
from saf.setaside.waiting import (
    Lanes,
    Parked,
    Waiting,
    parked,
    place_at,
    retry_now,
    undecided,
)

parking = Commands(help="Messages that wait, and when they are tried next.")


LaneSubscription = Annotated[
    str | None, typer.Option(help="Only messages that this subscription set aside.")
]
LaneDestination = Annotated[
    str | None, typer.Option(help="Only messages that wait for this destination.")
]
LaneKind = Annotated[Kind | None, typer.Option("--kind", help="Only lanes of this kind.")]
Subject = Annotated[
    str | None, typer.Option(help="Only the lane of this service, key, shard or conversation.")
]


def _group(shown_by: str) -> Any:
    """Return the option for a failure group, as a command shows it."""
    help_ = f"Only this failure group: an id that `{shown_by}` shows."
    return Annotated[str | None, typer.Option(metavar="ID", help=help_)]


def _lanes(*, kind: Kind | None, group: str | None, **criteria: Any) -> Lanes:
    return Lanes(lane=kind, group=check_group(group), **criteria)


def _parked_messages(
    *, ids: list[int] | None, kind: Kind | None, group: str | None, **criteria: Any
) -> ParkedMessages:
    group = check_group(group)
    return ParkedMessages(numbers=ids or None, lane=kind, group=group, **criteria)


OF_LANES = {
    "subscription": LaneSubscription,
    "destination": LaneDestination,
    "kind": LaneKind,
    "subject": Subject,
    "group": _group("saf parked groups"),
}
LANES = Options(OF_LANES, make=_lanes)
MESSAGES = Options(
    {
        "ids": numbers("saf parked messages"),
        **OF_LANES,
        "service": Service,
        "key": Key,
        "before": Before,
    },
    make=_parked_messages,
)
CountFirst = Annotated[bool, typer.Option("--dry-run", help="Count matches without changing them.")]

BY_LANE = Table[Parked](
    *("parked", "lane", "set aside by", "attempts", "next"),
    below="error",
    cells=lambda lane: (
        f"{lane.messages:,}", str(lane.own), lane.subscription, str(lane.attempts), _next(lane),
        lane.error,
    ),
)  # fmt: skip
ONE_BY_ONE = Table[ParkedMessage](
    *("number", "when", "lane", "set aside by", "service", "key", "bytes"),
    below="error",
    cells=lambda row: (
        str(row.parked_id), at(row.parked_at), str(row.lane), row.subscription, row.service,
        row.key or "", f"{row.bytes:,}", row.error or "",
    ),
)  # fmt: skip
BY_GROUP = Table[FailureGroup](
    *("group", "messages", "reason", "subscription", "destination", "service", "first", "last"),
    *("example's key",),
    below="example",
    cells=lambda row: (
        row.group, f"{row.messages:,}", row.reason, row.subscription, row.destination, row.service,
        at(row.first_at), at(row.last_at), row.key or "", row.error,
    ),
)  # fmt: skip


def _show_groups(
    round_: Round, role: str, criteria: Selection[Any], limit: int, *, as_json: bool
) -> None:
    found = round_.visit(role, lambda connection: failure_groups(connection, criteria, limit))
    rows = {name: groups.shown for name, groups in found.items()}

    def show() -> None:
        BY_GROUP.show(rows)
        for name, groups in found.items():
            if groups.more:
                echo(f"{name}: {counted(groups.more, 'smaller group')} more")

    more = {name: groups.more for name, groups in found.items()}
    round_.report({"groups": BY_GROUP.plain(rows), "more": more}, show, as_json=as_json)


@parking.command("list")
def lanes(
    *,
    round_: Brokers,
    limit: Annotated[
        int, typer.Option(min=1, max=MOST_ROWS, help="Lanes per broker, at most.")
    ] = 100,
    criteria: Annotated[Lanes, LANES],
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """Show the lanes of parked messages.

    It shows the number of messages in each, why they wait, and the next attempt. If there are more
    lanes than the limit, it shows those that block the most messages.
    """
    place = place_at(after)
    round_.go_on(after)
    lanes = round_.visit(
        "parked", lambda connection: parked(connection, limit, lanes=criteria, after=place)
    )

    def show() -> None:
        BY_LANE.show(lanes)
        if after is None:
            show_how_many_more(lanes)
        say_next(lanes)

    counts = {name: found.lanes for name, found in lanes.items()}
    answer = {"parked": BY_LANE.plain(lanes), "lanes": counts, "next": ends(lanes)}
    round_.report(answer, show, as_json=as_json)


def show_how_many_more(lanes: Mapping[str, Waiting]) -> None:
    """Print the number of lanes that are not shown, by broker."""
    for name, found in lanes.items():
        if more := found.lanes - len(found.shown):
            echo(f"{name}: {counted(more, 'lane')} more; {found.messages:,} parked in all")


def _next(lane: Parked) -> str:
    """Return the time of a lane's next attempt, in words."""
    if lane.awaits_handler:
        return "by a receiver that handles it"
    if lane.kind == Kind.AHEAD:
        return "when it has come"
    if lane.braked:
        return "after retry-now"
    if lane.next_attempt_at >= BLOCKED:
        return "after a decision about a dead letter"
    return "now" if lane.due else at(lane.next_attempt_at)


@parking.command("retry-now")
def retry_now_(
    *,
    round_: Brokers,
    criteria: Annotated[Lanes, LANES],
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Let the next run retry parked messages without waiting longer.

    The next run of the forwarder, or a receiver, retries them. A key that waits for your decision
    about its dead letter is counted, and still waits: see `saf dead`.
    """

    def retry(connection: psycopg.Connection[Any]) -> tuple[int, int]:
        return retry_now(connection, lanes=criteria, why=why), undecided(connection, criteria)

    def show() -> None:
        for name, (lanes, keys) in done.items():
            more = f"{counted(keys, 'key')} more until you decide about a dead letter"
            tried = f"{counted(lanes, 'lane')} to be tried by the next run"
            echo(f"{name}: {tried}" + (f"; {more}" if keys else ""))

    done = round_.visit("parked", retry)
    due = {name: lanes for name, (lanes, _) in done.items()}
    undecided_ = {name: keys for name, (_, keys) in done.items() if keys}
    round_.report({"lanes": due, "undecided": undecided_}, show, as_json=as_json)


@parking.command("messages")
def messages(
    *,
    round_: Brokers,
    criteria: Annotated[ParkedMessages, MESSAGES],
    after: After = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Show parked messages one by one.

    Those that were parked first come first.
    """
    criteria = criteria.going_on(after)
    round_.go_on(after)
    round_.show_pages(
        "parked",
        lambda connection: criteria.page(connection, limit),
        "parked",
        ONE_BY_ONE,
        as_json=as_json,
    )


@parking.command("groups")
def parked_groups(
    *,
    round_: Brokers,
    criteria: Annotated[ParkedMessages, MESSAGES],
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Show parked messages by the cause of their failure.

    The largest group comes first. A group's lanes failed with the same error but for numbers, ids,
    times and quoted values. The error and the key of its newest message are the example.
    """
    _show_groups(round_, "parked", criteria, limit, as_json=as_json)


def _count(
    round_: Round, criteria: ParkedMessages, *, to: str | None = None, as_json: bool
) -> None:
    found = round_.visit("parked", lambda connection: criteria.count(connection, MOST, to=to))

    def show() -> None:
        for name, row in found.items():
            stay = f"; {counted(row.staying, 'other')} would stay" if row.staying else ""
            echo(f"{name}: {counted(row.messages, 'parked message')}{stay}")
            say_staying(row.stays)

    counts = {name: {"messages": row.messages, "stay": row.staying, "why": dict(row.stays)}
              for name, row in found.items()}  # fmt: skip
    round_.report({"parked": counts}, show, as_json=as_json)


add_decisions(
    parking,
    "parked",
    MESSAGES,
    _count,
    CountFirst,
    discard="""Give parked messages up for good.

    Messages that a forwarder or a receiver has in hand stay; --dry-run shows which others stay, and
    why. A dialog that lacks one of the discarded messages fails at both ends.
    """,
    redirect="""Send parked messages to another destination.

    The forwarder delivers them, in order. Messages of receivers and of dialogs stay.
    """,
)


letters = Commands(help="Messages that need an operator's decision.")


Reason = Annotated[str | None, typer.Option(help=f"One of {', '.join(REASONS)}.")]
Destination = Annotated[str | None, typer.Option(help="Only messages for this destination.")]
Subscription = Annotated[
    str | None, typer.Option(help="Only dead letters of this subscription, such as forwarder.")
]
Error = Annotated[
    str | None, typer.Option(help="Only dead letters whose error contains this text.")
]


def _dead_letters(*, ids: list[int] | None, group: str | None, **criteria: Any) -> DeadLetters:
    found = DeadLetters(numbers=ids or None, group=check_group(group), **criteria)
    if found.reason is not None and found.reason not in REASONS:
        raise UsageError(f"--reason {found.reason}: the reasons are {', '.join(REASONS)}")
    return found


CRITERIA = Options(
    {
        "ids": numbers("saf dead list"),
        "reason": Reason,
        "service": Service,
        "destination": Destination,
        "key": Key,
        "before": Before,
        "subscription": Subscription,
        "error": Error,
        "group": _group("saf dead groups"),
    },
    make=_dead_letters,
)

LETTERS = Table[DeadLetter](
    *("number", "when", "subscription", "reason", "service", "key", "bytes"),
    below="error",
    cells=lambda row: (
        str(row.dead_letter_id), at(row.dead_letter_at), row.subscription, row.reason, row.service,
        row.key or "", f"{row.bytes:,}",
        row.error if row.stays is None else f"{row.error} ({WHY[row.stays]})",
    ),
)  # fmt: skip
AUDIT = Table[Audited](
    *("when", "who", "person", "action", "messages"),
    below="why",
    cells=lambda row: (
        at(row.audit_at), row.who, row.person or "", row.action, f"{row.messages:,}", row.why
    ),
)  # fmt: skip


@letters.command("list")
def list_(
    *,
    round_: Brokers,
    criteria: Annotated[DeadLetters, CRITERIA],
    after: After = None,
    limit: Limit = 100,
    count: Annotated[bool, typer.Option("--count", help="Count without listing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show dead letters, oldest first."""
    criteria = criteria.going_on(after)
    round_.go_on(after)
    if count:
        _show_count(round_, criteria, as_json=as_json)
    else:
        _show_letters(round_, criteria, limit, as_json=as_json)


@letters.command("groups")
def dead_groups(
    *,
    round_: Brokers,
    criteria: Annotated[DeadLetters, CRITERIA],
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Show dead letters by the cause of their failure.

    The largest group comes first. The errors of a group are the same but for numbers, ids, times
    and quoted values. The error and the key of its newest message are the example.
    """
    _show_groups(round_, "dead", criteria, limit, as_json=as_json)


@letters.command("audit")
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
    round_.show_pages(
        "dead",
        lambda connection: audit.page(connection, limit, before),
        "audit",
        AUDIT,
        as_json=as_json,
    )


@letters.command()
def show(
    number: Annotated[
        int, typer.Argument(max=GREATEST, help="Number, as `saf dead list` shows it.")
    ],
    *,
    round_: Brokers,
) -> None:
    """Write the body of a dead letter to standard output.

    On a terminal, the body is shown as text.
    """
    round_.only(number)
    for body in round_.visit("dead", lambda connection: dead.body(connection, number)).values():
        if body is None:
            raise UsageError(f"no dead letter {number}; see `saf dead list`")
        write(body)
    round_.finish(say=True)


def _show_count(round_: Round, criteria: DeadLetters, *, as_json: bool) -> None:
    found = round_.visit("dead", lambda connection: criteria.count(connection, MOST))
    counts = {name: row.messages for name, row in found.items()}
    lines = (f"{name}: {counted(count, 'dead letter')}" for name, count in counts.items())
    round_.say({"dead_letters": counts}, lines, as_json=as_json)


def _show_letters(
    round_: Round,
    criteria: DeadLetters,
    limit: int | None = None,
    *,
    to: str | None = None,
    as_json: bool,
) -> None:
    round_.show_pages(
        "dead",
        lambda connection: criteria.page(connection, limit, to=to),
        "dead_letters",
        LETTERS,
        as_json=as_json,
    )


add_decisions(
    letters,
    "dead",
    CRITERIA,
    _show_letters,
    DryRun,
    retry="""Deliver dead letters again, in order.

    The forwarder or their receivers deliver them.
    """,
    discard="Give dead letters up for good.",
    redirect="""Deliver dead letters again, to another destination.

    The forwarder delivers them. Dead letters of receivers and of dialogs stay, and are counted.
    """,
)
