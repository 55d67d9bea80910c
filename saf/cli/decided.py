"""An operator's decision about messages set aside: run it at each broker, show the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any
from uuid import UUID

import psycopg

from saf.cli.brokers import Round
from saf.cli.console import echo
from saf.operating.bulk import Chosen, Decision, in_chunks
from saf.operating.wording import counted
from saf.setaside import staying
from saf.setaside.staying import Counted

MOST = 1_000_000_000
"""Greater than any number of messages: a command may take the time to count all."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The result of a decision at a broker."""

    ids: list[UUID]
    """The message ids of the messages that were decided about."""
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

    ``role`` is that of the connections; ``count`` counts matches of a filter, up to a number.
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
