"""Messages of an outbox, page by page, and the path of one from its sender to its handlers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Any
from uuid import UUID

import psycopg
from starlette.responses import Response

from saf.config import TRACE_ID
from saf.errors import TookTooLong, UsageError
from saf.operating import journey, outbox
from saf.operating.journey import Stay, Stored
from saf.operating.outbox import STATES, Details, Place, SentPage, Wanted
from saf.ui.brokers import PATIENCE_SECONDS
from saf.ui.redaction import LARGEST_BYTES, Redaction
from saf.ui.site import Visit, moment_of

ROWS = 50
OUTBOX_SECONDS = PATIENCE_SECONDS / 2
"""Bound of a statement."""
OUTBOX_LOOK_SECONDS = 0.08
"""Time to search an outbox for one page."""
FURTHER_SECONDS = 0.5
"""Time to search if nothing was found, or if the user asks to look further."""
LONGER_SECONDS = 8.0
"""Bound of a statement, and of the wait for it, if the user asks for a page that takes long."""


def sent(visit: Visit) -> Response:
    """Show a page of one broker's outbox."""
    sources = [*visit.site.settings.brokers] + [
        name for name in visit.site.brokers.names() if "/" in name
    ]
    broker = visit.given("broker") or (sources or [""])[0]
    state = visit.given("state")
    if state is not None and state not in STATES:
        raise UsageError(f"unknown state {state!r}, only {', '.join(STATES)}")
    key, exact = visit.given("key"), bool(visit.given("exact"))
    wanted = Wanted(
        state=state,
        service=visit.given("service"),
        key=key if exact else None,
        key_contains=None if exact else key,
        since=moment_of(visit.given("since")),
        until=moment_of(visit.given("until")),
    )
    newest_first, longer = bool(visit.given("newest")), bool(visit.given("longer"))
    after = outbox.place_at(visit.given("after"), state)
    further = bool(visit.given("further"))

    def look(connection: psycopg.Connection[Any], place: Place | None, seconds: float) -> SentPage:
        return outbox.messages(
            connection,
            wanted,
            after=place,
            limit=ROWS,
            seconds=LONGER_SECONDS if longer else OUTBOX_SECONDS,
            look_seconds=seconds,
            newest_first=newest_first,
        )

    def page(connection: psycopg.Connection[Any]) -> tuple[SentPage, bool]:
        """Return the page, and whether the outbox has any message."""
        found = look(connection, after, FURTHER_SECONDS if further else OUTBOX_LOOK_SECONDS)
        if not found.shown and found.before is not None and not further:
            found = look(connection, outbox.place_at(found.next, state), FURTHER_SECONDS)
        return found, bool(found.shown) or outbox.has_messages(connection)

    answers = visit.site.brokers.ask(page, [broker], seconds=LONGER_SECONDS if longer else None)
    found, any_message = answers.found.get(broker, (None, False))
    took_too_long = isinstance(answers.errors.get(broker), TookTooLong)
    filled = {
        "state": state,
        "service": wanted.service,
        "key": key,
        "exact": "yes" if exact else None,
        "since": visit.given("since"),
        "until": visit.given("until"),
    }
    return visit.page(
        "outbox.html",
        title="Outbox",
        broker=broker,
        sources=sources,
        states=STATES,
        fields={"broker": broker, **filled, "newest": "yes" if newest_first else None},
        filled={name: value for name, value in filled.items() if value and name != "exact"},
        after=visit.given("after"),
        found=found,
        any_message=any_message,
        longer=longer,
        took_too_long=took_too_long,
        errors={} if took_too_long else answers.errors,
        known=broker in visit.site.brokers.names(),
    )


TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
"""W3C trace context: version, trace, span, flags."""

SECONDS = PATIENCE_SECONDS / 3
"""Bound of a statement; several statements follow each other."""
LOOK_SECONDS = 0.08
"""Time to search a broker's logs for one page."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A part of a message's path."""

    at: datetime
    kind: str
    where: str
    """The broker."""
    what: Any
    """A part of the broker's `saf.operating.journey.Stay`; for attempts, a list."""


RANK = ("held", "sent", "stored", "reading", "attempts", "aside", "decided")
"""Order of events of the same moment."""


def timeline(stays: Mapping[str, Stay]) -> list[Event]:
    """Return the path of a message through all brokers in the order of time.

    A subscription's progress has no time of its own, so it follows the arrival. Attempts that
    follow each other are one event.
    """
    events: list[tuple[datetime, str, str, Any]] = []
    for where, stay in stays.items():
        if stay.sent is not None:
            events.append((stay.sent.message.created_at, "sent", where, stay.sent))
        if stay.held is not None:
            events.append((stay.held.created_at, "held", where, stay.held))
        if stay.stored is not None:
            at = stay.stored.received_at
            events.append((at, "stored", where, stay.stored))
            events += [(at, "reading", where, one) for one in stay.readings]
        events += [(one.at, "attempts", where, one) for one in stay.attempts]
        events += [(one.since, "aside", where, one) for one in stay.aside]
        events += [(one.audit_at, "decided", where, one) for one in stay.decided]
    events.sort(key=lambda event: (event[0], RANK.index(event[1])))
    found = []
    for (kind, where), group in groupby(events, key=lambda event: (event[1], event[2])):
        same = [*group]
        if kind == "attempts":
            tried = [what for *_, what in same]
            found.append(Event(at=same[0][0], kind=kind, where=where, what=tried))
        else:
            found += [Event(at=at, kind=kind, where=where, what=what) for at, *_, what in same]
    return found


def message(visit: Visit) -> Response:
    """Show where a message is in all brokers, or the form to ask for one."""
    given, about = visit.given("id"), moment_of(visit.given("at"))
    if given is None:
        return visit.page("message.html", title="Message", wanted=None, about=None)
    longer = bool(visit.given("longer"))
    try:
        wanted = UUID(given)
    except ValueError:
        raise UsageError(f"{given!r} is not a message id, which is a UUID") from None
    show_body = visit.site.settings.ui.bodies
    places = _places(visit.given("from"))

    def ask(
        local: Mapping[str, str], connection: psycopg.Connection[Any]
    ) -> tuple[Stay, bytes | None]:
        found = journey.stay(
            connection,
            wanted,
            about=about,
            places=local,
            seconds=LONGER_SECONDS if longer else SECONDS,
            look_seconds=LOOK_SECONDS,
        )
        if not show_body or found.size is None or found.size > LARGEST_BYTES:
            return found, None
        return found, journey.body(connection, found)

    answers = visit.site.brokers.ask_each(
        {name: partial(ask, places.get(name, {})) for name in visit.site.brokers.names()},
        seconds=LONGER_SECONDS if longer else None,
    )
    stays = {name: local for name, (local, _) in answers.found.items()}
    known = {name: local for name, local in stays.items() if not local.nothing}
    copies = (one.sent or one.stored or one.held for one in known.values())
    first = next((copy for copy in copies if copy), None)
    redaction = visit.site.redaction
    headers = redaction.headers(first.headers) if first is not None else {}
    created = first.message.created_at if isinstance(first, Details) else None
    if isinstance(first, Stored):
        created = first.created_at
    return visit.page(
        "message.html",
        title="Message",
        wanted=wanted,
        about=about,
        known=known,
        timeline=timeline(dict(sorted(known.items(), key=lambda one: one[1].sent is None))),
        took_too_long=any(isinstance(one, UsageError) for one in answers.errors.values()),
        unfinished={name: local.unfinished for name, local in stays.items() if local.unfinished},
        further=_further(stays, about, created),
        headers=headers,
        trace=trace_of(headers, visit.site.settings.ui.trace_url),
        conversation=first.conversation_id if first is not None else None,
        body=_body(redaction, answers.found.values()),
        show_body=show_body,
        errors=answers.errors,
    )


def _body(redaction: Redaction, found: Iterable[tuple[Stay, bytes | None]]) -> str | None:
    """Return the body for display; None if no log has it."""
    for stay, body in found:
        if body is not None and (copy := stay.sent or stay.stored or stay.held) is not None:
            return redaction.body(body, copy.headers)
        if stay.size is not None and stay.size > LARGEST_BYTES:
            return f"{stay.size:,} bytes: more than are shown"
    return None


def _further(
    stays: Mapping[str, Stay], about: datetime | None, sent_at: datetime | None
) -> dict[str, object]:
    """Return the parameters with which this page continues the search.

    If the time of sending is known by now, the search continues there; otherwise where each
    broker's search has ended.
    """
    if about is None and sent_at is not None:
        return {"at": sent_at}
    ends = {
        name: {log: search.place for log, search in stay.unfinished.items()}
        for name, stay in stays.items()
        if stay.unfinished
    }
    return {"at": about, "from": json.dumps(ends)}


def _places(text: str | None) -> Mapping[str, Mapping[str, str]]:
    """Return where to continue, by broker and log.

    >>> _places('{"shop": {"outbox": "3.512"}}')
    {'shop': {'outbox': '3.512'}}
    """
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(positions, dict) and all(isinstance(place, str) for place in positions.values())
        for positions in found.values()
    ):
        raise UsageError(f"{text!r} is not a place where a search ended")
    return found


def trace_of(headers: Mapping[str, str], url: str | None) -> str | None:
    """Return the URL of a message's trace; None without a trace, if it is hidden, or without URL.

    >>> context = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    >>> trace_of(context, "https://traces.example/trace/{trace_id}?from=saf")
    'https://traces.example/trace/4bf92f3577b34da6a3ce929d0e0e4736?from=saf'
    >>> trace_of({"traceparent": "00-<b>-1-01"}, "https://traces.example/{trace_id}")
    >>> trace_of(context, None)
    """
    found = TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return url.replace(TRACE_ID, found[1]) if url is not None and found is not None else None
