"""Arrival: the step between reading a delivery's messages and handing them out.

By default, this step does nothing: every message is handed out. A `Hook`, installed once for the
process (`install`), processes messages that need more, such as those of a dialog. The package
``saf`` installs `saf.dialogs`; receiving itself knows no dialogs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

from saf.received import Received
from saf.setaside.dropped import Reason

if TYPE_CHECKING:
    from saf.receiving.hand import Reader


@dataclass(kw_only=True)
class Arrival:
    """The result of a delivery's arrival: each message is in one of these lists."""

    raw: psycopg.Connection[Any]
    messages: list[Received] = field(default_factory=list)
    """Messages to hand out."""
    ahead: list[Received] = field(default_factory=list)
    """Messages that must wait for an earlier one."""
    dropped: list[tuple[Received, Reason]] = field(default_factory=list)
    stray: list[tuple[Received, str]] = field(default_factory=list)
    """Messages that answer a dialog not begun here, each with the error."""
    done: list[Received] = field(default_factory=list)
    """saf's own messages, which have already taken effect."""
    refused: list[tuple[Received, str]] = field(default_factory=list)
    """Messages that must not be handed out, each with the reason."""
    fragments: list[tuple[int, Received]] = field(default_factory=list)
    """Messages received without being handed out, each with the number of messages in ``messages``
    that precede it."""

    def take_back(self, messages: Sequence[Received]) -> None:
        """Undo the arrival of these messages, given in order: they have not been received."""

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
