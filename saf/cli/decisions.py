"""Decisions: the commands with which operators decide about messages set aside.

A decision runs at each chosen broker, for messages that are set aside when it begins there.
Afterwards, the command prints the action, the number of messages, their first keys, and how many
others stay as they were, with the reason. If a broker fails, its error is shown, and the other
brokers are decided about as usual.

Discarded messages are lost, so `discard` asks first, with the number of messages and their first
keys; it then concerns only the messages that it has counted. Without a terminal, it needs
``--yes``. ``--dry-run`` shows the matches without changing them. A decision about all messages
needs ``--all``: without numbers or a filter, it is rejected. So is an unknown group.
"""

# Annotations are evaluated as the commands are made: each kind of messages has its own options.

import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Protocol
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import (
    GREATEST,
    AsJson,
    Config,
    Options,
    Round,
    Where,
    Why,
    Yes,
    grouped,
    round_at,
)
from saf.cli.console import confirm, echo
from saf.config import load, table_named
from saf.errors import UsageError
from saf.operating.decide import Decision, in_chunks
from saf.operating.places import everywhere
from saf.operating.wording import counted, first_of, named, none_at
from saf.setaside.selection import Counted, Selection, staying_in_words

MOST = 1_000_000_000
"""Exceeds any number of messages: a command may take the time to count all."""

All = Annotated[
    bool, typer.Option("--all", help="Confirm that all are meant, if no filter is given.")
]
To = Annotated[str, typer.Option(help="Name of the destination in saf.toml.")]

Key = Annotated[str | None, typer.Option(help="Only messages with this key.")]
Service = Annotated[str | None, typer.Option(help="Only messages for this service.")]

SAMPLE = 10
"""How many of the messages are read for their keys."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The brokers to decide at, and what to decide there."""

    round_: Round
    decision: Decision
    yes: bool = True
    """False: ask first."""


def numbers(shown_by: str) -> Any:
    """Return the argument for the numbers of messages, as a command shows them."""
    help_ = f"Numbers, as `{shown_by}` shows them."
    return Annotated[list[int] | None, typer.Argument(max=GREATEST, help=help_)]


class Preview(Protocol):
    """A function that shows the messages that a decision would concern, and ends the command."""

    def __call__(
        self, round_: Round, criteria: Any, *, to: str | None = None, as_json: bool
    ) -> None:
        """Show them for a redirection ``to`` a destination, or for other decisions."""


def add_decisions(
    app: typer.Typer, role: str, criteria: Options, preview: Preview, dry_run: Any, **helps: str
) -> None:
    """Add a command for each decision about one kind of messages.

    Args:
        app: the commands about them.
        role: the role of connections.
        criteria: the options that make their selection.
        preview: shows the matches, with ``dry_run``.
        dry_run: that option.
        helps: the help text of each decision, by its action.
    """
    for action, text in helps.items():
        app.command(action, help=text)(_command(action, role, criteria, preview, dry_run))


def _command(
    action: str, role: str, criteria: Options, preview: Preview, dry_run: Any
) -> Callable[..., None]:
    def anywhere(config: Path | None, broker: str | None, *, yes: bool = True) -> Target:
        decision = Decision(action=action)
        return Target(round_=round_at(everywhere, config, broker), decision=decision, yes=yes)

    target = Options({"config": Config, "broker": Where}, make=anywhere)
    if action == "redirect":
        target = Options({"to": To, **target.types}, make=_redirected)
    elif action == "discard":
        target = Options({"yes": Yes, **target.types}, make=anywhere)

    def decide(
        *,
        target: Annotated[Target, target],
        criteria: Annotated[Selection[Any], criteria],
        why: Why = "",
        everything: All = False,
        dry_run: dry_run = False,
        as_json: AsJson = False,
    ) -> None:
        if criteria == type(criteria)() and not everything:
            raise UsageError(f"which {criteria.WORD}s? Give numbers, a filter, or --all")
        if criteria.numbers:
            lost = action != "retry" and not dry_run
            round_ = of_numbers(target.round_, role, criteria, alone=not lost)
            target = replace(target, round_=round_)
        if dry_run:
            preview(target.round_, criteria, to=target.decision.to, as_json=as_json)
        else:
            _decide(target, role, criteria, why, as_json=as_json)

    return grouped(decide)


def of_numbers(round_: Round, role: str, criteria: Selection[Any], *, alone: bool = True) -> Round:
    """Return a round of the broker that has the messages with the chosen numbers.

    Each broker numbers its rows, so a number is a different message in each. ``alone``: if only one
    broker has messages with these numbers, they are meant. After a decision that cannot be undone,
    the same command would find another broker's message: such a command names its broker.

    Raises:
        UsageError: it is not clear which broker is meant; the error has the whole command.
    """
    if len(round_.brokers) <= 1:
        return round_
    numbered = type(criteria)(numbers=criteria.numbers)
    found = round_.visit(role, lambda connection: numbered.rows(connection, 1))
    having = [name for name, rows in found.items() if rows]
    if not having and not round_.failed:
        raise unknown(criteria, round_.brokers)
    if alone and len(having) == 1 and not round_.failed:
        return round_.among(having)
    round_.say_failures()
    numbers = ", ".join(map(str, criteria.numbers or ()))
    at = f"{criteria.WORD} {numbers} is at {', '.join(having)}" if having else "not all answer"
    command = shlex.join(["saf", *sys.argv[1:], "--broker", (having or [*round_.brokers])[0]])
    raise UsageError(f"numbers are different at each broker, and {at}: `{command}`")


def unknown(criteria: Selection[Any], places: Collection[str]) -> UsageError:
    """Return the error that no broker has the chosen messages."""
    if criteria.group is not None:
        return UsageError(
            f"no group {criteria.group} at {named(places)}; see `{criteria.COMMAND} groups`"
        )
    numbers = ", ".join(map(str, criteria.numbers or ()))
    return UsageError(
        f"no {criteria.WORD} {numbers} at {named(places)}; see `{criteria.COMMAND} "
        f"{criteria.LISTED_BY}`"
    )


def _redirected(to: str, config: Path | None, broker: str | None) -> Target:
    settings = load(config)
    table_named(settings.destinations, "destinations", to, f"--to {to}")
    round_ = Round(everywhere(settings, broker), settings)
    return Target(round_=round_, decision=Decision(action="redirect", to=to))


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The result of a decision at a broker."""

    ids: list[UUID]
    """Ids of the messages that were decided about."""
    keys: list[str]
    """Keys of the first messages, or their ids."""
    left: Counted
    """The other matching messages, which stay as they were."""
    readers: frozenset[str | None]
    """The subscriptions that get retried messages; None: the forwarder."""
    stopped: bool
    """True if an operator stopped the decision before its end."""

    @property
    def stays(self) -> dict[str, int]:
        """Numbers of messages that stay, by reason; see `saf.setaside.selection.WHY`."""
        stays = dict(self.left.stays)
        if self.left.messages:
            # a decision skips messages that others have locked
            why = "stopped" if self.stopped else "in_hand"
            stays[why] = stays.get(why, 0) + self.left.messages
        return stays


def _decide(
    target: Target, role: str, criteria: Selection[Any], why: str, *, as_json: bool
) -> None:
    round_, decision = target.round_, target.decision
    chosen = dict.fromkeys(round_.brokers, criteria)
    if not target.yes:
        chosen = _confirmed(round_, role, criteria, as_json=as_json)

    def decide(
        selection: Selection[Any], connection: psycopg.Connection[Any], stop: Callable[[], bool]
    ) -> Decided:
        now = selection.until_now(connection)
        keys = _keys(connection, now, decision.to)
        readers: set[str | None] = set()
        chunks = in_chunks(
            connection, decision, now, why, stop=stop, decided=lambda h: readers.update(h.readers)
        )
        ids = [*chain.from_iterable(chunks)]
        left = now.count(connection, MOST, to=decision.to)
        return Decided(
            ids=ids,
            keys=[key for message_id, key in keys.items() if message_id in ids],
            left=left,
            readers=frozenset(readers),
            stopped=stop(),
        )

    def show() -> None:
        for name, result in done.items():
            number = len(result.ids)
            if number or result.stays:
                more = number - len(result.keys)
                by = _by(result.readers) if decision.action == "retry" else ""
                say_done(name, counted(number, criteria.WORD), verb + by, result.keys, more)
            say_staying(result.stays)
        if done and nothing:
            none = none_at(f"{criteria.WORD}s", done, matching=criteria != type(criteria)())
            echo(f"{none} Nothing is {verb}.")

    verb = f"{DONE[decision.action]} {decision.to or ''}".rstrip()
    done = round_.decide(role, {name: partial(decide, one) for name, one in chosen.items()})
    nothing = not any(result.ids or result.stays for result in done.values())
    if done and nothing and not round_.failed and criteria.group is not None:
        raise unknown(criteria, done)
    ids = {name: [str(number) for number in result.ids] for name, result in done.items()}
    stay = {name: result.stays for name, result in done.items() if result.stays}
    round_.report({"message_ids": ids, "stay": stay}, show, as_json=as_json)


DONE: Mapping[str, str] = MappingProxyType(
    {"retry": "set to be retried", "redirect": "redirected to", "discard": "discarded"}
)
"""The actions in words, once they are done."""


def _by(readers: frozenset[str | None]) -> str:
    """Return which program tries retried messages next.

    >>> _by(frozenset(["billing"])), _by(frozenset([None]))
    (' by the worker of billing', ' by the next `saf forward`')
    >>> _by(frozenset(["billing", "audit", None]))
    ' by the workers of audit, billing, and the next `saf forward`'
    """
    names = sorted(name for name in readers if name is not None)
    parts = [f"the worker{'s' * (len(names) > 1)} of {', '.join(names)}"] if names else []
    parts += ["the next `saf forward`"] * (None in readers)
    return f" by {', and '.join(parts)}" if parts else ""


def _confirmed(
    round_: Round, role: str, criteria: Selection[Any], *, as_json: bool
) -> dict[str, Selection[Any]]:
    """Ask whether the messages may be discarded; return each broker's, as counted.

    Raises:
        UsageError: nobody can answer.
    """

    def count(
        connection: psycopg.Connection[Any],
    ) -> tuple[Selection[Any], Counted, dict[UUID, str]]:
        now = criteria.until_now(connection)
        return now, now.count(connection, MOST), _keys(connection, now, None)

    found = round_.visit(role, count)
    matches = {name: row for name, row in found.items() if row[1].messages}
    parts = [
        f"{counted(row.messages, criteria.WORD)} at {name} "
        + first_of(keys.values(), more=row.messages - len(keys))
        for name, (_, row, keys) in matches.items()
    ]
    if parts:
        round_.say_failures(as_json=as_json)
        lost = " and ".join(parts)
        listed = "list them"
        confirm(f"Discard {lost}?", yes=False, lost=lost, dry_run=listed, as_json=as_json)
    return {name: now for name, (now, _, _) in found.items()}


def _keys(
    connection: psycopg.Connection[Any], chosen: Selection[Any], to: str | None
) -> dict[UUID, str]:
    """Return the keys of the first messages that may be decided about, or their ids, by id."""
    rows = chosen.page(connection, SAMPLE, to=to).shown
    return {row.message_id: row.key or str(row.message_id) for row in rows if row.stays is None}


def say_done(name: str, what: str, verb: str, keys: Iterable[str], more: int) -> None:
    """Print what a broker has done, and the first keys; ``more`` messages have no key here."""
    echo(f"{name}: {what} {verb} {first_of(keys, more)}".rstrip())


def say_staying(stays: Mapping[str, int]) -> None:
    """Print how many messages stay as they are, and why."""
    for why, number in staying_in_words([stays]).items():
        echo(f"  {number:,} {'stays' if number == 1 else 'stay'}: {why}")
