"""Decisions: the commands with which operators decide about messages set aside.

A decision runs at each chosen broker, for messages that are set aside when it begins there.
Afterwards, the command prints how many messages were decided about, and how many others stay as
they were, with the reason. If a broker fails, its error is shown, and the other brokers are decided
about as usual.

``--dry-run`` shows the matches without changing them. A decision about all messages needs
``--all``: without numbers or a filter, it is rejected.
"""

# Annotations are evaluated as the commands are made: each kind of messages has its own options.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Protocol
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import GREATEST, AsJson, Config, Name, Options, Round, Why, grouped, round_at
from saf.cli.console import echo
from saf.config import did_you_mean, load
from saf.errors import ConfigurationError, UsageError
from saf.operating.decide import Decision, in_chunks
from saf.operating.places import chosen
from saf.operating.wording import counted
from saf.setaside.selection import Counted, Selection, staying_in_words

MOST = 1_000_000_000
"""Exceeds any number of messages: a command may take the time to count all."""

All = Annotated[
    bool, typer.Option("--all", help="Confirm that all are meant, if no filter is given.")
]
To = Annotated[str, typer.Option(help="The destination, by its name in saf.toml.")]

Key = Annotated[str | None, typer.Option(help="Only messages with this key.")]
Service = Annotated[str | None, typer.Option(help="Only messages for this service.")]

Target = tuple[Round, Decision]
"""The brokers to decide at, and what to decide there."""


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
    def anywhere(config: Path | None, broker: str | None) -> Target:
        return round_at(chosen, config, broker), Decision(action=action)

    target = Options({"config": Config, "broker": Name}, make=anywhere)
    if action == "redirect":
        target = Options({"to": To, **target.types}, make=_redirected)

    def decide(
        *,
        target: Annotated[Target, target],
        criteria: Annotated[Selection[Any], criteria],
        why: Why = "",
        everything: All = False,
        dry_run: dry_run = False,
        as_json: AsJson = False,
    ) -> None:
        round_, decision = target
        if criteria == type(criteria)() and not everything:
            raise UsageError(f"which {criteria.WORD}s? Give numbers, a filter, or --all")
        round_.only(criteria.numbers)
        if dry_run:
            preview(round_, criteria, to=decision.to, as_json=as_json)
        else:
            _decide(round_, role, decision, criteria, why, as_json=as_json)

    return grouped(decide)


def _redirected(to: str, config: Path | None, broker: str | None) -> Target:
    settings = load(config)
    if to not in settings.destinations:
        raise ConfigurationError(
            f"--to {to}: no [destinations.{to}] in saf.toml"
            f"{did_you_mean(to, settings.destinations)}"
        )
    return Round(chosen(settings, broker), settings), Decision(action="redirect", to=to)


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
        """Numbers of messages that stay, by reason; see `saf.setaside.selection.WHY`."""
        stays = dict(self.left.stays)
        if self.left.messages:
            # a decision skips messages that others have locked
            why = "stopped" if self.stopped else "in_hand"
            stays[why] = stays.get(why, 0) + self.left.messages
        return stays


def _decide(
    round_: Round,
    role: str,
    decision: Decision,
    criteria: Selection[Any],
    why: str,
    *,
    as_json: bool,
) -> None:
    def decide(connection: psycopg.Connection[Any], stop: Callable[[], bool]) -> Decided:
        now = criteria.until_now(connection)
        ids = [*chain.from_iterable(in_chunks(connection, decision, now, why, stop=stop))]
        left = now.count(connection, MOST, to=decision.to)
        return Decided(ids=ids, left=left, stopped=stop())

    def show() -> None:
        for name, result in done.items():
            echo(f"{name}: {counted(len(result.ids), 'message')}")
            say_staying(result.stays)

    done = round_.decide(role, decide)
    ids = {name: [str(number) for number in result.ids] for name, result in done.items()}
    stay = {name: result.stays for name, result in done.items() if result.stays}
    round_.report({"message_ids": ids, "stay": stay}, show, as_json=as_json)


def say_staying(stays: Mapping[str, int]) -> None:
    """Print how many messages stay as they are, and why."""
    for why, number in staying_in_words([stays]).items():
        echo(f"  {number:,} {'stays' if number == 1 else 'stay'}: {why}")
