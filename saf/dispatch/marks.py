"""Marks: what has come of messages, as it is written in one transaction."""

from __future__ import annotations

from dataclasses import dataclass, field

from saf.dispatch.answers import Answer
from saf.dispatch.progress import Mark
from saf.dispatch.talking import Outcome
from saf.message import Message
from saf.received import Received
from saf.receiving.retries import Waiting


@dataclass(kw_only=True)
class Marks:
    """What is to be written in one transaction."""

    cursors: list[Mark] = field(default_factory=list)
    park: list[Received] = field(default_factory=list)
    """Messages that wait in the lanes of their keys."""
    late: list[Received] = field(default_factory=list)
    """Messages that wait for their deliver_at."""
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """How lanes go on waiting."""
    bury: list[tuple[Received, str, str]] = field(default_factory=list)
    """Dead letters: the message, the reason and the error."""
    unreadable: list[Received] = field(default_factory=list)
    """Dead letters that the database copies by itself."""
    unpark: list[int] = field(default_factory=list)
    move: list[tuple[int, str]] = field(default_factory=list)
    """Messages that wait already, and go on waiting in the lane of their key; by parked_id."""
    succeeded: list[str] = field(default_factory=list)
    """Lanes of which nothing is in memory any more."""
    timed: set[int] = field(default_factory=set)
    """Shards whose delayed messages have come or gone."""
    attempts: list[tuple[Received, Answer]] = field(default_factory=list)
    """What failed, for people."""
    replies: list[tuple[Received, Message]] = field(default_factory=list)
    """What endpoints have answered to messages."""
    talked: list[tuple[Received, Outcome]] = field(default_factory=list)
    """Messages of dialogs, which are received by the marks."""
    messages: int = 0
    """How many messages are complete by it."""
    accepted: int = 0
    """How many of them the endpoint has accepted."""
