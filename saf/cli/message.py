"""``saf message``: one message, from its sender to its handlers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated
from uuid import UUID

import typer

from saf.cli.brokers import AsJson, Everywhere, moment
from saf.cli.console import echo
from saf.cli.options import grouped
from saf.cli.tables import Table, results_of
from saf.errors import UsageError
from saf.operating import journey
from saf.operating.journey import Stay
from saf.operating.wording import at, counted


@grouped
def command(
    message_id: Annotated[
        UUID,
        typer.Argument(help="Message id, as `saf outbox list` shows it, or `message.message_id`."),
    ],
    *,
    key: Annotated[
        str | None,
        typer.Option(help="Key of the message, so that only its shard is searched. Default: any."),
    ] = None,
    sent: Annotated[
        datetime | None,
        typer.Option(
            parser=moment,
            metavar="TIME",
            help="Approximate time at which it was sent: the search begins there.",
        ),
    ] = None,
    round_: Everywhere,
    timeout: Annotated[
        float, typer.Option(min=0.01, help="Seconds to search at each broker.")
    ] = journey.SECONDS,
    as_json: AsJson = False,
) -> None:
    """Show where one message is, in all brokers.

    It shows what each broker knows of the message: sent, stored, taken by which subscription,
    failed attempts, parked, dead, and operators' decisions. Logs are searched from their ends; the
    part that was not searched is named.
    """
    found = round_.visit(
        "outbox",
        lambda connection, _: journey.stay(
            connection, message_id, key, about=sent, seconds=timeout
        ),
    )
    known = {name: item for name, item in found.items() if not item.nothing}
    if as_json:
        echo(json.dumps({"message": results_of(known), "errors": round_.errors()}))
    else:
        HISTORY.show({name: [*_rows(item)] for name, item in known.items()})
    unfinished = [words for name, item in found.items() for words in _unfinished(name, item)]
    if not known and not round_.failed:
        raise UsageError(". ".join([f"no broker knows a message {message_id}", *unfinished]))
    for words in unfinished:
        echo(f"saf: {words}", err=True)
    round_.finish(say=not as_json)


def _unfinished(broker: str, stay: Stay) -> Iterator[str]:
    """Describe the logs of a broker that were not searched to the end."""
    for log, search in stay.unfinished.items():
        yield (
            f"only the messages {search.said} in the {log} of broker {broker!r} were searched: add "
            "--sent TIME, the message's --key, or --timeout with more seconds"
        )


def _rows(stay: Stay) -> Iterator[tuple[str, ...]]:
    """Yield the cells of what a broker knows of a message."""
    if stay.sent is not None:
        sent = stay.sent.message
        yield at(sent.created_at), f"sent, {sent.state}", f"to {sent.service}"
    if stay.stored is not None:
        yield at(stay.stored.received_at), "stored", f"for {stay.stored.service}"
    for reading in stay.readings:
        yield "", "taken" if reading.complete else "unread", reading.subscription
    for tried in stay.attempts:
        answer = "no answer" if tried.status is None else f"answer {tried.status}"
        what = f"tried for {tried.seconds:.1f} s: {answer}"
        yield at(tried.at), what, tried.subscription, tried.error
    for aside in stay.aside:
        what = aside.reason or ""
        if aside.lane is not None:
            what = f"{aside.lane}, {counted(aside.attempts or 0, 'attempt')}"
        yield at(aside.since), f"{aside.state}: {what}", aside.subscription, aside.error or ""
    for decided in stay.decided:
        yield at(decided.audit_at), decided.action, decided.person or decided.who, decided.why


HISTORY = Table[tuple[str, ...]]("when", "what", "by", below="why", cells=lambda cells: cells)
