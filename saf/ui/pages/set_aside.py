"""Messages set aside: their lanes, the messages themselves, and operators' decisions about them.

Lanes are retried at once. Single messages are chosen by filter, and a decision about chosen ones,
or about all that match, takes two steps. The first counts and shows its extent, and its page
remembers the last number at each broker. The second, a job, concerns only messages up to these
numbers. Messages that are set aside in between are left alone. The audit shows who did what with
messages, when and why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import psycopg
from starlette.responses import Response

from saf.errors import UsageError
from saf.operating.decide import Decision
from saf.operating.held import STATES, HeldMessages
from saf.setaside import audit as log
from saf.setaside.dead import REASONS
from saf.setaside.failure_groups import FailureGroups, failure_groups
from saf.setaside.fingerprint import check_group
from saf.setaside.lane import Origin, WaitsFor
from saf.setaside.selection import Counted, DeadLetters, ParkedMessages, Selection, staying_in_words
from saf.setaside.waiting import Lanes, Waiting, due, parked, place_at, retry_now
from saf.ui.jobs import Job
from saf.ui.site import LIVE, Visit, moment_of, number_of

LANES = 25
"""Lanes to show per broker, those that block most first; more for a single broker."""
LANES_OF_ONE = 50
MOST_OF_A_LANE = 10_000
"""Most messages of a lane to count."""
LANE_FIELDS = (
    *("subscription", "destination", "waits_for", "origin", "subject", "subject_contains"),
    "group",
)
MOST_OF_EVERY = 100_000
"""Most messages to count where a filter matches none."""


def lanes(visit: Visit) -> Response:
    """Show the waiting lanes."""
    found, errors = _found(visit)
    broker, wanted = visit.given("broker"), _lanes(visit)
    page = found.get(broker or "")
    every = 0
    if not found and wanted != Lanes():
        answers = visit.site.brokers.ask(lambda one: parked(one, 1, most=1), _brokers(visit))
        every = sum(one.lanes for one in answers.found.values())
    return visit.page(
        "parked.html",
        title="Parked",
        live=LIVE,
        found=found,
        errors=errors,
        choices=OF_LANES,
        most=MOST_OF_A_LANE,
        every=every,
        wanted=wanted,
        fields=asdict(wanted),
        broker=broker,
        after=page.next if page else None,
    )


def confirm_retry(visit: Visit) -> Response:
    """Show how many lanes would be retried, and ask for the reason."""
    wanted = _lanes(visit)
    answers = visit.site.brokers.ask(lambda connection: due(connection, wanted), _brokers(visit))
    return visit.page(
        "parked_confirm.html",
        title="Retry now",
        found={name: counted.tried for name, counted in answers.found.items() if counted.tried},
        others=sum(counted.others for counted in answers.found.values()),
        errors=answers.errors,
        fields=asdict(wanted) | {"broker": visit.given("broker")},
    )


def retry(visit: Visit) -> Response:
    """Let the next run retry lanes."""
    wanted, reason, person = _lanes(visit), visit.given("why") or "", visit.visitor.name

    def act(connection: psycopg.Connection[Any]) -> int:
        return retry_now(connection, lanes=wanted, why=reason, person=person)

    answers = visit.site.brokers.ask(act, _brokers(visit), seconds=10.0)
    return visit.page(
        "parked_done.html", title="Retry now", due=answers.found, errors=answers.errors
    )


def _found(visit: Visit) -> tuple[dict[str, Waiting], Any]:
    wanted, brokers = _lanes(visit), _brokers(visit)
    most = LANES if brokers is None else LANES_OF_ONE
    after = place_at(visit.given("after")) if brokers else None
    answers = visit.site.brokers.ask(
        lambda connection: parked(connection, most, lanes=wanted, after=after, most=MOST_OF_A_LANE),
        brokers,
    )
    return {name: page for name, page in answers.found.items() if page.lanes}, answers.errors


def _brokers(visit: Visit) -> list[str] | None:
    broker = visit.given("broker")
    return None if broker is None else [broker]


def _lanes(visit: Visit) -> Lanes:
    given = {name: visit.given(name) for name in LANE_FIELDS}
    for choice in OF_LANES:
        choice.check(given)
    check_group(given["group"])
    return Lanes(**given)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A criterion with few values."""

    name: str
    label: str
    values: Sequence[str]

    def check(self, given: Mapping[str, str | None]) -> None:
        """Raise if the given value is not one of them.

        Raises:
            UsageError: it is not.
        """
        value = given[self.name]
        if value is not None and value not in self.values:
            raise UsageError(
                f"unknown value of {self.label.lower()!r}: {value!r}, only {', '.join(self.values)}"
            )


OF_LANES = (
    Choice(name="waits_for", label="Waits for", values=[*WaitsFor]),
    Choice(name="origin", label="Origin", values=[*Origin]),
)

ROWS = 50
ROWS_OF_EACH = 10
"""Messages to show per broker while no broker is chosen."""
MOST = 1_000_000
"""Most messages to count before a decision."""
ROWS_TO_CONFIRM = 10
"""Messages of a broker to name before a decision."""
GROUPS = 50
"""Failure groups to show per broker."""
GROUPED = 20_000
"""Most messages per broker to group, those set aside last: a page waits no longer."""
MORE_FIELDS = ("group", "before", "beyond")
"""Criteria of the filters of both kinds; ``beyond`` is a number: only messages with greater ones.
A large backlog is grouped beyond a number, and a decision about a group concerns the same part."""
IN_WORDS = MappingProxyType(
    {
        "subject_contains": "subject",
        "name_contains": "name",
        "waits_for": "waits for",
        "group": "failure group",
        "beyond": "number above",
    }
)
"""Criteria whose names are not words."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """The pages about one kind of messages."""

    kind: type[Selection[Any]]
    at: str
    template: str
    """The template of the list."""
    fields: Sequence[str]
    """Criteria of the filter that are texts."""
    choices: Sequence[Choice]
    """Those that have few values."""
    words: Mapping[str, str]
    """Texts of the page that asks for the reason of a decision, the hints by the action."""

    def messages(self, visit: Visit) -> Response:
        """Show messages, in the order in which they were set aside."""
        broker, newest_first = visit.given("broker"), bool(visit.given("newest"))
        criteria = self._wanted(visit)
        wanted = replace(criteria, newest_first=newest_first).going_on(visit.given("after"))
        rows = ROWS if broker else ROWS_OF_EACH
        brokers = [broker] if broker else None
        answers = visit.site.brokers.ask(lambda one: wanted.page(one, rows), brokers)
        pages = answers.found
        shown = [(name, row) for name, page in pages.items() for row in page.shown]
        if broker is None:
            shown.sort(key=lambda found: getattr(found[1], self.kind.SINCE), reverse=newest_first)
        every = 0
        if not shown and criteria != self.kind():
            counts = visit.site.brokers.ask(
                lambda one: self.kind.every(one, MOST_OF_EVERY), brokers
            )
            every = sum(counts.found.values())
        return visit.page(
            self.template,
            title=f"{self.kind.WORD}s".capitalize(),
            at=self.at,
            kind=self.kind,
            messages=shown,
            newest=newest_first,
            every=every,
            criteria=[
                (IN_WORDS.get(name, name), visit.given(name))
                for name in (*self.fields, *MORE_FIELDS)
            ],
            more=sorted(name for name, page in pages.items() if page.next),
            last=pages[broker].next if broker and broker in pages else None,
            errors=answers.errors,
            choices=self.choices,
            fields=self._fields(visit),
            destinations=[*visit.site.settings.destinations],
        )

    def groups(self, visit: Visit) -> Response:
        """Show failure groups, the largest first, of the messages that were set aside last."""
        broker = visit.given("broker")
        wanted = self._wanted(visit)

        def group(connection: psycopg.Connection[Any]) -> FailureGroups:
            return failure_groups(connection, wanted, GROUPS, newest=GROUPED)

        answers = visit.site.brokers.ask(group, [broker] if broker else None)
        found = answers.found
        shown = [(name, one) for name, groups in found.items() for one in groups.shown]
        shown.sort(key=lambda row: row[1].messages, reverse=True)
        return visit.page(
            "groups.html",
            title=f"Groups of {self.kind.WORD}s",
            at=self.at,
            kind=self.kind,
            groups=shown,
            found=found,
            choices=self.choices,
            filtered=wanted != self.kind(),
            most=GROUPED,
            errors=answers.errors,
            fields=self._fields(visit),
        )

    def confirm(self, visit: Visit) -> Response:
        """Count the messages that a decision concerns, and ask for the reason."""
        decision = self._decision(visit)

        def count(
            selection: Selection[Any], connection: psycopg.Connection[Any]
        ) -> tuple[Counted, list[Any]]:
            counted = selection.count(connection, MOST, to=decision.to)
            rows = selection.rows(connection, ROWS, to=decision.to) if counted.messages else []
            return counted, [row for row in rows if row.stays is None][:ROWS_TO_CONFIRM]

        chosen = self._chosen(visit, decision)
        answers = visit.site.brokers.ask_each(
            {name: partial(count, selection) for name, selection in chosen.items()}
        )
        counts = {name: counted for name, (counted, _) in answers.found.items()}
        messages = sum(counted.messages for counted in counts.values())
        matching = visit.given("matching")
        return visit.page(
            "decide.html",
            title=decision.action.capitalize(),
            at=self.at,
            decision=decision,
            words=self.words,
            kind=self.kind,
            counts={name: counted for name, counted in counts.items() if counted.messages},
            first={name: rows for name, (_, rows) in answers.found.items()},
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
        for name, selection in self._chosen(visit, decision).items():
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
        if action == "reschedule":
            if (moment := moment_of(to)) is None:
                raise UsageError("reschedule to which time? Give one such as 2026-01-31T12:00Z")
            return Decision(action=action, to=moment.isoformat())
        if action != "redirect":
            return Decision(action=action)
        if to not in visit.site.settings.destinations:
            raise UsageError("redirect where? Choose one of the destinations of saf.toml")
        return Decision(action=action, to=to)

    def _chosen(self, visit: Visit, decision: Decision) -> Mapping[str, Selection[Any]]:
        """Return the selection for each broker that a form has chosen for a decision.

        Raises:
            UsageError: no message was chosen.
        """
        if visit.given("matching"):
            broker = visit.given("broker")
            names = [broker] if broker else visit.site.brokers.names()
            return dict.fromkeys(names, decision.of_these(self._wanted(visit)))
        found = _numbers(visit, "id")
        if not found:
            raise UsageError(
                f"nothing was chosen: tick {self.kind.WORD}s, or choose all that match"
            )
        return {
            name: decision.of_these(self.kind(numbers=numbers)) for name, numbers in found.items()
        }

    def _fields(self, visit: Visit) -> dict[str, Any]:
        """Return the filter as the pages' forms and links pass it on."""
        return {name: visit.given(name) for name in ("broker", *self.fields, *MORE_FIELDS)}

    def _wanted(self, visit: Visit) -> Selection[Any]:
        given: dict[str, Any] = {name: visit.given(name) for name in self.fields}
        given["key_contains"] = given.pop("key")
        for choice in self.choices:
            choice.check(given)
        return self.kind(
            **given,
            group=check_group(visit.given("group")),
            before=moment_of(visit.given("before")),
            beyond=number_of(visit.given("beyond")),
        )


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
    choices=[Choice(name="reason", label="Reason", values=REASONS)],
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
    fields=(
        *("subscription", "destination", "waits_for", "origin", "subject", "subject_contains"),
        *("service", "key"),
    ),
    choices=OF_LANES,
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

HELD = SetAside(
    kind=HeldMessages,
    at="/held",
    template="held.html",
    fields=("service", "name_contains", "key", "state"),
    choices=[Choice(name="state", label="State", values=STATES)],
    words={
        "all": "held message",
        "each": "held message",
        "stay": "stay as they are",
        "called": "Name",
        "order": "Those that were sent first go first",
        "nothing": "No held message matches any more. It was sent, or somebody else has decided.",
        "cancel": "They are never sent, and their names may be used again.",
        "reschedule": "They are sent at that time. Refused ones are tried again then.",
        "move": "The next run of the forwarder moves those refused messages that are allowed then.",
    },
)


def jobs(visit: Visit) -> Response:
    """Show the jobs of this process."""
    return visit.page("jobs.html", title="Jobs", jobs=visit.site.jobs.all())


def job(visit: Visit) -> Response:
    """Show the progress of one job."""
    found = _job(visit)
    live = "" if found.over else "every 1s"
    return visit.page("job.html", title="Job", live=live, job=found)


def cancel(visit: Visit) -> Response:
    """Stop a job after its current chunk."""
    found = _job(visit)
    found.stopping.set()
    return visit.to(f"/jobs/{found.number}")


def _job(visit: Visit) -> Job:
    number = number_of(visit.request.path_params["number"])
    if number is None or (found := visit.site.jobs.get(number)) is None:
        raise UsageError(f"no job {number} in this process; its changes are in the audit")
    return found


AUDIT_ROWS = 50
AUDIT_ROWS_OF_EACH = 20


def audit(visit: Visit) -> Response:
    """Show operators' actions, the last first; for one broker, page by page."""
    broker = visit.given("broker")
    before = log.place_at(visit.given("after")) if broker else None
    rows = AUDIT_ROWS if broker else AUDIT_ROWS_OF_EACH
    answers = visit.site.brokers.ask(
        lambda connection: log.page(connection, rows, before), [broker] if broker else None
    )
    shown = [(name, entry) for name, found in answers.found.items() for entry in found.shown]
    shown.sort(key=lambda row: row[1].audit_at, reverse=True)
    more = sorted(name for name, found in answers.found.items() if found.next)
    return visit.page(
        "audit.html",
        title="Audit",
        rows=shown,
        more=more,
        last=answers.found[broker].next if broker and broker in answers.found else None,
        broker=broker,
        errors=answers.errors,
    )
