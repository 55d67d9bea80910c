"""``saf held``: messages that are due later, by service and name, and operators' decisions.

`cancel` loses messages, so it asks first, like the other decisions that lose any. `reschedule`
moves them to another time. `retry` is for messages that were refused when they were due. Each
decision runs at the chosen brokers, for the messages that are held when it begins; see
`saf.operating.held`. If it skips messages that another transaction has locked, it names that
transaction, and exits with 75. A message that is given by its name or its id must be held;
otherwise the error shows when it was sent, or that the name is unknown.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from typing import Annotated, Any
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import (
    After,
    AsJson,
    Commands,
    DryRun,
    Everywhere,
    Limit,
    Options,
    Round,
    Why,
    Yes,
    moment,
    of_broker,
    with_unit,
    zoned,
)
from saf.cli.console import Listing, Table, complain, confirm, echo, results_of, write
from saf.cli.decisions import MOST, SAMPLE, All, Key, Service, say_done, say_staying
from saf.errors import Unavailable, UsageError
from saf.message import check_due
from saf.operating import held as messages
from saf.operating.decide import Decision, in_chunks
from saf.operating.held import HeldDetails, HeldMessage, HeldMessages, LockedMessage
from saf.operating.wording import age, at, counted, first_of, named, none_at
from saf.setaside.selection import WHY

app = Commands(help="Held messages: those that are due later, or refused.")

ROLE = "held"

Which = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SERVICE NAME | ID]", help="Service and name of one message, or its id."
    ),
]
Name = Annotated[str | None, typer.Option(help="Only messages with this name.")]
DueBefore = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="TIME", help="Only messages that are due before this."),
]
Overdue = Annotated[
    bool, typer.Option("--overdue", help="Only messages that are due and were not moved yet.")
]
Refused = Annotated[
    bool, typer.Option("--refused", help="Only messages that were refused when they were due.")
]


def _chosen(
    *,
    which: list[str] | None = None,
    due_before: datetime | None = None,
    overdue: bool = False,
    refused: bool = False,
    **criteria: Any,
) -> HeldMessages:
    if overdue and refused:
        raise UsageError("--overdue and --refused: a message is one of them")
    state = "overdue" if overdue else "refused" if refused else None
    found = HeldMessages(before=due_before, state=state, **criteria)
    if not which:
        return found
    given = _given(which)
    if twice := [name for name in ("service", "name") if getattr(found, name) is not None]:
        options = " and ".join(f"--{name}" for name in twice)
        raise UsageError(f"{shlex.join(which)} is one message: leave out {options}")
    return replace(found, **given)


def _given(which: list[str]) -> dict[str, Any]:
    """Return the criteria for one message.

    >>> _given(["billing", "remind-42"])
    {'service': 'billing', 'name': 'remind-42'}

    Raises:
        UsageError: it is neither a service and a name, nor an id.
    """
    if len(which) == 2:  # noqa: PLR2004 - a pair
        return {"service": which[0], "name": which[1]}
    if len(which) == 1:
        try:
            return {"message_id": UUID(which[0])}
        except ValueError:
            pass
    raise UsageError(
        f"{shlex.join(which)}: give the SERVICE and the NAME of a held message, or its id"
    )


OF_ALL: Mapping[str, Any] = {"service": Service, "name": Name, "key": Key, "due_before": DueBefore}
FILTER = Options({**OF_ALL, "overdue": Overdue, "refused": Refused}, make=_chosen)
ONE = Options({"which": Which}, make=_chosen)
CRITERIA = Options({"which": Which, **FILTER.types}, make=_chosen)
REFUSED = Options({"which": Which, **OF_ALL}, make=partial(_chosen, refused=True))


def _when(row: HeldMessage) -> str:
    """Return when a message is due, and how far that is."""
    distance = age(abs(row.due_in_seconds))
    return f"{at(row.due)}, {'in ' + distance if row.due_in_seconds > 0 else distance + ' ago'}"


MESSAGES = Table[HeldMessage](
    *("service", "name", "due", "state", "sent by", "key", "bytes", "message id"),
    things="held messages",
    below="refused",
    sparse=("key", "refused"),
    cells=lambda row: (
        row.service, row.name or "", _when(row), row.state, row.sender, row.key or "",
        f"{row.bytes:,}", str(row.message_id), WHY[row.stays] if row.stays else row.refused or "",
    ),
)  # fmt: skip


@app.command("list")
def list_(
    *,
    round_: Everywhere,
    criteria: Annotated[HeldMessages, FILTER],
    last: Annotated[bool, typer.Option("--last", help="Begin with those that are due last.")] = (
        False
    ),
    after: After = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List held messages, those that are due first at the top."""
    round_.go_on(after)
    wanted = replace(criteria, newest_first=last).going_on(after)
    _show(round_, wanted, limit, as_json=as_json)


def _show(
    round_: Round,
    wanted: HeldMessages,
    limit: int | None,
    *,
    to: str | None = None,
    as_json: bool,
) -> None:
    plain = replace(wanted, newest_first=False, after=None, after_due=None)
    round_.show_pages(
        ROLE,
        lambda connection: wanted.page(connection, limit, to=to),
        "held",
        MESSAGES,
        as_json=as_json,
        matching=plain != HeldMessages(),
    )


@app.command()
def show(
    *,
    criteria: Annotated[HeldMessages, ONE],
    round_: Everywhere,
    body: Annotated[
        bool, typer.Option("--body", help="Write only its body to standard output.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show one held message, without its body."""
    if criteria == HeldMessages():
        raise UsageError("which held message? Give its SERVICE and NAME, or its id")

    def read(connection: psycopg.Connection[Any]) -> tuple[HeldDetails | None, bytes | None]:
        for row in criteria.rows(connection, 1):
            content = messages.body(connection, row.message_id) if body else None
            return messages.details(connection, row.message_id), content
        return None, None

    asked = round_.visit(ROLE, read)
    found = {name: item for name, (item, _) in asked.items() if item is not None}
    if not found and not round_.failed:
        raise _not_held(round_, criteria)
    if body:
        for name in found:
            write(asked[name][1] or b"")
        round_.finish(say=False)
        return

    def show_all() -> None:
        for name, item in found.items():
            _show_details(name, item)

    round_.report({"held": results_of(found)}, show_all, as_json=as_json)


def _show_details(broker: str, row: HeldDetails) -> None:
    listing = Listing("what", "is")
    shown = {
        "broker": broker,
        "service": row.service,
        "name": row.name,
        "state": row.state,
        "due": _when(row),
        "refused": row.refused,
        "sent by": row.sender,
        "from": row.from_service,
        "to broker": row.to_broker,
        "message id": str(row.message_id),
        "key": row.key,
        "type": row.message_type,
        "headers": row.headers,
        "bytes": f"{row.bytes:,}",
        "sent": at(row.created_at),
        "expires": row.expires_at and at(row.expires_at),
    }
    for name, value in shown.items():
        if value:
            listing.add(name, value)
    listing.show()


@app.command()
def cancel(
    *,
    criteria: Annotated[HeldMessages, CRITERIA],
    round_: Everywhere,
    why: Why = "",
    everything: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Cancel held messages, which are then never sent, after asking.

    Their names may be used again.
    """
    decide = _Decide(Decision(action="cancel"), "cancelled", yes=yes)
    decide(round_, criteria, why, everything=everything, dry_run=dry_run, as_json=as_json)


@app.command()
def reschedule(
    *,
    criteria: Annotated[HeldMessages, CRITERIA],
    round_: Everywhere,
    at_: Annotated[
        datetime | None,
        typer.Option("--at", parser=zoned, metavar="TIME", help="Time at which to send them."),
    ] = None,
    in_: Annotated[
        float | None,
        typer.Option(
            "--in",
            parser=with_unit,
            metavar="DURATION",
            help="Time from now: 7d, 12h, 30m, 90s, 0.",
        ),
    ] = None,
    why: Why = "",
    everything: All = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Move held messages to another time, earlier or later.

    A refused message is tried again at that time.
    """
    due = _due(at_, in_)
    decision = Decision(action="reschedule", to=due.isoformat())
    decide = _Decide(decision, f"rescheduled to {at(due)}")
    decide(round_, criteria, why, everything=everything, dry_run=dry_run, as_json=as_json)


def _due(moment_: datetime | None, seconds: float | None) -> datetime:
    if (moment_ is None) == (seconds is None):
        raise UsageError("when? Give either --at TIME or --in DURATION")
    if moment_ is None:
        try:
            moment_ = datetime.now(UTC) + timedelta(seconds=seconds or 0)
        except OverflowError:
            raise UsageError(f"--in: {seconds:g} s from now is not a time") from None
    check_due(moment_)
    return moment_


@app.command()
def retry(
    *,
    criteria: Annotated[HeldMessages, REFUSED],
    round_: Everywhere,
    why: Why = "",
    everything: All = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Retry refused messages at the next run.

    It moves those that the rules and the outbox allow by then.
    """
    decide = _Decide(Decision(action="move"), "to be moved by the next `saf forward`")
    decide(round_, criteria, why, everything=everything, dry_run=dry_run, as_json=as_json)


@dataclass(frozen=True)
class _Decide:
    """A decision, and the word for its result."""

    decision: Decision
    done: str
    yes: bool = True
    """False: ask first."""

    def __call__(
        self,
        round_: Round,
        criteria: HeldMessages,
        why: str,
        *,
        everything: bool,
        dry_run: bool,
        as_json: bool,
    ) -> None:
        one = criteria.message_id is not None or criteria.name is not None
        by_state = criteria.state if self.decision.action != "move" else None
        if replace(criteria, state=by_state) == HeldMessages() and not everything:
            raise UsageError(
                "which held messages? Give SERVICE and NAME, an id, a filter, or --all"
            )
        if one:
            found = round_.visit(ROLE, _any(criteria))
            if not any(found.values()) and not round_.failed:
                raise _not_held(round_, criteria)
            round_ = round_.answering(found)
        if dry_run:
            _show(round_, criteria, None, to=self.decision.to, as_json=as_json)
            return
        chosen: Mapping[str, HeldMessages] = dict.fromkeys(round_.brokers, criteria)
        if not self.yes:
            chosen = _confirmed(round_, criteria, as_json=as_json)
        done = round_.decide(
            ROLE, {name: partial(self._at, selection, why) for name, selection in chosen.items()}
        )

        def show() -> None:
            for name, (ids, names, stays, _) in done.items():
                if ids:
                    number = counted(len(ids), criteria.WORD)
                    say_done(name, number, self.done, names, len(ids) - len(names))
                say_staying({why: number for why, number in stays.items() if why != "in_hand"})
            if done and not any(ids or stays for ids, _, stays, _ in done.values()):
                none = none_at(f"{criteria.WORD}s", done, matching=criteria != HeldMessages())
                echo(f"{none} Nothing is {self.done}.")
            for name, (*_, stays, locked) in done.items():
                if "in_hand" in stays:
                    _say_locked(name, stays["in_hand"], locked)

        answer = {
            "message_ids": {name: [str(id_) for id_ in ids] for name, (ids, *_) in done.items()},
            "stay": {name: stays for name, (*_, stays, _) in done.items() if stays},
            "locked": {
                name: [row.as_dict() for row in rows] for name, (*_, rows) in done.items() if rows
            },
        }
        later = any("in_hand" in stays for *_, stays, _ in done.values())
        code = Unavailable.exit_code if later else 0
        round_.report(answer, show, as_json=as_json, found=code)

    def _at(
        self,
        selection: HeldMessages,
        why: str,
        connection: psycopg.Connection[Any],
        stop: Callable[[], bool],
    ) -> tuple[list[UUID], list[str], dict[str, int], list[LockedMessage]]:
        """Decide at a broker.

        Return the ids, the first names, how many stay, and why, and the first that are locked.
        """
        now = selection.until_now(connection)
        to = self.decision.to
        before = now.count(connection, MOST, to=to)
        names = {row.message_id: row.called for row in now.rows(connection, SAMPLE, to=to)}
        ids = [*chain.from_iterable(in_chunks(connection, self.decision, now, why, stop=stop))]
        left = before.messages - len(ids)
        stays, locked = dict(before.stays), list[LockedMessage]()
        if left > 0 and stop():
            stays["stopped"] = left
        elif left > 0:
            stays["in_hand"] = left
            locked = messages.locked(connection, now, ids, SAMPLE, to=to)
        return ids, [names[id_] for id_ in ids if id_ in names], stays, locked


def _say_locked(broker: str, number: int, locked: Sequence[LockedMessage]) -> None:
    """Print on stderr that a decision has skipped messages: which, and who has locked them."""
    stay = "stays as it was" if number == 1 else "stay as they were"
    many = counted(number, HeldMessages.WORD)
    complain(of_broker(broker, f"{many} {stay}, locked by another transaction: try again later"))
    for row in locked:
        complain(f"{row.called}: {f'locked by {row.words}' if row.words else 'locked'}")
    if locked and number > len(locked):
        complain(f"{number - len(locked):,} more")


def _any(criteria: HeldMessages) -> Callable[[psycopg.Connection[Any]], bool]:
    return lambda connection: bool(criteria.rows(connection, 1))


def _confirmed(round_: Round, criteria: HeldMessages, *, as_json: bool) -> dict[str, HeldMessages]:
    """Ask whether the messages may be cancelled; return each broker's, as counted.

    Raises:
        UsageError: nobody can answer.
    """

    def count(connection: psycopg.Connection[Any]) -> tuple[HeldMessages, int, list[str]]:
        now = criteria.until_now(connection)
        names = [f"{row.service} {row.called}" for row in now.rows(connection, SAMPLE)]
        return now, now.count(connection, MOST).messages, names

    found = round_.visit(ROLE, count)
    parts = [
        f"{counted(number, criteria.WORD)} at {name} {first_of(names, more=number - len(names))}"
        for name, (_, number, names) in found.items()
        if number
    ]
    if parts:
        round_.say_failures(as_json=as_json)
        lost = " and ".join(parts)
        confirm(f"Cancel {lost}?", yes=False, lost=lost, dry_run="list them", as_json=as_json)
    return {name: now for name, (now, *_) in found.items()}


def _not_held(round_: Round, criteria: HeldMessages) -> UsageError:
    """Return the error for a message that is not held, or not in the wanted state."""
    places = named(round_.brokers)
    if criteria.message_id is not None:
        return UsageError(
            f"no message {criteria.message_id} is held at {places}; "
            f"`saf message {criteria.message_id}` shows whether it was sent"
        )
    name, service = criteria.name or "", criteria.service
    known = round_.visit(ROLE, lambda connection: messages.named(connection, name, service))
    sent = [f"{broker}: {row.words}" for broker, rows in known.items() for row in rows]
    if sent:
        what = "no such message is held" if criteria.state is None else f"none is {criteria.state}"
        return UsageError(f"{what}: {'; '.join(sent)}; see `saf message {shlex.quote(name)}`")
    to = f" to service {service!r}" if service is not None else ""
    return UsageError(
        f"no message{to} with the name {name!r} is known at {places}: none was sent, it was "
        "cancelled, or its name is forgotten"
    )
