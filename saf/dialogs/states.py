"""The states of a dialog's endpoint, and the events that change them. Pure.

The states are Service Broker's, with readable names. No statement sets the state: the server
computes the column ``state`` of saf.conversation from facts, which are the numbers sent and
received, the ends that have ended, and any error. Each event changes one fact; the table below
shows the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
    """State of an endpoint."""

    STARTED_OUTBOUND = "started_outbound"
    """Begun here, nothing sent yet (SO)."""
    STARTED_INBOUND = "started_inbound"
    """Begun by the other end, first message not handled yet (SI)."""
    CONVERSING = "conversing"
    """Both ends send (CO)."""
    DISCONNECTED_INBOUND = "disconnected_inbound"
    """The far end has ended, but not this end (DI)."""
    DISCONNECTED_OUTBOUND = "disconnected_outbound"
    """This end has ended, but not the far end (DO)."""
    ERROR = "error"
    """There was an error, and this end has not ended yet (ER)."""
    CLOSED = "closed"
    """Over. The end is remembered, so that late messages do not begin it again (CD)."""


class Event(StrEnum):
    """Event at an endpoint: an action of the application, or a received message."""

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
        # the other end does not know of the dialog, and never will
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
        # the other end knows more than this end, which was set back
        E.RECEIVE_ERROR: S.ERROR,
        E.EXPIRE: S.ERROR,
    },
    S.DISCONNECTED_OUTBOUND: {
        # dropped, because the application wants no more messages
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
"""Next state by state and event. An event that is missing here is refused if the application
requests it, and dropped if it is received."""


def after(state: State, event: Event) -> State | None:
    """Return the state after an event; None if the event is refused or dropped.

    >>> after(State.CONVERSING, Event.END), after(State.CLOSED, Event.SEND)
    (<State.DISCONNECTED_OUTBOUND: 'disconnected_outbound'>, None)
    """
    return TRANSITIONS[state].get(event)
