"""The states of a dialog's endpoint, and which events lead from one to another. Pure.

The states are Service Broker's, with readable names. The database does not store the state. It
computes it (`STATE`) from facts that it stores: what was sent, what was received, who has ended,
and whether there was an error. Each event changes one fact; the table below shows the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
    """What an endpoint is ready for."""

    STARTED_OUTBOUND = "started_outbound"
    """Begun here, and nothing is sent yet (SO)."""
    STARTED_INBOUND = "started_inbound"
    """Begun by the other end, whose first message is not handled yet (SI)."""
    CONVERSING = "conversing"
    """Both ends send (CO)."""
    DISCONNECTED_INBOUND = "disconnected_inbound"
    """The other end has ended; this one is yet to (DI)."""
    DISCONNECTED_OUTBOUND = "disconnected_outbound"
    """This end has ended; the other one is yet to (DO)."""
    ERROR = "error"
    """There was an error; this end is yet to end (ER)."""
    CLOSED = "closed"
    """Over. It is remembered, so that what comes late does not begin it again (CD)."""


class Event(StrEnum):
    """What happens to an endpoint: done by the application here, or received."""

    SEND = "send"
    RECEIVE = "receive"
    END = "end"
    RECEIVE_END = "receive_end"
    END_WITH_ERROR = "end_with_error"
    RECEIVE_ERROR = "receive_error"
    EXPIRE = "expire"


S, E = State, Event

TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    S.STARTED_OUTBOUND: {
        E.SEND: S.CONVERSING,
        # the other end has not heard of the dialog, and never will
        E.END: S.CLOSED,
        E.END_WITH_ERROR: S.CLOSED,
        E.EXPIRE: S.ERROR,
    },
    S.STARTED_INBOUND: {
        E.SEND: S.STARTED_INBOUND,
        E.RECEIVE: S.CONVERSING,
        E.END: S.DISCONNECTED_OUTBOUND,
        E.END_WITH_ERROR: S.CLOSED,
        E.RECEIVE_ERROR: S.ERROR,
        E.EXPIRE: S.ERROR,
    },
    S.CONVERSING: {
        E.SEND: S.CONVERSING,
        E.RECEIVE: S.CONVERSING,
        E.END: S.DISCONNECTED_OUTBOUND,
        E.RECEIVE_END: S.DISCONNECTED_INBOUND,
        E.END_WITH_ERROR: S.CLOSED,
        E.RECEIVE_ERROR: S.ERROR,
        E.EXPIRE: S.ERROR,
    },
    S.DISCONNECTED_INBOUND: {
        E.END: S.CLOSED,
        E.END_WITH_ERROR: S.CLOSED,
        # the other end knows more than this one, which was set back
        E.RECEIVE_ERROR: S.ERROR,
        E.EXPIRE: S.ERROR,
    },
    S.DISCONNECTED_OUTBOUND: {
        # dropped, because the application has said that it wants no more
        E.RECEIVE: S.DISCONNECTED_OUTBOUND,
        E.RECEIVE_END: S.CLOSED,
        E.RECEIVE_ERROR: S.CLOSED,
        E.EXPIRE: S.CLOSED,
    },
    S.ERROR: {
        E.END: S.CLOSED,
        E.END_WITH_ERROR: S.CLOSED,
    },
    S.CLOSED: {},
}
"""The next state by state and event. An event that is missing here is refused if the application
asks for it, and dropped if it is received."""


def after(state: State, event: Event) -> State | None:
    """The state that an event leads to; None if the event is refused or dropped.

    >>> after(State.CONVERSING, Event.END), after(State.CLOSED, Event.SEND)
    (<State.DISCONNECTED_OUTBOUND: 'disconnected_outbound'>, None)
    """
    return TRANSITIONS[state].get(event)


STATE = """CASE
    WHEN ended_here AND (ended_there OR error_code IS NOT NULL) THEN 'closed'
    WHEN error_code IS NOT NULL THEN 'error'
    WHEN ended_here THEN 'disconnected_outbound'
    WHEN ended_there THEN 'disconnected_inbound'
    WHEN is_initiator AND send_sequence = 0 THEN 'started_outbound'
    WHEN NOT is_initiator AND receive_sequence = 0 THEN 'started_inbound'
    ELSE 'conversing'
END"""
"""SQL: the state, computed from an endpoint's facts."""
