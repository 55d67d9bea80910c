"""What a person's decision has come to, as commands show it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from saf.cli.brokers import Round
from saf.cli.console import echo
from saf.operating.wording import counted
from saf.setaside import staying


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What a decision has done at a broker."""

    ids: Sequence[UUID]
    """The messages that it was about, by their message ids."""
    stays: Mapping[str, int]
    """How many others that match stay as they were, by why; see `saf.setaside.staying.WHY`."""


def show_decided(round_: Round, done: Mapping[str, Decided], *, as_json: bool) -> None:
    """Show what a decision has done at each broker, and end the command."""
    if as_json:
        ids = {name: [str(number) for number in one.ids] for name, one in done.items()}
        stay = {name: dict(one.stays) for name, one in done.items() if one.stays}
        echo(json.dumps({"message_ids": ids, "stay": stay, "errors": round_.errors()}))
    else:
        for name, one in done.items():
            echo(f"{name}: {counted(len(one.ids), 'message')}")
            say_staying(one.stays)
    round_.finish(say=not as_json)


def say_staying(stays: Mapping[str, int]) -> None:
    """Say how many messages stay as they are, and why."""
    for why, number in staying.in_words([stays]).items():
        echo(f"  {number:,} {'stays' if number == 1 else 'stay'}: {why}")
