"""Marks: the results of messages, as one transaction writes them."""

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
    """Rows to write in one transaction."""

    cursors: list[Mark] = field(default_factory=list)
    park: list[Received] = field(default_factory=list)
    """Messages that wait in the lanes of their keys."""
    late: list[Received] = field(default_factory=list)
    """Messages that wait for their deliver_at."""
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """New waiting states of lanes."""
    bury: list[tuple[Received, str, str]] = field(default_factory=list)
    """Dead letters: the message, the reason and the error."""
    unreadable: list[Received] = field(default_factory=list)
    """Dead letters to copy inside the database."""
    unpark: list[int] = field(default_factory=list)
    move: list[tuple[int, str]] = field(default_factory=list)
    """Messages that already wait and move to their key's lane, by parked_id."""
    succeeded: list[str] = field(default_factory=list)
    """Lanes without messages in memory."""
    timed: set[int] = field(default_factory=set)
    """Shards with delayed messages added or removed."""
    attempts: list[tuple[Received, Answer]] = field(default_factory=list)
    """Failed attempts, for operators."""
    replies: list[tuple[Received, Message]] = field(default_factory=list)
    """Replies of endpoints to messages."""
    talked: list[tuple[Received, Outcome]] = field(default_factory=list)
    """Messages of dialogs, which these marks receive."""
    messages: int = 0
    """Number of messages completed."""
    accepted: int = 0
    """Number of these messages that the endpoint has accepted."""
