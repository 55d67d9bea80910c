"""Both ends of a dialog against a model: whatever is said, and whatever the transport does to it.

The model is the table of transitions, and a transport that loses nothing but delays, repeats and
reorders as it likes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import saf
from saf.database import Dsn, fetch
from saf.dialogs.statements import Event, State, after
from saf.errors import DialogEnded
from tests.dialogs import END, ERROR, SHOP, WAREHOUSE, begin, prepare, receive, said
from tests.pipeline import connect
from tests.tiers import sized

COPY = """
SELECT to_service, from_service, key, conversation_id, from_initiator, sequence, message_type,
       headers::text, body
FROM saf.outbox WHERE conversation_id = %(conversation_id)s AND sequence = ANY (%(sequences)s)
"""
STORE = """
INSERT INTO saf.inbox (to_service, from_service, key, conversation_id, from_initiator, sequence,
                       message_type, headers, body)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
FACTS = """
SELECT state FROM saf.conversation WHERE conversation_id = %(id)s AND is_initiator = %(initiator)s
"""


@dataclass
class End:
    """What one end ought to be like."""

    initiator: bool
    state: State | None = None
    sent: list[str] = field(default_factory=list)
    """What each number is: a text, or a type of saf's own."""
    arrived: list[int] = field(default_factory=list)
    """Numbers of the other end's messages, not received yet."""
    ahead: set[int] = field(default_factory=set)
    received: int = 0

    def do(self, event: Event) -> bool:
        """An event of the application, or of what is received; False if it is refused."""
        assert self.state is not None
        found = after(self.state, event)
        self.state = found or self.state
        return found is not None

    def say(self, event: Event, what: str) -> bool:
        heard_of = bool(self.sent) or not self.initiator
        known_as_failed = self.state is State.ERROR and event is Event.END
        if not self.do(event):
            return False
        if (heard_of or event is Event.SEND) and not known_as_failed:
            self.sent.append(what)
        return True

    def receive(self, others: list[str]) -> list[str]:
        """What the application gets, from what has arrived."""
        got: list[str] = []
        batch, self.arrived = sorted(self.arrived), []
        while batch:
            last = max((n for n in batch if others[n - 1] == ERROR), default=0)
            # an Error of the initiator tells all that the first message would have told
            if self.state is None and (1 in batch or last) and not self.initiator:
                self.state = State.STARTED_INBOUND
            if self.state is None:
                self.ahead.update(batch)
                return got
            for number in batch:
                if number >= last:
                    got += self._take(number, others[number - 1])
            ended = self.state in (State.ERROR, State.CLOSED, State.DISCONNECTED_INBOUND)
            run = set(itertools.takewhile(
                lambda n: n in self.ahead, itertools.count(self.received + 1)
            ))  # fmt: skip
            batch = sorted(
                n for n in self.ahead
                if ended or n in run or n <= self.received or others[n - 1] == ERROR
            )  # fmt: skip
            self.ahead -= set(batch)
        return got

    def _take(self, number: int, what: str) -> list[str]:
        event = {END: Event.RECEIVE_END, ERROR: Event.RECEIVE_ERROR}.get(what, Event.RECEIVE)
        assert self.state is not None
        if number <= self.received or after(self.state, event) is None:
            return []
        if event is not Event.RECEIVE_ERROR and number > self.received + 1:
            self.ahead.add(number)
            return []
        ended_here = self.state is State.DISCONNECTED_OUTBOUND
        if self.state is State.STARTED_INBOUND and event is Event.RECEIVE_END:
            self.do(Event.RECEIVE)
        self.do(event)
        self.received = number
        return [] if ended_here else [what]


SIDES = st.sampled_from((True, False))
STEPS = [
    *["send"] * 4, *["carry"] * 3, *["carry all", "carry the last"] * 2, *["receive"] * 5,
    *["end", "fail"] * 2,
]  # fmt: skip


class TwoEnds(RuleBasedStateMachine):
    """One dialog between two databases."""

    def __init__(
        self,
        app: Dsn,
        mom: Dsn,
        connections: dict[bool, psycopg.Connection[Any]],
        seen: Counter[str],
    ) -> None:
        super().__init__()
        self.connections = connections
        self.dsns = {True: app, False: mom}
        self.services = {True: SHOP, False: WAREHOUSE}
        self.dialogs: dict[bool, saf.Dialog] = {True: begin(app)}
        self.ends = {side: End(initiator=side) for side in (True, False)}
        self.ends[True].state = State.STARTED_OUTBOUND
        self.number = itertools.count(1)
        self.seen = seen

    @property
    def conversation_id(self) -> UUID:
        return self.dialogs[True].conversation_id

    @initialize(first=st.sampled_from(([1], [])), some=st.lists(st.integers(1, 5), max_size=5))
    def begin(self, first: list[int], some: list[int]) -> None:
        """Enough is said, and some of it has arrived, for what follows to be of interest."""
        for _ in range(5):
            self._say(True, "send")
        self._carry(True, [*first, *some])
        self._receive(False)

    # One rule, because hypothesis would leave some of several out
    @rule(side=SIDES, step=st.sampled_from(STEPS), data=st.data())
    def go_on(self, side: bool, step: str, data: Any) -> None:
        sent = len(self.ends[side].sent)
        if step == "carry" and sent:
            numbers = st.lists(st.integers(1, sent), min_size=1, max_size=6)
            self._carry(side, data.draw(numbers))
        elif step == "carry all":
            self._carry(side, range(1, sent + 1))
        elif step == "carry the last" and sent:
            self._carry(side, [sent])
        elif step == "receive":
            self._receive(side)
        elif side in self.dialogs:
            self._say(side, step)

    def _carry(self, side: bool, sequences: Sequence[int]) -> None:
        """Some of what one end has said arrives at the other, in any order, now or again."""
        params = {"conversation_id": self.conversation_id, "sequences": list(sequences)}
        found = fetch(self.connections[side], COPY, params)
        rows = {row[5]: row for row in found if row[4] == side}
        for sequence in sequences:
            self.connections[not side].execute(STORE, rows[sequence])
        self.ends[not side].arrived += sequences

    def _receive(self, side: bool) -> None:
        received = receive(self.dsns[side], self.services[side])
        assert {one.conversation_id for one in received} <= {self.conversation_id}
        for one in received:
            assert one.dialog is not None
            assert self.dialogs.setdefault(side, one.dialog) == one.dialog
        expected = self.ends[side].receive(self.ends[not side].sent)
        assert said(received) == expected
        self.seen.update(expected)

    def _say(self, side: bool, step: str) -> None:
        dialog, text = self.dialogs[side], str(next(self.number))
        connection = self.connections[side]
        with connection.transaction():
            try:
                if step == "send":
                    expected = self.ends[side].say(Event.SEND, text)
                    dialog.send(connection, text)
                elif step == "end":
                    expected = self.ends[side].say(Event.END, END)
                    dialog.end(connection)
                elif step == "fail":
                    expected = self.ends[side].say(Event.END_WITH_ERROR, ERROR)
                    dialog.end_with_error(connection, 1, "no")
                else:
                    return
            except DialogEnded:
                assert not expected
            else:
                assert expected

    @invariant()
    def the_states_are_those_of_the_table(self) -> None:
        for side, end in self.ends.items():
            params = {"id": self.conversation_id, "initiator": side}
            found = fetch(self.connections[side], FACTS, params)
            assert [state for (state,) in found] == ([] if end.state is None else [end.state])

    def teardown(self) -> None:
        for side in (True, False):
            receive(self.dsns[side], self.services[side])


@pytest.mark.slow
def test_both_ends_do_what_the_model_does(app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)
    seen: Counter[str] = Counter()
    with connect(app) as here, connect(mom) as there:

        class Between(TwoEnds):
            def __init__(self) -> None:
                super().__init__(app, mom, {True: here, False: there}, seen)

        run_state_machine_as_test(
            Between,
            settings=settings(
                max_examples=sized(20, 60),
                stateful_step_count=20,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert min(seen[what] for what in ("1", "2", "3")) > 0, "the steps lead somewhere"


COMPUTED = """
SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d
JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
WHERE a.attrelid = 'saf.conversation'::regclass AND a.attname = 'state'
"""


@pytest.mark.every_postgresql
def test_the_state_that_the_database_finds_is_that_of_the_table(mom: Dsn) -> None:
    """Every way through the table of up to four events, as facts."""
    facts: dict[Event, dict[str, Any]] = {
        Event.SEND: {"send_sequence": 1},
        Event.RECEIVE: {"receive_sequence": 1},
        Event.END: {"ended_here": True},
        Event.RECEIVE_END: {"ended_there": True, "receive_sequence": 1},
        Event.END_WITH_ERROR: {"ended_here": True, "error_code": 1},
        Event.RECEIVE_ERROR: {"error_code": 1},
        Event.EXPIRE: {"error_code": -1},
    }
    starts = {True: State.STARTED_OUTBOUND, False: State.STARTED_INBOUND}
    rows: list[tuple[dict[str, Any], State]] = []
    for initiator, start in starts.items():
        for match in itertools.chain.from_iterable(
            itertools.product(Event, repeat=length) for length in range(5)
        ):
            row = {
                "is_initiator": initiator, "send_sequence": 0, "receive_sequence": 0,
                "ended_here": False, "ended_there": False, "error_code": None,
            }  # fmt: skip
            state = start
            for event in match:
                found = after(state, event)
                if found is None:
                    break
                row |= facts[event]
                if state is State.STARTED_OUTBOUND and event in (Event.END, Event.END_WITH_ERROR):
                    row["ended_there"] = True
                state = found
            rows.append((row, state))
    columns = list(rows[0][0])
    with connect(mom) as connection:
        ((computed,),) = fetch(connection, COMPUTED)
        for values, state in {(tuple(row.values()), state) for row, state in rows}:
            params = dict(zip(columns, values, strict=True))
            query = f"SELECT {computed} FROM (SELECT " + ", ".join(
                f"%({name})s::{'boolean' if name.startswith(('is', 'ended')) else 'int'} AS {name}"
                for name in columns
            ) + ") AS facts"  # fmt: skip
            assert fetch(connection, query, params) == [(state,)], params
