"""Arrival: the step between reading a delivery's messages and handing them out.

By default, this step does nothing: every message is handed out. A `Hook`, installed once for the
process (`install`), processes messages that need more, such as those of a dialog. The package
``saf`` installs `saf.dialogs`; receiving itself knows no dialogs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

from saf.received import Received

if TYPE_CHECKING:
    from saf.receiving.hand import Reader
    from saf.receiving.outcome import Outcome


@dataclass(kw_only=True)
class Arrival:
    """The result of a delivery's arrival: each message is in one of these collections."""

    raw: psycopg.Connection[Any]
    messages: list[Received] = field(default_factory=list)
    """Messages to hand out."""
    outcomes: dict[Received, Outcome] = field(default_factory=dict)
    """Outcomes of messages that are not handed out."""
    received: dict[Received, int] = field(default_factory=dict)
    """Messages received without being handed out, each with the number of messages in ``messages``
    that precede it: it waits if one of its key does."""

    def take_back(self, outcomes: Mapping[Received, Outcome]) -> None:
        """Undo the arrival of the messages that are not received, by the outcomes of all."""

    def give_up(self, message: Received) -> None:
        """Note that a message will never be handled."""


class Hook:
    """Extra processing of arriving messages; the default does nothing."""

    def arrive(
        self,
        raw: psycopg.Connection[Any],
        reader: Reader,  # noqa: ARG002 - the hook's signature
        messages: list[Received],
        behind: list[Received],  # noqa: ARG002 - the hook's signature
    ) -> Arrival:
        """Process arriving messages. Those in ``behind`` wait behind others of their keys."""
        return Arrival(raw=raw, messages=messages)

    def fail_unseen(self, raw: psycopg.Connection[Any], message: Received) -> None:
        """Process a message that cannot be received: it becomes a dead letter without arriving."""

    def body_hashes(
        self,
        raw: psycopg.Connection[Any],  # noqa: ARG002 - the hook's signature
        reader: Reader,  # noqa: ARG002 - the hook's signature
        messages: Sequence[Received],  # noqa: ARG002 - the hook's signature
    ) -> dict[Received, str]:
        """Return the SHA-256 of these messages' bodies, where the bodies were not read."""
        return {}

    def is_of_saf(self, message: Received) -> bool:  # noqa: ARG002 - the hook's signature
        """Return whether saf itself sends such a message unsigned, and it is safe to believe."""
        return False

    def closing(
        self,
        raw: psycopg.Connection[Any],  # noqa: ARG002 - the hook's signature
        messages: Collection[Received],  # noqa: ARG002 - the hook's signature
    ) -> Collection[Received]:
        """Return which of these messages only close what this side has ended already."""
        return ()

    def by_itself(self, message: Received) -> Callable[[Any], object] | None:  # noqa: ARG002 - the hook's signature
        """Return a call that processes a message without a handler; its argument is the connection.

        None: set the message aside like any other message without a handler.
        """
        return None


_installed = Hook()


def install(hook: Hook) -> None:
    """Install the hook that processes all messages that this process receives."""
    global _installed  # noqa: PLW0603 one for the process
    _installed = hook


def hook() -> Hook:
    """Return the installed hook."""
    return _installed
