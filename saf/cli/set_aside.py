"""``saf parked`` and ``saf dead``: messages set aside, and operators' decisions about them.

``saf parked`` shows what messages wait for, e.g. a destination, and until when: `lanes` by lane,
each with its next attempt, and `messages` one by one. `retry_now_` makes lanes due now. ``saf
dead`` shows the messages that need an operator. ``groups`` shows either by the causes of their
failure. The decisions are those of `saf.cli.decisions`; their ``--dry-run`` lists the messages.
Without ``--broker``, all of them concern the sources and the stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import psycopg
import typer

from saf.cli.brokers import (
    GREATEST,
    MOST_ROWS,
    After,
    AsJson,
    Before,
    Commands,
    DryRun,
    Everywhere,
    Limit,
    Options,
    Round,
    Why,
)
from saf.cli.console import Listing, Table, echo, ends, say_next, write
from saf.cli.decisions import (
    MOST,
    SAMPLE,
    Key,
    Service,
    add_decisions,
    numbers,
    of_numbers,
    say_done,
    say_staying,
    unknown,
)
from saf.errors import UsageError
from saf.operating.journey import Attempted, failed_attempts
from saf.operating.wording import at, counted, none_at
from saf.setaside import audit, dead
from saf.setaside.audit import Audited
from saf.setaside.dead import REASONS
from saf.setaside.failure_groups import FailureGroup, failure_groups
from saf.setaside.fingerprint import check_group
from saf.setaside.lane import Origin, WaitsFor
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
    first_keys,
    parked,
    place_at,
    retry_now,
    undecided,
)

parking = Commands(help="Parked messages: what they wait for, and the next attempt.")


LaneSubscription = Annotated[
    str | None, typer.Option(help="Only messages that this subscription set aside.")
]
LaneDestination = Annotated[str | None, typer.Option(help="Only messages for this destination.")]
LaneWaitsFor = Annotated[
    WaitsFor | None,
    typer.Option(
        "--waits-for", help=f"Only messages that wait for: {', '.join(WaitsFor)}.", metavar="WHAT"
    ),
]
LaneOrigin = Annotated[
    Origin | None,
    typer.Option("--origin", help=f"Only messages from: {', '.join(Origin)}.", metavar="ORIGIN"),
]
Subject = Annotated[
    str | None,
    typer.Option(help="Only messages that wait for this service, key, shard or conversation."),
]


def _group(shown_by: str) -> Any:
    """Return the option for a failure group, as a command shows it."""
    help_ = f"Only messages of this failure group: an id that `{shown_by}` shows."
    return Annotated[str | None, typer.Option(metavar="ID", help=help_)]


def _lanes(*, group: str | None, **criteria: Any) -> Lanes:
    return Lanes(group=check_group(group), **criteria)


def _parked_messages(
    *, ids: list[int] | None, group: str | None, **criteria: Any
) -> ParkedMessages:
    return ParkedMessages(numbers=ids or None, group=check_group(group), **criteria)


OF_LANES = {
    "subscription": LaneSubscription,
    "destination": LaneDestination,
    "waits_for": LaneWaitsFor,
    "origin": LaneOrigin,
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
BY_LANE = Table[Parked](
    *("parked", "waits for", "set aside by", "attempts", "next attempt"),
    things="parked messages",
    below="error",
    cells=lambda lane: (
        f"{lane.messages:,}", lane.words, lane.subscription, str(lane.attempts), _next(lane),
        lane.error,
    ),
)  # fmt: skip
ONE_BY_ONE = Table[ParkedMessage](
    *("number", "when", "waits for", "set aside by", "service", "key", "bytes"),
    things="parked messages",
    below="error",
    cells=lambda row: (
        str(row.parked_id), at(row.parked_at), row.words, row.subscription, row.service,
        row.key or "", f"{row.bytes:,}", row.error or "",
    ),
)  # fmt: skip


def _parked_group(row: FailureGroup) -> dict[str, Any]:
    return {**row.as_dict(), "waits_for": row.lane.waits_for}


PARKED_BY_GROUP = Table[FailureGroup](
    *("group", "messages", "waits for", "set aside by", "first", "last", "example's key"),
    things="failure groups of parked messages",
    below="example",
    cells=lambda row: (
        row.group, f"{row.messages:,}", str(row.lane), row.subscription, at(row.first_at),
        at(row.last_at), row.key or "", row.error,
    ),
    plain=_parked_group,
)  # fmt: skip


def _show_groups(
    round_: Round,
    role: str,
    criteria: Selection[Any],
    limit: int,
    table: Table[FailureGroup],
    *,
    as_json: bool,
) -> None:
    found = round_.visit(role, lambda connection: failure_groups(connection, criteria, limit))
    rows = {name: groups.shown for name, groups in found.items()}

    def show() -> None:
        table.show(rows, matching=criteria != type(criteria)())
        for name, groups in found.items():
            if groups.more:
                echo(f"{name}: {counted(groups.more, 'smaller group')} more")

    more = {name: groups.more for name, groups in found.items()}
    round_.report({"groups": table.plain(rows), "more": more}, show, as_json=as_json)


@parking.command("list")
def lanes(
    *,
    round_: Everywhere,
    limit: Annotated[
        int, typer.Option(min=1, max=MOST_ROWS, help="Lanes per broker, at most.")
    ] = 100,
    criteria: Annotated[Lanes, LANES],
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List parked messages by what they wait for, with the next attempt.

    Each row is a lane: messages that wait for the same thing, in order. If there are more lanes
    than the limit, it shows those that block the most messages.
    """
    place = place_at(after)
    round_.go_on(after)
    lanes = round_.visit(
        "parked", lambda connection: parked(connection, limit, lanes=criteria, after=place)
    )

    def show() -> None:
        BY_LANE.show(lanes, matching=criteria != Lanes())
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
        return "once a worker handles its type"
    if lane.waits_for is WaitsFor.CONVERSATION:
        return "once the earlier message arrives"
    if lane.paused:
        return "after saf destination resume"
    if lane.braked:
        return "after saf parked retry-now"
    if lane.next_attempt_at >= BLOCKED:
        return "after a decision about its dead letter"
    return f"due since {at(lane.next_attempt_at)}" if lane.due else at(lane.next_attempt_at)


@parking.command("retry-now")
def retry_now_(
    *,
    round_: Everywhere,
    criteria: Annotated[Lanes, LANES],
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Retry parked messages at the next run, without waiting longer.

    The next run of the forwarder, or a receiver, retries them. A key that waits for your decision
    about its dead letter is counted, and still waits: see `saf dead`.
    """

    def retry(connection: psycopg.Connection[Any]) -> tuple[int, list[str], int]:
        keys = first_keys(connection, SAMPLE + 1, criteria)
        lanes = retry_now(connection, lanes=criteria, why=why)
        return lanes, keys, undecided(connection, criteria)

    def show() -> None:
        for name, (lanes, keys, waiting) in done.items():
            if lanes:
                more = len(keys[SAMPLE:])
                say_done(name, counted(lanes, "lane"), verb, keys[:SAMPLE], more)
            if waiting:
                wait = "waits" if waiting == 1 else "wait"
                echo(f"{name}: {counted(waiting, 'key')} still {wait}: decide with `saf dead`")
        if done and nothing:
            nothing_found = none_at("parked messages", done, matching=criteria != Lanes())
            echo(f"{nothing_found} Nothing is retried.")

    verb = "to be tried by the next run"
    done = round_.visit("parked", retry)
    nothing = not any(lanes or waiting for lanes, _, waiting in done.values())
    if done and nothing and criteria.group is not None and not round_.failed:
        raise unknown(ParkedMessages(group=criteria.group), done)
    due = {name: lanes for name, (lanes, *_) in done.items()}
    undecided_ = {name: waiting for name, (*_, waiting) in done.items() if waiting}
    round_.report({"lanes": due, "undecided": undecided_}, show, as_json=as_json)


@parking.command("messages")
def messages(
    *,
    round_: Everywhere,
    criteria: Annotated[ParkedMessages, MESSAGES],
    after: After = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List parked messages one by one, those parked first at the top."""
    round_.go_on(after)
    wanted = criteria.going_on(after)
    round_.show_pages(
        "parked",
        lambda connection: wanted.page(connection, limit),
        "parked",
        ONE_BY_ONE,
        as_json=as_json,
        matching=criteria != ParkedMessages(),
    )


@parking.command("groups")
def parked_groups(
    *,
    round_: Everywhere,
    criteria: Annotated[ParkedMessages, MESSAGES],
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Group parked messages by their causes, the largest group first.

    A group's lanes failed with the same error but for numbers, ids, times and quoted values. The
    error and the key of its newest message are the example.
    """
    _show_groups(round_, "parked", criteria, limit, PARKED_BY_GROUP, as_json=as_json)


def _show_parked(
    round_: Round, criteria: ParkedMessages, *, to: str | None = None, as_json: bool
) -> None:
    """Show the messages that a decision concerns, and how many others stay, and why."""
    found = round_.visit(
        "parked",
        lambda connection: (
            criteria.page(connection, None, to=to),
            criteria.count(connection, MOST, to=to),
        ),
    )
    rows = {name: page for name, (page, _) in found.items()}
    counts = {name: count for name, (_, count) in found.items()}

    def show() -> None:
        ONE_BY_ONE.show(rows, matching=criteria != ParkedMessages())
        for name, row in counts.items():
            stay = f"; {counted(row.staying, 'other')} would stay" if row.staying else ""
            if row.messages or row.staying:
                echo(f"{name}: {counted(row.messages, 'parked message')}{stay}")
            say_staying(row.stays)

    numbers = {name: {"messages": row.messages, "stay": row.staying, "why": dict(row.stays)}
               for name, row in counts.items()}  # fmt: skip
    answer = {"parked": numbers, "messages": ONE_BY_ONE.plain(rows)}
    round_.report(answer, show, as_json=as_json)


add_decisions(
    parking,
    "parked",
    MESSAGES,
    _show_parked,
    DryRun,
    discard="""Discard parked messages for good, after asking.

    Messages that a forwarder or a receiver has in hand stay; --dry-run shows which others stay, and
    why. A dialog that lacks one of the discarded messages fails at both ends.
    """,
    redirect="""Redirect parked messages to another destination.

    The forwarder delivers them, in order. Messages of receivers and of dialogs stay.
    """,
)


letters = Commands(help="Dead letters: messages that need an operator's decision.")


Reason = Annotated[
    str | None, typer.Option(help=f"Only dead letters with this reason: {', '.join(REASONS)}.")
]
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
    things="dead letters",
    below="error",
    cells=lambda row: (
        str(row.dead_letter_id), at(row.dead_letter_at), row.subscription, row.reason, row.service,
        row.key or "", f"{row.bytes:,}",
        row.error if row.stays is None else f"{row.error} ({WHY[row.stays]})",
    ),
)  # fmt: skip
DEAD_BY_GROUP = Table[FailureGroup](
    *("group", "messages", "reason", "subscription", "destination", "service", "first", "last"),
    *("example's key",),
    things="dead letters",
    below="example",
    cells=lambda row: (
        row.group, f"{row.messages:,}", row.reason, row.subscription, row.destination, row.service,
        at(row.first_at), at(row.last_at), row.key or "", row.error,
    ),
)  # fmt: skip
AUDIT = Table[Audited](
    *("when", "who", "person", "action", "messages"),
    things="decisions",
    below="why",
    cells=lambda row: (
        at(row.audit_at), row.who, row.person or "", row.action, f"{row.messages:,}", row.why
    ),
)  # fmt: skip


@letters.command("list")
def list_(
    *,
    round_: Everywhere,
    criteria: Annotated[DeadLetters, CRITERIA],
    after: After = None,
    limit: Limit = 100,
    count: Annotated[bool, typer.Option("--count", help="Count without listing.")] = False,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first."""
    round_.go_on(after)
    criteria = criteria.going_on(after)
    if count:
        _show_count(round_, criteria, as_json=as_json)
    else:
        _show_letters(round_, criteria, limit, as_json=as_json)


@letters.command("groups")
def dead_groups(
    *,
    round_: Everywhere,
    criteria: Annotated[DeadLetters, CRITERIA],
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Group dead letters by their causes, the largest group first.

    The errors of a group are the same but for numbers, ids, times and quoted values. The error and
    the key of its newest message are the example.
    """
    _show_groups(round_, "dead", criteria, limit, DEAD_BY_GROUP, as_json=as_json)


@letters.command("audit")
def audit_(
    *,
    round_: Everywhere,
    limit: Limit = 100,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List operators' decisions and their reasons, latest first."""
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
    round_: Everywhere,
    body: Annotated[
        bool, typer.Option("--body", help="Write only its body to standard output, unchanged.")
    ] = False,
) -> None:
    """Show the error and the message of one dead letter.

    It also shows failed attempts at its endpoint. --body writes its body; on a terminal, as text.
    """
    criteria = DeadLetters(numbers=[number])
    round_ = of_numbers(round_, "dead", criteria)

    def read(
        connection: psycopg.Connection[Any],
    ) -> tuple[DeadLetter, list[Attempted], bytes | None] | None:
        for row in criteria.rows(connection, 1):
            attempts = failed_attempts(connection, row.message_id)
            return row, attempts, dead.body(connection, number) if body else None
        return None

    for where, found in round_.visit("dead", read).items():
        if found is None:
            raise unknown(criteria, [where])
        letter, attempts, content = found
        if content is None:
            _show_letter(where, letter, attempts)
        else:
            write(content)
    round_.finish(say=True)


def _show_letter(broker: str, letter: DeadLetter, attempts: Iterable[Attempted]) -> None:
    listing = Listing("what", "is")
    details = {
        "error": letter.error,
        "type": letter.message_type,
        "message id": str(letter.message_id),
        "key": letter.key,
        "service": letter.service,
        "headers": letter.headers,
        **{
            f"attempt {number}": f"{at(attempt.at)}  {attempt.words}: {attempt.error}"
            for number, attempt in enumerate(attempts, 1)
        },
        "broker": broker,
        "number": str(letter.dead_letter_id),
        "subscription": letter.subscription,
        "destination": letter.destination,
        "reason": letter.reason,
        "bytes": f"{letter.bytes:,}",
        "created": at(letter.created_at),
        "expires": letter.expires_at and at(letter.expires_at),
        "dead since": at(letter.dead_letter_at),
        "stays": letter.stays and WHY[letter.stays],
    }
    for name, value in details.items():
        if value:
            listing.add(name, value)
    listing.show()


def _show_count(round_: Round, criteria: DeadLetters, *, as_json: bool) -> None:
    found = round_.visit("dead", lambda connection: criteria.count(connection, MOST))
    counts = {name: row.messages for name, row in found.items()}
    lines = [f"{name}: {counted(count, 'dead letter')}" for name, count in counts.items()]
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
        matching=replace(criteria, after=None) != DeadLetters(),
    )


add_decisions(
    letters,
    "dead",
    CRITERIA,
    _show_letters,
    DryRun,
    retry="""Retry dead letters, in order.

    The forwarder or their receivers deliver them.
    """,
    discard="Discard dead letters for good, after asking.",
    redirect="""Redirect dead letters to another destination.

    The forwarder delivers them. Dead letters of receivers and of dialogs stay, and are counted.
    """,
)
