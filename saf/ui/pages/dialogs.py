"""Conversations of all brokers, and a sequence diagram for each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from starlette.responses import Response

from saf.dialogs.conversations import Conversation, Exchange, Spoken, exchange, page, place_at
from saf.dialogs.statements import State
from saf.errors import UsageError
from saf.ui.site import Visit

ROWS = 100
ROWS_OF_EACH = 10
ROW = 54
MOST = 60
"""Most messages to draw, the last ones."""


def list_(visit: Visit) -> Response:
    """Show the ends of conversations, by the time when they began."""
    broker, service, state = visit.given("broker"), visit.given("service"), visit.given("state")
    newest_first = bool(visit.given("newest"))
    rows = ROWS if broker else ROWS_OF_EACH
    after = place_at(visit.given("after")) if broker else None
    answers = visit.site.brokers.ask(
        lambda connection: page(
            connection,
            rows,
            service=service,
            states=[state] if state else None,
            after=after,
            newest_first=newest_first,
        ),
        [broker] if broker else None,
    )
    found = answers.found
    shown = [(name, endpoint) for name, listing in found.items() for endpoint in listing.shown]
    shown.sort(key=lambda row: row[1].created_at, reverse=newest_first)
    more = sorted(name for name, listing in found.items() if listing.next)
    every = 0
    if not shown and (service or state):
        counts = visit.site.brokers.ask(lambda one: page(one, ROWS), [broker] if broker else None)
        every = sum(len(listing.shown) for listing in counts.found.values())
    return visit.page(
        "dialogs.html",
        title="Dialogs",
        rows=shown,
        every=every,
        most=ROWS,
        more=more,
        last=found[broker].next if broker and broker in found else None,
        broker=broker,
        service=service,
        state=state,
        newest=newest_first,
        states=[*State],
        errors=answers.errors,
    )


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """A message in the diagram."""

    message: Spoken
    sent: datetime | None
    stored: datetime | None
    """Time of storing at the other end; None if it was not seen there."""
    to_right: bool
    to_itself: bool
    y: int


def one(visit: Visit) -> Response:
    """Show one conversation: both ends, and their messages."""
    given = visit.given("id")
    if given is None:
        return visit.to("/dialogs")
    try:
        wanted = UUID(given)
    except ValueError:
        raise UsageError(f"{given!r} is not a conversation_id, which is a UUID") from None
    answers = visit.site.brokers.ask(lambda connection: exchange(connection, wanted))
    found = answers.found
    ends = [(name, end) for name, part in found.items() for end in part.ends]
    arrows = arrows_of([*found.values()])
    return visit.page(
        "dialog.html",
        title="Dialog",
        wanted=wanted,
        ends=sorted(ends, key=lambda row: not row[1].is_initiator),
        arrows=arrows[-MOST:],
        more=max(0, len(arrows) - MOST),
        height=len(arrows[-MOST:]) * ROW + 70,
        left=_named(ends, arrows, left=True),
        right=_named(ends, arrows, left=False),
        errors=answers.errors,
    )


def arrows_of(found: list[Exchange]) -> list[Arrow]:
    """Return the messages of all brokers in the order of sending, each once."""
    sent: dict[UUID, Spoken] = {}
    stored: dict[UUID, Spoken] = {}
    for part in found:
        for spoken in part.messages:
            logs = sent if spoken.log == "outbox" else stored
            logs.setdefault(spoken.message_id, spoken)
    known = {**stored, **sent}
    order = sorted(known.values(), key=lambda message: message.at)
    first = max(0, len(order) - MOST)
    return [
        Arrow(
            message=message,
            sent=sent[message.message_id].at if message.message_id in sent else None,
            stored=stored[message.message_id].at if message.message_id in stored else None,
            to_right=message.from_initiator is not False,
            to_itself=message.sequence is None and message.from_service in (None, ""),
            y=90 + (number - first) * ROW,
        )
        for number, message in enumerate(order)
    ]


def _named(ends: list[tuple[str, Conversation]], arrows: list[Arrow], *, left: bool) -> str:
    """Return the name of one end: from its broker, or from the address of a message."""
    for _, end in ends:
        return end.service if end.is_initiator == left else end.far_service
    for arrow in arrows:
        if arrow.to_right == left:
            return arrow.message.from_service or "?"
        return arrow.message.to_service
    return "?"
