"""Messages set aside, by filter, with decisions about chosen ones, or about all that match.

A decision takes two steps. The first counts and shows its extent, and its page remembers the last
number at each broker. The second, a job, concerns only messages up to these numbers. Messages that
are set aside in between are left alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psycopg
from starlette.responses import Response

from saf.errors import UsageError
from saf.operating.decide import Decision
from saf.setaside.dead import REASONS
from saf.setaside.lane import Kind
from saf.setaside.selection import Counted, DeadLetters, ParkedMessages, Selection, staying_in_words
from saf.ui.fields import moment_of, number_of
from saf.ui.site import Visit

ROWS = 50
ROWS_OF_EACH = 10
"""Messages to show per broker while no broker is chosen."""
MOST = 1_000_000
"""Most messages to count before a decision."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """The pages about one kind of messages."""

    kind: type[Selection[Any]]
    at: str
    template: str
    """The template of the list."""
    fields: Sequence[str]
    """Criteria of the filter that are texts."""
    choice: tuple[str, str, Sequence[str]]
    """One of them that has few values: its name, its name in words, and the values."""
    words: Mapping[str, str]
    """Texts of the page that asks for the reason of a decision, the hints by the action."""

    def messages(self, visit: Visit) -> Response:
        """Show messages, in the order in which they were set aside."""
        broker = visit.given("broker")
        wanted = self._wanted(visit).going_on(visit.given("after"))
        rows = ROWS if broker else ROWS_OF_EACH
        answers = visit.site.brokers.ask(
            lambda connection: wanted.page(connection, rows), [broker] if broker else None
        )
        pages = answers.found
        shown = [(name, row) for name, page in pages.items() for row in page.shown]
        if broker is None:
            shown.sort(key=lambda found: getattr(found[1], self.kind.SINCE))
        return visit.page(
            self.template,
            title=f"{self.kind.WORD}s".capitalize(),
            at=self.at,
            kind=self.kind,
            messages=shown,
            more=sorted(name for name, page in pages.items() if page.next),
            last=pages[broker].next if broker and broker in pages else None,
            errors=answers.errors,
            options=self.choice[2],
            fields=self._fields(visit),
            destinations=[*visit.site.settings.destinations],
        )

    def confirm(self, visit: Visit) -> Response:
        """Count the messages that a decision concerns, and ask for the reason."""
        decision = self._decision(visit)

        def count(selection: Selection[Any], connection: psycopg.Connection[Any]) -> Counted:
            return selection.count(connection, MOST, to=decision.to)

        answers = visit.site.brokers.ask_each(
            {name: partial(count, selection) for name, selection in self._chosen(visit).items()}
        )
        counts = answers.found
        messages = sum(counted.messages for counted in counts.values())
        matching = visit.given("matching")
        return visit.page(
            "decide.html",
            title=decision.action.capitalize(),
            at=self.at,
            decision=decision,
            words=self.words,
            counts={name: counted for name, counted in counts.items() if counted.messages},
            stays=staying_in_words(counted.stays for counted in counts.values()),
            errors=answers.errors,
            fields=self._fields(visit)
            | {"action": decision.action, "to": decision.to}
            | {"matching": matching, "expected": messages},
            ids=[] if matching else visit.form.get("id", []),
            messages=messages,
            more=any(counted.more for counted in counts.values()),
        )

    def decide(self, visit: Visit) -> Response:
        """Begin the confirmed job.

        Raises:
            UsageError: no chosen message has been counted.
        """
        decision = self._decision(visit)
        last_ids = {name: numbers[-1] for name, numbers in _numbers(visit, "through").items()}
        counted = {}
        for name, selection in self._chosen(visit).items():
            broker = visit.site.brokers.place(name)
            if broker is not None and name in last_ids:
                counted[name] = broker, replace(selection, through=last_ids[name])
        if not counted:
            raise UsageError(
                f"nothing was chosen: choose {self.kind.WORD}s, or all that match a filter"
            )
        job = visit.site.jobs.begin(
            decision,
            counted,
            person=visit.visitor.name,
            why=visit.given("why") or "",
            expected=number_of(visit.given("expected")) or 0,
        )
        return visit.to(f"/jobs/{job.number}")

    def _decision(self, visit: Visit) -> Decision:
        action, to = visit.given("action") or "", visit.given("to")
        if action not in self.kind.DECISIONS:
            raise UsageError(f"unknown action {action!r}, only {', '.join(self.kind.DECISIONS)}")
        if action != "redirect":
            return Decision(action=action)
        if to not in visit.site.settings.destinations:
            raise UsageError("redirect where? Choose one of the destinations of saf.toml")
        return Decision(action=action, to=to)

    def _chosen(self, visit: Visit) -> Mapping[str, Selection[Any]]:
        """Return the selection for each broker that a form has chosen.

        Raises:
            UsageError: no message was chosen.
        """
        if visit.given("matching"):
            broker = visit.given("broker")
            names = [broker] if broker else visit.site.brokers.names()
            return dict.fromkeys(names, self._wanted(visit))
        found = _numbers(visit, "id")
        if not found:
            raise UsageError(
                f"nothing was chosen: tick {self.kind.WORD}s, or choose all that match"
            )
        return {name: self.kind(numbers=numbers) for name, numbers in found.items()}

    def _fields(self, visit: Visit) -> dict[str, Any]:
        """Return the filter as the pages' forms and links pass it on."""
        return {name: visit.given(name) for name in ("broker", *self.fields, "before")}

    def _wanted(self, visit: Visit) -> Selection[Any]:
        given: dict[str, Any] = {name: visit.given(name) for name in self.fields}
        name, word, values = self.choice
        if given[name] is not None and given[name] not in values:
            raise UsageError(f"unknown {word} {given[name]!r}, only {', '.join(values)}")
        return self.kind(**given, before=moment_of(visit.given("before")))


def _numbers(visit: Visit, field: str) -> dict[str, list[int]]:
    """Return the numbers in the values of a field, such as ``shop:17``, by broker."""
    found: dict[str, list[int]] = defaultdict(list)
    for text in visit.form.get(field, []):
        name, _, number = text.rpartition(":")
        found[name].append(number_of(number) or 0)
    return found


DISCARD = "They are given up for good. Both ends of a dialog that lacks one get an Error."
STORED = (
    "If a destination has stored one and its answer got lost, it has arrived there all the same."
)

DEAD = SetAside(
    kind=DeadLetters,
    at="/dead",
    template="dead.html",
    fields=("reason", "service", "key", "error", "destination", "subscription"),
    choice=("reason", "reason", REASONS),
    words={
        "all": "message",
        "each": "dead letter",
        "stay": "stay as they are",
        "nothing": "No dead letter matches any more. Somebody else may have decided.",
        "retry": "They are handed over again, in order: to the forwarder, or to their receivers.",
        "redirect": "The forwarder sends them there.",
        "discard": DISCARD,
    },
)
PARKED = SetAside(
    kind=ParkedMessages,
    at="/parked/messages",
    template="parked_messages.html",
    fields=("subscription", "destination", "lane", "subject", "service", "key"),
    choice=("lane", "kind of lane", [*Kind]),
    words={
        "all": "parked message",
        "each": "message",
        "stay": "stay parked",
        "nothing": "No parked message matches any more.",
        "redirect": "The forwarder sends them there, in the order in which they were written. "
        + STORED,
        "discard": f"{DISCARD} {STORED}",
    },
)
